"""`floatscope data`: what a file of questions holds, how long its prompts are, and what is amiss in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text as Line

    from floatscope.models.text import ModelTokenizer
    from floatscope.tasks.read import Reading
    from floatscope.tasks.sample import Passage, Sample

Opt = typer.Option

SHOWN = 3  # samples: the first, one from the middle, the last
OTHERS = 2  # passages of a sample that are shown beside the gold ones
LONG, SHORT = 180, 90  # characters of a gold passage and of another
NAMED = 4  # ids, and bad lines, that are printed


def data(
    file: Annotated[Path, typer.Argument(help="Questions: JSON lines or a JSON document; also .gz and .xz.")],
    format: Annotated[str | None, Opt(help="Its format, if it is not to be seen from the first object.")] = None,
    model: Annotated[str | None, Opt(help="Count prompts in tokens of this model; else in words.")] = None,
    limit: Annotated[int | None, Opt(help="Only the first so many samples.")] = None,
    skip_bad: Annotated[bool, Opt("--skip-bad", help="Leave out what cannot be read, and say so.")] = False,
    as_json: Annotated[bool, Opt("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what a file of questions holds.

    Formats: own, paper, lost-in-the-middle, kv, squad, hotpot, 2wiki, musique, poisonedrag.

    Of a model only the tokenizer is opened; no weights are read or fetched.
    """
    from rich.console import Console

    from floatscope.tasks.read import counts, problems, read_file

    with Console(stderr=True).status("reading"):
        reading = read_file(file, limit, format=format, skip_bad=skip_bad)
        told: dict[str, Any] = {
            "file": str(file),
            "format": reading.format,
            **counts(reading.samples),
            "prompts": _prompts(reading.samples, model),
            "problems": problems(reading.samples),
            "bad": [{reading.unit: number, "reason": reason} for number, reason in reading.bad],
        }
    shown = _some(reading.samples)
    if as_json:
        typer.echo(json.dumps({**told, "shown": [sample.as_json() for sample in shown]}, indent=1))
        return
    console = Console(highlight=False)
    console.print(_facts(told))
    for sample in shown:
        console.print()
        console.print(_line(f"Sample {sample.id}", "bold"))
        console.print(_sample(sample))
    if told["problems"] or reading.bad:
        console.print()
        console.print(_line("Problems", "bold"))
        console.print(_problems(told["problems"], reading))


def _some(samples: list[Sample]) -> list[Sample]:
    """A few of them, from the first to the last."""
    last = len(samples) - 1
    places = sorted({round(last * part / (SHOWN - 1)) for part in range(SHOWN)})
    return [samples[place] for place in places]


def _prompts(samples: list[Sample], model: str | None) -> dict[str, Any]:
    """How long the prompts are, in tokens of a model and against its context, or in words."""
    from floatscope.tasks.prompt import prompt_of
    from floatscope.tasks.read import spread

    prompts = [prompt_of(sample).text for sample in samples]
    if model is None:
        return {"counted_in": "words", **spread([len(prompt.split()) for prompt in prompts])}
    text, context = _tokenizer(model)
    lengths = [len(text.encode(prompt, chat=text.has_template)) for prompt in prompts]
    over = 0 if context is None else sum(length > context for length in lengths)
    return {"counted_in": f"tokens of {model}", **spread(lengths), "context": context, "longer_than_context": over}


def _tokenizer(name: str) -> tuple[ModelTokenizer, int | None]:
    """A model's tokenizer and the length it was trained for."""
    from floatscope.errors import UserError
    from floatscope.models import gguf
    from floatscope.models.describe import describe
    from floatscope.models.load import as_path, locate
    from floatscope.models.text import open_text

    context = describe(name).spec.context
    path = as_path(name)
    text = gguf.read_text(path) if path.suffix == ".gguf" else open_text(locate(name, weights=False)[0])
    if text is None:
        raise UserError(f"{name} has no tokenizer; leave --model out to count words")
    return text, context


def _facts(told: dict[str, Any]) -> Table:
    each, prompts, judged = told["passages_each"], told["prompts"], told["yes_or_no"]
    over = prompts.get("longer_than_context")
    facts = {
        "file": told["file"],
        "format": told["format"],
        "samples": f"{told['samples']:,}",
        "passages": f"{_range(each)} each" if each["max"] else "none",
        "gold": _share(told, "with_gold"),
        "evidence": _share(told, "with_evidence") + (f"; {judged:,} are answered yes or no" if judged else ""),
        "unanswerable": _share(told, "unanswerable"),
        "prompts": f"{_range(prompts)} {prompts['counted_in']}"
        + (f"; {over:,} are longer than its context of {prompts['context']:,}" if over else ""),
    }
    table = _table()
    for fact, value in facts.items():
        table.add_row(_line(fact, "cyan"), _line(value))
    return table


def _share(told: dict[str, Any], name: str) -> str:
    there, all = told[name], told["samples"]
    return "none" if not there else f"all {all:,}" if there == all else f"{there:,} of {all:,}"


def _range(spread: dict[str, Any]) -> str:
    if spread["min"] == spread["max"]:
        return f"{spread['min']:,}"
    return f"{spread['min']:,} to {spread['max']:,} (median {round(spread['median']):,})"


def _sample(sample: Sample) -> Table:
    """A sample as a person reads it: what is asked, what is right, and where that stands."""
    table = _table()
    table.add_row(_line("question", "cyan"), _line(_cut(sample.question, 2 * LONG)))
    answers = " | ".join(_cut(answer, SHORT) for answer in sample.answers[:NAMED])
    more = " | …" if len(sample.answers) > NAMED else ""
    table.add_row(_line("answers", "cyan"), _line(answers + more if answers else "none", "green" if answers else "dim"))
    others = [number for number, passage in enumerate(sample.passages, 1) if not passage.gold]
    for number, passage in enumerate(sample.passages, 1):
        if passage.gold:
            table.add_row(_line(f"gold {number}", "bold cyan"), _excerpt(passage, LONG))
        elif number in others[:OTHERS]:
            table.add_row(_line(f"passage {number}", "dim"), _excerpt(passage, SHORT))
    if len(others) > OTHERS:
        table.add_row("", _line(f"and {len(others) - OTHERS:,} more", "dim"))
    if sample.meta:
        also = _line(", ".join(f"{name} {_said(value)}" for name, value in sample.meta.items()), "dim")
        also.no_wrap, also.overflow = True, "ellipsis"
        table.add_row(_line("also", "dim"), also)
    return table


def _said(value: Any) -> str:
    return _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 2 * SHORT)


def _excerpt(passage: Passage, room: int) -> Line:
    """The title and some of the text, around its evidence, which stands between « and »; one line if it is not gold."""
    evidence = sorted(passage.evidence)
    first = evidence[0][0] if evidence else 0
    start = max(0, min(first - room // 3, len(passage.text) - room))
    stop = start + room
    shown = _line(f"{_cut(passage.title, SHORT)}: " if passage.title else "", "bold" if passage.gold else "")
    plain = "not bold" if passage.gold else "dim"
    shown.append("…" if start else "", plain)
    for a, b in evidence:
        if start <= a < stop:
            shown.append(_clean(passage.text[start:a]), plain).append(f"«{_clean(passage.text[a:b])}»", "bold green")
            start = b
    shown.append(_clean(passage.text[start:stop]), plain).append(
        "…" if max(start, stop) < len(passage.text) else "", plain
    )
    shown.no_wrap, shown.overflow = not passage.gold, "ellipsis"
    return shown


def _problems(found: dict[str, list[str]], reading: Reading) -> Table:
    table = _table()
    for problem, ids in found.items():
        named = ", ".join(_cut(id, 40) for id in ids[:NAMED]) + (", …" if len(ids) > NAMED else "")
        table.add_row(_line(f"{len(ids):,}", "yellow"), _line(f"{problem}: {named}"))
    if reading.bad:
        table.add_row(
            _line(f"{len(reading.bad):,}", "red"), _line(f"{reading.unit}s that cannot be read, and were left out")
        )
    for number, reason in reading.bad[:NAMED]:
        table.add_row("", _line(f"{reading.unit} {number}: {reason}"))
    return table


def _table() -> Table:
    from rich.table import Table

    table = Table("", "", box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    table.columns[0].min_width = 12
    return table


def _line(text: str, style: str = "") -> Line:
    from rich.text import Text as Line

    return Line(_clean(text), style=style)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _clean(text: str) -> str:
    """Text of a file for a terminal: white space is a space, and other characters that do not print are spelled out."""
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)
