"""Verdicts on published claims, from the runs of a report: every MDM against the ARM that was traced beside it.

    pairs = judge_pairs(runs)                     # the claims about attention, tested on these runs
    build_verdict_table(pairs)                    # a row per claim, a verdict per pair
    describe_claims(pairs)                        # a line per claim, in words

The claims and their tests are those of `analysis.claims`; the registry's digest is printed with every verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.analysis.claims import CLAIMS, Claim, ClaimResult, ModelTables, judge_tables
from floatscope.analysis.claims.verdicts import CONTRADICTED, NO_EFFECT, SMALLER, SUPPORTED, verdict_word
from floatscope.analysis.statistics import BootstrapEstimate
from floatscope.reports.charts import Cell, Table
from floatscope.reports.report_runs import ReportRun
from floatscope.schema import Paradigm

AS_PUBLISHED = {
    SUPPORTED: "as published",
    SMALLER: "as published, but small",
    CONTRADICTED: "the opposite of the published result",
    NO_EFFECT: "not seen here",
}


@dataclass(frozen=True)
class PairResults:
    """The results of the claims about attention for one MDM and one ARM."""

    arm: str
    mdm: str
    results: Sequence[ClaimResult]

    def result(self, claim: Claim | str) -> ClaimResult | None:
        """The result of a claim; None if it was not measured."""
        id = claim if isinstance(claim, str) else claim.id
        return next((r for r in self.results if r.claim.id == id and not r.missing), None)


def judge_pairs(runs: Sequence[ReportRun]) -> list[PairResults]:
    """Test the claims about attention on each MDM and the first ARM; empty without both."""
    arm = next((run for run in runs if run.paradigm is Paradigm.ARM), None)
    if arm is None:
        return []
    return [
        PairResults(arm.label, run.label, judge_tables(_model_tables(arm), _model_tables(run)))
        for run in runs
        if run.paradigm is Paradigm.MDM
    ]


def build_verdict_table(pairs: Sequence[PairResults]) -> Table:
    """A row per claim that was measured: the tested number and the verdict for each pair."""
    columns = ["claim", "measured as", "compared"]
    for pair in pairs:
        columns += [f"{pair.mdm} and {pair.arm}", "verdict"]
    rows: list[list[Cell]] = []
    for claim in CLAIMS.values():
        results = [pair.result(claim) for pair in pairs]
        if any(results):
            cells: list[Cell] = [claim.statement, claim.statistic, claim.comparison]
            for result in results:
                cells += ["–", "not measured"] if result is None else [format_tested(result), result.verdict]
            rows.append(cells)
    return Table(columns, rows, "Published claims, tested on these runs")


def describe_claims(pairs: Sequence[PairResults]) -> list[str]:
    """A line per claim with a short name: the value of each model, and the verdict for each MDM."""
    lines = []
    for claim in CLAIMS.values():
        measured = [(pair, result) for pair in pairs if (result := pair.result(claim)) is not None]
        if not claim.short or not measured:
            continue
        values: dict[str, float] = {}
        for pair, result in measured:
            values |= {pair.arm: result.values.get("arm", math.nan), pair.mdm: result.values["mdm"]}
        listed = ", ".join(f"{label} {format_value(claim, value)}" for label, value in values.items())
        verdicts = list(dict.fromkeys(describe_verdict(result) for _, result in measured))
        if len(verdicts) > 1:
            verdicts = [f"{describe_verdict(result)} ({pair.mdm})" for pair, result in measured]
        lines.append(f"{claim.short}: {listed}: {', '.join(verdicts)}")
    return lines


def describe_verdict(result: ClaimResult) -> str:
    """The verdict in words: `as published`, `not seen here`, `inconclusive (n = 12)`."""
    word = verdict_word(result.verdict)
    return AS_PUBLISHED.get(word, f"inconclusive (n = {result.tested.n})")


def format_value(claim: Claim, value: float) -> str:
    """A value in the unit of the claim."""
    unit = f" {claim.unit}" if claim.unit else ""
    return f"{format_digits(claim, value)}{unit}"


def format_tested(result: ClaimResult, estimate: BootstrapEstimate | None = None) -> str:
    """The tested number with its interval, in the unit of the claim."""
    tested, claim = estimate or result.tested, result.claim
    mean = format_digits(claim, tested.mean, sign=True)
    if math.isnan(tested.low):
        return mean
    return f"{mean} [{format_digits(claim, tested.low)}, {format_digits(claim, tested.high)}]"


def format_digits(claim: Claim, value: float, sign: bool = False) -> str:
    """A number of a claim, with one decimal if it is large and with two or three if it is small."""
    if math.isnan(value):
        return "–"
    scaled = claim.scale * value
    margin = claim.scale * claim.margin
    digits = 1 if margin >= 1 else 2 if margin >= 0.1 else 3
    return f"{scaled + 0.0:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def _model_tables(run: ReportRun) -> ModelTables:
    return ModelTables(run.tables.tables, [control.tables for control in run.controls])
