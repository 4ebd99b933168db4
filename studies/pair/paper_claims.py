"""The claims of "Revealing the Attention Floating Mechanism in Masked Diffusion Models", each with its measure.

    for claim in CLAIMS:
        table = claim.table(Path("runs/pair"))          # a row per question
        bootstrap(table, claim.difference)              # the tested number; the claim says it is above zero

Claims about scores compare the effect of a change on each model, in points and, as a weaker model has less to lose, as
the share of the score that is retained. Claims about attention are means over layers for each question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from runs import is_finished
from trace_tables import CONTROL, read_table
from verdicts import Statistic, find_limit

from floatscope.analysis.anchor_movement import depth_third
from floatscope.analysis.evaluations import open_predictions
from floatscope.analysis.experiments import read_experiment
from floatscope.errors import UserError

PARADIGMS = ("arm", "mdm")
POINTS = 0.05
"""The margin of a score: the smallest difference that matters."""


@dataclass(frozen=True)
class Claim:
    """A claim, its measure, and its test."""

    statement: str
    measure: str
    table: Callable[[Path], pd.DataFrame]  # runs → a row per question
    arm: Statistic
    mdm: Statistic
    margin: float
    difference: Statistic  # the tested number
    tested: str = "MDM − ARM"
    scale: float = 100.0
    find_limit: Callable[[pd.Series], str] = lambda _: ""
    is_threshold: bool = False  # staying below the threshold does not contradict the claim
    has_untrained: bool = False  # the table has columns of untrained controls


# Scores.


def read_answers(folder: Path) -> pd.DataFrame:
    """Return a row per question; refuse an unfinished run, which has the longest questions only."""
    if not is_finished(folder):
        raise UserError(f"{folder} is not finished; run studies/pair/run.py again to resume it")
    return open_predictions(folder).table


def _answer_table(folders: dict[str, Sequence[str]], value: str = "acc") -> Callable[[Path], pd.DataFrame]:
    """Return the reader of a table; `folders` maps a column to folders with {} for the model, averaged by question."""

    def table(out: Path) -> pd.DataFrame:
        columns = {}
        for paradigm in PARADIGMS:
            for name, paths in folders.items():
                parts = [read_answers(out / path.format(paradigm)) for path in paths]
                columns[f"{paradigm} {name}"] = pd.concat(parts).groupby("sample")[value].mean()
        return pd.DataFrame(columns).dropna()

    return table


def _change_claim(statement: str, measure: str, after: Sequence[str], before: Sequence[str]) -> Claim:
    """Return a claim about the effect of a change of the prompt, in points."""
    arm, mdm = _gain("arm"), _gain("mdm")
    table = _answer_table({"before": before, "after": after})
    return Claim(statement, measure, table, arm, mdm, POINTS, lambda m: mdm(m) - arm(m), find_limit=find_limit)


def _retention_claim(statement: str, measure: str, after: Sequence[str], before: Sequence[str]) -> Claim:
    """Return a claim about the share of the score that is retained after a change."""
    arm, mdm = (_ratio(f"{paradigm} after", f"{paradigm} before") for paradigm in PARADIGMS)
    table = _answer_table({"before": before, "after": after})
    return Claim(statement, measure, table, arm, mdm, 2 * POINTS, lambda m: mdm(m) - arm(m), find_limit=find_limit)


def _gain(paradigm: str) -> Statistic:
    return lambda m: m[f"{paradigm} after"] - m[f"{paradigm} before"]


def _ratio(numerator: str, denominator: str) -> Statistic:
    return lambda m: m[numerator] / m[denominator]


def _twice(gain: Claim) -> Claim:
    """Return the claim of about twice the gain, tested as at least 1.5 times."""
    tested = "MDM − 1.5 × ARM"
    difference: Statistic = lambda m: gain.mdm(m) - 1.5 * gain.arm(m)  # noqa: E731
    return replace(gain, statement="… about twice as much", tested=tested, difference=difference, is_threshold=True)


def _spread(paradigm: str) -> Statistic:
    """Return (best − worst position) / mean."""

    def statistic(m: pd.DataFrame) -> pd.Series:
        scores = m[[name for name in m.columns if name.startswith(paradigm)]]
        return (scores.max(axis=1) - scores.min(axis=1)) / scores.mean(axis=1)

    return statistic


NQ, XQUAD = (
    {choice: [f"scores/{data}-{choice}/{{}}"] for choice in ("closed", "gold", "five")} for data in ("nq", "xquad")
)
POSITIONS = {str(position): [f"stress/position/{{}}/gold-{position}"] for position in range(5)}
GAIN = "MDMs gain more from passages"
ROBUST = "MDMs are more robust to distractors"
GOLD_POSITION = "MDMs are less sensitive to the position of the gold passage"
QUESTION_POSITION = "MDMs are less sensitive to the position of the question"
GAINS = [
    _change_claim(GAIN, "gold passage − none, NQ", NQ["gold"], NQ["closed"]),
    _change_claim(GAIN, "gold passage − none, XQuAD", XQUAD["gold"], XQUAD["closed"]),
]
SCORE_CLAIMS = [
    *(claim for gain in GAINS for claim in (gain, _twice(gain))),
    _change_claim(ROBUST, "4 distractors − none, NQ", NQ["five"], NQ["gold"]),
    _change_claim(ROBUST, "4 distractors − none, XQuAD", XQUAD["five"], XQUAD["gold"]),
    _retention_claim(ROBUST, "score retained with 4 distractors, NQ", NQ["five"], NQ["gold"]),
    _retention_claim(ROBUST, "score retained with 4 distractors, XQuAD", XQUAD["five"], XQUAD["gold"]),
    _retention_claim(
        ROBUST,
        "score retained with 8 distractors, NQ",
        ["stress/noise/{}/random-8"],
        ["stress/noise/{}/random-0"],
    ),
    _retention_claim(
        GOLD_POSITION,
        "score retained in the middle, relative to first and last",
        POSITIONS["2"],
        POSITIONS["0"] + POSITIONS["4"],
    ),
    Claim(
        GOLD_POSITION,
        "best − worst of five positions, over their mean",
        _answer_table(dict(POSITIONS)),
        _spread("arm"),
        _spread("mdm"),
        2 * POINTS,
        lambda m: _spread("arm")(m) - _spread("mdm")(m),
        "ARM − MDM",
        find_limit=find_limit,
    ),
    _retention_claim(
        QUESTION_POSITION,
        "score retained with the question before the passages, relative to after them",
        ["stress/query/{}/before"],
        ["stress/query/{}/after"],
    ),
    _retention_claim(
        QUESTION_POSITION,
        "score retained with the question between the passages, relative to after them",
        ["stress/query/{}/middle"],
        ["stress/query/{}/after"],
    ),
]


# Attention.

Value = Callable[[Path], pd.Series]
"""The folder of a model's trace tables → a number for each question."""


def mean_by_question(table: str, column: str, **only: str) -> Value:
    """Return the mean of a question's rows over layers, steps and heads; `only` selects rows by their columns."""
    return lambda folder: _mean_by_question(read_table(folder, table), column, **only)


def _mean_by_question(rows: pd.DataFrame, column: str, **only: str) -> pd.Series:
    if "depth" in rows:
        rows = rows.assign(third=[depth_third(depth) for depth in rows["depth"]])
    for name, value in only.items():
        rows = rows[rows[name] == value]
    return rows.groupby("sample")[column].mean()


def subtract(a: Value, b: Value) -> Value:
    """Return a − b."""
    return lambda folder: a(folder) - b(folder)


def _attention_claim(
    statement: str, measure: str, value: Value, margin: float, tested: str = "MDM − ARM", scale: float = 100.0
) -> Claim:
    def table(out: Path) -> pd.DataFrame:
        folders = {paradigm: out / "traces" / paradigm for paradigm in PARADIGMS}
        trained = {paradigm: value(folder) for paradigm, folder in folders.items()}
        untrained = {f"{paradigm} untrained": value(folder / CONTROL) for paradigm, folder in folders.items()}
        return pd.DataFrame(trained | untrained)

    arm, mdm = (lambda m: m["arm"]), (lambda m: m["mdm"])
    return Claim(statement, measure, table, arm, mdm, margin, TESTS[tested], tested, scale, has_untrained=True)


TESTS: dict[str, Statistic] = {
    "MDM − ARM": lambda m: m["mdm"] - m["arm"],
    "ARM − MDM": lambda m: m["arm"] - m["mdm"],
    "MDM − untrained": lambda m: m["mdm"] - m["mdm untrained"],
    "MDM − ARM, each minus untrained": lambda m: m["mdm"] - m["mdm untrained"] - m["arm"] + m["arm untrained"],
    "MDM": lambda m: m["mdm"],
}


def excess_absorption(keys: str) -> Value:
    """Return the percent of attention beyond that of uniform attention."""
    percent, uniform = (mean_by_question("absorption", column, set=keys) for column in ("percent", "uniform"))
    return subtract(percent, uniform)


def deep_minus_shallow(read_rows: Callable[[Path], pd.DataFrame], column: str) -> Value:
    """Return the mean in the last third of the layers minus that in the first third."""

    def value(folder: Path) -> pd.Series:
        rows = read_rows(folder)
        return _mean_by_question(rows, column, third="deep") - _mean_by_question(rows, column, third="shallow")

    return value


def content(folder: Path) -> pd.DataFrame:
    """Return the attention on content relative to uniform attention, and the same for contributions.

    The first token counts as structure and is left out of both, as a sink there would dominate the result.
    """
    rows, first = read_table(folder, "structure"), read_table(folder, "absorption")
    rows = rows[rows["set"] == "content"].merge(first[first["set"] == "first"], on=["sample", "layer", "depth"])
    base = rows["base"] / (1 - rows["uniform"] / 100)
    columns = (("share", "percent"), ("contribution_x", "contribution_y"))
    attended, contributed = (rows[own] / (1 - rows[of_first] / 100) for own, of_first in columns)
    return rows.assign(attended=attended / base, contributed=contributed / base)


def gold(folder: Path) -> pd.DataFrame:
    """Return the attention of the predicting rows on the gold passage relative to uniform, without the first token."""
    table = read_table(folder, "predicting_rows")
    rows, first = (table[table["region"] == region] for region in ("gold", "bos"))
    both = rows.merge(first, on=["sample", "layer", "depth"])
    share, uniform = (both[f"{column}_x"] / (1 - both[f"{column}_y"]) for column in ("mass", "base"))
    return both.assign(ratio=share / uniform)


def gold_preference(folder: Path) -> pd.Series:
    """Return the gold passage's share of the attention on all passages, relative to uniform, minus 1."""
    table = read_table(folder, "predicting_rows")
    mean = table.groupby(["sample", "region"])[["mass", "base"]].mean().unstack("region")
    share, uniform = (
        mean[column]["gold"] / (mean[column]["gold"] + mean[column]["other documents"]) for column in ("mass", "base")
    )
    excess: pd.Series = share / uniform - 1
    return excess


def layer_changes(folder: Path) -> pd.Series:
    """Return the share of neighbouring layers between which the top key changes."""
    changes, layers = read_table(folder, "layer_drift"), read_table(folder, "floating")["layer"].nunique()
    return changes.groupby("sample")["changes"].mean() / max(1, layers - 1)


def anchor_turnover(folder: Path) -> pd.Series:
    """Return 1 − the Jaccard index of the anchors with those of the first step, mean over later steps."""
    return 1 - mean_by_question("drift", "jaccard_first")(folder)


FIRST = "percent of attention on the first token, beyond uniform"
DEPTH = "content relative to uniform, last third − first third, without the first token"
PREFERENCE = "gold's share of the attention on all passages, relative to uniform, minus 1"
BEYOND_UNTRAINED = "MDM − ARM, each minus untrained"
SINK = "The first token is less of a sink"
MORE = "… more than in an ARM"
SAME = "the same"
FLOAT, TURNOVER, POSITION = (
    mean_by_question("floating", "within"),
    anchor_turnover,
    mean_by_question("floating", "across"),
)
ATTENDED, CONTRIBUTED, GOLD = (
    deep_minus_shallow(content, "attended"),
    deep_minus_shallow(content, "contributed"),
    deep_minus_shallow(gold, "ratio"),
)
ATTENTION_CLAIMS = [
    _attention_claim(SINK, FIRST, excess_absorption("first"), 5, "ARM − MDM", 1),
    _attention_claim(SINK, "heads that give it more than 0.3", mean_by_question("sinks", "first"), 0.05, "ARM − MDM"),
    _attention_claim(
        "Anchors are dispersed", "percent on the top key, beyond uniform", excess_absorption("top"), 5, "ARM − MDM", 1
    ),
    _attention_claim("Anchors float over steps", "steps off the most frequent top key", FLOAT, 0.05, "MDM − untrained"),
    _attention_claim(MORE, SAME, FLOAT, 0.05, BEYOND_UNTRAINED),
    _attention_claim(
        "The anchor set changes over steps", "1 − Jaccard with the first step", TURNOVER, 0.05, "MDM − untrained"
    ),
    _attention_claim(MORE, SAME, TURNOVER, 0.05, BEYOND_UNTRAINED),
    _attention_claim(
        "The position of the top key varies between texts",
        "steps off the layer's most frequent position",
        POSITION,
        0.05,
        "MDM − untrained",
    ),
    _attention_claim(MORE, SAME, POSITION, 0.05),
    _attention_claim(
        "Anchors float over layers",
        "neighbouring layers with different top keys",
        layer_changes,
        0.05,
        "MDM − untrained",
    ),
    _attention_claim(MORE, SAME, layer_changes, 0.05),
    _attention_claim("Shallow layers attend to structure, deep layers to content", DEPTH, ATTENDED, 0.1, "MDM", 1),
    _attention_claim(MORE, SAME, ATTENDED, 0.1, "MDM − ARM", 1),
    _attention_claim("… by contribution", "the same for contributions", CONTRIBUTED, 0.1, "MDM", 1),
    _attention_claim(
        "Deep layers attend to the gold passage",
        "its ratio in predicting rows, last third − first third, without the first token",
        GOLD,
        0.1,
        "MDM − untrained",
        1,
    ),
    _attention_claim(MORE, SAME, GOLD, 0.1, "MDM − ARM", 1),
    _attention_claim(
        "Predicting rows distinguish the gold passage from others", PREFERENCE, gold_preference, 0.1, "MDM", 1
    ),
    _attention_claim("… better than in an ARM", SAME, gold_preference, 0.1, "MDM − ARM", 1),
]


# Heads.


def copy_scores(out: Path) -> pd.DataFrame:
    """Return a column per model and head with its copy score."""
    tables = [read_table(out / "traces" / paradigm, "retrieval").assign(paradigm=paradigm) for paradigm in PARADIGMS]
    return pd.concat(tables).pivot(index="sample", columns=["paradigm", "layer", "head"], values="wu_set").dropna()


def effective_heads(paradigm: str) -> Statistic:
    """Return the effective number of copying heads, (Σs)² / Σs², as a share of all heads."""

    def statistic(m: pd.DataFrame) -> pd.Series:
        scores = m[paradigm]
        return scores.sum(axis=1) ** 2 / (scores**2).sum(axis=1) / scores.shape[1]

    return statistic


# Interventions.


def read_edited(study: str, condition: str, value: str) -> Callable[[Path], pd.DataFrame]:
    """Return the reader of scores or NLLs under an edit and under its controls."""

    def table(out: Path) -> pd.DataFrame:
        columns = {}
        for paradigm in PARADIGMS:
            folder = out / "studies" / study / paradigm
            conditions = read_experiment(folder)["conditions"]
            controls = [c["name"] for c in conditions if c["control_of"] == condition]
            if not controls:
                raise UserError(f"{folder} has no control of {condition}")
            for name, members in (("edited", [condition]), ("control", controls)):
                answers = pd.concat([read_answers(folder / member) for member in members])
                columns[f"{paradigm} {name}"] = answers.groupby("sample")[value].mean()
        return pd.DataFrame(columns).dropna()

    return table


def _cost_claim(
    statement: str, measure: str, study: str, condition: str, value: str, tested: str = "ARM − MDM"
) -> Claim:
    """Return a claim about what an edit costs beyond its control, in points or in nats."""
    sign, scale, margin = (-1, 100.0, POINTS) if value == "acc" else (1, 1.0, 0.1)

    def cost(paradigm: str) -> Statistic:
        return lambda m: sign * (m[f"{paradigm} edited"] - m[f"{paradigm} control"])

    arm, mdm = cost("arm"), cost("mdm")
    difference = {"ARM − MDM": lambda m: arm(m) - mdm(m), "MDM": mdm}[tested]
    limit = find_limit if value == "acc" else (lambda _: "")
    table = read_edited(study, condition, value)
    return Claim(statement, measure, table, arm, mdm, margin, difference, tested, scale, limit)


INTERVENTION_CLAIMS = [
    *(
        _cost_claim(f"Masking {keys} hurts ARMs more", f"{unit}, beyond random keys", "sinks", condition, value)
        for keys, condition in (("each head's top key", "anchors-1"), ("each head's five anchors", "anchors-5"))
        for unit, value in (("NLL", "nll"), ("points lost", "acc"))
    ),
    *(
        _cost_claim(
            statement, f"{unit}, pinned to the first {place}, beyond random keys", "pin", condition, value, "MDM"
        )
        for statement, place, condition in (
            ("MDMs need their anchors to float", "step", "step-0-5"),
            ("MDMs need separate anchors in each layer", "layer", "layer-0-5"),
        )
        for unit, value in (("NLL", "nll"), ("points lost", "acc"))
    ),
    Claim(
        "Retrieval is spread over more heads",
        "effective share of heads that copy evidence",
        copy_scores,
        effective_heads("arm"),
        effective_heads("mdm"),
        0.02,
        lambda m: effective_heads("mdm")(m) - effective_heads("arm")(m),
    ),
    _cost_claim(
        "MDMs depend less on their retrieval heads",
        "NLL, the first four zeroed, beyond other heads",
        "heads",
        "heads-4",
        "nll",
    ),
]

CLAIMS = [*ATTENTION_CLAIMS, *SCORE_CLAIMS, *INTERVENTION_CLAIMS]
