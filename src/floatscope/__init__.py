"""floatscope: a microscope for attention in masked diffusion language models.

    import floatscope as fs
    model = fs.load("twin:mdm")
    out = fs.decode(model, "What floats?", new_tokens=32, watch=fs.Watch())
    out.trace.plot(path="map.png")

Importing it is light: torch, transformers and matplotlib are loaded by the first name that needs them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.6.0"

_HOME = {
    "Decoding": "decoding",
    "decode": "decoding",
    "final_state": "final_state",
    "lens": "lens",
    "answer_nll": "likelihood",
    "trace_samples": "tracing",
    "watch": "watching",
    "UserError": "errors",
    "CanvasState": "values",
    "Commits": "values",
    "Edit": "values",
    "Keys": "values",
    "Groups": "values",
    "Reductions": "values",
    "Regions": "values",
    "State": "values",
    "Reducer": "capture.reducer",
    "Watch": "capture.watcher",
    "Model": "models",
    "ModelSpec": "models",
    "load": "models",
    "untrained": "models",
    "write_checkpoint": "models",
    "write_random": "models",
    "Step": "decode",
    "Run": "trace",
    "Trace": "trace",
    "create_run": "trace",
    "forecast": "trace",
    "open_run": "trace",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from floatscope.capture.reducer import Reducer
    from floatscope.capture.watcher import Watch
    from floatscope.decoding import Decoding, decode
    from floatscope.errors import UserError
    from floatscope.final_state import final_state
    from floatscope.lens import lens
    from floatscope.likelihood import answer_nll
    from floatscope.models import Model, ModelSpec, load, untrained, write_checkpoint, write_random
    from floatscope.trace import Run, Trace, create_run, forecast, open_run
    from floatscope.tracing import trace_samples
    from floatscope.values import CanvasState, Commits, Edit, Groups, Keys, Reductions, Regions, State
    from floatscope.watching import watch


def __getattr__(name: str) -> Any:
    if name == "analysis":
        return import_module("floatscope.analysis")
    if name not in _HOME:
        raise AttributeError(f"module 'floatscope' has no attribute '{name}'")
    value = getattr(import_module(f"floatscope.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME, "analysis"]


class _Face(ModuleType):
    """`floatscope.decode` is the verb, though a room has the same name: importing the room must not hide it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
