"""What a twin's attention does, beside its untrained control: the numbers of its card.

    for watched in observe(Path("twins/models/mdm")): ...        # writes attention.json beside the weights
    read_attention(folder)["tables"]["floating"]

The twin and the same architecture with fresh weights (three seeds) answer the same questions, watched at every step.
Intervals are 95 %, bootstrapped over questions, for the control over seeds as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import torch

from floatscope.analysis import absorption, difference, estimate, floating_index, trace_views
from floatscope.analysis.floating import THIRDS, tops
from floatscope.capture.watcher import Watch
from floatscope.files.atomic import writing
from floatscope.files.records import digest, read_json, write_json
from floatscope.lab.twins.evaluate import Asked
from floatscope.lab.twins.heldout import read
from floatscope.lab.twins.lessons import prompt_of
from floatscope.models.files import WHOLE
from floatscope.models.load import load
from floatscope.models.model import Model
from floatscope.models.place import one_thread
from floatscope.models.untrained import untrained
from floatscope.pipelines.decode import decode
from floatscope.pipelines.final_state import final_state
from floatscope.tasks.sample import Sample
from floatscope.traces import Trace

ATTENTION = "attention.json"
FILE, SAMPLES = "reading-5", 24
SEEDS = (0, 1, 2)
NEW_TOKENS = 16
RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
WATCH = Watch(fields=("received", "uniform", "seen", "eligible"))


def observe(
    folder: Path, device: torch.device | None = None, over: Callable[[], bool] = lambda: False
) -> Iterator[Asked]:
    """Measure the twin in `folder` if its weights have not been; ends early, with nothing, if the time is over."""
    if read_attention(folder) is not None or over():
        return
    model, samples = load(folder, device=device), read(FILE)[:SAMPLES]
    watched: list[list[Trace]] = []
    masked: list[pd.DataFrame] = []
    done, total = 0, len(samples) * (1 + len(SEEDS))
    for each in (model, *(untrained(model, seed=seed) for seed in SEEDS)):
        traces, tables = list[Trace](), list[pd.DataFrame]()
        for sample in samples:
            if over():
                return
            with one_thread():
                traces.append(_answering(each, sample))
                tables += _masked(each, sample) if model.spec.paradigm == "mdm" else []
            done += 1
            yield Asked(folder.name, done, total, "attention")
        watched.append(traces)
        masked += [pd.concat(tables, ignore_index=True)] if tables else []
    shown = {"first key": _first_key(*watched), "floating": _floating(*watched)}
    if masked:
        shown["masks"] = _masks(*masked)
    told = {"weights": digest(folder / WHOLE), "samples": len(samples), "steps": NEW_TOKENS, "tables": shown}
    with writing("the attention", folder):
        write_json(folder / ATTENTION, told)


def read_attention(folder: Path) -> dict[str, Any] | None:
    """What was measured of the weights that lie there; None if nothing was."""
    if not (folder / ATTENTION).is_file():
        return None
    told = read_json(folder / ATTENTION)
    return told if told.get("weights") == digest(folder / WHOLE) else None


def _answering(model: Model, sample: Sample) -> Trace:
    pace: dict[str, Any] = {} if model.spec.paradigm == "arm" else {"steps": NEW_TOKENS}
    out = decode(
        model,
        prompt_of(sample),
        chat=False,
        new_tokens=NEW_TOKENS,
        stop=False,
        watch=WATCH,
        samples=[sample.id],
        **pace,
    )
    return out.trace


def _first_key(own: list[Trace], *others: list[Trace]) -> dict[str, Any]:
    twin = _first(own)
    compared = _compared(twin, [_first(each) for each in others], ["percent", "lift"], ["layer"])
    rows = [[str(layer), *(_said(each, "layer", layer) for each in compared)] for layer in twin["layer"].unique()]
    return {
        "says": "What the first key receives, in percent of each layer's attention and as lift (1 = as much as uniform"
        " attention would give), mean over steps.",
        "columns": ["layer", "percent", "untrained", "difference", "lift", "untrained", "difference"],
        "rows": rows,
    }


def _first(traces: list[Trace]) -> pd.DataFrame:
    table = absorption(traces)
    return table[table["set"] == "first"]


def _floating(own: list[Trace], *others: list[Trace]) -> dict[str, Any]:
    twin, *control = (_index(each) for each in (own, *others))
    rows = []
    for name in ("within", "across"):
        overall = _compared(twin, control, [name], [])
        rows.append([name, "all", *(_cell(each.iloc[0]) for each in overall)])
        by_third = _compared(twin, control, [name], ["third"])
        there = [third for third in THIRDS if (twin["third"] == third).any()]
        rows += [[name, third, *(_said(each, "third", third) for each in by_third)] for third in there]
    return {
        "says": "The floating index. Within: the share of steps whose top key is not the usual one of that text and"
        " layer. Across: the share of steps, over all texts, whose top key is not the layer's usual position.",
        "columns": ["index", "layers", "twin", "untrained", "difference"],
        "rows": rows,
    }


def _index(traces: list[Trace]) -> pd.DataFrame:
    return floating_index(pd.concat([tops(look) for look in trace_views(traces)], ignore_index=True))


def _masks(twin: pd.DataFrame, *others: pd.DataFrame) -> dict[str, Any]:
    compared = _compared(twin, list(others), ["percent", "lift"], ["masked"])
    return {
        "says": "The key of largest lift in one forward over a passage, its question and its answer with so much of it"
        " masked: percent of the attention and lift, mean over layers.",
        "columns": ["masked", "percent", "untrained", "difference", "lift", "untrained", "difference"],
        "rows": [[f"{ratio:.0%}", *(_said(each, "masked", ratio) for each in compared)] for ratio in RATIOS],
    }


def _masked(model: Model, sample: Sample) -> Iterator[pd.DataFrame]:
    """What the top key takes with more and more of the text masked."""
    assert model.tokenizer is not None
    assert model.spec.mask_id is not None
    ids = model.tokenizer.encode(f"{prompt_of(sample)} {sample.answers[0]}", chat=False)
    order = list(range(1, len(ids)))
    Random(sample.id).shuffle(order)
    for ratio in RATIOS:
        hidden = set(order[: max(1, round(ratio * len(ids)))])
        canvas = [model.spec.mask_id if i in hidden else token for i, token in enumerate(ids)]
        out = decode(model, [canvas], infill=True, steps=1, watch=WATCH, samples=[sample.id])
        trace = out.trace if ratio else final_state(out, WATCH)[0]
        table = absorption([trace])
        yield table[table["set"] == "top"].assign(masked=ratio)


def _compared(
    twin: pd.DataFrame, control: list[pd.DataFrame], values: Sequence[str], by: Sequence[str]
) -> list[pd.DataFrame]:
    """For each value the twin's estimates, the control's and their difference."""
    kinds: tuple[Callable[[str], pd.DataFrame], ...] = (
        lambda value: estimate(twin, value, by),
        lambda value: estimate(control, value, by),
        lambda value: difference(twin, control, value, by),
    )
    return [kind(value) for value in values for kind in kinds]


def _said(table: pd.DataFrame, column: str, value: object) -> str:
    return _cell(table[table[column] == value].iloc[0])


def _cell(row: Any) -> str:
    return f"{row['mean']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
