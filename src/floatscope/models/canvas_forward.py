"""The forward of a model that denoises a canvas after an encoded text (DiffusionGemma).

    forward = model.canvas_forward()
    forward.encode(canvas)                            # the positions before the canvas that are not in the cache yet
    logits = forward(canvas, None)                    # [batch, canvas, vocabulary]: one row per position of the canvas
    logits = forward(canvas, logits / temperature)    # the next step: the logits of the one before condition it

The last `canvas_size` positions are the canvas. The encoder reads the text before it causally and fills a cache; the
decoder reads the cache and the canvas, in both directions. Sliding layers of the decoder see the last window − 1
positions of the text, and the whole canvas.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from floatscope.canvas import CanvasState
from floatscope.compat import attention_name, full_mask_function
from floatscope.errors import UserError
from floatscope.models.spec import ModelSpec


class CanvasForward:
    """The decoder of a model and the cache that its encoder fills."""

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        from transformers import DynamicCache

        assert spec.canvas_size is not None
        self._module: Any = module
        self._spec, self._size = spec, spec.canvas_size
        self._cache = DynamicCache()  # without a config it drops nothing, so a sliding window can be captured too
        self._encoded = 0

    def encode(self, canvas: CanvasState) -> None:
        """Encode the positions before the canvas that are not encoded yet."""
        start, stop = self._encoded, canvas.tokens.shape[1] - self._size
        if start == stop:
            return
        valid = canvas.valid[:, :stop]
        if not self._spec.supports_padding and not bool(valid[:, 0].all()):
            raise UserError(
                f"{self._spec.name} predicts something else when it is padded; decode prompts of one length together"
            )
        self._module.model.encoder(
            input_ids=canvas.tokens[:, start:stop],
            attention_mask=valid.long(),
            position_ids=_position_ids(canvas)[:, start:stop],
            past_key_values=self._cache,
        )
        self._encoded = stop

    def __call__(
        self, canvas: CanvasState, conditioning: Float[Tensor, "batch row vocabulary"] | None
    ) -> Float[Tensor, "batch row vocabulary"]:
        """Return the logits of the canvas; `conditioning` are those of the step before, None at the first step."""
        self.encode(canvas)
        start = self._encoded
        dtype = self._module.get_input_embeddings().weight.dtype
        logits: Tensor = self._module(
            decoder_input_ids=canvas.tokens[:, start:],
            self_conditioning_logits=None if conditioning is None else conditioning.to(dtype),
            decoder_attention_mask=self._masks(canvas),
            decoder_position_ids=_position_ids(canvas)[:, start:],
            past_key_values=self._cache,
        ).logits
        return logits.to(canvas.tokens.device)

    def _masks(self, canvas: CanvasState) -> dict[str, Any]:
        """The mask of each kind of layer, in the form of the module's attention implementation."""
        from transformers import AttentionMaskInterface

        config = self._module.config.get_text_config()
        first_seen = self._encoded - config.sliding_window + 1

        def window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            visible: Tensor = (key >= first_seen) & (query >= 0)
            return visible

        batch, length = canvas.tokens.shape
        full = full_mask_function()
        rules = {"full_attention": full, "sliding_attention": window if first_seen > 0 else full}
        return {
            kind: AttentionMaskInterface()[attention_name(config)](
                batch_size=batch,
                q_length=self._size,
                kv_length=length,
                q_offset=self._encoded,
                kv_offset=0,
                mask_function=rules[kind],
                attention_mask=canvas.valid,
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=rules[kind] is full,
                dtype=self._module.dtype,
                config=config,
                device=canvas.tokens.device,
            )
            for kind in sorted(set(config.layer_types))
        }


def _position_ids(canvas: CanvasState) -> Tensor:
    """Positions count valid tokens only."""
    return (canvas.valid.long().cumsum(-1) - 1).clamp_min(0)
