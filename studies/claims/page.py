"""docs/claims.md from the folders of `run.py`; no model is loaded, and a claim without runs is listed as not measured.

python studies/claims/page.py --out runs/claims --page docs/claims.md

The results of a comparison whose folder is there are stored in results/ first; the page is written from those files.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from earlier_verdicts import write_changed_verdicts
from markdown_tables import markdown_table
from stored_results import RESULTS, Comparison, read_comparison, store_comparison

from floatscope.analysis.claims import CLAIMS, ClaimResult, registry_digest, registry_line
from floatscope.analysis.claims.registry import CHANGES
from floatscope.analysis.claims.results import ALL_THREE
from floatscope.analysis.claims.verdicts import SMALLER, VERDICTS, verdict_word
from floatscope.reports.claim_tables import format_digits, format_tested

PAGE = Path(__file__).parent.parent.parent / "docs" / "claims.md"
COMPARISONS = {
    "twins": {"7M twins: mdm − arm": ("arm", "mdm"), "7M twins: mdm-adapted − arm": ("arm", "mdm-adapted")},
    "smollm2": {"SmolLM2 pair: MDM − ARM": ("arm", "mdm")},
}
"""Folder of a comparison → its columns, each with the roles of the ARM and the MDM."""
Results = Mapping[str, Sequence[ClaimResult]]
"""Column → the results of all claims, in the order of the registry."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(arguments)
    for name, columns in COMPARISONS.items():
        if (args.out / name).exists():
            store_comparison(args.out / name, columns, args.results / f"{name}.json")
    files = {name: args.results / f"{name}.json" for name in COMPARISONS}
    comparisons = {name: read_comparison(file) for name, file in files.items() if file.exists()}
    results = {column: tested for comparison in comparisons.values() for column, tested in comparison.columns.items()}
    parts = [
        INTRODUCTION.format(registry=registry_line()),
        *write_summary(results),
        "## Every claim\n",
        write_verdicts(results),
        *write_changed_verdicts(results),
        *write_comparisons(results),
        *(part for comparison in comparisons.values() for part in comparison.details),
        write_registry_changes(),
        "---\n",
        *(write_origin(name, comparison) for name, comparison in comparisons.items()),
    ]
    args.page.write_text("\n".join(parts))


INTRODUCTION = """# Claims

This page answers which published claims about masked diffusion models are supported by three pairs of small models. It
is written by `python studies/claims/page.py` from the runs of `python studies/claims/run.py`. {registry}

**The columns.** The 7M twins are trained on the same rows, `mdm` for 20,000 steps and the others for 12,000
([twins.md](twins.md)): `mdm` against `arm`, and `mdm-adapted`, made from `arm`, against `arm`. In the SmolLM2 pair,
both models come from SmolLM2-135M-Instruct and were trained on the same questions, one with masks and one
autoregressively ([adapt.md](adapt.md)). The published claims are about models of 7 to 8 billion parameters: a claim
that is not supported here may hold there. Each model was trained with one seed, so the intervals are over texts and do
not include the variation between trainings.

**The tests.** Each claim is written as a number that is above zero if the claim is true, and judged by its 95 % CI (BCa
bootstrap over questions, paired) after Holm's correction over the claims of a column:

- **supported**: the interval is above zero; *smaller than the margin* if all of it is.
- **contradicted**: the interval is below zero and reaches beyond minus the margin.
- **no effect larger than the margin**: the interval excludes effects of that size in the claimed direction.
- **inconclusive**: anything else, with the reason: n, a ceiling or floor, no variation, or Holm's correction.

The margin is the smallest difference that matters, and was set before the runs. Reading, order and floating use the
steps that write the answer, without the end-of-text tokens after it. Edits are compared with edits of random keys that
move the same amount of attention. *Untrained* is the same architecture with fresh weights.
"""


def write_summary(results: Results) -> Iterator[str]:
    """Yield the number of verdicts by column, and the claims on which the columns disagree."""
    yield "## Summary\n"
    rows = [["", *VERDICTS, "not measured"]]
    for column, tested in results.items():
        counts = Counter(verdict_word(result.verdict) for result in tested if not result.missing)
        missing = sum(bool(result.missing) for result in tested)
        rows.append([column, *(str(counts[verdict]) for verdict in VERDICTS), str(missing)])
    yield markdown_table(rows)
    for word, title in (("supported", "Supported in every column"), ("contradicted", "Contradicted in every column")):
        if claims := [id for id in CLAIMS if _words(results, id) == {word}]:
            yield write_list(title, claims)
    opposed = [
        id for id in CLAIMS if "contradicted" in (words := _words(results, id)) and words & {"supported", SMALLER}
    ]
    if opposed:
        yield write_list("Supported in one column and contradicted in another", opposed)


def write_list(title: str, claims: Sequence[str]) -> str:
    """Return the claims with these ids as a list."""
    return f"**{title}** ({len(claims)} claims):\n\n" + "".join(f"- {_name(id)}\n" for id in claims)


def _words(results: Results, id: str) -> set[str]:
    """The verdicts on a claim over the columns that measured it, without their reasons."""
    found = (next(result for result in tested if result.claim.id == id) for tested in results.values())
    return {verdict_word(result.verdict) for result in found if not result.missing}


def _name(id: str) -> str:
    claim = CLAIMS[id]
    statement = claim.statement
    if statement.startswith("…"):
        before = list(CLAIMS)[: list(CLAIMS).index(id)]
        parent = next(
            CLAIMS[other].statement for other in reversed(before) if not CLAIMS[other].statement.startswith("…")
        )
        statement = f"{parent}{statement.replace('…', ',')}"
    return f"{statement} ({claim.statistic})"


def write_verdicts(results: Results) -> str:
    """Return a row per claim with a verdict and the tested number per column, and the sources."""
    rows = [["claim", "source", "measured as", "tested", "margin", *results]]
    for number, claim in enumerate(CLAIMS.values()):
        margin = f"{claim.scale * claim.margin:g} {claim.unit}".strip()
        row = [claim.statement, _arxiv_id(claim.source), claim.statistic, claim.comparison, margin]
        for tested in results.values():
            result = tested[number]
            if result.missing:
                row.append("not measured")
                continue
            row.append(f"**{result.verdict}**: {format_tested(result)}, n = {result.tested.n}")
        rows.append(row)
    sources = dict.fromkeys(claim.source for claim in CLAIMS.values())
    return f"{markdown_table(rows)}\nSources, by their arXiv numbers: {'; '.join(sources)}.\n"


def _arxiv_id(source: str) -> str:
    return source[source.rindex("(") + 1 : -1]


def write_comparisons(results: Results) -> Iterator[str]:
    """Yield, for every column, the values of all models, all comparisons and both verdicts."""
    for column, tested in results.items():
        seeds = max((result.untrained_seeds for result in tested), default=0)
        yield f"## {column}: all values and comparisons\n"
        yield (
            f"Training seeds: 1. Seeds of the untrained controls: {seeds}. *p* is uncorrected, *Holm* is after the"
            " correction, and *uncorrected* is the verdict without it, where it differs.\n"
        )
        header = ["claim", "ARM", "untrained", "MDM", "untrained", *ALL_THREE, "p", "Holm", "uncorrected"]
        rows = [header]
        for result in tested:
            if result.missing:
                continue
            values = [
                format_digits(result.claim, result.values.get(role, float("nan")))
                for role in ("arm", "arm untrained", "mdm", "mdm untrained")
            ]
            others = [
                format_tested(result, result.comparisons[name]) if name in result.comparisons else "–"
                for name in ALL_THREE
            ]
            corrected = "–" if result.corrected_p != result.corrected_p else f"{result.corrected_p:.2g}"
            differs = result.uncorrected if result.uncorrected != result.verdict else ""
            rows.append(
                [
                    result.claim.id,
                    *values,
                    *others,
                    result.tested.format_p_value().removeprefix("p = "),
                    corrected,
                    differs,
                ]
            )
        yield markdown_table(rows)
        if missing := [result.claim.id for result in tested if result.missing]:
            yield f"Not measured: {', '.join(missing)}.\n"


def write_origin(name: str, comparison: Comparison) -> str:
    """Return where the runs of a comparison were made, and which registry they were judged by."""
    is_current = comparison.registry == registry_digest()
    registry = "" if is_current else f" They were judged by the registry with digest {comparison.registry}."
    return f"The runs of {name} were made on {comparison.machines}.{registry}\n"


def write_registry_changes() -> str:
    """Return the changelog of the registry."""
    return "## Versions of the registry\n\n" + "".join(
        f"- **{version}.** {text}\n" for version, text in CHANGES.items()
    )


if __name__ == "__main__":
    main()
