"""A user's own reduction, in about ten lines, on every mask."""

from __future__ import annotations

import pytest
import torch
from calls import call_of, mask, masks, probabilities, small_blocks
from hypothesis import given, settings

import floatscope as fs
from floatscope.capture.attention import attend


class Local(fs.Reducer):  # the docstring's example
    name, axes = "local", ("head",)

    def start(self, call):
        return torch.zeros(call.query.shape[:2])

    def block(self, total, at):
        rows, keys = torch.arange(at.rows.start, at.rows.stop), torch.arange(at.keys.start, at.keys.stop)
        near = (rows[:, None] - keys).abs() <= 8
        total[at.batch, at.heads] += (at.p * near).sum((-1, -2))

    def finish(self, total, call):
        return total / call.query.shape[2]


class Diagonal(fs.Reducer):
    """What each query gives to its own key: a result along the queries."""

    name, axes = "own", ("head", "query")

    def start(self, call):
        return torch.zeros(call.query.shape[:3])

    def block(self, own, at):
        for i in range(at.rows.start, at.rows.stop):
            if at.keys.start <= i < at.keys.stop:
                own[at.batch, at.heads, i] = at.p[:, :, i - at.rows.start, i - at.keys.start]

    def finish(self, own, call):
        return own


@settings(max_examples=40)
@given(masks(largest=24))
def test_the_example_equals_a_dense_restatement(m):
    call = call_of(m)
    near = (torch.arange(m.queries)[:, None] - torch.arange(m.keys)).abs() <= 8
    A = probabilities(call, m)
    if m.valid is not None:  # padding is cut away where it stands on one side
        for b in range(m.batch):
            _, rows, _ = m.visibility.sample(b)
            outside = torch.ones(m.queries, dtype=torch.bool)
            outside[rows] = False
            A[b, :, outside] = 0
    want = (A * near).sum((-1, -2)) / m.queries
    for lse in (attend(call).lse, None):
        with small_blocks():
            torch.testing.assert_close(Local().run(call, lse).double(), want, rtol=1e-4, atol=1e-5)


def test_blocks_pass_every_pair_once():
    m = mask("full", 2, 70, 70)
    call = call_of(m, heads=4, repeats=2)
    want = probabilities(call, m).diagonal(dim1=-2, dim2=-1)
    with small_blocks():
        torch.testing.assert_close(Diagonal().run(call, attend(call).lse).double(), want, rtol=1e-4, atol=1e-6)


def test_a_result_of_the_wrong_shape_is_refused():
    class Forgetful(Local):
        def finish(self, total, call):
            return total.sum(0)

    with pytest.raises(fs.UserError, match=r"reducer 'local' returned shape \(3,\); expected \[batch=2, head\]"):
        Forgetful().run(call_of(mask("full")), None)


def test_names_must_be_free():
    class Taken(Local):
        name = "received"

    with pytest.raises(fs.UserError, match="a reducer is named 'received', which is taken; give it another name"):
        fs.Watch(reducers=(Taken(),))
    with pytest.raises(fs.UserError, match="a reducer is named 'local', which is taken"):
        fs.Watch(reducers=(Local(), Local()))


def test_a_reducer_is_stored_in_the_trace_beside_the_fields(llada):
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    watch = fs.Watch(level="full", reducers=(Local(), Diagonal()))
    traces = fs.decode(llada, prompts, new_tokens=12, steps=4, watch=watch).traces
    for prompt, trace in zip(prompts, traces, strict=True):
        n = len(prompt) + 12
        matrix = torch.tensor(trace.arrays["matrix"])  # [step, layer, head, query, key]
        assert trace.axes["local"] == ("step", "layer", "head")
        assert trace.axes["own"] == ("step", "layer", "head", "query")
        assert trace.arrays["own"].shape == (4, 3, 4, n)
        near = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= 8
        want = (matrix * near).sum((-1, -2)) / 17  # the example divides by the length of the batch
        torch.testing.assert_close(torch.tensor(trace.arrays["local"]), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(trace.arrays["own"]), matrix.diagonal(dim1=-2, dim2=-1))
