"""The verdicts of earlier versions that the registry changes, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from markdown_tables import markdown_table

from floatscope.analysis.claims import ClaimResult

NULL = (
    "The old test compared the leading key with that of an untrained network, which is a coin toss (lift 1.02, lead"
    " 0.2 %); attention moved is about 0 there, and the leader counts only where it is an anchor."
)
ANSWER = "The old test counted every commit, most of them end-of-text tokens; now the commits of the answer."
DOSE = "The old control masked as many keys, which hold a fifth as much attention; now it has the same dose."
HARDER = "The old setting was at the ceiling; now the ARM is at 70 to 90 %."
ALL_QUESTIONS = "The same test on all held-out questions, with BCa intervals and Holm's correction."

PAIR, TWINS = "SmolLM2 pair: MDM − ARM", "7M twins: mdm − arm"
EARLIER: list[tuple[str, str, str, str, str]] = [
    (PAIR, "Anchors float over steps", "contradicted", "moved-all-untrained", NULL),
    (PAIR, "Anchors float over steps, more than in an ARM", "contradicted", "moved-all", NULL),
    (PAIR, "Anchors float over steps, more than in an ARM", "contradicted", "leader-predicting", NULL),
    (PAIR, "Anchors float over layers, more than in an ARM", "supported", "leader-layers", NULL),
    (PAIR, "Deep layers attend to the gold passage, more than in an ARM", "contradicted",
     "gold-depth-arm", "More questions, BCa intervals and Holm's correction."),
    (PAIR, "MDMs gain more from passages (NQ)", "contradicted", "rag-gain", ALL_QUESTIONS),
    (PAIR, "MDMs gain more from passages (XQuAD)", "contradicted", "rag-gain-second",
     ALL_QUESTIONS),
    (PAIR, "Masking each head's five anchors hurts ARMs more (points)", "supported", "mask-5-acc",
     DOSE),
    (PAIR, "MDMs need their anchors to float (NLL)", "inconclusive", "pin-step-nll",
     f"{DOSE} Pinning leaves evidence keys alone."),
    (TWINS, "MDMs gain more from passages", "inconclusive", "rag-gain", "The twins were trained again."),
    (TWINS, "MDMs are more robust to distractors", "inconclusive", "noise-random", HARDER),
    (TWINS, "MDMs are more robust to contradicting passages", "inconclusive", "noise-dated",
     "The old contradictions could not be told from the right passage; now they carry an older date."),
    (TWINS, "MDMs are less sensitive to the position of the gold passage", "inconclusive",
     "position-middle", HARDER),
    (TWINS, "MDMs are less sensitive to the order of hops", "inconclusive", "layout-reversed", HARDER),
]  # fmt: skip
"""Column, old claim, old verdict, the claim that replaces it, why the test changed."""


def write_changed_verdicts(results: Mapping[str, Sequence[ClaimResult]]) -> Iterator[str]:
    """Yield the earlier verdicts whose test changed, beside those of now."""
    rows = [["column", "earlier claim", "earlier verdict", "now", "what changed"]]
    for column, statement, verdict, id, reason in EARLIER:
        result = next((r for r in results.get(column, ()) if r.claim.id == id and not r.missing), None)
        if result is not None and not result.verdict.startswith(verdict):
            rows.append([column, statement, verdict, f"{result.verdict} (`{id}`)", reason])
    if len(rows) > 1:
        yield "## Verdicts that changed\n"
        yield markdown_table(rows)
