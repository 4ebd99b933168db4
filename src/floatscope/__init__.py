"""floatscope: a microscope for attention in masked diffusion language models.

    import floatscope as fs
    model = fs.load("twin:mdm")
    out = fs.decode(model, "What floats?", new_tokens=32, watch=fs.Watch())
    out.trace.plot(path="map.png")

Importing it is light: torch, transformers and matplotlib are loaded by the first name that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.6.0"

_HOME = {
    "Decoding": "pipelines.decode",
    "decode": "pipelines.decode",
    "final_state": "pipelines.final_state",
    "lens": "pipelines.lens",
    "answer_nll": "pipelines.likelihood",
    "trace_samples": "pipelines.trace",
    "watch": "pipelines.watch",
    "UserError": "errors",
    "CanvasState": "canvas",
    "Commits": "canvas",
    "Edit": "interventions.edits",
    "Keys": "interventions.edits",
    "Groups": "canvas",
    "Reductions": "canvas",
    "Regions": "canvas",
    "State": "schema",
    "Reducer": "capture.reducer",
    "Watch": "capture.watcher",
    "Model": "models.model",
    "ModelSpec": "models.model",
    "load": "models.load",
    "untrained": "models.untrained",
    "write_checkpoint": "models.write",
    "write_random": "models.random",
    "Step": "canvas",
    "Run": "traces",
    "Trace": "traces",
    "create_run": "traces",
    "forecast": "traces",
    "open_run": "traces",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from floatscope.canvas import CanvasState, Commits, Groups, Reductions, Regions
    from floatscope.capture.reducer import Reducer
    from floatscope.capture.watcher import Watch
    from floatscope.errors import UserError
    from floatscope.interventions.edits import Edit, Keys
    from floatscope.models.load import load
    from floatscope.models.model import Model, ModelSpec
    from floatscope.models.random import write_random
    from floatscope.models.untrained import untrained
    from floatscope.models.write import write_checkpoint
    from floatscope.pipelines.decode import Decoding, decode
    from floatscope.pipelines.final_state import final_state
    from floatscope.pipelines.lens import lens
    from floatscope.pipelines.likelihood import answer_nll
    from floatscope.pipelines.trace import plan_trace
    from floatscope.pipelines.watch import watch
    from floatscope.schema import State
    from floatscope.traces import Run, Trace, create_run, forecast, open_run


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
