"""The claims about masked diffusion models that floatscope tests: one registry for every model, page and demo.

    CLAIMS["rag-gain"].statement                 # "MDMs gain more from passages than ARMs"
    registry_digest()                            # printed with every verdict, so that a page names its tests

A claim names what is measured, how the models are compared, and the smallest difference that matters, all set before
the runs. The comparison is written so that the claim says it is above zero. A changed test is a new VERSION with an
entry in CHANGES.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from floatscope.analysis.claims.attention_claims import ATTENTION_CLAIMS
from floatscope.analysis.claims.claim import Claim
from floatscope.analysis.claims.score_claims import EDIT_CLAIMS, SCORE_CLAIMS

VERSION = 2
CHANGES = {
    1: "The first registry. It replaces the tests of docs/pair.md (41 tests, one pair) and docs/results.md (7 tests,"
    " twins) of 0.7 and before: floating is attention moved and not only the change of the leading key; reading, order"
    " and floating use the commits of the answer; edits are compared with controls of the same dose; intervals are BCa;"
    " verdicts use Holm's correction.",
    2: "`retrieval-heads-zeroed` is compared with zeroing other heads of the same layers; version 1 looked for a"
    " control that moves as much attention, which heads do not have, so it had no result. A gain from passages is"
    " inconclusive if both models are at the ceiling with them. That rule was added after the twins had been run:"
    " without it, the verdicts on their gains were `no effect larger than the margin` and `contradicted`, although"
    " they answer 97 to 100 % of the questions with the gold passage and no model can gain more than the other,"
    " nor 1.5 times as much.",
}
"""Version → what changed, and what the old test had said."""

CLAIMS: dict[str, Claim] = {claim.id: claim for claim in (*ATTENTION_CLAIMS, *SCORE_CLAIMS, *EDIT_CLAIMS)}
"""Every claim by its id, in the order of the page."""


def registry_digest() -> str:
    """Return the first 12 digits of the sha256 of all claims and the version."""
    claims = [asdict(claim) | {"kind": type(claim.measure).__name__} for claim in CLAIMS.values()]
    text = json.dumps({"version": VERSION, "claims": claims}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def registry_line() -> str:
    """Return the sentence that a page with verdicts prints: version, number of claims and digest."""
    return f"Registry of claims: version {VERSION}, {len(CLAIMS)} claims, digest {registry_digest()}."
