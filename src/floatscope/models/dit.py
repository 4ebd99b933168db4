"""The network of MDLM and BD3-LM: transformer blocks with adaptive layer norm (DiT), which transformers does not have.

    module = DiTForMaskedLM(DiTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
    module(input_ids).logits      # [batch, position, vocabulary]

Each block scales, shifts and gates its two branches by numbers that a small network computes from the noise level. The
published checkpoints were trained without time conditioning: their noise level is always 0, so these numbers are
constants. MDLM attends to all positions. BD3-LM is the same network with block-causal attention (`block_causal.py`).

Submodules have the names of the authors' code (kuleshov-group/mdlm and bd3lms, `models/dit.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MLP_RATIO = 4  # hidden units of an MLP for each unit of the stream
ROTATION_BASE = 10_000.0
NOISE_FEATURES = 256  # cosines and sines of the noise level


@strict
class DiTConfig(PreTrainedConfig):  # type: ignore[misc]
    """The sizes of a DiT, with the names of transformers."""

    model_type = "floatscope_dit"

    vocab_size: int = 50258
    hidden_size: int = 768
    conditioning_size: int = 128
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def validate_architecture(self) -> None:
        """Check that the heads divide the width and have pairs of dimensions to rotate; called by `strict`."""
        if min(self.hidden_size, self.num_attention_heads, self.conditioning_size) < 1:
            raise ValueError("hidden_dim, n_heads and cond_dim must be at least 1")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_dim {self.hidden_size} is not an even multiple of n_heads {self.num_attention_heads}"
            )


class NoiseEmbedding(nn.Module):
    """The conditioning vector of the noise level 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(NOISE_FEATURES, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self) -> Float[Tensor, " conditioning"]:
        """Return the vector: the cosines of 0 are 1 and its sines are 0."""
        weight = next(self.mlp.parameters())
        features = torch.cat([weight.new_ones(NOISE_FEATURES // 2), weight.new_zeros(NOISE_FEATURES // 2)])
        return F.silu(self.mlp(features))


class Rotation(nn.Module):
    """The rotary embedding of positions; checkpoints store its frequencies."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / ROTATION_BASE ** (torch.arange(0, head_dim, 2).float() / head_dim))

    def forward(self, positions: Int[Tensor, "batch position"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [batch, 1, position, head_dim]."""
        angles = positions[..., None] * self.inv_freq  # (B, T, D / 2)
        angles = torch.cat([angles, angles], -1)[:, None]  # (B, 1, T, D)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Modulation(nn.Linear):
    """From the conditioning vector to shift, scale and gate of each branch; the readout has no gate."""

    def __init__(self, config: DiTConfig, parts: int) -> None:
        super().__init__(config.conditioning_size, parts * config.hidden_size)
        self.parts = parts

    def forward(self, conditioning: Float[Tensor, " conditioning"]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the parts, [width] each."""
        return super().forward(conditioning).chunk(self.parts)


class DiTBlock(nn.Module):
    """Attention and an MLP, each with a modulated norm before it and a gate after it."""

    is_causal = False

    def __init__(self, config: DiTConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.layer, self.heads = config, layer, config.num_attention_heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, MLP_RATIO * width), nn.GELU("tanh"), nn.Linear(MLP_RATIO * width, width)
        )
        self.adaLN_modulation = Modulation(config, 6)

    def forward(
        self,
        x: Float[Tensor, "batch position width"],
        conditioning: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Any,
        cache: Cache | None,
    ) -> Float[Tensor, "batch position width"]:
        """Return the residual stream after the block; the mask is what its attention implementation takes."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(conditioning)
        attended = self._attend(modulate(self.norm1, x, shift1, scale1), rotation, mask, cache)
        x = x + gate1 * self.attn_out(attended)
        x = x + gate2 * self.mlp(modulate(self.norm2, x, shift2, scale2))
        return x

    def _attend(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Any, cache: Cache | None
    ) -> Float[Tensor, "batch position width"]:
        q, k, v = self.attn_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out: Tensor = attend(self, q, k, v, mask, dropout=0.0, scaling=q.shape[-1] ** -0.5)[0]  # (B, T, H, D)
        return out.flatten(-2)


class DiTReadout(nn.Module):
    """The final norm, modulated, and the output embedding."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(config.hidden_size, bias=False)
        self.linear = nn.Linear(config.hidden_size, config.vocab_size)
        self.adaLN_modulation = Modulation(config, 2)

    def forward(self, x: Tensor, conditioning: Tensor) -> Float[Tensor, "batch row vocabulary"]:
        """Return the logits."""
        shift, scale = self.adaLN_modulation(conditioning)
        logits: Tensor = self.linear(modulate(self.norm_final, x, shift, scale))
        return logits


class DiTBackbone(nn.Module):
    """The parts of the network, under the name that the tensors of checkpoints have."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.vocab_embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.sigma_map = NoiseEmbedding(config.conditioning_size)
        self.rotary_emb = Rotation(config.hidden_size // config.num_attention_heads)
        self.blocks = nn.ModuleList(DiTBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.output_layer = DiTReadout(config)


class DiTForMaskedLM(PreTrainedModel):  # type: ignore[misc]
    """A masked diffusion language model of DiT blocks; it uses the AttentionInterface of transformers."""

    config_class = DiTConfig
    base_model_prefix = "backbone"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ("DiTBlock",)
    _keep_in_fp32_modules_strict = ("rotary_emb",)

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.backbone = DiTBackbone(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.backbone.vocab_embed

    def get_output_embeddings(self) -> nn.Module:
        """The output embedding, which is not tied to the input."""
        return self.backbone.output_layer.linear

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise without modulation and with open gates, as the authors' variant without adaptive norm has them.

        Their variant with adaptive norm begins with closed gates and an output embedding of zeros: such a network
        reads no context and predicts all tokens alike, which would be no control.
        """
        if isinstance(module, Modulation):
            bias = torch.zeros_like(module.bias)
            bias.view(module.parts, -1)[2::3] = 1  # the gates
            init.zeros_(module.weight)
            init.copy_(module.bias, bias)
        else:
            super()._init_weights(module)

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "batch position"] | None = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int | slice | Tensor = 0,
    ) -> MaskedLMOutput:
        """Return the logits.

        Args:
            input_ids: the tokens.
            attention_mask: 1 for tokens and 0 for padding.
            position_ids: the position of each token; default: counted from 0, or from the end of the cache.
            past_key_values: the keys and values of finished blocks; those of this call are added.
            logits_to_keep: the rows whose logits are computed: the last n, or an index; 0: all.
        """
        net = self.backbone
        x = net.vocab_embed(input_ids)
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(start, start + x.shape[1], device=x.device)[None]
        mask = create_bidirectional_mask(self.config, x, attention_mask, past_key_values=past_key_values)
        rotation, conditioning = net.rotary_emb(position_ids, x.dtype), net.sigma_map()
        for block in net.blocks:
            x = block(x, conditioning, rotation, mask, past_key_values)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return MaskedLMOutput(logits=net.output_layer(x[:, rows], conditioning))


def modulate(norm: nn.LayerNorm, x: Tensor, shift: Tensor, scale: Tensor) -> Float[Tensor, "batch position width"]:
    """Normalise in fp32 or better, then scale and shift."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.layer_norm(x.to(wide), norm.normalized_shape, norm.weight.to(wide), eps=norm.eps)
    return (normed * (1 + scale) + shift).to(x.dtype)


def rotate(x: Float[Tensor, "batch head position dim"], cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dimensions (i, i + dim / 2)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
