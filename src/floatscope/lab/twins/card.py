"""The model card of a twin: README.md and losses.png, from the JSON files beside its weights.

    write_card(Path("twins/models/mdm"))         # reads training.json, scores.json and, if present, attention.json

Every number of a card comes from those files, so the same call always makes the same card.
"""

from __future__ import annotations

from pathlib import Path

from floatscope.files.records import read_typed
from floatscope.lab.training.card import (
    PLOT,
    describe_run,
    describe_schedule,
    loss_table,
    markdown_table,
    write_card_files,
)
from floatscope.lab.training.record import read_training
from floatscope.lab.twins.attention import AttentionRecord, read_attention
from floatscope.lab.twins.held_out import SIZES
from floatscope.lab.twins.record import TwinTraining
from floatscope.lab.twins.scores import (
    LONG_ANSWER_TOKENS,
    NEW_TOKENS,
    SCORES,
    FileScore,
    Score,
    TwinScores,
    chance_accuracy,
)

DESCRIPTIONS = {
    "arm": "An autoregressive language model: it predicts the next token from those before it.",
    "mdm": "A masked diffusion language model, trained from scratch: it fills masks with bidirectional attention.",
    "mdm-adapted": "A masked diffusion language model adapted from the trained `arm`: its training starts from those"
    " weights, it fills masks with bidirectional attention, and it keeps the shift of the `arm`.",
}
STRUCTURE = {  # attention, position that row p predicts, checkpoint layout
    "arm": ("causal", "p + 1", "Llama"),
    "mdm": ("bidirectional", "p", "LLaDA"),
    "mdm-adapted": ("bidirectional", "p + 1", "Dream; the biases of Qwen2 are zero and not counted"),
}
QUESTIONS = {
    "reading-1": "a fact of a fresh person, stated in one passage",
    "reading-5": "the same, in one of five passages",
    "closed-book": "a fact of the fixed world, without passages",
    "closed-book-fresh": "a fact of a fresh person, without passages: it cannot be known",
    "two-hop": "a fact of somebody's teacher, stated in two of five passages",
    "contradicted": "a fact of the fixed world that a passage contradicts; the passage is right",
    "unanswerable": 'somebody in none of the five passages; "unknown" is right',
    "few-shot": "which of three words is meant, from four examples of a rule",
    "biography": "all facts of a fresh person, stated in one or two of five passages",
    "dated": "a fact of a fresh person that three of five passages state differently; the latest year is right",
}


def write_card(folder: Path) -> None:
    """Write the card and the loss plot of the twin in `folder`."""
    write_card_files(folder, read_training(folder, TwinTraining), card(folder))


def card(folder: Path) -> str:
    """Return the Markdown of the card."""
    training, scores = read_training(folder, TwinTraining), read_typed(folder / SCORES, TwinScores)
    parts = [_overview(training), _data(training), _training(training), _scores(scores)]
    if (attention := read_attention(folder)) is not None:
        parts.append(attention_section(attention))
    parts += [_loading(training), _limits(training, scores)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def attention_section(attention: AttentionRecord) -> str:
    """Return the section with the tables of attention.json."""
    parts = [
        "## Attention",
        f"Measured on {attention.samples:,} held-out questions, {attention.steps} steps each, beside three"
        " untrained models of the same architecture. Brackets are 95 % CIs from a bootstrap over questions, for the"
        " untrained models over seeds as well. Differences are paired by question.",
    ]
    for name, table in attention.tables.items():
        parts += [f"### {name.capitalize()}", table.caption, markdown_table(table.columns, table.rows)]
    return "\n\n".join(parts)


def _overview(training: TwinTraining) -> str:
    kind, recipe = training.kind, training.recipe
    attention, predicts, layout = STRUCTURE[kind]
    rows = {
        "parameters": f"{training.parameters:,}",
        "layers": recipe.layers,
        "width": recipe.width,
        "heads": f"{recipe.heads} of {recipe.width // recipe.heads}",
        "feed-forward": f"{recipe.ffn}, SwiGLU",
        "positions": f"rotary; rows of {recipe.length} tokens",
        "vocabulary": f"{recipe.vocabulary:,}, byte-level BPE trained on this text",
        "attention": attention,
        "row p predicts position": predicts,
        "checkpoint layout": layout,
        "weights": f"bf16, sha256 `{training.weights}`",
    }
    return f"""
# {kind}

{DESCRIPTIONS[kind]}

One of three twins, `arm`, `mdm` and `mdm-adapted`. They share the architecture, the tokenizer, the text, the invented
worlds and the training rows, in the same order; they differ in how they are trained, and the `mdm`, which learns from
scratch and from masked tokens only, is trained longer.

{markdown_table(("", ""), rows.items())}"""


def _data(training: TwinTraining) -> str:
    text = training.text
    files = "\n".join(f"- `{name}`, sha256 `{digest}`" for name, digest in text.files.items())
    licence = f"Licence: {text.licence}." if text.licence else "The licence of the text was not given."
    return f"""
## Data and licences

Text: {text.characters:,} characters, {text.tokens:,} tokens. {licence}

{files}

Invented worlds: people, facts about them, passages and questions, which floatscope generates from seeds during
training. They describe nobody and carry no third-party licence. The fresh people of the held-out questions have names
that never occur in training."""


def _training(training: TwinTraining) -> str:
    recipe = training.recipe
    facts = {
        "steps": f"{training.steps:,} of {recipe.batch} rows",
        "training tokens": f"{training.tokens:,}",
        "learning rate": describe_schedule(recipe),
        "weight decay": f"{recipe.weight_decay:g} (AdamW)",
        "seed": training.seed,
        **describe_run(training),
    }
    if training.kind == "arm":
        losses = "*Text* is the mean loss of all next tokens, *answers* that of the answer tokens."
    else:
        losses = (
            "*Text* is the diffusion loss of half the rows, weighted by 1/t; it is not a next-token loss and cannot be"
            " compared with that of the `arm`. *Answers* is the loss of the masked answers in the other half."
        )
    return f"""
## Training

```
{training.command or "floatscope.lab.twins.segments.train_segment(…), from Python"}
```

Repeat the same command until all three twins are done; it resumes where it stopped. The complete loss curve and the
recipe are in `training.json`.

{markdown_table(("", ""), facts.items())}

![Losses of text and answers by step]({PLOT})

{losses} Each number is the mean over the steps since the previous entry in `training.json`.

{loss_table(training.losses)}"""


def _scores(scores: TwinScores) -> str:
    rows = []
    for name in _scored_files(scores):
        file, chance = scores.files[name], chance_accuracy(name)
        chance_cell = "—" if chance is None else f"{chance:.3f}"
        rows.append((name, QUESTIONS[name], f"{file.acc:.3f}", _interval(file), file.n, chance_cell))
    positions = [
        (i, f"{score.acc:.3f}", _interval(score), score.n)
        for i, score in enumerate(scores.files["reading-5"].by_gold, 1)
    ]
    table = markdown_table(("file", "question about", "accuracy", "95 % CI", "n", "chance"), rows, numeric_columns=4)
    if biography := scores.files.get("biography"):
        table += (
            f"\n\nA `biography` is decoded with {LONG_ANSWER_TOKENS['biography']} new tokens, and is correct only with"
            f" all its sentences in their order. On average an answer states {biography.facts:.3f} of the facts, and"
            f" its f1 is {biography.f1:.3f}."
        )
    return f"""
## Scores

Accuracy on the held-out questions: an answer is correct if it contains the words of the gold answer, ignoring case,
articles and punctuation. Prompts as in training, temperature 0, {NEW_TOKENS} new tokens, one token per step;
{scores.dtype}, {scores.device}. Intervals are 95 % CIs (Wilson).

{table}

`reading-5` by the position of the gold passage:

{markdown_table(("position", "accuracy", "95 % CI", "n"), positions, numeric_columns=3)}"""


def _loading(training: TwinTraining) -> str:
    kind = training.kind
    return f"""
## Loading

```python
import floatscope as fs

model = fs.load("twin:{kind}")  # the shipped twin; give a folder for one of your own
prompt = "Document 1: Mira Velwick lives in Dramora.\\nQuestion: Where does Mira Velwick live?\\nAnswer:"
fs.decode(model, prompt, new_tokens={NEW_TOKENS}).text
```"""


def _limits(training: TwinTraining, scores: TwinScores) -> str:
    recipe = training.recipe
    lines = [
        "It is an instrument for studying attention, not a model to use: it holds no conversation, and its statements"
        " about the real world are noise.",
        "It answers the questions of its worlds in the wordings of its training, after `Answer:`; other wordings,"
        " languages and tasks are out of scope.",
        f"It was trained on rows of {recipe.length} tokens, with passages of a few sentences; longer prompts are"
        " out of distribution.",
        "The people it has memorised are invented. Its prose imitates its text and is neither true nor coherent.",
    ]
    for name in _scored_files(scores):
        chance, file = chance_accuracy(name), scores.files[name]
        if chance is not None and name != "closed-book-fresh" and file.low <= chance:
            lines.append(
                f"It has not learnt `{name}` ({QUESTIONS[name]}): accuracy {file.acc:.3f}, chance {chance:.3f}."
            )
    lines.append("One seed was trained; the variation between seeds is not known.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _scored_files(scores: TwinScores) -> list[str]:
    """Return the question files that have a score; a file may be newer than the weights."""
    return [name for name in SIZES if name in scores.files]


def _interval(score: Score | FileScore) -> str:
    return f"{score.low:.3f} … {score.high:.3f}"
