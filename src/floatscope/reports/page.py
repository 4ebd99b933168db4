"""The report as one HTML file that needs nothing else: no network, no other file, no library.

    write_page(report, "report.html")

The page holds its style, its scripts and its numbers. Its content security policy allows exactly this style and this
script, by their hashes, so whatever a token or a label holds can only ever be text.
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

from floatscope.errors import UserError
from floatscope.files.atomic import write_atomic
from floatscope.reports import palette
from floatscope.reports.charts import Report, chart_json
from floatscope.reports.palette import Colour

SCRIPTS = ("common.js", "charts.js", "explorer.js")
NO_BREAK = "\u00a0"
NARROW = 48  # a map with more columns takes the whole width
FAMILIES = {"mdm": "masked diffusion", "arm": "autoregressive"}


def write_page(report: Report, path: str | Path) -> Path:
    """Write the page, whole or not at all. A section links its table if that file is there, beside the page."""
    path = Path(path)
    try:
        write_atomic(path, [page(report, path.parent).encode("utf-8", "replace")])
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror}; give another place") from error
    return path


def page(report: Report, folder: Path = Path()) -> str:
    """The page as text; links to tables are relative to `folder`."""
    charts: list[dict[str, Any]] = []
    sections = []
    for section in report.sections:
        told = [chart_json(chart) for chart in section.charts]
        for chart in told:
            if chart["kind"] == "table":
                columns = range(len(chart["columns"]))
                chart["numeric"] = [all(_is_number(row[i]) for row in chart["rows"]) for i in columns]
            else:
                chart["number"] = len(charts)
                charts.append(chart)
            chart["wide"] = chart["kind"] == "table" or (chart["kind"] == "map" and len(chart["x"]) > NARROW)
        name = section.table_name
        table = name if name is not None and (folder / name).is_file() else None
        sections.append({**vars(section), "charts": told, "table": table})
    style = _asset("page.css") + _colours()
    script = "\n".join(_asset(name) for name in SCRIPTS)
    return _template().render(
        report=report,
        sections=sections,
        families=FAMILIES,
        model_colours=len(palette.MODELS),
        style=Markup(style),
        style_hash=_hash(style),
        script=Markup(script),
        script_hash=_hash(script),
        data=embedded(_data(report, charts)),
        samples=[embedded(sample) for sample in report.explorer],
    )


def embedded(value: Any) -> Markup:
    """JSON that can stand inside a <script>: ASCII only, and nothing that HTML could read as a tag or a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _data(report: Report, charts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the scripts need at once; samples are read when they are chosen."""
    return {
        "models": report.labels,
        "charts": charts,
        "levels": palette.LEVELS,
        "ramps": {ground: palette.ramp(ground) for ground in Colour._fields},
        "model_colours": len(palette.MODELS),
        "region_colours": len(palette.REGIONS),
        "samples": [{"label": told["label"], "sample": told["sample"]} for told in report.explorer],
        "highest_lift": max((high for told in report.explorer for high in told["lift"]["high"]), default=1.0),
    }


def _colours() -> str:
    """The palette as style: --c of a model, --g of a region, the levels of a map as fill and as ground of text."""
    rules = [f".m{i}{{--c:{_both(colour)}}}" for i, colour in enumerate(palette.MODELS)]
    regions = "".join(f"--g{i}:{_both(colour)};" for i, colour in enumerate(palette.REGIONS))
    rules.append(f":root{{{regions}--top:{_both(palette.TOP)};--commit:{_both(palette.COMMIT)}}}")
    rules += [f".g{i}{{--c:var(--g{i})}}" for i in range(len(palette.REGIONS))]
    levels = [Colour(*pair) for pair in zip(palette.ramp("light"), palette.ramp("dark"), strict=True)]
    for i, ground in enumerate(levels):
        text = Colour(*(palette.ink(colour) for colour in ground))
        rules.append(f".f{i}{{fill:{_both(ground)}}}")
        if i:  # the lowest level is the ground itself
            rules.append(f".l{i}{{background-color:{_both(ground)};color:{_both(text)}}}")
    stops = ",".join(_both(ground) for ground in levels[::7])
    rules.append(f".ramp{{background:linear-gradient(90deg,{stops})}}")
    return "\n".join(rules)


def _both(colour: Colour) -> str:
    return f"light-dark({colour.light},{colour.dark})"


def _asset(name: str) -> str:
    return (files("floatscope.reports") / "page" / name).read_text(encoding="utf-8")


def _is_number(cell: Any) -> bool:
    return cell is None or isinstance(cell, int | float)


def _plain(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if not isinstance(value, Mapping)}


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _template() -> jinja2.Template:
    templates = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    templates.filters |= {"bold": bold, "said": said, "plain": _plain}
    return templates.from_string(_asset("template.html.j2"))


def bold(text: str) -> Markup:
    """`**so**` becomes strong; everything else stays text. No line ends inside "5 %" or "0.2 [0.1, 0.3]"."""
    kept = re.sub(r"(?<=\d) (?=%)|(?<=[\d%]) (?=\[)", NO_BREAK, text)
    kept = re.sub(r"\[[^\[\]]{1,24}\]", lambda found: found[0].replace(" ", NO_BREAK), kept)
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(kept))))


def said(value: Any) -> str:
    """A number or setting as people write it: three figures, lists with commas."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:,.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(said(inner) for inner in value)
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
