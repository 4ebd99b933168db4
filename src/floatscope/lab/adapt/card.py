"""The card of an adapter: README.md and losses.png, from training.json and scores.json beside it.

write_card(Path("sibling/adapter"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from floatscope.files.atomic import write_atomic, writing
from floatscope.files.records import read_json
from floatscope.lab.adapt.lessons import SHARES
from floatscope.lab.adapt.scores import LENGTH
from floatscope.lab.training.card import CARD, PICTURE, picture, table
from floatscope.models.fetched import BASES

LOSSES = {
    False: "*Text* is the diffusion loss, each mask weighted by 1/t. *Answers* is the loss of masked answers, plus a"
    " tenth of that of the ends behind them.",
    True: "*Text* is the loss of every next token. *Answers* is that of the answers, plus a tenth of that of the ends"
    " behind them.",
}
SIBLING = (
    "A diffusion sibling",
    "An adapter: with it the base, an autoregressive model, is a masked diffusion model. It fills masks and looks both"
    " ways.",
)
CONTROL = (
    "A control",
    "An adapter: the base went on as the autoregressive model it is, from the same rows as a diffusion sibling, so that"
    " the two differ in nothing else.",
)
SHOWN = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # parts of the training whose losses are in the table


def write_card(folder: Path) -> None:
    training = read_json(folder / "training.json")
    with writing("the card", folder):
        write_atomic(folder / PICTURE, [picture(training)])
        write_atomic(folder / CARD, [card(folder).encode()])


def card(folder: Path) -> str:
    """The Markdown of a folder's card."""
    training, scores = read_json(folder / "training.json"), read_json(folder / "scores.json")
    parts = [_what(training), _data(training), _training(training)]
    if "masked" in scores:
        parts.append(_scores(scores))
    parts += [_loading(training), _limits(training)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _what(training: dict[str, Any]) -> str:
    recipe = training["recipe"]
    how = f"rank {recipe['rank']} on every projection" if recipe["rank"] else "all weights"
    mask = f"`{training['mask_token']}`" if training["mask_token"] else "which the tokenizer does not have"
    control = recipe["control"]
    rows = {
        "base": f"{training['base_name']}, sha256 `{training['base_sha256']}`",
        "learnt": f"{how}{'' if control else ', and the embedding of the mask'}: {training['parameters']:,} parameters",
        **({} if control else {"mask": f"token {training['mask_id']}, {mask}"}),
        "attention": "causal" if control else "both ways",
        "row p decides position": "p + 1, as in the base",
        "weights": f"bf16, sha256 `{training['weights']}`",
    }
    title, does = CONTROL if control else SIBLING
    return f"""
# {title} of {training["base_name"]}

{does} The weights of the base are not in it.

{table(("", ""), rows.items())}"""


def _data(training: dict[str, Any]) -> str:
    made, names = (
        training["material"],
        {"text": "text", "data": "questions", "held_text": "text", "held_data": "questions"},
    )
    files = [
        (names[kind], "held apart" if kind.startswith("held") else "learnt from", f"`{name}`", f"`{digest}`")
        for kind, found in made["files"].items()
        for name, digest in found.items()
    ]
    licence = f"Licence: {training['licence']}." if training["licence"] else "Their licence was not given."
    shares = ", ".join(f"{100 * share:.0f} % {name}" for name, share in _shares(made).items())
    told = f"{made['tokens']:,} tokens of text, {made['questions']:,} questions with their right passages."
    if made["left_out"]:
        told += f" {made['left_out']:,} more were left out: a file that is held apart has the question or its passage."
    told += f" Of the lessons {shares}."
    return f"""
## Data and licences

{licence}

{table(("", "", "file", "sha256"), files)}

{told}

Gaps are sentences of the text with a name or a number taken out, asked of the paragraph they stand in; worlds are
invented by floatscope. In half of the questions another answer is put into the passages, so that it must be read."""


def _shares(made: dict[str, Any]) -> dict[str, float]:
    words = {"data": "questions", "gap": "gaps", "world": "worlds"}
    there = {"data": made["questions"], "gap": made["paragraphs"], "world": 1}
    able = {kind: share for kind, share in SHARES.items() if there[kind]}
    return {words[kind]: share / sum(able.values()) for kind, share in able.items()}


def _training(training: dict[str, Any]) -> str:
    recipe, curve = training["recipe"], training["losses"]
    mask = f"opened over {recipe['anneal']:,} steps" if recipe["anneal"] else "removed at once"
    mask = "kept" if recipe["control"] else mask
    facts = {
        "steps": f"{training['steps']:,}, each {recipe['tokens']:,} tokens of text and as many of questions",
        "tokens seen": f"{training['tokens']:,}, with what fills rows of questions up",
        "causal mask": mask,
        "learning rate": f"{recipe['peak']:g}, after {recipe['warmup']:,} steps of warm-up, by a cosine to a twentieth",
        "rows": f"text {recipe['length']} tokens, questions up to {max(recipe['lengths']):,}",
        "seed": recipe["seed"],
        "time": f"{training['seconds']:,.0f} s, {training['tokens_per_second']:,} tokens/s",
        "device": training["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in training["versions"].items()),
    }
    chosen = dict.fromkeys(tuple(curve[round(part * (len(curve) - 1))]) for part in SHOWN)
    rows = [(f"{step:,}", f"{text:.3f}", f"{answers:.3f}") for step, text, answers in chosen]
    return f"""
## Training

```
{training["command"] or "floatscope.lab.adapt.legs.leg(…), from Python"}
```

The same command is given until it is done; it goes on where it stopped.

{table(("", ""), facts.items())}

![Loss of the text and of the answers by step]({PICTURE})

{LOSSES[recipe["control"]]} Each number is the mean of the steps since the one before in `training.json`.

{table(("step", "text", "answers"), rows, right=3)}"""


def _scores(scores: dict[str, Any]) -> str:
    plain = {row["ratio"]: _percent(row) for row in scores.get("masked_base", [])}
    rows = [(f"{100 * r['ratio']:.0f} %", _percent(r), plain.get(r["ratio"], "–"), r["n"]) for r in scores["masked"]]
    n = scores["masked"][0].get("length", LENGTH)
    return f"""
## Masks filled on held-out text

The share of masks whose most likely token is the right one, in one forward; 95 % intervals over rows of {n} tokens. The
base here is opened with the same mask token and without its causal mask, and has learnt nothing of either.

{table(("masked", "adapted", "base", "rows"), rows, right=3)}"""


def _percent(row: dict[str, Any]) -> str:
    return f"{100 * row['accuracy']:.1f} % [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def _loading(training: dict[str, Any]) -> str:
    known = [f"{name}:arm" for name, base in BASES.items() if base.sha256 == training["base_sha256"]]
    return f"""
## Loading it

```python
import floatscope as fs

model = fs.load("{known[0] if known else training["base_name"]}+adapter")  # the base, a plus, this folder
fs.decode(model, "What floats?", new_tokens=16).text
```"""


def _limits(training: dict[str, Any]) -> str:
    longest = max(training["recipe"]["lengths"])
    return f"""
## Limits

- It is a sibling for measuring, made in minutes: its prose is worse than the base's, and it says wrong things with
  confidence.
- It learnt to answer in a few words; rows had up to {longest:,} tokens, and longer canvases are new to it.
- One seed was trained: how much another would differ is not known."""
