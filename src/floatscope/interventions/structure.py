"""Which positions of a canvas are structure, for edits of structural anchors: by the class of the token, and the
region of the template. The definition is that of the analyses (`models/token_classes.py`).

    StructureFinder(model).find(canvas)          # [batch, key]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.models.model import Model
from floatscope.models.token_classes import STRUCTURE, TEMPLATE, classify_token


@dataclass
class StructureFinder:
    """Finds structure on the canvases of one decoding; every token is classified once."""

    model: Model
    _is_structure: dict[int, bool] = field(default_factory=dict)  # by token id
    _latest: tuple[Tensor, Tensor] | None = None  # the tokens of the latest canvas, and its structure

    def find(self, canvas: CanvasState) -> Bool[Tensor, "batch key"]:
        """Which positions hold structure. The layers of a step share one result."""
        if self._latest is None or self._latest[0] is not canvas.tokens:
            ids, index = canvas.tokens.unique(return_inverse=True)
            by_id = torch.tensor([self._classify(i) for i in ids.tolist()], device=ids.device)
            structure = by_id[index] & canvas.valid
            names, member = canvas.regions.names, canvas.regions.member
            if member is not None and TEMPLATE in names:
                structure = structure | member[..., names.index(TEMPLATE)].to(structure.device)
            self._latest = canvas.tokens, structure
        return self._latest[1]

    def _classify(self, token_id: int) -> bool:
        if token_id not in self._is_structure:
            spec, tokenizer = self.model.spec, self.model.tokenizer
            assert tokenizer is not None  # checked by `check_edits`
            roles = {spec.bos_id, spec.eos_id, spec.eot_id, spec.mask_id, spec.pad_id}
            special_ids = tokenizer.special_ids | {i for i in roles if i is not None}
            text = tokenizer.pieces([token_id])[0]
            name = classify_token(token_id, text, bos=spec.bos_id, mask=spec.mask_id, special_ids=special_ids)
            self._is_structure[token_id] = name in STRUCTURE
        return self._is_structure[token_id]
