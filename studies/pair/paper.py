"""The claims of "Revealing the Attention Floating Mechanism in Masked Diffusion Models", each with how it is measured.

    for claim in CLAIMS:
        table = claim.table(Path("runs/pair"))          # a row per question
        of_means(table, claim.apart)                    # what is tested; the claim says it is above zero

Claims about scores compare what a change does to each model, in points and, since a weaker model has less to lose, as
the share of the score that is kept. Claims about attention are means over layers, of each question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from runs import finished
from tables import CONTROL, read_table
from verdict import Stat, stuck

from floatscope.analysis.evaluations import open_predictions
from floatscope.analysis.experiments import read_experiment
from floatscope.analysis.floating import third
from floatscope.errors import UserError

WHO = ("arm", "mdm")
POINTS = 0.05
"""Of scores: what would matter."""


@dataclass(frozen=True)
class Claim:
    says: str
    measured: str
    table: Callable[[Path], pd.DataFrame]  # runs → a row per question
    arm: Stat
    mdm: Stat
    margin: float
    apart: Stat  # what is tested
    tested: str = "MDM − ARM"
    scale: float = 100.0
    blocked: Callable[[pd.Series], str] = lambda _: ""
    least: bool = False  # whether a least number is asked for: one that stays below is no opposite
    untrained: bool = False  # whether the table has the same of fresh weights


# Of answers.


def answers(folder: Path) -> pd.DataFrame:
    """A row per question; refused if some are still to be asked: the longest are asked first."""
    if not finished(folder):
        raise UserError(f"{folder} is not finished; studies/pair/run.py goes on with it")
    return open_predictions(folder).table


def _answers(folders: dict[str, Sequence[str]], value: str = "acc") -> Callable[[Path], pd.DataFrame]:
    """Column → folders with {} for the model, whose mean is taken question by question."""

    def table(out: Path) -> pd.DataFrame:
        columns = {}
        for who in WHO:
            for name, some in folders.items():
                parts = [answers(out / folder.format(who)) for folder in some]
                columns[f"{who} {name}"] = pd.concat(parts).groupby("sample")[value].mean()
        return pd.DataFrame(columns).dropna()

    return table


def _changes(says: str, measured: str, after: Sequence[str], before: Sequence[str]) -> Claim:
    """What a change of the prompt does, in points."""
    arm, mdm = _gain("arm"), _gain("mdm")
    table = _answers({"before": before, "after": after})
    return Claim(says, measured, table, arm, mdm, POINTS, lambda m: mdm(m) - arm(m), blocked=stuck)


def _keeps(says: str, measured: str, after: Sequence[str], before: Sequence[str]) -> Claim:
    """The share of the score that is left after a change."""
    arm, mdm = (_ratio(f"{who} after", f"{who} before") for who in WHO)
    table = _answers({"before": before, "after": after})
    return Claim(says, measured, table, arm, mdm, 2 * POINTS, lambda m: mdm(m) - arm(m), blocked=stuck)


def _gain(who: str) -> Stat:
    return lambda m: m[f"{who} after"] - m[f"{who} before"]


def _ratio(above: str, below: str) -> Stat:
    return lambda m: m[above] / m[below]


def _twice(gains: Claim) -> Claim:
    """About twice: one and a half times at least."""
    tested = "MDM − 1.5 × ARM"
    apart: Stat = lambda m: gains.mdm(m) - 1.5 * gains.arm(m)  # noqa: E731
    return replace(gains, says="… about twice as much", tested=tested, apart=apart, least=True)


def _spread(who: str) -> Stat:
    """Best less worst place, over the mean."""

    def stat(m: pd.DataFrame) -> pd.Series:
        own = m[[name for name in m.columns if name.startswith(who)]]
        return (own.max(axis=1) - own.min(axis=1)) / own.mean(axis=1)

    return stat


NQ, XQUAD = (
    {setting: [f"scores/{data}-{setting}/{{}}"] for setting in ("closed", "gold", "five")} for data in ("nq", "xquad")
)
PLACES = {str(place): [f"stress/position/{{}}/gold-{place}"] for place in range(5)}
GAINS = [
    _changes("MDMs gain more from passages", "gold passage − none, NQ", NQ["gold"], NQ["closed"]),
    _changes("MDMs gain more from passages", "gold passage − none, XQuAD", XQUAD["gold"], XQUAD["closed"]),
]
ANSWERS = [
    *(both for gains in GAINS for both in (gains, _twice(gains))),
    _changes("MDMs bear distractors better", "4 distractors − none, NQ", NQ["five"], NQ["gold"]),
    _changes("MDMs bear distractors better", "4 distractors − none, XQuAD", XQUAD["five"], XQUAD["gold"]),
    _keeps("MDMs bear distractors better", "score kept among 4 distractors, NQ", NQ["five"], NQ["gold"]),
    _keeps(
        "MDMs bear distractors better",
        "score kept among 4 distractors, XQuAD",
        XQUAD["five"],
        XQUAD["gold"],
    ),
    _keeps(
        "MDMs bear distractors better",
        "score kept among 8 distractors, NQ",
        ["stress/noise/{}/random-8"],
        ["stress/noise/{}/random-0"],
    ),
    _keeps(
        "MDMs mind the place of the gold passage less",
        "score kept in the middle, of that first and last",
        PLACES["2"],
        PLACES["0"] + PLACES["4"],
    ),
    Claim(
        "MDMs mind the place of the gold passage less",
        "best − worst of five places, over their mean",
        _answers(dict(PLACES)),
        _spread("arm"),
        _spread("mdm"),
        2 * POINTS,
        lambda m: _spread("arm")(m) - _spread("mdm")(m),
        "ARM − MDM",
        blocked=stuck,
    ),
    _keeps(
        "MDMs mind the place of the question less",
        "score kept with the question before the passages, of that after them",
        ["stress/query/{}/before"],
        ["stress/query/{}/after"],
    ),
    _keeps(
        "MDMs mind the place of the question less",
        "score kept with the question amid the passages, of that after them",
        ["stress/query/{}/middle"],
        ["stress/query/{}/after"],
    ),
]


# Of attention.

Value = Callable[[Path], pd.Series]
"""The tables of a model's traces → a number for each question."""


def mean_of(table: str, column: str, **only: str) -> Value:
    """The mean over layers (and steps, and heads) of a question's rows; `only` picks some by their columns."""
    return lambda folder: _mean(read_table(folder, table), column, **only)


def _mean(rows: pd.DataFrame, column: str, **only: str) -> pd.Series:
    if "depth" in rows:
        rows = rows.assign(third=[third(depth) for depth in rows["depth"]])
    for name, wanted in only.items():
        rows = rows[rows[name] == wanted]
    return rows.groupby("sample")[column].mean()


def less(a: Value, b: Value) -> Value:
    return lambda folder: a(folder) - b(folder)


def _attends(
    says: str, measured: str, value: Value, margin: float, tested: str = "MDM − ARM", scale: float = 100.0
) -> Claim:
    def table(out: Path) -> pd.DataFrame:
        both = {who: out / "traces" / who for who in WHO}
        trained = {who: value(folder) for who, folder in both.items()}
        return pd.DataFrame(trained | {f"{who} untrained": value(folder / CONTROL) for who, folder in both.items()})

    arm, mdm = (lambda m: m["arm"]), (lambda m: m["mdm"])
    return Claim(says, measured, table, arm, mdm, margin, TESTS[tested], tested, scale, untrained=True)


TESTS: dict[str, Stat] = {
    "MDM − ARM": lambda m: m["mdm"] - m["arm"],
    "ARM − MDM": lambda m: m["arm"] - m["mdm"],
    "MDM − untrained": lambda m: m["mdm"] - m["mdm untrained"],
    "MDM − ARM, each less untrained": lambda m: m["mdm"] - m["mdm untrained"] - m["arm"] + m["arm untrained"],
    "MDM": lambda m: m["mdm"],
}


def absorbed(keys: str) -> Value:
    """Percent of the attention beyond what uniform attention would give."""
    return less(mean_of("absorption", "percent", set=keys), mean_of("absorption", "uniform", set=keys))


def over_depth(rows: Callable[[Path], pd.DataFrame], column: str) -> Value:
    """In the last third of the layers, less that in the first."""
    return lambda folder: _mean(rows(folder), column, third="deep") - _mean(rows(folder), column, third="shallow")


def content(folder: Path) -> pd.DataFrame:
    """Attention on content over what uniform attention would give it, the first token left out of both: it counts as
    structure, and a sink there would be all that is seen. The same of what attention moves."""
    rows, first = read_table(folder, "structure"), read_table(folder, "absorption")
    rows = rows[rows["set"] == "content"].merge(first[first["set"] == "first"], on=["sample", "layer", "depth"])
    base = rows["base"] / (1 - rows["uniform"] / 100)
    attended, moved = (rows[a] / (1 - rows[b] / 100) for a, b in (("share", "percent"), ("moved_x", "moved_y")))
    return rows.assign(attended=attended / base, moved=moved / base)


def gold(folder: Path) -> pd.DataFrame:
    """Attention of the rows that decide on the gold passage over what an even look would give it, the first token left
    out of both."""
    table = read_table(folder, "answer_rows")
    rows, first = (table[table["region"] == region] for region in ("gold", "bos"))
    both = rows.merge(first, on=["sample", "layer", "depth"])
    share, even = (both[f"{column}_x"] / (1 - both[f"{column}_y"]) for column in ("mass", "base"))
    return both.assign(ratio=share / even)


def picked_out(folder: Path) -> pd.Series:
    """Gold's share of what all passages get from the rows that decide, over what an even look would give it; 0: no
    more than that."""
    table = read_table(folder, "answer_rows")
    mean = table.groupby(["sample", "region"])[["mass", "base"]].mean().unstack("region")
    share, even = (
        mean[column]["gold"] / (mean[column]["gold"] + mean[column]["other documents"]) for column in ("mass", "base")
    )
    beyond: pd.Series = share / even - 1
    return beyond


def hops(folder: Path) -> pd.Series:
    """The share of neighbouring layers between which the top key changes."""
    changes, layers = read_table(folder, "over_layers"), read_table(folder, "floating")["layer"].nunique()
    return changes.groupby("sample")["changes"].mean() / max(1, layers - 1)


def anew(folder: Path) -> pd.Series:
    """How little of the anchors of the first step is left, mean over later steps."""
    return 1 - mean_of("drift", "jaccard_first")(folder)


FIRST = "percent of attention on the first token, beyond uniform"
DEPTH = "content over uniform, last third − first, without the first token"
APART = "gold's share of all passages' attention, over an even one, less 1"
BEYOND = "MDM − ARM, each less untrained"
ATTENTION = [
    _attends("The first token is less of a sink", FIRST, absorbed("first"), 5, "ARM − MDM", 1),
    _attends(
        "The first token is less of a sink",
        "heads that give it more than .3",
        mean_of("sinks", "first"),
        0.05,
        "ARM − MDM",
    ),
    _attends("Anchors are dispersed", "percent on the top key, beyond uniform", absorbed("top"), 5, "ARM − MDM", 1),
    _attends(
        "Anchors float over steps",
        "steps off the usual top key",
        mean_of("floating", "within"),
        0.05,
        "MDM − untrained",
    ),
    _attends("… more than an ARM's", "the same", mean_of("floating", "within"), 0.05, BEYOND),
    _attends("Sets of anchors change over steps", "1 − Jaccard with the first step", anew, 0.05, "MDM − untrained"),
    _attends("… more than an ARM's", "the same", anew, 0.05, BEYOND),
    _attends(
        "The top key stands elsewhere from text to text",
        "steps off the layer's usual index",
        mean_of("floating", "across"),
        0.05,
        "MDM − untrained",
    ),
    _attends("… more than an ARM's", "the same", mean_of("floating", "across"), 0.05),
    _attends("Anchors float over layers", "neighbouring layers with another top key", hops, 0.05, "MDM − untrained"),
    _attends("… more than an ARM's", "the same", hops, 0.05),
    _attends(
        "Shallow layers look at structure, deep ones at content", DEPTH, over_depth(content, "attended"), 0.1, "MDM", 1
    ),
    _attends("… more than an ARM's", "the same", over_depth(content, "attended"), 0.1, "MDM − ARM", 1),
    _attends("… by what is moved", "the same of what attention moves", over_depth(content, "moved"), 0.1, "MDM", 1),
    _attends(
        "Deep layers read the gold passage",
        "its ratio in rows that decide, last third − first, without the first token",
        over_depth(gold, "ratio"),
        0.1,
        "MDM − untrained",
        1,
    ),
    _attends("… more than an ARM's", "the same", over_depth(gold, "ratio"), 0.1, "MDM − ARM", 1),
    _attends("The rows that decide tell the gold passage from others", APART, picked_out, 0.1, "MDM", 1),
    _attends("… better than an ARM's", "the same", picked_out, 0.1, "MDM − ARM", 1),
]


# Of heads.


def copying(out: Path) -> pd.DataFrame:
    """A column per model and head: its copy score."""
    tables = [read_table(out / "traces" / who, "retrieval").assign(who=who) for who in WHO]
    return pd.concat(tables).pivot(index="sample", columns=["who", "layer", "head"], values="wu_set").dropna()


def effective(who: str) -> Stat:
    """How many heads carry the copying, (Σs)² / Σs², as a share of all."""

    def stat(m: pd.DataFrame) -> pd.Series:
        own = m[who]
        return own.sum(axis=1) ** 2 / (own**2).sum(axis=1) / own.shape[1]

    return stat


# Of interventions.


def edited(study: str, arm: str, value: str) -> Callable[[Path], pd.DataFrame]:
    """Right answers or their NLL under an edit and under its controls."""

    def table(out: Path) -> pd.DataFrame:
        columns = {}
        for who in WHO:
            folder = out / "studies" / study / who
            controls = [a["name"] for a in read_experiment(folder)["arms"] if a["control_of"] == arm]
            if not controls:
                raise UserError(f"{folder} has no control of {arm}")
            for name, arms in (("edited", [arm]), ("control", controls)):
                parts = pd.concat([answers(folder / each) for each in arms])
                columns[f"{who} {name}"] = parts.groupby("sample")[value].mean()
        return pd.DataFrame(columns).dropna()

    return table


def _hurts(says: str, measured: str, study: str, arm: str, value: str, tested: str = "ARM − MDM") -> Claim:
    """What an edit costs more than its control, in points or in nats."""
    sign, scale, margin = (-1, 100.0, POINTS) if value == "acc" else (1, 1.0, 0.1)

    def of(who: str) -> Stat:
        return lambda m: sign * (m[f"{who} edited"] - m[f"{who} control"])

    a, b = of("arm"), of("mdm")
    apart = {"ARM − MDM": lambda m: a(m) - b(m), "MDM": b}[tested]
    blocked = stuck if value == "acc" else (lambda _: "")
    return Claim(says, measured, edited(study, arm, value), a, b, margin, apart, tested, scale, blocked)


INTERVENTIONS = [
    *(
        _hurts(f"Masking {what} hurts ARMs more", f"{how}, beyond random keys", "sinks", arm, value)
        for what, arm in (("each head's top key", "anchors-1"), ("each head's five anchors", "anchors-5"))
        for how, value in (("NLL", "nll"), ("points lost", "acc"))
    ),
    *(
        _hurts(what, f"{how}, pinned to the first {place}, beyond random keys", "pin", arm, value, "MDM")
        for what, place, arm in (
            ("MDMs need their anchors to float", "step", "step-0-5"),
            ("MDMs need anchors of each layer", "layer", "layer-0-5"),
        )
        for how, value in (("NLL", "nll"), ("points lost", "acc"))
    ),
    Claim(
        "Retrieval is spread over more heads",
        "effective share of heads that copy evidence",
        copying,
        effective("arm"),
        effective("mdm"),
        0.02,
        lambda m: effective("mdm")(m) - effective("arm")(m),
    ),
    _hurts(
        "MDMs lean less on their retrieval heads",
        "NLL, the first four zeroed, beyond other heads",
        "heads",
        "heads-4",
        "nll",
    ),
]

CLAIMS = [*ATTENTION, *ANSWERS, *INTERVENTIONS]
