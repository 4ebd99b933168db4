"""The model card of a twin: README.md and losses.png, from the JSON files that lie beside its weights.

    write_card(Path("twins/models/mdm"))         # reads training.json, scores.json and, if it is there, attention.json

Every number of a card comes from those files, so a card is made again by the same call and cannot say anything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from floatscope.files.atomic import write_atomic, writing
from floatscope.files.records import read_json
from floatscope.lab.training.card import CARD, PICTURE, picture, table
from floatscope.lab.twins.attention import read_attention
from floatscope.lab.twins.evaluate import DRAWS, NEW_TOKENS, SCORES, chance
from floatscope.lab.twins.heldout import SIZES
from floatscope.lab.twins.record import read_training

IS = {
    "arm": "An autoregressive language model: it predicts the next token from those before.",
    "mdm": "A masked diffusion language model, trained from scratch: it fills masks and looks both ways.",
    "mdm-adapted": "A masked diffusion language model made from the trained `arm`: its training begins with those"
    " weights, it fills masks and looks both ways, and the shift of the `arm` is kept.",
}
BUILT = {  # attention, which position row p decides, layout
    "arm": ("causal", "p + 1", "Llama's"),
    "mdm": ("both ways", "p", "LLaDA's"),
    "mdm-adapted": ("both ways", "p + 1", "Dream's; Qwen2's biases are zero and not counted"),
}
ASKS = {
    "reading-1": "a fact of a fresh person, told in one passage",
    "reading-5": "the same, in one of five passages",
    "closed-book": "a fact of the fixed world, without passages",
    "closed-book-fresh": "a fact of a fresh person, without passages: nobody can know",
    "two-hop": "a fact of somebody's teacher, told in two of five passages",
    "contradicted": "a fact of the fixed world that a passage tells differently; the passage counts",
    "unanswerable": 'somebody who is in none of the five passages; "unknown" is right',
    "few-shot": "which of three words is meant, from four examples of a rule",
}
SHOWN = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # parts of the training whose losses are in the table


def write_card(folder: Path) -> None:
    training = read_training(folder)
    with writing("the card", folder):
        write_atomic(folder / PICTURE, [picture(training)])
        write_atomic(folder / CARD, [card(folder).encode()])


def card(folder: Path) -> str:
    """The Markdown of a folder's card."""
    training, scores = read_training(folder), read_json(folder / SCORES)
    parts = [_what(training), _data(training), _training(training), _scores(scores)]
    if (measured := read_attention(folder)) is not None:
        parts.append(attention_section(measured))
    parts += [_loading(training), _limits(training, scores)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def attention_section(measured: dict[str, Any]) -> str:
    """{"samples": n, "steps": n, "tables": {name: {"says": sentence, "columns": […], "rows": [[…]]}}}, rendered."""
    said = [
        "## What its attention does",
        f"Watched over {measured['samples']:,} held-out questions, {measured['steps']} steps each, beside three"
        " untrained models of the same architecture. In brackets: 95 %, bootstrapped over questions, of the untrained"
        " over seeds as well. Differences are taken question by question.",
    ]
    for name, shown in measured["tables"].items():
        said += [f"### {name.capitalize()}", shown["says"], table(shown["columns"], shown["rows"])]
    return "\n\n".join(said)


def _what(training: dict[str, Any]) -> str:
    kind, recipe = training["kind"], training["recipe"]
    attention, decides, layout = BUILT[kind]
    rows = {
        "parameters": f"{training['parameters']:,}",
        "layers": recipe["layers"],
        "width": recipe["width"],
        "heads": f"{recipe['heads']} of {recipe['width'] // recipe['heads']}",
        "feed-forward": f"{recipe['ffn']}, SwiGLU",
        "positions": f"rotary; rows of {recipe['length']} tokens",
        "vocabulary": f"{recipe['vocabulary']:,}, byte-level BPE made for this text",
        "attention": attention,
        "row p decides position": decides,
        "layout of the files": layout,
        "weights": f"bf16, sha256 `{training['weights']}`",
    }
    return f"""
# {kind}

{IS[kind]}

One of three twins, `arm`, `mdm` and `mdm-adapted`, which share the architecture, the tokenizer, the text, the invented
worlds and the very rows they learn from, in the same order: what differs is how they learn.

{table(("", ""), rows.items())}"""


def _data(training: dict[str, Any]) -> str:
    text = training["text"]
    files = "\n".join(f"- `{name}`, sha256 `{digest}`" for name, digest in text["files"].items())
    licence = f"Licence: {text['licence']}." if text["licence"] else "Its licence was not given."
    return f"""
## Data and licences

Text: {text["characters"]:,} characters, {text["tokens"]:,} tokens. {licence}

{files}

Invented worlds: people, facts about them, passages and questions, made by floatscope from seeds while it trains. They
describe nobody and are under no licence of others. The fresh people of the held-out questions have names that never
occur in training."""


def _training(training: dict[str, Any]) -> str:
    recipe, versions = training["recipe"], training["versions"]
    facts = {
        "steps": f"{training['steps']:,} of {recipe['batch']} rows",
        "tokens seen": f"{training['tokens']:,}",
        "learning rate": f"{recipe['peak']:g}, after {recipe['warmup']:,} steps of warm-up, by a cosine to a twentieth",
        "weight decay": f"{recipe['decay']:g} (AdamW)",
        "seed": training["seed"],
        "time": f"{training['seconds']:,.0f} s, {training['tokens_per_second']:,} tokens/s",
        "device": training["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    if training["kind"] == "arm":
        losses = "*Text* is the loss of every next token, *answers* that of the tokens of answers."
    else:
        losses = (
            "*Text* is the diffusion loss of half the rows, weighted by 1/t; it is no next-token loss and is not to be"
            " compared with the `arm`'s. *Answers* is the loss of masked answers in the other half."
        )
    curve = training["losses"]
    chosen = [curve[round(part * (len(curve) - 1))] for part in SHOWN]
    rows = [(f"{step:,}", f"{text:.3f}", f"{answers:.3f}") for step, text, answers in dict.fromkeys(map(tuple, chosen))]
    return f"""
## Training

```
{training["command"] or "floatscope.lab.twins.legs.leg(…), from Python"}
```

The same command is given until all three twins are done; it goes on where it stopped. The whole curve and the recipe
are in `training.json`.

{table(("", ""), facts.items())}

![Loss of the text and of the answers by step]({PICTURE})

{losses} Each number is the mean of the steps since the one before in `training.json`.

{table(("step", "text", "answers"), rows, right=3)}"""


def _scores(scores: dict[str, Any]) -> str:
    rows = []
    for name in SIZES:
        file, guessed = scores["files"][name], chance(name)
        shown = "—" if guessed is None else f"{guessed:.3f}"
        rows.append((name, ASKS[name], f"{file['acc']:.3f}", _interval(file), file["n"], shown))
    places = [
        (i, f"{place['acc']:.3f}", _interval(place), place["n"])
        for i, place in enumerate(scores["files"]["reading-5"]["by_gold"], 1)
    ]
    return f"""
## Scores

The share of held-out questions with a right answer: the answer's words stand in what it says, case, articles and
punctuation aside. Prompt as in training, temperature 0, {NEW_TOKENS} new tokens, one step a token; {scores["dtype"]},
{scores["device"]}. Intervals are 95 %, from {DRAWS:,} bootstraps over questions. Where all n are right they have no
width: then up to 3/n of all such questions may go wrong.

{table(("file", "asks", "right", "95 % interval", "n", "chance"), rows, right=4)}

`reading-5` by the place of the passage that has the answer:

{table(("passage", "right", "95 % interval", "n"), places, right=3)}"""


def _loading(training: dict[str, Any]) -> str:
    kind = training["kind"]
    return f"""
## Loading it

```python
import floatscope as fs

model = fs.load("twin:{kind}")  # the one that comes with floatscope; one of your own by its folder
prompt = "Document 1: Mira Velwick lives in Dramora.\\nQuestion: Where does Mira Velwick live?\\nAnswer:"
fs.decode(model, prompt, new_tokens={NEW_TOKENS}).text
```"""


def _limits(training: dict[str, Any], scores: dict[str, Any]) -> str:
    recipe = training["recipe"]
    said = [
        "It is an instrument for looking at attention, not a model to use: it holds no conversation, and what it says"
        " of the real world is noise.",
        "It answers the questions of its worlds in the words it learnt them in, after `Answer:`; other wordings,"
        " languages and tasks are beyond it.",
        f"It learnt from rows of {recipe['length']} tokens, with passages of a few sentences; longer prompts are new.",
        "The people it knows by heart are invented. Its prose imitates its text and is neither true nor coherent.",
    ]
    for name in SIZES:
        guessed, file = chance(name), scores["files"][name]
        if guessed is not None and name != "closed-book-fresh" and file["low"] <= guessed:
            said.append(
                f"It has not learnt `{name}` ({ASKS[name]}): {file['acc']:.3f}, where guessing gives {guessed:.3f}."
            )
    said.append("One seed was trained: how much another would differ is not known.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in said)


def _interval(score: dict[str, Any]) -> str:
    return f"{score['low']:.3f} … {score['high']:.3f}"
