"""docs/pair.md from the folders `run.py` made; no model is loaded, and what was not run is left out.

python studies/pair/page.py --out runs/pair --page docs/pair.md --adapter src/floatscope/assets/adapters/smollm2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

import pandas as pd
from figures import drawn
from paper import ANSWERS, CLAIMS, WHO, mean_of
from run import STUDIES as RUN
from runs import finished, machines, swept, tried
from shown import markdown, points, rows
from tables import CONTROL, read_table
from verdict import HOLDS, NOT, OPEN, Stat, Told, of_means, verdict

import floatscope as fs
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.experiments import effects
from floatscope.analysis.floating import THIRDS
from floatscope.analysis.retrieval import THRESHOLD, correlation, head_map
from floatscope.analysis.studies import STUDIES
from floatscope.analysis.tokens import CLASSES
from floatscope.errors import UserError
from floatscope.traces.record import RECORD, read_record

PAGE = Path(__file__).parent.parent.parent / "docs" / "pair.md"
DATA = {"nq": "NQ", "xquad": "XQuAD"}
SETTINGS = {"closed": "closed book", "gold": "gold passage", "five": "gold and 4 distractors"}
GOAL = 0.5
SWEEPS = {
    "position": "Where does the gold passage stand?",
    "noise": "How many distractors?",
    "query": "Where does the question stand?",
}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pair"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--adapter", type=Path, help="a folder with its training.json and scores.json")
    args = parser.parse_args(given)
    parts = [head(args.out), *claims(args.out)]
    parts += [*scores(args.out), *stress(args.out), *attention(args.out), *heads(args.out)]
    parts += [*pictures(args.out, args.page), *interventions(args.out), *adapter(args.adapter)]
    parts += missing(args.out)
    parts.append(f"---\n\nfloatscope {fs.__version__}. The runs were made on {machines(args.out)}.\n")
    args.page.write_text("\n".join(parts))


# What was asked.

ALIKE = """\
The ARM is a control: it learnt from the same rows as the MDM, in the same order, with small matrices of the same rank,
but with its causal mask and the next token. The base is what both were made from. Both learnt equally long, and not
equally much: the ARM went on as it was, while the MDM had to learn to fill masks and to look both ways. So where the
MDM scores less, the short training may be why. The control is not shipped;
[adapt.md](adapt.md#smollm2-and-its-sibling) has its command, and says what both read beside what they are asked.
"""
UNLIKE = """\
**The MDM was made from the ARM and learnt to answer questions with passages, and the ARM learnt nothing more.** So
attention alone does not explain what the two score: a claim about scores that holds here may hold because of those
lessons. `floatscope adapt --control` makes an ARM that learnt the same.
"""


def head(out: Path) -> str:
    arm, mdm = (settings(out, who) for who in WHO)
    return f"""# A pair of models

Written by `python studies/pair/page.py` from the runs of `python studies/pair/run.py`. The ARM is `{arm["model"]}`, the
MDM `{mdm["model"]}`. Both are asked the same questions in the same words, for {mdm["new_tokens"]} tokens; the MDM
writes one token per step. A distractor is the passage of another question that does not tell the answer.

{lessons(arm, mdm)}
Numbers in brackets are 95 % intervals, bootstrapped over questions; differences are paired, question by question.
*Right* means that the answer has one of the right answers in it.
"""


def lessons(arm: Mapping[str, Any], mdm: Mapping[str, Any]) -> str:
    """Who learnt what, where one or both are a base with an adapter."""
    if mdm["layout"] != "adapted":
        return ""
    return ALIKE if arm["layout"] == "adapted" else UNLIKE


def settings(out: Path, who: str) -> dict[str, Any]:
    """Of the first run of a model."""
    records = (path for path in sorted(out.rglob(RECORD)) if who in path.relative_to(out).parts)
    told: dict[str, Any] = read_record(next(records).parent)["settings"]
    return told


def _by_family(out: Path, text: str) -> str:
    """With ARM and MDM in the place of the names `head` gives them."""
    names = {str(settings(out, who)["model"]): who.upper() for who in WHO}
    for name in sorted(names, key=len, reverse=True):  # the name of a base begins that of its adapters
        text = text.replace(name, names[name])
    return text


def adapter(folder: Path | None) -> Iterator[str]:
    """What the adapter's own files tell, as far as they are there."""
    files = {} if folder is None else {name: folder / f"{name}.json" for name in ("training", "scores")}
    told = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if told:
        yield "## The adapter\n"
    numbers = {name: each for name, each in told.get("training", {}).items() if type(each) in (int, float)}
    if numbers:
        yield markdown([["training", ""], *([name.replace("_", " "), f"{each:,}"] for name, each in numbers.items())])
    if masked := told.get("scores", {}).get("masked", []):
        base = {row["ratio"]: row for row in told["scores"].get("masked_base", [])}
        lines = [["masked", "adapted", "before", "rows of text"]]
        for row in masked:
            lines.append([f"{row['ratio']:.0%}", _share(row), _share(base.get(row["ratio"])), str(row["n"])])
        yield "Masked-token accuracy by mask ratio on held-out text, in percent. *Before* is the base model, opened"
        yield "with a mask token but not adapted.\n"
        yield markdown(lines)


def _share(row: dict[str, float] | None) -> str:
    return "–" if row is None else f"{100 * row['accuracy']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


# The claims.

HEAD = """## The paper's claims

The claims are those of [Revealing the Attention Floating Mechanism in Masked Diffusion
Models](https://arxiv.org/abs/2601.07894), which were made of far larger models."""
RULES = """Each claim is written as a number that it says is above zero, *tested* below, and judged by its interval
alone:

- **holds**: the interval lies above zero; *by less than would matter* where all of it is within the margin.
- **does not**: it lies below zero (*the opposite*), or it has zero in it and ends below the margin: *no difference that
  would matter* where it begins above minus the margin, else *no gain that would matter*.
- **cannot be told at this size**: it has zero in it and reaches the margin; or both models are above 97 % after the
  change, or one of them is below 5 % before and after, so that there is nothing to gain or lose; or all questions say
  the same, and there is no interval.

The margin, what would matter, is 5 points of a score, 10 points of a share of a score, 5 points of attention or of
steps, 0.1 of a ratio, 0.1 nats per token, 2 % of the heads. A model that scores less has less to lose in points, so
that what distractors and places cost is judged by the share of the score that is kept as well. *About twice* is tested
as one and a half times at least. Best less worst of several places is never below zero, and too large for both models
where questions are few.

*Untrained* is the same architecture with fresh weights, and stands beside each model: an ARM that keeps its rows adds
one per step, so that its anchors can hardly move, and an untrained MDM floats most of all. What floats is therefore
compared with the untrained model first. The ARM's first token takes most of its attention in deep layers; where that
would be all a test sees, the first token is left out.
"""
UNSAID = """
Tests depend on each other, most of them through the ARM's first token; intervals are not corrected for their number,
and tell of other questions, not of another training: each model was trained once, and each untrained one drawn once.
An MDM that is done writes ends of text, often before the answer, and those are steps too. The index of the top key
counts the same token of two texts as two places where they begin alike and differ in length before it. An edit's
control acts on as many keys, drawn once, which need not have as much attention. A mean over layers hides single ones
that differ; the pictures show them. The base comes with weights of four bits.
"""


def claims(out: Path) -> Iterator[str]:
    unlike = lessons(*(settings(out, who) for who in WHO)) == UNLIKE
    lines = [["claim", "measured as", "n", "ARM", "untrained", "MDM", "untrained", "tested", "is", "verdict"]]
    for claim in CLAIMS:
        try:
            table = claim.table(out)
        except (UserError, FileNotFoundError):
            continue
        stats = [claim.arm, claim.mdm]
        if claim.untrained:
            stats = [claim.arm, lambda m: m["arm untrained"], claim.mdm, lambda m: m["mdm untrained"]]
        means = [of_means(table, stat).mean for stat in stats]
        plain = [f"{claim.scale * mean:.{_digits(claim.scale, mean)}f}" for mean in means]
        plain = plain if claim.untrained else [plain[0], "", plain[1], ""]
        apart = of_means(table, claim.apart)
        said = verdict(apart, claim.margin, claim.blocked(table.mean()), claim.least)
        if unlike and claim in ANSWERS and said.startswith(HOLDS):
            said += ", and the lessons may be why"
        shown = [str(apart.n), *plain, claim.tested, _interval(apart, claim.scale), f"**{said}**"]
        lines.append([claim.says, claim.measured, *shown])
    missing = len(CLAIMS) + 1 - len(lines)
    rest = f"; the runs of {missing} others are not finished" if missing else ""
    yield f"{HEAD} Of {len(lines) - 1}\ntests {tally([line[-1] for line in lines[1:]])}{rest}.\n"
    yield in_short({(line[0], line[1]): line[-1] for line in _in_full(lines[1:])})
    yield RULES
    yield markdown(lines)
    yield UNSAID


def _in_full(lines: Sequence[list[str]]) -> Iterator[list[str]]:
    """With the claim before it where one goes on with it."""
    before = ""
    for says, *rest in lines:
        before = before if says.startswith("…") else says
        yield [before + says.replace("…", ",") if says.startswith("…") else says, *rest]


def in_short(verdicts: Mapping[tuple[str, str], str]) -> str:
    """(claim, how it is measured) → verdict, as three lists of claims."""
    found: dict[str, list[str]] = {}
    for (says, _), said in verdicts.items():
        found.setdefault(says, []).append(said)
    kinds = {HOLDS: "Hold", NOT: "Do not", OPEN: "Cannot be told"}
    lists: dict[str, list[str]] = {words: [] for words in (*kinds.values(), "Differ by how they are measured")}
    for says, each in found.items():
        alike = [words for kind, words in kinds.items() if all(said.startswith(f"**{kind}") for said in each)]
        if alike:
            lists[alike[0]].append(says)
        else:
            lists["Differ by how they are measured"].append(f"{says} ({tally(each)})")
    return "".join(f"- **{words}:** {'; '.join(some)}.\n" for words, some in lists.items() if some)


def tally(verdicts: Sequence[str]) -> str:
    """How many of them say what."""
    kinds = {HOLDS: "hold", NOT: "do not", OPEN: "cannot be told"}
    counts = {said: sum(verdict.startswith(f"**{kind}") for verdict in verdicts) for kind, said in kinds.items()}
    return ", ".join(f"{count} {said}" for said, count in counts.items() if count)


def _digits(scale: float, mean: float) -> int:
    return 1 if scale == 100 or abs(mean) >= 10 else 2


def _interval(told: Told, scale: float = 100.0, sign: str = "+") -> str:
    if isnan(told.low):
        return "–"
    digits = _digits(scale, told.mean)
    return f"{scale * told.mean:{sign}.{digits}f} [{scale * told.low:.{digits}f}, {scale * told.high:.{digits}f}]"


# Scores.


SCORES: dict[str, Stat] = {
    "ARM, right": lambda m: m["arm"],
    "MDM, right": lambda m: m["mdm"],
    "MDM − ARM": lambda m: m["mdm"] - m["arm"],
}
GAINS: dict[str, Stat] = {
    "ARM, gain": lambda m: m["arm"] - m["arm closed"],
    "MDM, gain": lambda m: m["mdm"] - m["mdm closed"],
    "MDM − ARM": lambda m: m["mdm"] - m["mdm closed"] - m["arm"] + m["arm closed"],
}
RATIOS: dict[str, Stat] = {
    "MDM / ARM, gain": lambda m: (m["mdm"] - m["mdm closed"]) / (m["arm"] - m["arm closed"]),
    "MDM / ARM, score": lambda m: m["mdm"] / m["arm"],
}


def scores(out: Path) -> Iterator[str]:
    folders = {(data, setting): out / "scores" / f"{data}-{setting}" for data in DATA for setting in SETTINGS}
    folders = {key: folder for key, folder in folders.items() if all(finished(folder / who) for who in WHO)}
    if not folders:
        return
    asked = [*WHO, *(["base"] if all(finished(folder / "base") for folder in folders.values()) else [])]
    found = {key: pd.DataFrame({who: _column(folder / who, "acc") for who in asked}) for key, folder in folders.items()}
    shown = {**({"base, right": lambda m: m["base"]} if "base" in asked else {}), **SCORES}
    lines = [["questions", "passages", "n", *shown, "ARM, F1", "MDM, F1"]]
    for (data, setting), table in found.items():
        f1 = [f"{100 * _column(folders[data, setting] / who, 'f1').mean():.1f}" for who in WHO]
        cells = [_interval(of_means(table, stat), sign="+" if "−" in name else "") for name, stat in shown.items()]
        lines.append([DATA[data], SETTINGS[setting], str(len(table)), *cells, *f1])
    yield "## Scores\n"
    yield markdown(lines)
    lines = [["questions", "passages", *GAINS, *RATIOS]]
    for data, setting in found:
        if setting != "closed" and (data, "closed") in found:
            both = found[data, setting].join(found[data, "closed"].add_suffix(" closed"))
            cells = [_interval(of_means(both, stat)) for stat in GAINS.values()]
            cells += [_interval(of_means(both, stat), 1, "") for stat in RATIOS.values()]
            lines.append([DATA[data], SETTINGS[setting], *cells])
    yield "*Gain* is with passages less without, question by question.\n"
    yield markdown(lines)
    yield from goal(found)


def _column(folder: Path, value: str) -> pd.Series:
    return open_evaluation(folder).table.set_index("sample")[value]


def goal(found: Mapping[tuple[str, str], pd.DataFrame]) -> Iterator[str]:
    """Whether adapting left the MDM at least half of what its base can do."""
    for data in DATA:
        if (data, "gold") in found:
            base = "base" if "base" in found[data, "gold"] else "arm"
            told = of_means(found[data, "gold"], lambda m, base=base: m["mdm"] / m[base])
            said = "holds" if told.low >= GOAL else "does not hold" if told.high < GOAL else "cannot be told"
            yield f"With the gold passage the MDM has {_interval(told, 1, '')} of its base's score on {DATA[data]}:"
            yield f"that it is {GOAL:g} or more {said}."
            if base == "base":
                of_arm = of_means(found[data, "gold"], lambda m: m["mdm"] / m["arm"])
                yield "The base did not learn such answers; of the score of the ARM, which did, the MDM has"
                yield f"{_interval(of_arm, 1, '')}."
            yield ""


def stress(out: Path) -> Iterator[str]:
    for kind, title in SWEEPS.items():
        folders = [out / "stress" / kind / who for who in WHO]
        if all(map(swept, folders)):
            yield f"### {title}\n\n`--kind {kind}`, NQ. *Gold* is the attention of the rows that decide on the gold"
            yield "passage, as lift: 1 is its share of the canvas.\n"
            yield _by_family(out, points(folders))


# Attention.

MEASURES: list[tuple[str, str, str, dict[str, str], float]] = [
    ("first token, % of attention", "absorption", "percent", {"set": "first"}, 1),
    ("top key, % of attention", "absorption", "percent", {"set": "top"}, 1),
    ("top key, lift", "absorption", "lift", {"set": "top"}, 1),
    ("row entropy", "concentration", "row_entropy", {}, 1),
    ("floating within a text, %", "floating", "within", {}, 100),
    ("floating across texts, %", "floating", "across", {}, 100),
    ("Jaccard of anchors with the first step", "drift", "jaccard_first", {}, 1),
    ("structure, ratio", "structure", "ratio", {"set": "structure"}, 1),
    ("content, ratio", "structure", "ratio", {"set": "content"}, 1),
    ("content, ratio of what is moved", "structure", "moved_ratio", {"set": "content"}, 1),
    ("gold in rows that decide, ratio", "answer_rows", "ratio", {"region": "gold"}, 1),
    ("other passages in them, ratio", "answer_rows", "ratio", {"region": "other documents"}, 1),
    ("evidence in them, ratio", "answer_rows", "ratio", {"region": "evidence"}, 1),
]
"""What it is called, its table and column, the rows taken, and the scale it is shown on."""


def traced(out: Path) -> list[Path]:
    """The tables of both models and of their controls, once all are there."""
    folders = [out / "traces" / who / of for who in WHO for of in ("", CONTROL)]
    return folders if all((folder / RECORD).exists() for folder in folders) else []


def attention(out: Path) -> Iterator[str]:
    folders = traced(out)
    if not folders:
        return
    lines = [["", "layers", "ARM", "untrained", "MDM", "untrained", "MDM − ARM"]]
    for title, table, column, only, scale in MEASURES:
        for number, part in enumerate(THIRDS):
            found = _four(folders, table, column, {**only, "third": part})
            if found.empty:
                continue
            apart = of_means(found[["arm", "mdm"]], SCORES["MDM − ARM"])
            lines.append(["" if number else title, part, *_means(found, scale), _interval(apart, scale)])
    read = len(read_table(folders[0], "sinks"))
    yield f"## Where attention goes\n\n{read} questions of NQ, five passages each; every head is watched at every step."
    yield "Sinks and entropies are those of whole forwards: of the ARM, which keeps its rows, that of the prompt."
    yield "*Untrained* is the same architecture with fresh weights: what it shows has not been learnt. Layers are in"
    yield "thirds. Rows that decide are those that write the answer, up to its end. *Ratio* is over what"
    yield "uniform attention would give, of all attention, what the first token takes included;"
    yield "[analysis.md](analysis.md) defines the rest.\n"
    yield markdown(lines)
    yield "### What anchors are\n\nHow often a token of each class is an anchor, over its share of the text.\n"
    lines = [["class", "ARM", "untrained", "MDM", "untrained", "MDM − ARM"]]
    for kind in CLASSES:
        found = _four(folders, "identity", "ratio", {"class": kind})
        if found.notna().any(axis=None):
            lines.append([kind, *_means(found, 1), _interval(of_means(found[["arm", "mdm"]], SCORES["MDM − ARM"]), 1)])
    yield markdown(lines)


def _four(folders: Sequence[Path], table: str, column: str, only: Mapping[str, str]) -> pd.DataFrame:
    """A row per question, of the models and their controls."""
    values = [mean_of(table, column, **only)(folder) for folder in folders]
    return pd.DataFrame(dict(zip(("arm", "arm control", "mdm", "mdm control"), values, strict=True)))


def _means(found: pd.DataFrame, scale: float) -> list[str]:
    return ["–" if isnan(each) else f"{scale * each:.{1 if scale == 100 else 2}f}" for each in found.mean()]


def heads(out: Path) -> Iterator[str]:
    folders = {who: out / "traces" / who for who in WHO}
    if not all((folder / RECORD).exists() for folder in folders.values()):
        return
    tables = {who: read_table(folder, "retrieval") for who, folder in folders.items()}
    lines = [["", "heads", f"above {THRESHOLD:g}", "their layers", "the five best (layer.head: score)"]]
    for who, table in tables.items():
        scores = head_map(table).stack()
        best = scores.sort_values(ascending=False, kind="stable")
        layers = sorted({int(layer) for layer, _ in scores.index[scores > THRESHOLD]})
        five = ", ".join(f"{layer}.{number}: {score:.2f}" for (layer, number), score in best.head(5).items())
        above = str(int((scores > THRESHOLD).sum()))
        lines.append([who.upper(), str(len(scores)), above, ", ".join(map(str, layers)) or "–", five])
    yield "### Retrieval heads\n\nA head's score is the share of the evidence's tokens that it copied, mean over"
    yield f"questions. The correlation of both models' scores, head by head, is {correlation(*tables.values()):.2f}.\n"
    yield markdown(lines)


def pictures(out: Path, page: Path) -> Iterator[str]:
    found = list(drawn(out, page.parent / page.stem)) if traced(out) else []
    if found:
        yield "### In pictures\n\nBands are 95 % intervals, dashed lines untrained controls.\n"
    for path, caption in found:
        yield f"![{caption}]({path.relative_to(page.parent)})\n"


def missing(out: Path) -> Iterator[str]:
    """What `run.py` would still ask."""
    swept_all = {kind: all(swept(out / "stress" / kind / who) for who in WHO) for kind in SWEEPS}
    tried_all = {study: all(tried(out / "studies" / study / who) for who in WHO) for study in RUN}
    left = [f"`--kind {kind}`" for kind, done in swept_all.items() if not done]
    left += [f"the study `{study}`" for study, done in tried_all.items() if not done]
    if left:
        yield f"## Not finished\n\n{', '.join(left)}.\n"


# Interventions.


def interventions(out: Path) -> Iterator[str]:
    for study in STUDIES:
        folders = [out / "studies" / study / who for who in WHO]
        if not all(map(tried, folders)):
            continue
        table = effects(folders)
        count = int(table["n"].max())
        yield f"### {STUDIES[study].title}\n\n`floatscope study {study}`, {count} questions of NQ, five passages each."
        yield f"{STUDIES[study].about} *Effect* is an edited run less the mean of its controls.\n"
        yield _by_family(out, rows(table))
        yield _by_family(out, "".join(f"- {sentence}\n" for sentence in STUDIES[study].summarise(table)))


if __name__ == "__main__":
    main()
