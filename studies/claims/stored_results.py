"""The results of a comparison as a JSON file beside the scripts, so that the page does not need the run folders.

    store_comparison(Path("runs/claims/twins"), {"7M twins: mdm − arm": ("arm", "mdm")}, RESULTS / "twins.json")
    comparison = read_comparison(RESULTS / "twins.json")
    comparison.columns["7M twins: mdm − arm"]      # the result of every claim, in the order of the registry

The run folders of a comparison have tens of megabytes; what the page prints of them has a few hundred kilobytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from details import write_details
from prompt_variance import write_prompt_variance
from runs import describe_machines

from floatscope.analysis.claims import CLAIMS, ClaimResult, judge_folder, registry_digest
from floatscope.analysis.claims.results import NOT_MEASURED, correct
from floatscope.analysis.statistics import BootstrapEstimate
from floatscope.files.atomic import write_atomic

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """What the page prints of one comparison."""

    columns: dict[str, list[ClaimResult]]
    details: list[str]  # sections in Markdown
    machines: str
    registry: str  # the digest of the registry that the results were judged by


def store_comparison(folder: Path, columns: Mapping[str, tuple[str, str]], out: Path) -> None:
    """Judge the runs in `folder`, for each column with its roles of the ARM and the MDM, and write the results."""
    content = {
        "registry": registry_digest(),
        "machines": describe_machines(folder),
        "columns": {name: [_as_json(r) for r in judge_folder(folder, *roles)] for name, roles in columns.items()},
        "details": [*write_prompt_variance(folder), *write_details(folder)],
    }
    out.parent.mkdir(exist_ok=True)
    write_atomic(out, [json.dumps(content, indent=1, ensure_ascii=False).encode(), b"\n"])


def read_comparison(file: Path) -> Comparison:
    """Read what `store_comparison` wrote. A claim that the registry has added since then is not measured."""
    content = json.loads(file.read_text())
    columns = {name: _read_results(stored) for name, stored in content["columns"].items()}
    return Comparison(columns, content["details"], content["machines"], content["registry"])


def _as_json(result: ClaimResult) -> dict[str, Any]:
    return {
        "claim": result.claim.id,
        "tested": asdict(result.tested),
        "values": dict(result.values),
        "limit": result.limit,
        "comparisons": {name: asdict(estimate) for name, estimate in result.comparisons.items()},
        "untrained_seeds": result.untrained_seeds,
        "missing": result.missing,
    }


def _read_results(stored: Sequence[dict[str, Any]]) -> list[ClaimResult]:
    by_id = {entry.pop("claim"): entry for entry in stored}
    results = []
    for claim in CLAIMS.values():
        entry = by_id.get(claim.id, {"tested": asdict(NOT_MEASURED), "values": {}, "missing": "added later"})
        comparisons = {name: BootstrapEstimate(**values) for name, values in entry.pop("comparisons", {}).items()}
        tested = BootstrapEstimate(**entry.pop("tested"))
        results.append(ClaimResult(claim, tested, comparisons=comparisons, **entry))
    return correct(results)
