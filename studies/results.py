"""docs/results.md from runs: the twins on their held-out worlds, and a real model on real files.

    python studies/results.py --out runs/results                              # the twins
    python studies/results.py --out runs/results --real smol.gguf --qa qa     # and a real model on the files in qa/

Runs are stored under --out and resumed; the page is written from all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from markdown_tables import markdown_table, sweep_table
from runs import describe_machines, evaluate_once, stress_once
from twin_claims import write_claims
from twin_interventions import write_interventions

import floatscope as fs
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.statistics import estimate
from floatscope.lab.twins.world import make_few_shot
from floatscope.reports.score_table import format_scores, score_rows
from floatscope.tasks.sample_files import read_samples, read_shipped

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
TWINS = ("arm", "mdm", "mdm-adapted")
SETTINGS: dict[str, Any] = {"new_tokens": 8}
STRESS: list[tuple[str, str, dict[str, Any], str]] = [
    ("position", "reading-5", {}, "Position of the gold passage"),
    (
        "noise",
        "reading-5",
        {"distractors": ("random", "counterfactual"), "counts": (0, 2, 8), "lengths": "growing"},
        "Number and kind of distractors",
    ),
    ("layout", "two-hop", {}, "Arrangement of the two hops"),
    ("query", "reading-5", {}, "Position of the question"),
    ("masks", "reading-5", {"counts": (16, 64)}, "More masks than the answer needs"),
    (
        "dirty",
        "reading-5",
        {"transforms": ("typos", "typos-question", "ocr", "stale"), "levels": 0.1},
        "Typos, OCR errors, stale versions",
    ),
]
REAL = {
    "NQ": "nq-open-oracle.jsonl.gz",
    "XQuAD": "xquad.en.json",
    "HotpotQA": "hotpot_dev_distractor_100.json",
    "2Wiki": "2wiki_500.json.gz",
}


def main() -> None:
    """Run what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--limit", type=int, default=100, help="questions of each file")
    parser.add_argument("--twins", nargs="+", default=TWINS, help="only these twins")
    parser.add_argument("--real", help="a checkpoint for the real files")
    parser.add_argument("--qa", type=Path, help="the folder of the real files")
    parser.add_argument("--real-limit", type=int, default=60)
    parser.add_argument("--batch", type=int, help="questions per batch")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    SETTINGS["batch_size"] = args.batch
    parts = [INTRODUCTION, *write_twins(args.out, args.limit, args.twins)]
    if table := list(write_claims(args.out, args.twins)):
        parts += [CLAIMS, *table]
    parts += write_interventions(args.out / "studies", {name: fs.load(f"twin:{name}") for name in args.twins})
    if args.real and args.qa:
        parts += write_real(args.real, args.qa, args.out / "real", args.real_limit)
    parts.append(f"---\n\nfloatscope {fs.__version__}. The runs were made on {describe_machines(args.out)}.\n")
    args.page.write_text("\n".join(parts))


INTRODUCTION = """# Results

This page answers what retrieval, stress tests and interventions do to the shipped twins, and to one real model. It is
written by `python studies/results.py`. Scores are percentages with 95 % CIs from a bootstrap over questions; *gain* is
the score with passages minus the score without, paired by question. *Gold* is the attention of the predicting rows on
the gold passage, mean over layers and heads, as lift: 1 is its share of the canvas.
"""


CLAIMS = """## Published claims, tested on the twins

A claim compares the effect of a change on the MDM with its effect on the ARM, in points, paired by question. It is
*supported* if the 95 % CI of the difference lies above zero, *contradicted* if it lies below zero, and *inconclusive*
otherwise. The twins have 7 million parameters and read worlds invented for them: a claim that is not supported here may
hold at 8 billion parameters, and a claim that is supported here does not need a large model.
"""


def write_twins(out: Path, limit: int, names: Sequence[str]) -> Iterator[str]:
    """Yield scores, few-shot curve and stress sweeps of the twins."""
    models = {name: fs.load(f"twin:{name}") for name in names}
    yield "## The twins on their held-out worlds\n"
    for data, passage_choices in (("reading-5", (0, "gold", 5)), ("two-hop", (0, 5)), ("closed-book", (0,))):
        samples, folders = read_shipped(data)[:limit], []
        for name, model in models.items():
            for passages in passage_choices:
                folder = out / f"{data}-{passages}" / name
                folders.append(
                    evaluate_once(model, samples, folder, passages=passages, source={"data": data}, **SETTINGS)
                )
        yield f"`{data}`, {limit} questions\n\n{format_scores(score_rows(folders), 'md')}"
    yield "### Number of few-shot examples\n\nWhich of three words is meant; chance is 33\n"
    yield write_few_shot(models, out / "examples", limit)
    for kind, data, options, title in STRESS:
        runnable = [name for name in names if kind != "masks" or models[name].spec.paradigm == "mdm"]
        if runnable:
            samples = read_shipped(data)[:limit]
            yield f"### {title}\n\n`--kind {kind}` on `{data}`\n"
            yield sweep_table(
                [stress_once(models[name], samples, out / kind / name, kind, options, **SETTINGS) for name in runnable]
            )


def write_few_shot(models: dict[str, fs.Model], out: Path, limit: int) -> str:
    """Return the accuracy by the number of examples, on fresh questions."""
    lines = [["examples", *models]]
    for shots in (1, 2, 4, 6):
        samples = [make_few_shot(Random(f"{shots} {i}"), f"rule-{i}", shots) for i in range(limit)]
        source = {"data": f"{shots}"}
        folders = [
            evaluate_once(model, samples, out / f"{shots}" / name, passages="all", source=source, **SETTINGS)
            for name, model in models.items()
        ]
        scores = [estimate(open_evaluation(folder).table, "acc").iloc[0] for folder in folders]
        lines.append(
            [str(shots), *(f"{100 * s['mean']:.1f} [{100 * s['low']:.1f}, {100 * s['high']:.1f}]" for s in scores)]
        )
    return markdown_table(lines)


REAL_INTRODUCTION = """\
The model is small and its answers are long: a correct answer is often part of a longer sentence, so *acc* is more
informative than *em*. The model is autoregressive; the tables show the effect of retrieval, distractors and position on
an ARM with real questions. Its MDM sibling is not part of these runs, and no claim about MDMs is tested here.
"""


def write_real(name: str, qa: Path, out: Path, limit: int) -> Iterator[str]:
    """Yield the scores of a real model on real files, and the sweep over positions."""
    model = fs.load(name)
    yield f"## {model.spec.name} on real files\n"
    yield REAL_INTRODUCTION
    settings = {**SETTINGS, "template": "instruct", "new_tokens": 16}
    folders = []
    for data, file in REAL.items():
        samples = read_samples(qa / file, limit)
        for passages in (0, "gold") if data in ("NQ", "XQuAD") else (0, "gold", 5):
            folder = out / f"{data}-{passages}"
            folders.append(evaluate_once(model, samples, folder, passages=passages, source={"data": data}, **settings))
    yield format_scores(score_rows(folders), "md")
    yield "### Position of the gold passage (NQ, five passages)\n"
    samples = read_samples(qa / REAL["NQ"], limit)
    yield sweep_table([stress_once(model, samples, out / "position", "position", {"documents": 5}, **settings)])


if __name__ == "__main__":
    main()
