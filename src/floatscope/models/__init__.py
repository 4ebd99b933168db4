"""Checkpoints → `Model`: a native transformers module and what must be known of it."""

from floatscope.models.load import load
from floatscope.models.model import Model, ModelSpec
from floatscope.models.random import write_random
from floatscope.models.untrained import untrained
from floatscope.models.write import write_checkpoint

__all__ = ["Model", "ModelSpec", "load", "untrained", "write_checkpoint", "write_random"]
