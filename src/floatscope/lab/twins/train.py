"""Training steps of the twins: one recipe, three objectives.

    module = build_module(recipe)
    optimizer = build_optimizer(module, recipe)
    for progress in train_steps(module, optimizer, recipe, "mdm", batches, Progress(0, []), is_over):
        progress.step, progress.losses

`arm` predicts the next token. `mdm` and `mdm-adapted` fill masks; the latter starts from the trained `arm` and keeps
its shift. All three see the same rows in the same order, `mdm` more of them. The loss is that of the text plus that of
the answers, at equal weight: answers are about three tokens in a hundred, too few to teach reading otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from floatscope.lab.training.losses import masked_mean, sample_masks
from floatscope.lab.training.progress import Progress, learning_rate
from floatscope.lab.twins.examples import ANSWER, Rows

KINDS = ("arm", "mdm", "mdm-adapted")
LOG_EVERY = 100  # steps per entry of the loss curve
FULL_MASK_RATE = 0.6  # share of answers that are masked completely, as they are when decoding begins
TAIL_WEIGHT = 0.1  # of the ends of text after an answer


@dataclass(frozen=True)
class Recipe:
    """The settings of a training: everything the weights depend on beside the rows."""

    layers: int = 8
    width: int = 256
    heads: int = 8
    ffn: int = 576
    vocabulary: int = 4096
    length: int = 1024  # tokens per row
    batch: int = 64  # rows per step
    steps: int = 12000
    warmup: int = 300
    lr: float = 1e-3  # peak
    weight_decay: float = 0.1
    seed: int = 0

    @property
    def as_json(self) -> dict[str, Any]:
        """All settings, as they are stored in training.json."""
        return asdict(self)

    @property
    def mask_id(self) -> int:
        """The id of the mask, which `train_tokenizer` puts last."""
        return self.vocabulary - 1


RECIPES = {"arm": Recipe(), "mdm": Recipe(steps=20000), "mdm-adapted": Recipe()}
"""`mdm` learns from scratch and from the masked tokens only, and needs more steps to reach the scores of the others."""
_TINY = {"layers": 2, "width": 64, "heads": 4, "ffn": 96, "vocabulary": 2048, "length": 128, "batch": 8, "warmup": 20}
TINY_RECIPES = {kind: Recipe(**_TINY, steps=200) for kind in KINDS}


def build_module(recipe: Recipe) -> nn.Module:
    """Return a Llama with fresh weights, the same for every kind."""
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


def build_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(module.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=fused)


def next_token_loss(
    forward: Callable[[Tensor], Tensor],
    tokens: Int[Tensor, "row position"],
    roles: Int[Tensor, "row position"],
) -> tuple[Tensor, Tensor]:
    """Return (mean loss of all tokens, mean loss of the answers)."""
    logits = forward(tokens)[:, :-1]
    losses = _token_losses(logits, tokens[:, 1:]).flatten()
    is_answer = (roles[:, 1:] == ANSWER).flatten()
    return losses.mean(), masked_mean(losses, is_answer)


def masked_loss(
    forward: Callable[[Tensor], Tensor],
    tokens: Int[Tensor, "row position"],
    roles: Int[Tensor, "row position"],
    rng: torch.Generator,
    mask_id: int,
    shift: bool,
) -> tuple[Tensor, Tensor]:
    """Return (diffusion loss of half the rows, weighted by 1/t; loss of the masked answers in the other half)."""
    t, random_masks = sample_masks(tokens, rng)
    answer_masks = _sample_answer_masks(roles, rng)
    is_odd = torch.arange(len(tokens), device=tokens.device) % 2 == 1
    reads = is_odd[:, None] & (roles == ANSWER).any(-1, keepdim=True)  # rows whose answers are masked
    masked = torch.where(reads, answer_masks, random_masks)
    logits = forward(torch.where(masked, mask_id, tokens))
    if shift:  # row p predicts position p + 1; no row predicts the first position
        logits, masked, tokens, roles = logits[:, :-1], masked[:, 1:], tokens[:, 1:], roles[:, 1:]
    losses = _token_losses(logits, tokens)
    diffusion = (losses * (masked & ~reads) / t).sum() / (~reads).expand_as(masked).sum().clamp_min(1)
    masked, is_answer = masked & reads, roles == ANSWER
    return diffusion, masked_mean(losses, masked & is_answer) + TAIL_WEIGHT * masked_mean(losses, masked & ~is_answer)


def _token_losses(logits: Float[Tensor, "row position token"], targets: Int[Tensor, "row position"]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)


def _sample_answer_masks(roles: Int[Tensor, "row position"], rng: torch.Generator) -> Bool[Tensor, "row position"]:
    """Mask answers with their tails: most of them completely, each of the others at its own rate in 0 … 1."""
    inside = roles >= ANSWER
    begins = inside & ~F.pad(inside, (1, 0))[:, :-1]
    number = begins.long().cumsum(-1)
    rows, length = roles.shape
    draws = torch.rand(2, rows, length + 1, device=roles.device, generator=rng)
    rate = torch.where(draws[0] < FULL_MASK_RATE, 1.0, draws[1]).gather(1, number)
    return inside & (torch.rand(rows, length, device=roles.device, generator=rng) < rate)


def train_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    kind: str,
    batches: Iterator[Rows],
    progress: Progress,
    is_over: Callable[[], bool],
    compiled: bool = False,
) -> Iterator[Progress]:
    """Train batch after batch until `is_over()` or the last step; yield at every entry of the loss curve.

    The random numbers of a step depend on its number alone, so that segments do not change the result.
    """
    device = next(module.parameters()).device
    forward = _make_forward(module, kind, compiled)
    module.train()
    for rows in batches:
        if progress.step >= recipe.steps or is_over():
            break
        rng = torch.Generator(device).manual_seed(recipe.seed * 1_000_003 + progress.step)
        tokens = torch.from_numpy(rows.tokens.astype("int64")).to(device, non_blocking=True)
        roles = torch.from_numpy(rows.roles.astype("int64")).to(device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, progress.step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            if kind == "arm":
                text, answers = next_token_loss(forward, tokens, roles)
            else:
                text, answers = masked_loss(forward, tokens, roles, rng, recipe.mask_id, kind == "mdm-adapted")
        (text + answers).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress.record_step(text, answers, LOG_EVERY, recipe.steps):
            yield progress


def _make_forward(module: Any, kind: str, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Return tokens → logits, compiled layer by layer if asked.

    A network compiled as a whole builds a mask that full attention does not need, and adds the gradients of a batch of
    masks to one embedding row one after the other.
    """
    if compiled:
        for layer in module.model.layers:
            layer.compile()

    def forward(tokens: Tensor) -> Tensor:
        logits: Tensor = module(tokens, is_causal=kind == "arm", use_cache=False).logits
        return logits

    return forward
