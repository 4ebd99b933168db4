"""`floatscope data`: what a file of questions contains, how long its prompts are, and which problems it has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatscope.cli import options as o
from floatscope.cli.console import show_status
from floatscope.errors import escape_controls

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text as Line

    from floatscope.models.tokenizer import ModelTokenizer
    from floatscope.tasks.sample import Passage, Sample
    from floatscope.tasks.sample_files import SampleFile

EXAMPLES = 3  # samples that are printed: the first, one from the middle, the last
OTHERS = 2  # passages of a sample that are printed beside the gold ones
LONG, SHORT = 180, 90  # characters of a gold passage and of another
NAMED = 4  # ids, and bad entries, that are printed


@o.expand_groups
def data(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON lines or a JSON document, also .gz and .xz, or twin:NAME for a shipped file.",
            show_default=False,
        ),
    ],
    *,
    model: Annotated[str | None, o.Opt(help="Count the prompts in tokens of this model. Default: in words.")] = None,
    as_json: o.AsJson = False,
    reading: o.DataOptions,
) -> None:
    """Describe a file of questions.

    Formats: own, paper, lost-in-the-middle, kv, squad, hotpot, 2wiki, musique, poisonedrag.

    --model opens only the tokenizer; it reads and fetches no weights.
    """
    from rich.console import Console

    from floatscope.tasks.summary import count_samples, find_problems

    if model is not None:
        o.check_model(model)
    with show_status(f"reading {file}"):
        contents = reading.read(file)
        record: dict[str, Any] = {
            "file": file,
            "format": contents.format,
            **count_samples(contents.samples),
            "prompts": _measure_prompts(contents.samples, model),
            "problems": find_problems(contents.samples),
            "skipped": [{contents.unit: number, "reason": reason} for number, reason in contents.errors],
        }
    examples = _pick_examples(contents.samples)
    if as_json:
        typer.echo(json.dumps({**record, "examples": [sample.as_json() for sample in examples]}, indent=1))
        return
    console = Console(highlight=False)
    console.print(_facts(record))
    for sample in examples:
        console.print()
        console.print(_line(f"Sample {sample.id}", "bold"))
        console.print(_sample(sample))
    if record["problems"] or contents.errors:
        console.print()
        console.print(_line("Problems", "bold"))
        console.print(_problems(record["problems"], contents))


def _pick_examples(samples: list[Sample]) -> list[Sample]:
    """A few samples, evenly spread from the first to the last."""
    last = len(samples) - 1
    places = sorted({round(last * part / (EXAMPLES - 1)) for part in range(EXAMPLES)})
    return [samples[place] for place in places]


def _measure_prompts(samples: list[Sample], model: str | None) -> dict[str, Any]:
    """The lengths of the prompts in words, or in tokens of a model and against its context."""
    from floatscope.tasks.summary import min_median_max
    from floatscope.tasks.template import load_template

    prompts = [load_template().prompt(sample).text for sample in samples]
    if model is None:
        return {"counted_in": "words", **min_median_max([len(prompt.split()) for prompt in prompts])}
    tokenizer, context = _open_tokenizer(model)
    lengths = [len(tokenizer.encode(prompt, chat=tokenizer.has_chat_template)) for prompt in prompts]
    too_long = 0 if context is None else sum(length > context for length in lengths)
    spread = min_median_max(lengths)
    return {"counted_in": f"tokens of {model}", **spread, "context": context, "longer_than_context": too_long}


def _open_tokenizer(name: str) -> tuple[ModelTokenizer, int | None]:
    """The tokenizer of a model and the context length it was trained for."""
    from floatscope.errors import UserError
    from floatscope.models import gguf
    from floatscope.models.description import describe
    from floatscope.models.names import find_checkpoint, resolve_path
    from floatscope.models.tokenizer_files import open_tokenizer

    context = describe(name).spec.context
    path = resolve_path(name)
    is_gguf = path.suffix == ".gguf"
    tokenizer = gguf.read_tokenizer(path) if is_gguf else open_tokenizer(find_checkpoint(name, weights=False)[0])
    if tokenizer is None:
        raise UserError(f"{name} has no tokenizer; leave --model out to count words")
    return tokenizer, context


def _facts(record: dict[str, Any]) -> Table:
    passages, prompts, yes_or_no = record["passages_each"], record["prompts"], record["yes_or_no"]
    too_long = prompts.get("longer_than_context")
    facts = {
        "file": record["file"],
        "format": record["format"],
        "samples": f"{record['samples']:,}",
        "passages": f"{_range(passages)} each" if passages["max"] else "none",
        "gold": _share(record, "with_gold"),
        "evidence": _share(record, "with_evidence") + (f"; {yes_or_no:,} are answered yes or no" if yes_or_no else ""),
        "unanswerable": _share(record, "unanswerable"),
        "prompts": f"{_range(prompts)} {prompts['counted_in']}"
        + (f"; {too_long:,} are longer than its context of {prompts['context']:,}" if too_long else ""),
    }
    table = _table()
    for fact, value in facts.items():
        table.add_row(_line(fact, "cyan"), _line(value))
    return table


def _share(record: dict[str, Any], name: str) -> str:
    """How many samples: none, all, or "3 of 4"."""
    count, total = record[name], record["samples"]
    return "none" if not count else f"all {total:,}" if count == total else f"{count:,} of {total:,}"


def _range(spread: dict[str, Any]) -> str:
    if spread["min"] == spread["max"]:
        return f"{spread['min']:,}"
    return f"{spread['min']:,} to {spread['max']:,} (median {round(spread['median']):,})"


def _sample(sample: Sample) -> Table:
    """A sample in readable form: the question, the answers, the passages with the evidence."""
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
        other = _line(", ".join(f"{name} {_format_meta(value)}" for name, value in sample.meta.items()), "dim")
        other.no_wrap, other.overflow = True, "ellipsis"
        table.add_row(_line("other", "dim"), other)
    return table


def _format_meta(value: Any) -> str:
    return _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 2 * SHORT)


def _excerpt(passage: Passage, room: int) -> Line:
    """The title and part of the text around the evidence, which is between « and »; one line if it is not gold."""
    evidence = sorted(passage.evidence)
    first = evidence[0][0] if evidence else 0
    start = max(0, min(first - room // 3, len(passage.text) - room))
    stop = start + room
    excerpt = _line(f"{_cut(passage.title, SHORT)}: " if passage.title else "", "bold" if passage.gold else "")
    plain = "not bold" if passage.gold else "dim"
    excerpt.append("…" if start else "", plain)
    for a, b in evidence:
        if start <= a < stop:
            excerpt.append(_clean(passage.text[start:a]), plain).append(f"«{_clean(passage.text[a:b])}»", "bold green")
            start = b
    excerpt.append(_clean(passage.text[start:stop]), plain).append(
        "…" if max(start, stop) < len(passage.text) else "", plain
    )
    excerpt.no_wrap, excerpt.overflow = not passage.gold, "ellipsis"
    return excerpt


def _problems(problems: dict[str, list[str]], contents: SampleFile) -> Table:
    table = _table()
    for problem, ids in problems.items():
        names = ", ".join(_cut(id, 40) for id in ids[:NAMED]) + (", …" if len(ids) > NAMED else "")
        table.add_row(_line(f"{len(ids):,}", "yellow"), _line(f"{problem}: {names}"))
    if contents.errors:
        skipped = f"{contents.unit}s that cannot be read are skipped"
        table.add_row(_line(f"{len(contents.errors):,}", "red"), _line(skipped))
    for number, reason in contents.errors[:NAMED]:
        table.add_row("", _line(f"{contents.unit} {number}: {reason}"))
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


def _cut(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _clean(text: str) -> str:
    """Text of a file for a terminal: white space becomes a space, control characters are spelled out."""
    return escape_controls("".join(" " if c.isspace() else c for c in text))
