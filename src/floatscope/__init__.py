"""floatscope: a microscope for attention in masked diffusion language models.

    import floatscope as fs
    model = fs.load("twin:mdm")
    prompt = "Document 1: Mira Velwick lives in Dramora.\\nQuestion: Where does Mira Velwick live?\\nAnswer:"
    out = fs.decode(model, prompt, new_tokens=8, watch=fs.Watch())
    out.text                                   # " Dramora"
    out.trace.plot(path="map.png")

Importing floatscope is cheap: torch, transformers, pandas and matplotlib load with the first name that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.7.0"

_HOMES = {
    "CanvasState": "canvas",
    "Commits": "canvas",
    "Decoding": "pipelines.decoding",
    "Edit": "interventions.edits",
    "Evaluation": "analysis.evaluations",
    "Groups": "canvas",
    "Model": "models.model",
    "ModelSpec": "models.spec",
    "Paradigm": "schema",
    "Passage": "tasks.sample",
    "Reducer": "capture.reducer",
    "Reductions": "canvas",
    "Regions": "canvas",
    "Run": "traces",
    "Sample": "tasks.sample",
    "Sampling": "sampling.settings",
    "State": "schema",
    "Step": "canvas",
    "Trace": "traces",
    "UserError": "errors",
    "Watch": "capture.watcher",
    "analyse": "analysis",
    "answer_nll": "pipelines.likelihood",
    "compare": "reports.score_table",
    "create_run": "traces",
    "decode": "pipelines.decode",
    "evaluate": "pipelines.evaluate",
    "final_state": "pipelines.final_state",
    "forecast": "traces",
    "intervene": "pipelines.intervene",
    "lens": "pipelines.lens",
    "load": "models.loader",
    "open_evaluation": "analysis.evaluations",
    "open_run": "traces",
    "read_samples": "tasks.sample_files",
    "report": "reports.build",
    "stress": "pipelines.stress",
    "study": "pipelines.studies",
    "trace": "pipelines.trace",
    "untrained": "models.untrained",
    "watch": "pipelines.watch",
    "write_checkpoint": "models.checkpoint_writer",
    "write_random": "models.random_checkpoints",
}
"""Public name → the module that defines it."""

_MODULES = {"analysis": "floatscope.analysis", "edits": "floatscope.interventions.edits"}
"""Public module → its full name."""

__all__ = [*_HOMES, *_MODULES]

if TYPE_CHECKING:
    from floatscope import analysis
    from floatscope.analysis import analyse
    from floatscope.analysis.evaluations import Evaluation, open_evaluation
    from floatscope.canvas import CanvasState, Commits, Groups, Reductions, Regions, Step
    from floatscope.capture.reducer import Reducer
    from floatscope.capture.watcher import Watch
    from floatscope.errors import UserError
    from floatscope.interventions import edits
    from floatscope.interventions.edits import Edit
    from floatscope.models.checkpoint_writer import write_checkpoint
    from floatscope.models.loader import load
    from floatscope.models.model import Model
    from floatscope.models.random_checkpoints import write_random
    from floatscope.models.spec import ModelSpec
    from floatscope.models.untrained import untrained
    from floatscope.pipelines.decode import decode
    from floatscope.pipelines.decoding import Decoding
    from floatscope.pipelines.evaluate import evaluate
    from floatscope.pipelines.final_state import final_state
    from floatscope.pipelines.intervene import intervene
    from floatscope.pipelines.lens import lens
    from floatscope.pipelines.likelihood import answer_nll
    from floatscope.pipelines.stress import stress
    from floatscope.pipelines.studies import study
    from floatscope.pipelines.trace import trace
    from floatscope.pipelines.watch import watch
    from floatscope.reports.build import report
    from floatscope.reports.score_table import compare
    from floatscope.sampling.settings import Sampling
    from floatscope.schema import Paradigm, State
    from floatscope.tasks.sample import Passage, Sample
    from floatscope.tasks.sample_files import read_samples
    from floatscope.traces import Run, Trace, create_run, forecast, open_run


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'floatscope' has no attribute '{name}'")
    value = getattr(import_module(f"floatscope.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
