"""Published claims and their tests: the registry, the measures, the verdicts.

results = judge_folder(Path("runs/claims/twins"), arm="arm", mdm="mdm")
results[0].claim.statement, results[0].verdict
"""

from floatscope.analysis.claims.claim import Claim
from floatscope.analysis.claims.registry import CLAIMS, registry_digest, registry_line
from floatscope.analysis.claims.results import ClaimResult, ModelTables, judge_folder, judge_tables
from floatscope.analysis.claims.verdicts import judge

__all__ = [
    "CLAIMS",
    "Claim",
    "ClaimResult",
    "ModelTables",
    "judge",
    "judge_folder",
    "judge_tables",
    "registry_digest",
    "registry_line",
]
