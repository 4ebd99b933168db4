"""docs/results.md from fresh runs: the twins on their held-out worlds, and a real model on real files.

    python studies/results.py --out runs/results                              # the twins
    python studies/results.py --out runs/results --real smol.gguf --qa qa     # and a real model on the files in qa/

Every run is kept under --out and gone on with; the page is written anew from what is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from claims import claims
from runs import asked, machines, under
from shown import markdown, points

import floatscope as fs
from floatscope.analysis.estimate import estimate
from floatscope.analysis.evaluations import open_evaluation
from floatscope.lab.twins.heldout import read
from floatscope.lab.twins.world import few_shot
from floatscope.reports.scores import compared, written
from floatscope.tasks.read import read_samples
from interventions import interventions

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
TWINS = ("arm", "mdm", "mdm-adapted")
HOW: dict[str, Any] = {"new_tokens": 8}
STRESS: list[tuple[str, str, dict[str, Any], str]] = [
    ("position", "reading-5", {}, "Where does the gold passage stand?"),
    (
        "noise",
        "reading-5",
        {"distractors": ("random", "counterfactual"), "counts": (0, 2, 8), "lengths": "growing"},
        "How many distractors, of which sort?",
    ),
    ("layout", "two-hop", {}, "How do the two hops stand to each other?"),
    ("query", "reading-5", {}, "Where does the question stand?"),
    ("masks", "reading-5", {"counts": (16, 64)}, "More masks than the answer needs"),
    (
        "dirty",
        "reading-5",
        {"transforms": ("typos", "typos-question", "ocr", "stale"), "levels": 0.1},
        "Typos, scanning errors, stale versions",
    ),
]
REAL = {
    "NQ": "nq-open-oracle.jsonl.gz",
    "XQuAD": "xquad.en.json",
    "HotpotQA": "hotpot_dev_distractor_100.json",
    "2Wiki": "2wiki_500.json.gz",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--limit", type=int, default=100, help="questions of each file")
    parser.add_argument("--twins", nargs="+", default=TWINS, help="only these")
    parser.add_argument("--real", help="a checkpoint for the real files")
    parser.add_argument("--qa", type=Path, help="the folder of the real files")
    parser.add_argument("--real-limit", type=int, default=60)
    parser.add_argument("--batch", type=int, help="questions asked together")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    HOW["batch"] = args.batch
    parts = [HEAD, *twins(args.out, args.limit, args.twins)]
    if table := list(claims(args.out, args.twins)):
        parts += [CLAIMS, *table]
    parts += interventions(args.out / "studies", {name: fs.load(f"twin:{name}") for name in args.twins})
    if args.real and args.qa:
        parts += real(args.real, args.qa, args.out / "real", args.real_limit)
    parts.append(f"---\n\nfloatscope {fs.__version__}. The runs were made on {machines(args.out)}.\n")
    args.page.write_text("\n".join(parts))


HEAD = """# Results

Written by `python studies/results.py` from fresh runs. Scores are percent with 95 % intervals, bootstrapped over
questions; *gain* is with passages less without, question by question. *Gold* is the attention the rows that decide the
answer give to the gold passage, mean over layers and heads, as lift: 1 is its share of the canvas.
"""


CLAIMS = """## What the twins say of the claims

A claim compares what a change does to the MDM with what it does to the ARM, in points, question by question; it holds
where the 95 % interval of that difference lies above zero. The twins have 7 million parameters and read worlds made up
for them: a claim that fails here may hold at 8 billion, and one that holds here shows that size is not needed for it.
"""


def twins(out: Path, limit: int, names: Sequence[str]) -> Iterator[str]:
    models = {name: fs.load(f"twin:{name}") for name in names}
    yield "## The twins on their held-out worlds\n"
    for data, settings in (("reading-5", (0, "gold", 5)), ("two-hop", (0, 5)), ("closed-book", (0,))):
        samples, folders = read(data)[:limit], []
        for name, model in models.items():
            for passages in settings:
                where = out / f"{data}-{passages}" / name
                folders.append(asked(model, samples, where, passages=passages, source={"data": data}, **HOW))
        yield f"`{data}`, {limit} questions\n\n{written(compared(folders), 'md')}"
    yield "### How many examples does a rule take?\n\nWhich of three words is meant; chance 33\n"
    yield examples(models, out / "examples", limit)
    for kind, data, options, question in STRESS:
        able = [name for name in names if kind != "masks" or models[name].spec.paradigm == "mdm"]
        if able:
            yield f"### {question}\n\n`--kind {kind}` on `{data}`\n"
            yield points(
                [under(models[name], read(data)[:limit], out / kind / name, kind, options, **HOW) for name in able]
            )


def examples(models: dict[str, fs.Model], out: Path, limit: int) -> str:
    """Accuracy against the number of examples, on fresh questions."""
    lines = [["examples", *models]]
    for shots in (1, 2, 4, 6):
        samples = [few_shot(Random(f"{shots} {i}"), f"rule-{i}", shots) for i in range(limit)]
        folders = [
            asked(model, samples, out / f"{shots}" / name, passages="all", source={"data": f"{shots}"}, **HOW)
            for name, model in models.items()
        ]
        scores = [estimate(open_evaluation(folder).table, "acc").iloc[0] for folder in folders]
        lines.append(
            [str(shots), *(f"{100 * s['mean']:.1f} [{100 * s['low']:.1f}, {100 * s['high']:.1f}]" for s in scores)]
        )
    return markdown(lines)


READ = """The model is small, and what it says is long: its answers are often right inside a sentence that is not the
answer, so that *acc* says more than *em*. It is autoregressive; what it shows is what retrieval, distractors and place
do to an ARM on real questions. Its masked sibling is not among these runs: no claim about MDMs is tested here.
"""


def real(name: str, qa: Path, out: Path, limit: int) -> Iterator[str]:
    model = fs.load(name)
    yield f"## {model.spec.name} on real files\n"
    yield READ
    how = {**HOW, "prompt": "instruct", "new_tokens": 16}
    folders = []
    for data, file in REAL.items():
        samples = read_samples(qa / file, limit)
        for passages in (0, "gold") if data in ("NQ", "XQuAD") else (0, "gold", 5):
            where = out / f"{data}-{passages}"
            folders.append(asked(model, samples, where, passages=passages, source={"data": data}, **how))
    yield written(compared(folders), "md")
    yield "### Where does the gold passage stand? (NQ, five passages)\n"
    samples = read_samples(qa / REAL["NQ"], limit)
    yield points([under(model, samples, out / "position", "position", {"documents": 5}, **how)])


if __name__ == "__main__":
    main()
