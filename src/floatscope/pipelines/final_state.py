"""`final_state`: one more forward over the finished sequences of a decoding, as in most pictures of "the attention".

(trace,) = final_state(decode(model, "What floats?"), Watch())      # never mixed with traces of steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from floatscope.canvas import CanvasState, Commits, Step
from floatscope.capture.hooks import attach
from floatscope.capture.watcher import Watch, Watcher
from floatscope.errors import UserError
from floatscope.pipelines.decoding import Decoding
from floatscope.pipelines.watched_forwards import build_recorder
from floatscope.schema import Paradigm, RowSource, State
from floatscope.traces import Trace


def final_state(decoding: Decoding, watch: Watch | None = None) -> list[Trace]:
    """Capture one forward over the finished sequences of a decoding.

    Args:
        decoding: from `fs.decode`, without edits; remaining steps run first.
        watch: what to capture; the default is `fs.Watch()`.

    Returns:
        One trace per prompt, each with a single step and the meta entry `state: final`. Its commits are all commits of
        the decoding, with their predicting rows; of a position that was edited, the last one.

    Example:
        out = fs.decode(fs.load("twin:mdm"), "Where does Mira live?", new_tokens=4)
        (trace,) = fs.final_state(out)
        trace.received().shape  # (1, layer, key)
    """
    if not isinstance(decoding, Decoding):
        raise UserError(f"final_state needs the result of fs.decode, got {type(decoding).__name__}")
    if watch is not None and not isinstance(watch, Watch):
        raise UserError(f"watch must be a fs.Watch(…) or None, got {watch!r}")
    if watch is not None and watch.influence:
        raise UserError("influence needs the commits of a step, and final_state has no steps; leave influence out")
    if decoding.meta.get("edits"):
        raise UserError("final_state runs the unedited model, but this decoding was edited; decode without edits")
    steps, model = decoding.steps, decoding.model
    if not steps:
        raise UserError("nothing was decoded: no prompt has a mask to fill")
    canvas = _build_final_canvas(decoding)
    commits = _last_commits(steps)
    watcher = Watcher(watch or Watch(), predicting_rows=True)
    first_row = int(commits.row.min()) if len(commits) else 0
    with torch.no_grad(), attach(model.module, watcher):
        watcher.begin(canvas, first_row=first_row)
        model.forward(canvas, slice(canvas.tokens.shape[1] - 1, canvas.tokens.shape[1]))
        capture = watcher.finish(commits)
        meta = {**decoding.meta, "rows": RowSource.ALL, "state": "final", "fields": list(watcher.watch.selected_fields)}
        recorder = build_recorder(decoding.samples, watcher, meta)
        recorder.add(Step(canvas, canvas, commits), capture)
    return recorder.build_traces()


def _last_commits(steps: Sequence[Step]) -> Commits:
    """The last commit of each position, in the order of the steps."""
    columns = [torch.cat([getattr(step.commits, f.name) for step in steps]) for f in fields(Commits)]
    places = torch.stack(columns[:2], 1).tolist()
    last = {(sample, position): i for i, (sample, position) in enumerate(places)}
    chosen = torch.tensor(sorted(last.values()), dtype=torch.long, device=columns[0].device)
    return Commits(*(column[chosen] for column in columns))


def _build_final_canvas(decoding: Decoding) -> CanvasState:
    """The canvas after the last step; positions after the end of a sample become padding."""
    after = decoding.steps[-1].after
    states = after.states.clone()
    if decoding.model.spec.paradigm is Paradigm.ARM:
        is_committed = torch.zeros_like(states, dtype=torch.bool)
        for step in decoding.steps:
            is_committed[step.commits.sample, step.commits.position] = True
        states[(states == State.COMMITTED) & ~is_committed] = int(State.PAD)
    elif decoding.sampling.stop and not decoding.layout.suffix:
        ends = torch.tensor(decoding.model.spec.stop_ids, device=states.device)
        no_mask_before = after.masked.cumsum(-1) == 0
        is_end = torch.isin(after.tokens, ends) & (after.states == State.COMMITTED) & no_mask_before
        states[(is_end.cumsum(-1) - is_end.long()) > 0] = int(State.PAD)
    return replace(after, states=states, step=0, block=None, active=None)
