"""`answer_nll`: the negative log-likelihood of an answer, with one definition for ARMs and MDMs.

    answer_nll(model, prompts, ["Kuburg", "the flute"], new_tokens=8)     # nats per token, one number per prompt
    measure_answers(…)                                                    # the same, with dose and notes of the edits

The answer is the target of a teacher-forced `decode`. An autoregressive model writes it from left to right, which gives
the usual likelihood. A masked diffusion model writes it in the order of its own sampler, and the chain rule follows
that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from floatscope.errors import UserError
from floatscope.interventions.notes import EditNote
from floatscope.models.model import Model
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.pipelines.decode import decode
from floatscope.pipelines.decoding import Decoding
from floatscope.pipelines.prompting import (
    RawPrompt,
    encode_prompts,
    list_prompts,
    parse_token_ids,
    uses_chat_template,
)


def answer_nll(
    model: Model,
    prompts: RawPrompt | Sequence[RawPrompt],
    answers: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    new_tokens: int,
    chat: bool | None = None,
    **settings: Any,
) -> list[float]:
    """Return the mean of −log p over the tokens of each answer and the end token after it. All prompts are one batch.

    Args:
        model: from `fs.load`.
        prompts: as in `fs.decode`.
        answers: one per prompt, a text that continues the prompt or a list of token ids. An end of text follows it (an
            end of turn after a chat template), and ends of text fill up the `new_tokens`.
        new_tokens: the number of new tokens, at least one more than the longest answer.
        chat: as in `fs.decode`.
        **settings: as in `fs.decode`.

    Returns:
        Nats per token, one number per prompt. p is the probability of a token at the step that commits it
        (`Commits.confidence` of `fs.decode`); the mean is inf if p is 0 in fp32.

    Example:
        prompt = "Document 1: Mira lives in Velmora.\\nQuestion: Where does Mira live?\\nAnswer:"
        fs.answer_nll(fs.load("twin:mdm"), prompt, "Velmora", new_tokens=8)
    """
    return measure_answers(model, prompts, answers, new_tokens=new_tokens, chat=chat, **settings).nlls


class MeasuredAnswers(NamedTuple):
    """The NLL of each answer, and what the edits did: their dose for each answer, and notes."""

    nlls: list[float]
    doses: list[float]
    notes: list[EditNote]


def measure_answers(
    model: Model, prompts: Any, answers: Any, *, new_tokens: int, chat: bool | None = None, **settings: Any
) -> MeasuredAnswers:
    """Return the NLL of each answer, as `answer_nll` defines it, with `Decoding.doses` and `Decoding.notes`."""
    if not isinstance(model, Model):
        raise UserError(f"answer_nll needs a floatscope Model (fs.load), got {type(model).__name__}")
    if not isinstance(new_tokens, int):
        raise UserError(f"new_tokens must be a whole number, got {new_tokens!r}")
    eos = settings.get("eos") or getattr(settings.get("sampling"), "eos", None)
    if eos not in (None, "free"):
        raise UserError(f"an answer ends with an end of text, which eos={eos!r} excludes; leave eos out")
    ids = encode_prompts(model, prompts, chat)
    answer_list = list_prompts(answers)
    if len(answer_list) != len(ids):
        raise UserError(f"{len(answer_list)} answers for {len(ids)} prompts; give one for each")
    end_id, fill_id = _get_end_ids(model, chat)
    target_ids, lengths = [], []
    for number, (prompt, answer) in enumerate(zip(ids, answer_list, strict=True)):
        answer_ids = _encode_answer(model, prompt, answer, f"answer {number}")
        length = len(answer_ids) + 1
        if length > new_tokens:
            raise UserError(
                f"answer {number} has {len(answer_ids)} tokens and an end token, which exceeds new_tokens={new_tokens};"
                f" give new_tokens={length} or more"
            )
        target_ids.append([*answer_ids, end_id, *[fill_id] * (new_tokens - length)])
        lengths.append(length)
    decoding = decode(model, ids, target_ids=target_ids, new_tokens=new_tokens, **settings)
    nll = -_collect_probabilities(decoding).double().log()
    means = [float(row[:length].mean()) for row, length in zip(nll, lengths, strict=True)]
    return MeasuredAnswers(means, decoding.doses, decoding.notes)


def encode_continuation(tokenizer: ModelTokenizer, prompt: Sequence[int], answer: str) -> list[int]:
    """Encode an answer as the continuation of a prompt.

    A space separates them unless the prompt ends in whitespace or in a special token. If the encoding of both texts
    together starts with the prompt's ids, its remainder is returned; else the ids of the answer alone.
    """
    prompt_text = tokenizer.decode(prompt)
    needs_no_space = not prompt or prompt[-1] in tokenizer.special_ids or prompt_text[-1:].isspace()
    answer_text = answer.strip() if needs_no_space else f" {answer.strip()}"
    joint_ids = tokenizer.encode(prompt_text + answer_text)
    if joint_ids[: len(prompt)] == list(prompt):
        return joint_ids[len(prompt) :]
    return tokenizer.encode(answer_text)[len(tokenizer.encode("")) :]


def _get_end_ids(model: Model, chat: bool | None) -> tuple[int, int]:
    """The token that ends an answer, and the token that fills the positions after it."""
    spec = model.spec
    if not spec.stop_ids:
        raise UserError(f"{spec.name} has no end token, and an answer ends with one; use fs.decode(target_ids=…)")
    end_of_turn = spec.eot_id if uses_chat_template(model, chat) else None
    return spec.stop_ids[0] if end_of_turn is None else end_of_turn, spec.stop_ids[0]


def _encode_answer(model: Model, prompt: list[int], answer: Any, name: str) -> list[int]:
    """The token ids of an answer after its prompt."""
    if isinstance(answer, str) and model.tokenizer is None:
        raise UserError(f"{model.spec.name} has no tokenizer: give answers as lists of token ids")
    if isinstance(answer, str) and model.tokenizer is not None:
        ids = encode_continuation(model.tokenizer, prompt, answer) if answer.strip() else []
    else:
        ids = parse_token_ids(model, answer, name)
    if not ids:
        raise UserError(f"{name} is empty; give a text or token ids")
    if ends := set(ids) & set(model.spec.stop_ids):
        raise UserError(f"{name} contains an end token ({min(ends)}); leave it out, one is added to every answer")
    return ids


def _collect_probabilities(decoding: Decoding) -> Float[Tensor, "batch new"]:
    """The probability of each new token at the step that commits it; NaN where none is committed."""
    p = torch.full((len(decoding.samples), decoding.sampling.new_tokens), torch.nan)
    for step in decoding.steps:
        commits = step.commits.to(p.device)
        new = commits.position - decoding.answer_start
        is_target = new < p.shape[1]  # a model that attends in blocks fills the last one
        p[commits.sample[is_target], new[is_target]] = commits.confidence[is_target]
    return p
