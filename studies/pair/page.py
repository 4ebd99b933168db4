"""docs/pair.md from the folders of `run.py`; no model is loaded, and runs that are missing are left out.

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
from figures import draw_figures
from markdown_tables import effect_table, markdown_table, sweep_table
from paper_claims import CLAIMS, PARADIGMS, SCORE_CLAIMS, mean_by_question
from run import STUDIES as STUDY_OPTIONS
from runs import describe_machines, is_finished, is_study_finished, is_sweep_finished
from trace_tables import CONTROL, read_table
from verdicts import SUPPORTED, VERDICTS, Estimate, Statistic, bootstrap, judge

import floatscope as fs
from floatscope.analysis.anchor_movement import THIRDS
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.experiments import effects
from floatscope.analysis.retrieval_heads import THRESHOLD, head_correlation, head_map
from floatscope.analysis.studies import STUDIES
from floatscope.analysis.tokens import CLASSES
from floatscope.errors import UserError
from floatscope.traces.run_record import RECORD_FILE, read_record

PAGE = Path(__file__).parent.parent.parent / "docs" / "pair.md"
DATA = {"nq": "NQ", "xquad": "XQuAD"}
PASSAGES = {"closed": "closed book", "gold": "gold passage", "five": "gold and 4 distractors"}
BASE_SHARE_GOAL = 0.5
SWEEPS = {
    "position": "Position of the gold passage",
    "noise": "Number of distractors",
    "query": "Position of the question",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pair"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--adapter", type=Path, help="a folder with its training.json and scores.json")
    args = parser.parse_args(arguments)
    parts = [write_introduction(args.out), *write_claims(args.out)]
    parts += [*write_scores(args.out), *write_stress(args.out), *write_attention(args.out), *write_heads(args.out)]
    parts += [*write_figures(args.out, args.page), *write_interventions(args.out), *write_adapter(args.adapter)]
    parts += write_missing(args.out)
    parts.append(f"---\n\nfloatscope {fs.__version__}. The runs were made on {describe_machines(args.out)}.\n")
    args.page.write_text("\n".join(parts))


# Introduction.

SAME_TRAINING = """\
The ARM is a control: it was trained on the same rows as the MDM, in the same order, with LoRA of the same rank, but
with its causal mask and the next-token objective. The base is the model that both were made from. Both were trained
for the same number of steps, but not for equally hard tasks: the ARM continued as it was, while the MDM had to learn
to fill masks with bidirectional attention. Where the MDM scores lower, the short training may be the reason. The
control is not shipped; [adapt.md](adapt.md#smollm2-and-its-sibling) has its command, and reports the overlap between
training text and held-out questions.
"""
OTHER_TRAINING = """\
**The MDM was made from the ARM and trained to answer questions with passages; the ARM was not.** So attention alone
does not explain the scores: a claim about scores that is supported here may be supported because of that training.
`floatscope adapt --autoregressive` makes an ARM with the same training.
"""


def write_introduction(out: Path) -> str:
    """Return the head of the page."""
    arm, mdm = (read_settings(out, paradigm) for paradigm in PARADIGMS)
    return f"""# A pair of models

This page answers which claims of a paper on attention floating are supported by one pair of small models, an ARM and an
MDM from the same base. It is written by `python studies/pair/page.py` from the runs of `python studies/pair/run.py`.
The ARM is `{arm["model"]}`, the MDM `{mdm["model"]}`. Both answer the same questions with the same prompts, with
{mdm["new_tokens"]} new tokens; the MDM commits one token per step. A distractor is the passage of another question that
does not contain the answer.

{describe_training(arm, mdm)}
Brackets are 95 % CIs from a bootstrap over questions; differences are paired by question. An answer is *correct* if it
contains one of the gold answers.
"""


def describe_training(arm: Mapping[str, Any], mdm: Mapping[str, Any]) -> str:
    """Return how the training of the two compares, if one or both have an adapter."""
    if mdm["architecture"] != "adapted":
        return ""
    return SAME_TRAINING if arm["architecture"] == "adapted" else OTHER_TRAINING


def read_settings(out: Path, paradigm: str) -> dict[str, Any]:
    """Return the settings of the first run of a model."""
    records = (path for path in sorted(out.rglob(RECORD_FILE)) if paradigm in path.relative_to(out).parts)
    settings: dict[str, Any] = read_record(next(records).parent)["settings"]
    return settings


def _use_short_names(out: Path, text: str) -> str:
    """Replace the models' names by ARM and MDM."""
    names = {str(read_settings(out, paradigm)["model"]): paradigm.upper() for paradigm in PARADIGMS}
    for name in sorted(names, key=len, reverse=True):  # the name of a base is a prefix of its adapters' names
        text = text.replace(name, names[name])
    return text


def write_adapter(folder: Path | None) -> Iterator[str]:
    """Yield what the adapter's own files record, as far as they exist."""
    files = {} if folder is None else {name: folder / f"{name}.json" for name in ("training", "scores")}
    records = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if records:
        yield "## The adapter\n"
    numbers = {name: value for name, value in records.get("training", {}).items() if type(value) in (int, float)}
    if numbers:
        rows = ([name.replace("_", " "), f"{value:,}"] for name, value in numbers.items())
        yield markdown_table([["training", ""], *rows])
    if masked := records.get("scores", {}).get("masked", []):
        base = {row["ratio"]: row for row in records["scores"].get("masked_base", [])}
        lines = [["masked", "adapted", "before", "rows of text"]]
        for row in masked:
            before = _format_accuracy(base.get(row["ratio"]))
            lines.append([f"{row['ratio']:.0%}", _format_accuracy(row), before, str(row["n"])])
        yield "Masked-token accuracy by mask ratio on held-out text, in percent. *Before* is the base model, opened"
        yield "with a mask token but not adapted.\n"
        yield markdown_table(lines)


def _format_accuracy(row: dict[str, float] | None) -> str:
    return "–" if row is None else f"{100 * row['accuracy']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


# Claims.

CLAIMS_TITLE = """## The paper's claims

The claims are those of [Revealing the Attention Floating Mechanism in Masked Diffusion
Models](https://arxiv.org/abs/2601.07894), which were made about far larger models."""
RULES = """\
Each claim is written as a number that is above zero if the claim is true, *tested* below, and judged by the 95 % CI
of that number:

- **supported**: the interval lies above zero; *within the margin* if all of it is smaller than the margin.
- **contradicted**: the interval lies below zero; *within the margin* if all of it is closer to zero than the margin.
- **not supported**: the interval contains zero and ends below the margin. *No difference beyond the margin* if it
  also begins above minus the margin, else *no gain beyond the margin*. A test of a threshold (*about twice*) that
  stays below it is not supported either.
- **inconclusive**: the interval contains zero and reaches the margin; or both models are above 97 % after the change,
  or one of them is below 5 % before and after, so that there is nothing to gain or lose; or there is no variation
  between questions, and so no interval.

The margin is the smallest difference that matters: 5 points of a score, 10 points of a share of a score, 5 points of
attention or of steps, 0.1 of a ratio, 0.1 nats per token, 2 % of the heads. A model that scores lower has fewer
points to lose, so the cost of distractors and positions is also measured as the share of the score that is retained.
*About twice* is tested as at least 1.5 times. The difference between the best and the worst of several positions is
never negative, and too large for both models if there are few questions.

*Untrained* is the same architecture with fresh weights. A cached ARM adds one row per step, so its anchors can hardly
move, and an untrained MDM floats most of all; therefore floating is compared with the untrained model first. In deep
layers the ARM's first token receives most of the attention; where it would dominate a test, it is left out.
"""
CAVEATS = """
The tests are not independent: most of them depend on the ARM's first token. The intervals are not corrected for the
number of tests, and they cover other questions, not another training: each model was trained once, and each untrained
control has one seed. An MDM that is done commits ends of text, often before the answer, and those steps count too. The
position of the top key counts the same token in two texts as two positions if the texts differ in length before it. The
control of an edit acts on the same number of random keys, drawn once, which need not receive as much attention. A mean
over layers hides single layers that differ; the figures show them. The base has 4-bit weights.
"""


def write_claims(out: Path) -> Iterator[str]:
    """Yield the tally, the lists of claims by verdict, the rules and the table of tests."""
    other_training = describe_training(*(read_settings(out, paradigm) for paradigm in PARADIGMS)) == OTHER_TRAINING
    lines = [["claim", "measured as", "n", "ARM", "untrained", "MDM", "untrained", "tested", "value", "verdict"]]
    for claim in CLAIMS:
        try:
            table = claim.table(out)
        except (UserError, FileNotFoundError):
            continue
        statistics = [claim.arm, claim.mdm]
        if claim.has_untrained:
            statistics = [claim.arm, lambda m: m["arm untrained"], claim.mdm, lambda m: m["mdm untrained"]]
        means = [bootstrap(table, statistic).mean for statistic in statistics]
        cells = [f"{claim.scale * mean:.{_digits(claim.scale, mean)}f}" for mean in means]
        cells = cells if claim.has_untrained else [cells[0], "", cells[1], ""]
        estimate = bootstrap(table, claim.difference)
        verdict = judge(estimate, claim.margin, claim.find_limit(table.mean()), claim.is_threshold)
        if other_training and claim in SCORE_CLAIMS and verdict.startswith(SUPPORTED):
            verdict += ", possibly because of the training"
        results = [str(estimate.n), *cells, claim.tested, _format_estimate(estimate, claim.scale), f"**{verdict}**"]
        lines.append([claim.statement, claim.measure, *results])
    missing = len(CLAIMS) + 1 - len(lines)
    rest = f"; the runs of {missing} others are not finished" if missing else ""
    counts = tally([line[-1] for line in lines[1:]])
    yield f"{CLAIMS_TITLE} The verdicts of\n{len(lines) - 1} tests are: {counts}{rest}.\n"
    yield list_by_verdict([(line[0], line[-1]) for line in _complete_statements(lines[1:])])
    yield RULES
    yield markdown_table(lines)
    yield CAVEATS


def _complete_statements(lines: Sequence[list[str]]) -> Iterator[list[str]]:
    """Yield the lines with every "…" replaced by the claim it continues."""
    before = ""
    for statement, *rest in lines:
        before = before if statement.startswith("…") else statement
        yield [before + statement.replace("…", ",") if statement.startswith("…") else statement, *rest]


def list_by_verdict(verdicts: Sequence[tuple[str, str]]) -> str:
    """Return the claims as lists by verdict, from (claim, verdict) of every test."""
    by_claim: dict[str, list[str]] = {}
    for statement, verdict in verdicts:
        by_claim.setdefault(statement, []).append(verdict)
    mixed = "Depends on the measure"
    lists: dict[str, list[str]] = {title: [] for title in (*(kind.capitalize() for kind in VERDICTS), mixed)}
    for statement, own in by_claim.items():
        kinds = {_verdict_kind(verdict) for verdict in own}
        if len(kinds) == 1:
            lists[kinds.pop().capitalize()].append(statement)
        else:
            lists[mixed].append(f"{statement} ({tally(own)})")
    return "".join(f"- **{title}:** {'; '.join(claims)}.\n" for title, claims in lists.items() if claims)


def tally(verdicts: Sequence[str]) -> str:
    """Return how many verdicts are of each kind: "16 supported, 4 not supported"."""
    counts = {kind: sum(_verdict_kind(verdict) == kind for verdict in verdicts) for kind in VERDICTS}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def _verdict_kind(verdict: str) -> str:
    return next(kind for kind in VERDICTS if verdict.startswith(f"**{kind}"))


def _digits(scale: float, mean: float) -> int:
    return 1 if scale == 100 or abs(mean) >= 10 else 2


def _format_estimate(estimate: Estimate, scale: float = 100.0, sign: str = "+") -> str:
    if isnan(estimate.low):
        return "–"
    digits = _digits(scale, estimate.mean)
    mean, low, high = (scale * value for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:{sign}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


# Scores.


SCORES: dict[str, Statistic] = {
    "ARM, acc": lambda m: m["arm"],
    "MDM, acc": lambda m: m["mdm"],
    "MDM − ARM": lambda m: m["mdm"] - m["arm"],
}
GAINS: dict[str, Statistic] = {
    "ARM, gain": lambda m: m["arm"] - m["arm closed"],
    "MDM, gain": lambda m: m["mdm"] - m["mdm closed"],
    "MDM − ARM": lambda m: m["mdm"] - m["mdm closed"] - m["arm"] + m["arm closed"],
}
RATIOS: dict[str, Statistic] = {
    "MDM / ARM, gain": lambda m: (m["mdm"] - m["mdm closed"]) / (m["arm"] - m["arm closed"]),
    "MDM / ARM, score": lambda m: m["mdm"] / m["arm"],
}


def write_scores(out: Path) -> Iterator[str]:
    """Yield the tables of scores and gains."""
    folders = {(data, choice): out / "scores" / f"{data}-{choice}" for data in DATA for choice in PASSAGES}
    folders = {key: folder for key, folder in folders.items() if all(is_finished(folder / p) for p in PARADIGMS)}
    if not folders:
        return
    has_base = all(is_finished(folder / "base") for folder in folders.values())
    roles = [*PARADIGMS, *(["base"] if has_base else [])]
    tables = {
        key: pd.DataFrame({role: _read_column(folder / role, "acc") for role in roles})
        for key, folder in folders.items()
    }
    statistics = {**({"base, acc": lambda m: m["base"]} if has_base else {}), **SCORES}
    lines = [["questions", "passages", "n", *statistics, "ARM, F1", "MDM, F1"]]
    for (data, choice), table in tables.items():
        f1 = [f"{100 * _read_column(folders[data, choice] / paradigm, 'f1').mean():.1f}" for paradigm in PARADIGMS]
        cells = [
            _format_estimate(bootstrap(table, statistic), sign="+" if "−" in name else "")
            for name, statistic in statistics.items()
        ]
        lines.append([DATA[data], PASSAGES[choice], str(len(table)), *cells, *f1])
    yield "## Scores\n"
    yield markdown_table(lines)
    lines = [["questions", "passages", *GAINS, *RATIOS]]
    for data, choice in tables:
        if choice != "closed" and (data, "closed") in tables:
            both = tables[data, choice].join(tables[data, "closed"].add_suffix(" closed"))
            cells = [_format_estimate(bootstrap(both, statistic)) for statistic in GAINS.values()]
            cells += [_format_estimate(bootstrap(both, statistic), 1, "") for statistic in RATIOS.values()]
            lines.append([DATA[data], PASSAGES[choice], *cells])
    yield "*Gain* is the score with passages minus the score without, paired by question.\n"
    yield markdown_table(lines)
    yield from write_base_share(tables)


def _read_column(folder: Path, value: str) -> pd.Series:
    return open_evaluation(folder).table.set_index("sample")[value]


def write_base_share(tables: Mapping[tuple[str, str], pd.DataFrame]) -> Iterator[str]:
    """Yield whether the MDM retains at least half of its base's score."""
    for data in DATA:
        if (data, "gold") in tables:
            base = "base" if "base" in tables[data, "gold"] else "arm"
            share = bootstrap(tables[data, "gold"], lambda m, base=base: m["mdm"] / m[base])
            is_supported, is_contradicted = share.low >= BASE_SHARE_GOAL, share.high < BASE_SHARE_GOAL
            verdict = "supported" if is_supported else "not supported" if is_contradicted else "inconclusive"
            yield f"With the gold passage the MDM reaches {_format_estimate(share, 1, '')} of its base's score on"
            yield f"{DATA[data]}. That it is at least {BASE_SHARE_GOAL:g} is {verdict}."
            if base == "base":
                arm_share = bootstrap(tables[data, "gold"], lambda m: m["mdm"] / m["arm"])
                yield "The base was not trained for such answers; relative to the ARM, which was, the MDM reaches"
                yield f"{_format_estimate(arm_share, 1, '')}."
            yield ""


def write_stress(out: Path) -> Iterator[str]:
    """Yield the tables of the stress sweeps."""
    for kind, title in SWEEPS.items():
        folders = [out / "stress" / kind / paradigm for paradigm in PARADIGMS]
        if all(map(is_sweep_finished, folders)):
            yield f"### {title}\n\n`--kind {kind}`, NQ. *Gold* is the attention of the predicting rows on the gold"
            yield "passage, as lift: 1 is its share of the canvas.\n"
            yield _use_short_names(out, sweep_table(folders))


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
    ("content, ratio of contributions", "structure", "contribution_ratio", {"set": "content"}, 1),
    ("gold in predicting rows, ratio", "predicting_rows", "ratio", {"region": "gold"}, 1),
    ("other passages in them, ratio", "predicting_rows", "ratio", {"region": "other documents"}, 1),
    ("evidence in them, ratio", "predicting_rows", "ratio", {"region": "evidence"}, 1),
]
"""Name, table, column, selected rows, scale."""


def find_trace_folders(out: Path) -> list[Path]:
    """Return the table folders of both models and their controls, if all are finished."""
    folders = [out / "traces" / paradigm / part for paradigm in PARADIGMS for part in ("", CONTROL)]
    return folders if all((folder / RECORD_FILE).exists() for folder in folders) else []


def write_attention(out: Path) -> Iterator[str]:
    """Yield the tables of attention by layer, and of anchor classes."""
    folders = find_trace_folders(out)
    if not folders:
        return
    lines = [["", "layers", "ARM", "untrained", "MDM", "untrained", "MDM − ARM"]]
    for title, table, column, only, scale in MEASURES:
        for number, third in enumerate(THIRDS):
            values = _read_values(folders, table, column, {**only, "third": third})
            if values.empty:
                continue
            estimate = bootstrap(values[["arm", "mdm"]], SCORES["MDM − ARM"])
            cells = [*_format_means(values, scale), _format_estimate(estimate, scale)]
            lines.append(["" if number else title, third, *cells])
    questions = len(read_table(folders[0], "sinks"))
    yield f"## Attention\n\n{questions} questions of NQ, five passages each; every head is traced at every step."
    yield "Sinks and entropies are of complete forwards: for the ARM, which has a cache, that of the prompt."
    yield "*Untrained* is the same architecture with fresh weights; what it shows is not learnt. Layers are in thirds."
    yield "Predicting rows are those of the answer, up to its end. *Ratio* is relative to uniform attention, over all"
    yield "attention, including that on the first token; [analysis.md](analysis.md) defines the other measures.\n"
    yield markdown_table(lines)
    yield "### Classes of anchors\n\nHow often a token of each class is an anchor, relative to its share of the text.\n"
    lines = [["class", "ARM", "untrained", "MDM", "untrained", "MDM − ARM"]]
    for token_class in CLASSES:
        values = _read_values(folders, "anchor_classes", "ratio", {"class": token_class})
        if values.notna().any(axis=None):
            estimate = bootstrap(values[["arm", "mdm"]], SCORES["MDM − ARM"])
            lines.append([token_class, *_format_means(values, 1), _format_estimate(estimate, 1)])
    yield markdown_table(lines)


def _read_values(folders: Sequence[Path], table: str, column: str, only: Mapping[str, str]) -> pd.DataFrame:
    """Return a row per question with the values of both models and their controls."""
    values = [mean_by_question(table, column, **only)(folder) for folder in folders]
    return pd.DataFrame(dict(zip(("arm", "arm control", "mdm", "mdm control"), values, strict=True)))


def _format_means(values: pd.DataFrame, scale: float) -> list[str]:
    return ["–" if isnan(mean) else f"{scale * mean:.{1 if scale == 100 else 2}f}" for mean in values.mean()]


def write_heads(out: Path) -> Iterator[str]:
    """Yield the table of retrieval heads."""
    folders = {paradigm: out / "traces" / paradigm for paradigm in PARADIGMS}
    if not all((folder / RECORD_FILE).exists() for folder in folders.values()):
        return
    tables = {paradigm: read_table(folder, "retrieval") for paradigm, folder in folders.items()}
    lines = [["", "heads", f"above {THRESHOLD:g}", "their layers", "five highest (layer.head: score)"]]
    for paradigm, table in tables.items():
        scores = head_map(table).stack()
        ranked = scores.sort_values(ascending=False, kind="stable")
        layers = sorted({int(layer) for layer, _ in scores.index[scores > THRESHOLD]})
        highest = ", ".join(f"{layer}.{head}: {score:.2f}" for (layer, head), score in ranked.head(5).items())
        above = str(int((scores > THRESHOLD).sum()))
        lines.append([paradigm.upper(), str(len(scores)), above, ", ".join(map(str, layers)) or "–", highest])
    correlation = head_correlation(*tables.values())
    yield "### Retrieval heads\n\nThe score of a head is the share of evidence tokens that it copied, mean over"
    yield f"questions. The correlation of the two models' scores over heads is {correlation:.2f}.\n"
    yield markdown_table(lines)


def write_figures(out: Path, page: Path) -> Iterator[str]:
    """Draw the figures beside the page and yield links to them."""
    figures = list(draw_figures(out, page.parent / page.stem)) if find_trace_folders(out) else []
    if figures:
        yield "### Figures\n\nBands are 95 % CIs, dashed lines untrained controls.\n"
    for path, caption in figures:
        yield f"![{caption}]({path.relative_to(page.parent)})\n"


def write_missing(out: Path) -> Iterator[str]:
    """Yield what `run.py` has not finished."""
    sweeps = {kind: all(is_sweep_finished(out / "stress" / kind / p) for p in PARADIGMS) for kind in SWEEPS}
    studies = {name: all(is_study_finished(out / "studies" / name / p) for p in PARADIGMS) for name in STUDY_OPTIONS}
    missing = [f"`--kind {kind}`" for kind, done in sweeps.items() if not done]
    missing += [f"the study `{name}`" for name, done in studies.items() if not done]
    if missing:
        yield f"## Not finished\n\n{', '.join(missing)}.\n"


# Interventions.


def write_interventions(out: Path) -> Iterator[str]:
    """Yield a section for each finished study."""
    for name, study in STUDIES.items():
        folders = [out / "studies" / name / paradigm for paradigm in PARADIGMS]
        if not all(map(is_study_finished, folders)):
            continue
        table = effects(folders)
        questions = int(table["n"].max())
        yield f"### {study.title}\n\n`floatscope study {name}`, {questions} questions of NQ, five passages each."
        yield f"{study.description} *Effect* is an edited condition minus the mean of its controls.\n"
        yield _use_short_names(out, effect_table(table))
        yield _use_short_names(out, "".join(f"- {sentence}\n" for sentence in study.summarise(table)))


if __name__ == "__main__":
    main()
