"""Training a twin: one recipe, three objectives, in legs that can be broken off anywhere.

    module = new_module(recipe)
    for progress in train_steps(module, optimizer_for(module, recipe), recipe, "mdm", batches, Progress(0, []), over):
        progress.step, progress.losses

`arm` predicts the next token; `mdm` and `mdm-adapted` fill masks, the latter from the trained `arm`, with its shift
kept. All see the same rows in the same order. The loss is that of the text plus, at full weight, that of the answers:
three answer tokens in a hundred would teach no reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from floatscope.lab.training.masks import drawn
from floatscope.lab.training.progress import Progress, rate
from floatscope.lab.twins.lessons import ANSWER, Rows

KINDS = ("arm", "mdm", "mdm-adapted")
EVERY = 100  # steps between two losses that are kept
WHOLE_ANSWER = 0.85  # how often an answer is masked as a whole, as it will be when it is asked for


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on, beside the rows."""

    layers: int = 8
    width: int = 256
    heads: int = 8
    ffn: int = 576
    vocabulary: int = 4096
    length: int = 512
    batch: int = 128
    steps: int = 12000
    warmup: int = 300
    peak: float = 1e-3
    decay: float = 0.1
    seed: int = 0

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def mask_id(self) -> int:
        """The last token, as `train_tokenizer` has it."""
        return self.vocabulary - 1


RECIPES = {kind: Recipe() for kind in KINDS}
_SMALL = {"layers": 2, "width": 64, "heads": 4, "ffn": 96, "vocabulary": 2048, "length": 128, "batch": 8, "warmup": 20}
TINY = {kind: Recipe(**_SMALL, steps=200) for kind in KINDS}


def new_module(recipe: Recipe) -> nn.Module:
    """A Llama with fresh weights; the same for every kind."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)
        module: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=recipe.vocabulary,
                hidden_size=recipe.width,
                intermediate_size=recipe.ffn,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.heads,
                num_key_value_heads=recipe.heads,
                max_position_embeddings=2048,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                bos_token_id=recipe.vocabulary - 2,
                eos_token_id=recipe.vocabulary - 3,
            )
        )
    return module


def optimizer_for(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(module.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.peak, betas=(0.9, 0.95), fused=fused)


def next_token_loss(
    forward: Callable[[Tensor], Tensor],
    tokens: Int[Tensor, "row position"],
    roles: Int[Tensor, "row position"],
    draw: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """(loss of everything, loss of the answers)."""
    logits = forward(tokens)[:, :-1]
    each = _each(logits, tokens[:, 1:]).flatten()
    answers = (roles[:, 1:] == ANSWER).flatten()
    return each.mean(), _mean(each, answers)


def masked_loss(
    forward: Callable[[Tensor], Tensor],
    tokens: Int[Tensor, "row position"],
    roles: Int[Tensor, "row position"],
    draw: torch.Generator,
    mask_id: int,
    shift: bool,
) -> tuple[Tensor, Tensor]:
    """(diffusion loss, weighted 1/t, of half the rows; loss of the answers masked in the other half)."""
    t, anywhere = drawn(tokens, draw)
    asked = _whole_answers(roles, draw)
    odd = torch.arange(len(tokens), device=tokens.device) % 2 == 1
    reading = odd[:, None] & (roles == ANSWER).any(-1, keepdim=True)
    masked = torch.where(reading, asked, anywhere)
    logits = forward(torch.where(masked, mask_id, tokens))
    if shift:  # row p decides position p + 1; nothing decides the first
        logits, masked, tokens, roles, reading = logits[:, :-1], masked[:, 1:], tokens[:, 1:], roles[:, 1:], reading
    each = _each(logits, tokens)
    diffusion = (each * (masked & ~reading) / t).sum() / (~reading).expand_as(masked).sum().clamp_min(1)
    asked, answer = masked & reading, roles == ANSWER
    return diffusion, _mean(each, asked & answer) + 0.1 * _mean(each, asked & ~answer)


def _each(logits: Float[Tensor, "row position token"], wanted: Int[Tensor, "row position"]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none").view_as(wanted)


def _whole_answers(roles: Int[Tensor, "row position"], draw: torch.Generator) -> Bool[Tensor, "row position"]:
    """Answers with their tails, most of them masked from end to end, the others token by token."""
    inside = roles >= ANSWER
    begins = inside & ~F.pad(inside, (1, 0))[:, :-1]
    number = begins.long().cumsum(-1)
    rows, length = roles.shape
    chosen = torch.rand(rows, length + 1, device=roles.device, generator=draw).gather(1, number) < WHOLE_ANSWER
    tokenwise = torch.rand(rows, length, device=roles.device, generator=draw) < 0.5
    return inside & (chosen | tokenwise)


def _mean(each: Float[Tensor, "*n"], chosen: Bool[Tensor, "*n"]) -> Tensor:
    return (each * chosen).sum() / chosen.sum().clamp_min(1)


def train_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    kind: str,
    batches: Iterator[Rows],
    progress: Progress,
    over: Callable[[], bool],
    compiled: bool = False,
) -> Iterator[Progress]:
    """Train on batch after batch until the time is over; yields every hundred steps and at the last. A step draws by
    its number."""
    device = next(module.parameters()).device
    forward = _forward(module, kind, compiled)
    module.train()
    for rows in batches:
        if progress.step >= recipe.steps or over():
            break
        draw = torch.Generator(device).manual_seed(recipe.seed * 1_000_003 + progress.step)
        tokens = torch.from_numpy(rows.tokens.astype("int64")).to(device, non_blocking=True)
        roles = torch.from_numpy(rows.roles.astype("int64")).to(device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, progress.step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            if kind == "arm":
                text, answers = next_token_loss(forward, tokens, roles, draw)
            else:
                text, answers = masked_loss(forward, tokens, roles, draw, recipe.mask_id, kind == "mdm-adapted")
        (text + answers).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress.stepped(text, answers, EVERY, recipe.steps):
            yield progress


def _forward(module: Any, kind: str, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Layer by layer: a network compiled as a whole makes the mask that full attention does not need, and adds the
    gradients of a batch of masks to one embedding in turn."""
    if compiled:
        for layer in module.model.layers:
            layer.compile()

    def forward(tokens: Tensor) -> Tensor:
        logits: Tensor = module(tokens, is_causal=kind == "arm", use_cache=False).logits
        return logits

    return forward
