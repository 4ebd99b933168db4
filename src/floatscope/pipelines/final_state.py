"""`final_state`: one more forward, over what a decoding has finished. What a picture of "the attention" often is.

(trace,) = final_state(decode(model, "What floats?"), Watch())          # never mixed with traces of steps
"""

from __future__ import annotations

from dataclasses import replace

import torch

from floatscope.canvas import CanvasState, Commits, Step
from floatscope.capture.watcher import Watch, Watcher
from floatscope.capture.ways import attach
from floatscope.errors import UserError
from floatscope.pipelines.decode import Decoding
from floatscope.pipelines.watch import recorder_for
from floatscope.schema import State
from floatscope.traces import Trace


def final_state(decoding: Decoding, watch: Watch | None = None) -> list[Trace]:
    """One forward over each finished sequence.

    A trace of one step for each prompt, marked `state: final`; its commits are all of the decoding's, with their
    predicting rows.
    """
    if not isinstance(decoding, Decoding):
        raise UserError(f"final_state looks at what fs.decode gave, got {type(decoding).__name__}")
    if watch is not None and not isinstance(watch, Watch):
        raise UserError(f"watch must be a fs.Watch(…) or None, got {watch!r}")
    if watch is not None and watch.influence:
        raise UserError("influence is of a step and what it commits, and final_state is no step; leave influence out")
    if decoding.meta.get("edits"):
        raise UserError("final_state looks with the model as it is, and this decoding was edited; decode without edits")
    steps, model = decoding.steps, decoding.model
    if not steps:
        raise UserError("nothing was decoded: no prompt had a mask to fill")
    canvas = _finished(decoding)
    parts = [step.commits for step in steps]
    commits = Commits(
        *(torch.cat([getattr(c, n) for c in parts]) for n in ("sample", "position", "row", "token", "confidence"))
    )
    watcher = Watcher(watch or Watch(), rows=True)
    first = int(commits.row.min()) if len(commits) else 0
    with torch.no_grad(), attach(model.module, watcher):
        watcher.begin(canvas, first_row=first)
        model.forward(canvas, slice(canvas.tokens.shape[1] - 1, canvas.tokens.shape[1]))
        layers = watcher.finish(commits)
        meta = {**decoding.meta, "rows": "all", "state": "final", "fields": list(watcher.watch.names)}
        recorder = recorder_for(decoding.samples, watcher, meta)
        recorder.add(Step(canvas, canvas, commits), layers, watcher.layer_visibility)
    return recorder.traces()


def _finished(decoding: Decoding) -> CanvasState:
    """The canvas after the last step; whatever stands behind the end of a sample that had ended is padding."""
    after = decoding.steps[-1].after
    states = after.states.clone()
    if decoding.model.spec.paradigm == "arm":
        written = torch.zeros_like(states, dtype=torch.bool)
        for step in decoding.steps:
            written[step.commits.sample, step.commits.position] = True
        states[(states == State.COMMITTED) & ~written] = int(State.PAD)
    elif decoding.how.stop and not decoding._suffix:
        ends = torch.tensor(decoding.model.spec.stop_ids, device=states.device)
        whole = after.masked.cumsum(-1) == 0
        ended = torch.isin(after.tokens, ends) & (after.states == State.COMMITTED) & whole
        states[(ended.cumsum(-1) - ended.long()) > 0] = int(State.PAD)
    return replace(after, states=states, step=0, block=None, active=None)
