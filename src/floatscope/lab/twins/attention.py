"""Attention statistics of a twin beside its untrained control: the numbers in its card.

    for event in measure_attention(Path("twins/models/mdm")): ...        # writes attention.json beside the weights
    read_attention(folder).tables["floating"]

The twin, and the same architecture with fresh weights (three seeds), answer the same questions with every step traced.
Intervals are 95 % CIs from a bootstrap over questions, for the control over seeds as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import torch
from msgspec import to_builtins

from floatscope.analysis import absorption, difference, floating
from floatscope.analysis.floating import THIRDS
from floatscope.analysis.statistics import estimate
from floatscope.capture.watcher import Watch
from floatscope.files.atomic import explain_write_errors
from floatscope.files.digests import sha256_file
from floatscope.files.json_files import write_json
from floatscope.files.records import Record, read_typed
from floatscope.lab.training.record import rename_keys
from floatscope.lab.twins.examples import build_prompt
from floatscope.lab.twins.scores import EvaluationEvent
from floatscope.models.checkpoint import WEIGHTS_FILE
from floatscope.models.device import use_one_thread
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.models.untrained import untrained
from floatscope.pipelines.decode import decode
from floatscope.pipelines.final_state import final_state
from floatscope.schema import Paradigm
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_shipped
from floatscope.traces import Trace

ATTENTION = "attention.json"
FILE, SAMPLES = "reading-5", 24
SEEDS = (0, 1, 2)
NEW_TOKENS = 16
MISSING = "–"
FLOATING_ROWS = (("moved", "all"), ("moved", "predicting"), ("within", "all"), ("across", "all"))
MASK_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
WATCH = Watch(fields=("received", "uniform", "visible_rows", "eligible"))


class AttentionTable(Record):
    """A table of the card."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


class AttentionRecord(Record):
    """The type of attention.json."""

    weights: str  # sha256 of their file
    samples: int
    steps: int
    tables: dict[str, AttentionTable]


def measure_attention(
    folder: Path, device: torch.device | None = None, is_over: Callable[[], bool] = lambda: False
) -> Iterator[EvaluationEvent]:
    """Measure the twin in `folder` unless attention.json is of its weights; stop without a result once `is_over()`."""
    if read_attention(folder) is not None or is_over():
        return
    model, samples = load(folder, device=device), read_shipped(FILE)[:SAMPLES]
    decoded: list[list[Trace]] = []
    masked: list[pd.DataFrame] = []
    done, total = 0, len(samples) * (1 + len(SEEDS))
    for variant in (model, *(untrained(model, seed=seed) for seed in SEEDS)):
        traces, tables = list[Trace](), list[pd.DataFrame]()
        for sample in samples:
            if is_over():
                return
            with use_one_thread():
                traces.append(_trace_answer(variant, sample))
                tables += _absorption_by_mask_ratio(variant, sample) if model.spec.paradigm is Paradigm.MDM else []
            done += 1
            yield EvaluationEvent(folder.name, done, total, "attention")
        decoded.append(traces)
        masked += [pd.concat(tables, ignore_index=True)] if tables else []
    results = {"first key": _first_key_table(*decoded), "floating": _floating_table(*decoded)}
    if masked:
        results["masks"] = _mask_table(*masked)
    weights = sha256_file(folder / WEIGHTS_FILE)
    record = AttentionRecord(weights=weights, samples=len(samples), steps=NEW_TOKENS, tables=results)
    with explain_write_errors("the attention", folder):
        write_json(folder / ATTENTION, to_builtins(record))


def read_attention(folder: Path) -> AttentionRecord | None:
    """Return the measurements of the weights in `folder`; None if there are none."""
    if not (folder / ATTENTION).is_file():
        return None
    record = read_typed(folder / ATTENTION, AttentionRecord, upgrade=rename_keys)
    return record if record.weights == sha256_file(folder / WEIGHTS_FILE) else None


def _trace_answer(model: Model, sample: Sample) -> Trace:
    steps: dict[str, Any] = {} if model.spec.paradigm is Paradigm.ARM else {"steps": NEW_TOKENS}
    out = decode(
        model,
        build_prompt(sample),
        chat=False,
        new_tokens=NEW_TOKENS,
        stop=False,
        watch=WATCH,
        samples=[sample.id],
        **steps,
    )
    return out.trace


def _first_key_table(twin_traces: list[Trace], *control_traces: list[Trace]) -> AttentionTable:
    twin = _first_key_absorption(twin_traces)
    controls = [_first_key_absorption(traces) for traces in control_traces]
    estimates = _compare(twin, controls, ["percent", "lift"], ["layer"])
    return AttentionTable(
        caption="Attention received by the first key, in percent of each layer's attention and as lift (1 = uniform"
        " attention), mean over steps.",
        columns=["layer", "percent", "untrained", "difference", "lift", "untrained", "difference"],
        rows=[
            [str(layer), *(_format_estimate(table, "layer", layer) for table in estimates)]
            for layer in twin["layer"].unique()
        ],
    )


def _first_key_absorption(traces: list[Trace]) -> pd.DataFrame:
    table = absorption(traces)
    return table[table["set"] == "first"]


def _floating_table(twin_traces: list[Trace], *control_traces: list[Trace]) -> AttentionTable:
    tables = [floating(traces) for traces in (twin_traces, *control_traces)]
    rows = []
    for name, group in FLOATING_ROWS:
        twin, *controls = (table[table["group"] == group] for table in tables)
        overall = _compare(twin, controls, [name], [])
        rows.append([name, group, "all", *(_format_interval(table.iloc[0]) for table in overall)])
        by_third = _compare(twin, controls, [name], ["third"])
        thirds = [third for third in THIRDS if (twin["third"] == third).any()]
        rows += [
            [name, group, third, *(_format_estimate(table, "third", third) for table in by_third)] for third in thirds
        ]
    return AttentionTable(
        caption="Moved: the share of the attention of all queries, or of the predicting rows, that moves from one"
        " step to the next. Within: the share of steps whose top key is not the most frequent one of that text and"
        " layer. Across: the share of steps, over all texts, whose top key is not at the layer's most frequent"
        " position. Within and across count the steps whose top key has a lift of 2 or more; – if there are none.",
        columns=["index", "queries", "layers", "twin", "untrained", "difference"],
        rows=rows,
    )


def _mask_table(twin: pd.DataFrame, *controls: pd.DataFrame) -> AttentionTable:
    estimates = _compare(twin, list(controls), ["percent", "lift"], ["masked"])
    return AttentionTable(
        caption="The key of largest lift in one forward over passages, question and answer, by the share of tokens"
        " that is masked: percent of the attention, and lift, mean over layers.",
        columns=["masked", "percent", "untrained", "difference", "lift", "untrained", "difference"],
        rows=[
            [f"{ratio:.0%}", *(_format_estimate(table, "masked", ratio) for table in estimates)]
            for ratio in MASK_RATIOS
        ],
    )


def _absorption_by_mask_ratio(model: Model, sample: Sample) -> Iterator[pd.DataFrame]:
    """Yield the absorption of the top key as more and more of the text is masked."""
    assert model.tokenizer is not None
    assert model.spec.mask_id is not None
    ids = model.tokenizer.encode(f"{build_prompt(sample)} {sample.answers[0]}", chat=False)
    order = list(range(1, len(ids)))
    Random(sample.id).shuffle(order)
    for ratio in MASK_RATIOS:
        hidden = set(order[: max(1, round(ratio * len(ids)))])
        canvas = [model.spec.mask_id if i in hidden else token for i, token in enumerate(ids)]
        out = decode(model, [canvas], infill=True, steps=1, watch=WATCH, samples=[sample.id])
        trace = out.trace if ratio else final_state(out, WATCH)[0]
        table = absorption([trace])
        yield table[table["set"] == "top"].assign(masked=ratio)


def _compare(
    twin: pd.DataFrame, controls: list[pd.DataFrame], values: Sequence[str], by: Sequence[str]
) -> list[pd.DataFrame]:
    """Return, for each value, the twin's estimates, the control's, and their difference."""
    statistics: tuple[Callable[[str], pd.DataFrame], ...] = (
        lambda value: estimate(twin, value, by),
        lambda value: estimate(controls, value, by),
        lambda value: difference(twin, controls, value, by),
    )
    return [statistic(value) for value in values for statistic in statistics]


def _format_estimate(table: pd.DataFrame, column: str, value: object) -> str:
    rows = table[table[column] == value]
    return _format_interval(rows.iloc[0]) if len(rows) else MISSING


def _format_interval(row: Any) -> str:
    if row["mean"] != row["mean"]:
        return MISSING
    return f"{row['mean']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
