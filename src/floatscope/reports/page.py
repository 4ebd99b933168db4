"""A report as one HTML file that needs no network, no other file and no library.

    write_page(report, "report.html")

The page holds its style, its scripts and its numbers. Its content security policy allows only this style and this
script, by their hashes, so a token or a label can never be anything but text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from floatscope.errors import UserError, escape_controls
from floatscope.files.atomic import write_atomic
from floatscope.reports import palette
from floatscope.reports.charts import Report, chart_to_json
from floatscope.reports.palette import Colour

SCRIPTS = ("common.js", "charts.js", "explorer.js")
NO_BREAK_SPACE = "\u00a0"
_ESCAPED = re.compile(r"\\ud[89ab]..\\ud[c-f]..|\\u....|\\.|\x7f")  # in JSON: a pair for one character, others
MAX_NARROW_COLUMNS = 48  # a map with more columns takes the full width


def write_page(report: Report, path: str | Path) -> Path:
    """Write the page atomically, and return its path. A section links its table if that file exists."""
    path = Path(path)
    try:
        write_atomic(path, [render_page(report, path.parent).encode("utf-8", "replace")])
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror}; give another path") from error
    return path


def render_page(report: Report, folder: Path = Path()) -> str:
    """The page as text. Links to tables are relative to `folder`."""
    charts: list[dict[str, Any]] = []
    sections = []
    for section in report.sections:
        section_charts = [chart_to_json(chart) for chart in section.charts]
        for chart in section_charts:
            if chart["kind"] == "table":
                columns = range(len(chart["columns"]))
                chart["is_numeric"] = [all(_is_number(row[i]) for row in chart["rows"]) for i in columns]
            else:
                chart["number"] = len(charts)
                charts.append(chart)
            is_wide_map = chart["kind"] == "map" and len(chart["x"]) > MAX_NARROW_COLUMNS
            chart["is_wide"] = chart["kind"] == "table" or is_wide_map
        name = section.table_file
        table = name if name is not None and (folder / name).is_file() else None
        sections.append({**vars(section), "charts": section_charts, "table": table})
    style = _read_asset("page.css") + _colour_rules()
    script = "\n".join(_read_asset(name) for name in SCRIPTS)
    page = _load_template().render(
        report=report,
        sections=sections,
        model_colours=len(palette.MODELS),
        style=Markup(style),
        style_hash=_csp_hash(style),
        script=Markup(script),
        script_hash=_csp_hash(script),
        data=embed_json(_page_data(report, charts)),
        samples=[embed_json(sample) for sample in report.explorer],
    )
    return escape_controls(page)  # names and texts of others; style, scripts and template have none


def embed_json(value: Any) -> Markup:
    """JSON that is safe inside a <script>: ASCII only, without any character that HTML could read as markup."""
    text = _ESCAPED.sub(_escape_control, json.dumps(value, allow_nan=False, separators=(",", ":")))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _escape_control(escape_sequence: re.Match[str]) -> str:
    """An escape sequence of JSON; that of a control character spelled out, so that the page shows it."""
    shown = escape_controls(json.loads(f'"{escape_sequence[0]}"'))
    return escape_sequence[0] if len(shown) == 1 else json.dumps(shown)[1:-1]


def render_bold(text: str) -> Markup:
    """`**words**` become strong, everything else stays text. "5 %", "n = 24" and "0.2 [0.1, 0.3]" stay on one line."""
    text = re.sub(r"(?<=\d) (?=%)|(?<=[\d%]) (?=\[)", NO_BREAK_SPACE, text)
    text = re.sub(r"(?<=\b\w) = (?=\d)", f"{NO_BREAK_SPACE}={NO_BREAK_SPACE}", text)
    text = re.sub(r"\[[^\[\]]{1,24}\]", lambda match: match[0].replace(" ", NO_BREAK_SPACE), text)
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(text))))


def format_value(value: Any) -> str:
    """A number or a setting for people: three significant digits, lists with commas."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:,.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _page_data(report: Report, charts: list[dict[str, Any]]) -> dict[str, Any]:
    """The data that the scripts read at once; they read a sample only when it is chosen."""
    return {
        "models": report.labels,
        "charts": charts,
        "levels": palette.LEVELS,
        "ramps": {background: palette.build_ramp(background) for background in Colour._fields},
        "model_colours": len(palette.MODELS),
        "region_colours": len(palette.REGIONS),
        "samples": [{"label": payload["label"], "sample": payload["sample"]} for payload in report.explorer],
        "max_lift": max((high for payload in report.explorer for high in payload["lift"]["high"]), default=1.0),
    }


def _colour_rules() -> str:
    """The palette as CSS: --c of a model, --g of a region, the levels of a map as fill and as background of text."""
    rules = [f".m{i}{{--c:{_light_dark(colour)}}}" for i, colour in enumerate(palette.MODELS)]
    regions = "".join(f"--g{i}:{_light_dark(colour)};" for i, colour in enumerate(palette.REGIONS))
    rules.append(f":root{{{regions}--top:{_light_dark(palette.TOP)};--commit:{_light_dark(palette.COMMIT)}}}")
    rules += [f".g{i}{{--c:var(--g{i})}}" for i in range(len(palette.REGIONS))]
    levels = [Colour(*pair) for pair in zip(palette.build_ramp("light"), palette.build_ramp("dark"), strict=True)]
    for i, background in enumerate(levels):
        text = Colour(*(palette.choose_text_colour(colour) for colour in background))
        rules.append(f".f{i}{{fill:{_light_dark(background)}}}")
        if i:  # the lowest level is the background of the page itself
            rules.append(f".l{i}{{background-color:{_light_dark(background)};color:{_light_dark(text)}}}")
    stops = ",".join(_light_dark(level) for level in levels[::7])
    rules.append(f".ramp{{background:linear-gradient(90deg,{stops})}}")
    return "\n".join(rules)


def _light_dark(colour: Colour) -> str:
    return f"light-dark({colour.light},{colour.dark})"


def _read_asset(name: str) -> str:
    return (files("floatscope.reports") / "page" / name).read_text(encoding="utf-8")


def _is_number(cell: Any) -> bool:
    return cell is None or isinstance(cell, int | float)


def _without_groups(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not isinstance(value, Mapping)}


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"bold": render_bold, "value": format_value, "without_groups": _without_groups}
    return environment.from_string(_read_asset("template.html.j2"))
