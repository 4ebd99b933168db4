"""Claims tested on a pair of models: each becomes a tested number with its interval and a verdict.

    results = judge_folder(Path("runs/claims/twins"), arm="arm", mdm="mdm")     # every claim, from run folders
    results = judge_tables(arm, mdm)                                            # claims about attention, from tables
    results[0].verdict, results[0].tested.mean, results[0].values["mdm"]

Holm's correction is over the claims of one list; `uncorrected` is the verdict without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from floatscope.analysis.claims.claim import ARM_MDM, MDM, MDM_ARM, MDM_UNTRAINED, TRAINED_DIFFERENCE, TWICE, Claim
from floatscope.analysis.claims.measures import TRACES, UNTRAINED, AttentionMeasure
from floatscope.analysis.claims.registry import CLAIMS
from floatscope.analysis.claims.verdicts import judge
from floatscope.analysis.statistics import BootstrapEstimate, bootstrap, holm
from floatscope.errors import UserError

ROLES = ("arm", "mdm", "arm untrained", "mdm untrained")
Value = Callable[[str], pd.Series]
"""A role → the value of its column means, a number per resample."""

COMPARISONS: dict[str, Callable[[Value], pd.Series]] = {
    MDM_ARM: lambda v: v("mdm") - v("arm"),
    ARM_MDM: lambda v: v("arm") - v("mdm"),
    MDM: lambda v: v("mdm"),
    MDM_UNTRAINED: lambda v: v("mdm") - v("mdm untrained"),
    TRAINED_DIFFERENCE: lambda v: v("mdm") - v("mdm untrained") - v("arm") + v("arm untrained"),
    TWICE: lambda v: v("mdm") - 1.5 * v("arm"),
}
"""What is tested; the claim says that it is above zero."""
ALL_THREE = (MDM_ARM, MDM_UNTRAINED, TRAINED_DIFFERENCE)
"""The comparisons that are printed for every claim about attention, whichever of them decides."""
NOT_MEASURED = BootstrapEstimate(float("nan"), float("nan"), float("nan"), 0, float("nan"))


@dataclass(frozen=True)
class ClaimResult:
    """A claim tested on one pair of models."""

    claim: Claim
    tested: BootstrapEstimate
    values: Mapping[str, float]  # role → the compared value
    limit: str = ""  # why the test cannot decide
    comparisons: Mapping[str, BootstrapEstimate] = field(default_factory=dict)  # of a claim about attention
    untrained_seeds: int = 0
    corrected_p: float = float("nan")
    missing: str = ""  # why it was not measured

    @property
    def verdict(self) -> str:
        """The verdict after Holm's correction."""
        return judge(self.tested, self.claim.margin, self.limit, self.corrected_p)

    @property
    def uncorrected(self) -> str:
        """The verdict without Holm's correction."""
        return judge(self.tested, self.claim.margin, self.limit)


@dataclass(frozen=True)
class ModelTables:
    """The tables of a model and of its untrained controls."""

    trained: Mapping[str, pd.DataFrame]
    untrained: Sequence[Mapping[str, pd.DataFrame]] = ()


def judge_folder(folder: Path, arm: str, mdm: str) -> list[ClaimResult]:
    """Test every claim on the runs of a comparison; `arm` and `mdm` are the roles of the two models."""

    def read(claim: Claim, role: str, seed: int | None = None) -> pd.DataFrame:
        model = {"arm": arm, "mdm": mdm}[role]
        return claim.measure.read(folder, model if seed is None else f"{model}/{UNTRAINED}-{seed}")

    seeds = len(list((folder / TRACES / mdm).glob(f"{UNTRAINED}-*")))
    return correct(
        [
            _try_test(claim, read, seeds if isinstance(claim.measure, AttentionMeasure) else 0)
            for claim in CLAIMS.values()
        ]
    )


def judge_tables(
    arm: ModelTables, mdm: ModelTables, claims: Sequence[Claim] = tuple(CLAIMS.values())
) -> list[ClaimResult]:
    """Test the claims about attention on tables in memory."""
    models = {"arm": arm, "mdm": mdm}

    def read(claim: Claim, role: str, seed: int | None = None) -> pd.DataFrame:
        assert isinstance(claim.measure, AttentionMeasure)
        tables = models[role].trained if seed is None else models[role].untrained[seed]
        return claim.measure.read_tables(tables)

    seeds = min(len(arm.untrained), len(mdm.untrained))
    claims = [claim for claim in CLAIMS.values() if isinstance(claim.measure, AttentionMeasure)]
    return correct([_try_test(claim, read, seeds) for claim in claims])


def correct(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Add Holm's correction over the claims that can decide."""
    p_values = [float("nan") if result.limit else result.tested.p_value for result in results]
    return [replace(result, corrected_p=float(p)) for result, p in zip(results, holm(p_values), strict=True)]


def _try_test(claim: Claim, read: Callable[..., pd.DataFrame], seeds: int) -> ClaimResult:
    try:
        return _test(claim, read, seeds)
    except (UserError, KeyError) as error:
        return ClaimResult(claim, NOT_MEASURED, {}, missing=str(error))


def _test(claim: Claim, read: Callable[..., pd.DataFrame], seeds: int) -> ClaimResult:
    uses_arm = claim.comparison not in (MDM, MDM_UNTRAINED)
    roles = ["arm", "mdm"] if uses_arm or seeds else ["mdm"]
    trained = {role: read(claim, role) for role in roles}
    tables = []
    for seed in range(seeds) or [None]:
        parts = dict(trained)
        if seed is not None:
            parts |= {f"{role} untrained": read(claim, role, seed) for role in roles}
        tables.append(pd.concat(parts, axis=1))
    needed = {column for column in _roles_of(claim.comparison) if column in tables[0].columns.get_level_values(0)}
    if missing := set(_roles_of(claim.comparison)) - needed:
        raise UserError(f"{', '.join(sorted(missing))} was not measured")

    def test(comparison: str) -> BootstrapEstimate:
        used = _roles_of(comparison)
        return bootstrap(
            [table[used] for table in tables],
            lambda m: COMPARISONS[comparison](lambda role: claim.measure.value(m[role])),
        )

    tested = test(claim.comparison)
    complete = pd.concat(tables).dropna(subset=[column for column in tables[0].columns if column[0] in needed])
    means = complete.mean().to_frame().T
    values = {
        role: float(claim.measure.value(means[role]).iloc[0])
        for role in dict.fromkeys(means.columns.get_level_values(0))
    }
    limit = claim.measure.limit({role: means[role].iloc[0] for role in roles})
    others = {name: test(name) for name in ALL_THREE} if seeds else {}
    return ClaimResult(claim, tested, values, limit, others, seeds)


def _roles_of(comparison: str) -> list[str]:
    """The roles that a comparison reads."""
    used: list[str] = []

    def note(role: str) -> pd.Series:
        used.append(role)
        return pd.Series([0.0])

    COMPARISONS[comparison](note)
    return used
