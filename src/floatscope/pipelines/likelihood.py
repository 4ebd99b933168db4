"""`answer_nll`: how unlikely a model finds an answer, by one definition for both families.

    answer_nll(model, prompts, ["Kuburg", "the flute"], new_tokens=8)     # a number per prompt: nats per token

The answer is forced on `decode`. An autoregressive model takes it from left to right, which gives the usual likelihood;
a masked diffusion model in the order of its own sampler, and the chain rule is followed along that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.models.text import ModelTokenizer
from floatscope.pipelines import prompts as asked
from floatscope.pipelines.decode import Decoding, decode


def answer_nll(
    model: Model,
    prompts: asked.Prompt | Sequence[asked.Prompt],
    answers: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    new_tokens: int,
    chat: bool | None = None,
    **settings: Any,
) -> list[float]:
    """The mean of −log p over an answer's tokens and the end behind it, for each prompt; all prompts are one batch.

    An answer is a text, with which the prompt goes on, or a list of token ids. Behind it stands the end of text (of the
    turn, in a conversation), and ends of text fill the `new_tokens`. p is the probability a token has at the step that
    commits it, `Commits.confidence` of `decode`, which takes the `settings`; where fp32 has 0 for it, the mean is inf.
    """
    if not isinstance(model, Model):
        raise UserError(f"answer_nll needs a floatscope Model (fs.load), got {type(model).__name__}")
    if not isinstance(new_tokens, int):
        raise UserError(f"new_tokens must be a whole number, got {new_tokens!r}")
    if settings.get("eos") not in (None, "free"):
        raise UserError(f"an answer ends with an end of text, and eos={settings['eos']!r} denies it; leave eos out")
    ids = asked.token_ids(model, prompts, chat)
    texts = asked.several(answers)
    if len(texts) != len(ids):
        raise UserError(f"{len(texts)} answers for {len(ids)} prompts; give one for each")
    end, fill = _ends(model, chat)
    forced, lengths = [], []
    for number, (prompt, answer) in enumerate(zip(ids, texts, strict=True)):
        said = _said(model, prompt, answer, f"answer {number}")
        if len(said) >= new_tokens:
            raise UserError(
                f"answer {number} has {len(said)} tokens and an end behind it, and {new_tokens} new ones are asked"
                f" for; give new_tokens={len(said) + 1} or more"
            )
        forced.append([*said, end, *[fill] * (new_tokens - len(said) - 1)])
        lengths.append(len(said) + 1)
    nll = -_probability(decode(model, ids, target_ids=forced, new_tokens=new_tokens, **settings)).double().log()
    return [float(row[:length].mean()) for row, length in zip(nll, lengths, strict=True)]


def _ends(model: Model, chat: bool | None) -> tuple[int, int]:
    """What ends an answer, and what fills the room behind it."""
    spec = model.spec
    if not spec.stop_ids:
        raise UserError(f"{spec.name} has no token that ends a text, and an answer ends with one; see decode(forced=…)")
    turn = spec.eot_id if asked.uses_template(model, chat) else None
    return spec.stop_ids[0] if turn is None else turn, spec.stop_ids[0]


def _said(model: Model, prompt: list[int], answer: Any, name: str) -> list[int]:
    """The answer's token ids behind the prompt."""
    if isinstance(answer, str) and model.tokenizer is None:
        raise UserError(f"{model.spec.name} has no tokenizer: give answers as lists of token ids")
    if isinstance(answer, str) and model.tokenizer is not None:
        ids = continuation(model.tokenizer, prompt, answer) if answer.strip() else []
    else:
        ids = asked.written_ids(model, answer, name)
    if not ids:
        raise UserError(f"{name} is empty; give a text or token ids")
    if ends := set(ids) & set(model.spec.stop_ids):
        raise UserError(f"{name} holds an end of text ({min(ends)}); leave it out, one is put behind every answer")
    return ids


def continuation(text: ModelTokenizer, prompt: Sequence[int], answer: str) -> list[int]:
    """The ids of the answer as the prompt goes on with it: after a space, unless the prompt ends in space or a special
    token. They are those of both texts together where these begin with the prompt's, else the answer's alone."""
    before = text.decode(prompt)
    opened = not prompt or prompt[-1] in text.special_ids or before[-1:].isspace()
    said = answer.strip() if opened else f" {answer.strip()}"
    both = text.encode(before + said)
    if both[: len(prompt)] == list(prompt):
        return both[len(prompt) :]
    return text.encode(said)[len(text.encode("")) :]


def _probability(decoding: Decoding) -> Float[Tensor, "batch new"]:
    """What the model gave each new token when it was committed; NaN where none was."""
    found = torch.full((len(decoding.samples), decoding.how.new_tokens), torch.nan)
    for step in decoding.steps:
        commits = step.commits.to(found.device)
        found[commits.sample, commits.position - decoding.answer_start] = commits.confidence
    return found
