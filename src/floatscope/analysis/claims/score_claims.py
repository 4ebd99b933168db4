"""Claims about scores: what passages, stress and edits of the attention do to the answers."""

from __future__ import annotations

from floatscope.analysis.claims.claim import AF, ARM_MDM, LIU, MDM, MDM_ARM, PISKORZ, RULLI, TWICE, Claim
from floatscope.analysis.claims.measures import EditCost, ScoreChange, ScoreRetained, ScoreSpread

POINTS = 0.05
SHARE = 0.10  # of a score that is retained
NATS = 0.1

_POSITIONS = tuple(f"stress/position/{{}}/{point}" for point in ("first", "middle", "last"))
_MAIN = {choice: f"scores/main-{choice}/{{}}" for choice in ("closed", "gold", "five")}
_SECOND = {choice: f"scores/second-{choice}/{{}}" for choice in ("closed", "gold", "five")}


def _change(
    id: str,
    statement: str,
    source: str,
    statistic: str,
    after: tuple[str, ...],
    before: tuple[str, ...],
    comparison: str = MDM_ARM,
) -> Claim:
    return Claim(id, statement, source, statistic, ScoreChange(after, before), comparison, POINTS, 100.0, "points")


def _retained(
    id: str, statement: str, source: str, statistic: str, after: tuple[str, ...], before: tuple[str, ...]
) -> Claim:
    measure = ScoreRetained(after, before)
    return Claim(id, statement, source, statistic, measure, MDM_ARM, SHARE, 100.0, "% of the score")


SCORE_CLAIMS = [
    _change("rag-gain", "MDMs gain more from passages than ARMs", AF, "gold passage − none",
            (_MAIN["gold"],), (_MAIN["closed"],)),
    _change("rag-factor", "… about twice as much", AF, "gold passage − none, at least 1.5 times",
            (_MAIN["gold"],), (_MAIN["closed"],), TWICE),
    _change("rag-gain-second", "MDMs gain more from passages than ARMs", AF, "gold passage − none, second task",
            (_SECOND["gold"],), (_SECOND["closed"],)),
    _change("rag-factor-second", "… about twice as much", AF, "gold passage − none, second task, at least 1.5 times",
            (_SECOND["gold"],), (_SECOND["closed"],), TWICE),
    _retained("noise-random", "MDMs are more robust to distractors", AF, "score retained with random distractors",
              ("stress/noise/{}/random-many",), ("stress/noise/{}/random-none",)),
    _retained("noise-dated", "MDMs are more robust to outdated passages", AF,
              "score retained with contradicting passages of an older date",
              ("stress/dated/{}/dated-many",), ("stress/dated/{}/dated-none",)),
    _retained("position-middle", "MDMs are less lost in the middle", LIU,
              "score retained with the gold passage in the middle, relative to first and last",
              (_POSITIONS[1],), (_POSITIONS[0], _POSITIONS[2])),
    Claim("position-spread", "MDMs are less sensitive to the position of the gold passage", AF,
          "best − worst position, over their mean", ScoreSpread(_POSITIONS), ARM_MDM, SHARE, 100.0, "% of the score"),
    _retained("layout-reversed", "MDMs are less sensitive to the order of the hops", AF,
              "score retained with the hops reversed", ("stress/layout/{}/reversed",), ("stress/layout/{}/adjacent",)),
    _retained("layout-separated", "MDMs are less sensitive to the distance of the hops", AF,
              "score retained with the hops apart", ("stress/layout/{}/separated",), ("stress/layout/{}/adjacent",)),
    *(
        _retained(f"question-{place}", "MDMs are less sensitive to the place of the question", AF,
                  f"score retained with the question {words}, relative to after the passages",
                  (f"stress/query/{{}}/{place}",), ("stress/query/{}/after",))
        for place, words in (("before", "before the passages"), ("middle", "between the passages"),
                             ("both", "before and after the passages"))
    ),
    _change("masks", "More masks distract MDMs", PISKORZ, "filler text − as many further masks",
            ("stress/masks/{}/filler-many",), ("stress/masks/{}/masks-many",), MDM),
    _change("few-shot", "MDMs learn a rule in context", PISKORZ, "six examples − one",
            ("examples/6/{}",), ("examples/1/{}",), MDM),
    _change("few-shot-arm", "… better than ARMs", PISKORZ, "six examples − one",
            ("examples/6/{}",), ("examples/1/{}",)),
    _retained("dirty", "MDMs are more robust to typos", AF, "score retained with one letter in ten wrong",
              ("stress/dirty/{}/typos",), ("stress/dirty/{}/clean",)),
]  # fmt: skip


SAME_DOSE = "random keys of the same dose"


def _cost(
    id: str,
    statement: str,
    source: str,
    what: str,
    study: str,
    condition: str,
    value: str,
    comparison: str,
    control: str = SAME_DOSE,
) -> Claim:
    measure = EditCost(study, condition, value)
    margin, scale, unit = (POINTS, 100.0, "points lost") if value == "acc" else (NATS, 1.0, "nats per token")
    statistic = f"{unit}, {what}, beyond {control}"
    return Claim(f"{id}-{value}", statement, source, statistic, measure, comparison, margin, scale, unit)


EDIT_CLAIMS = [
    *(
        _cost(f"mask-{k}", f"Masking each head's {words} hurts ARMs more", RULLI, f"{words} masked", "sinks",
              f"anchors-{k}", value, ARM_MDM)
        for k, words in ((1, "top key"), (5, "five anchors"), (10, "ten anchors")) for value in ("nll", "acc")
    ),
    *(
        _cost(f"mask-{name}", f"Masking anchors hurts ARMs more: {words}", RULLI, f"of five anchors, {words}", "sinks",
              f"anchors-5-{name}", "nll", ARM_MDM)
        for name, words in (("first", "the first token only"), ("structural", "structural ones only"),
                            ("evidence", "evidence only"), ("all-but-evidence", "all but evidence"))
    ),
    *(
        _cost(f"pin-{place}", statement, AF, f"anchors pinned to those of the first {place}, without evidence", "pin",
              f"{place}-0-5", value, MDM)
        for place, statement in (("step", "MDMs need their anchors to float"),
                                 ("layer", "MDMs need anchors of their own in each layer"))
        for value in ("nll", "acc")
    ),
    _cost("retrieval-heads-zeroed", "MDMs depend less on their retrieval heads", AF,
          "the four strongest zeroed", "heads", "heads-4", "nll", ARM_MDM, "as many other heads of their layers"),
]  # fmt: skip
