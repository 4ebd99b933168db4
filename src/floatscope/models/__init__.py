"""Checkpoints → `Model`: a native transformers module and what must be known of it."""

from floatscope.models.llada import open_llada, write_random_llada
from floatscope.models.model import Model, ModelSpec
from floatscope.models.untrained import untrained

__all__ = ["Model", "ModelSpec", "open_llada", "untrained", "write_random_llada"]
