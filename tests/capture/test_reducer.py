"""A reducer of the user works on every mask and is stored in the trace."""

from __future__ import annotations

import pytest
import torch
from calls import make_call, make_mask, masks, probabilities, small_blocks
from hypothesis import given

import floatscope as fs
from example_counts import examples
from floatscope.capture.attention import attend


class Local(fs.Reducer):
    name, axes = "local", ("head",)

    def start(self, call):
        return torch.zeros(call.query.shape[:2])

    def update(self, total, block):
        rows, keys = torch.arange(block.rows.start, block.rows.stop), torch.arange(block.keys.start, block.keys.stop)
        is_near = (rows[:, None] - keys).abs() <= 8
        total[block.batch, block.heads] += (block.p * is_near).sum((-1, -2))

    def finish(self, total, call):
        return total / call.query.shape[2]


class Diagonal(fs.Reducer):
    """The attention of each query to its own key: a result with a query axis."""

    name, axes = "own", ("head", "query")

    def start(self, call):
        return torch.zeros(call.query.shape[:3])

    def update(self, own, block):
        for i in range(block.rows.start, block.rows.stop):
            if block.keys.start <= i < block.keys.stop:
                own[block.batch, block.heads, i] = block.p[:, :, i - block.rows.start, i - block.keys.start]

    def finish(self, own, call):
        return own


@examples(40)
@given(masks(largest=24))
def test_a_local_share_equals_the_dense_one(m):
    call = make_call(m)
    is_near = (torch.arange(m.queries)[:, None] - torch.arange(m.keys)).abs() <= 8
    A = probabilities(call, m)
    if m.valid is not None:  # padding on one side is cut away
        for b in range(m.batch):
            _, rows, _ = m.visibility.unpadded_sample(b)
            outside = torch.ones(m.queries, dtype=torch.bool)
            outside[rows] = False
            A[b, :, outside] = 0
    expected = (A * is_near).sum((-1, -2)) / m.queries
    for lse in (attend(call).lse, None):
        with small_blocks():
            torch.testing.assert_close(Local().run(call, lse).double(), expected, rtol=1e-4, atol=1e-5)


def test_blocks_cover_every_pair_once():
    m = make_mask("full", 2, 70, 70)
    call = make_call(m, heads=4, repeats=2)
    expected = probabilities(call, m).diagonal(dim1=-2, dim2=-1)
    with small_blocks():
        torch.testing.assert_close(Diagonal().run(call, attend(call).lse).double(), expected, rtol=1e-4, atol=1e-6)


def test_a_result_of_the_wrong_shape_is_refused():
    class WrongShape(Local):
        def finish(self, total, call):
            return total.sum(0)

    with pytest.raises(fs.UserError, match=r"reducer 'local' returned shape \(3,\); expected \[batch=2, head\]"):
        WrongShape().run(make_call(make_mask("full")), None)


def test_reducer_names_must_be_unique():
    class Conflicting(Local):
        name = "received"

    with pytest.raises(
        fs.UserError, match="a reducer is named 'received', which is already in use; give it another name"
    ):
        fs.Watch(reducers=(Conflicting(),))
    with pytest.raises(fs.UserError, match="a reducer is named 'local', which is already in use"):
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
        is_near = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= 8
        expected = (matrix * is_near).sum((-1, -2)) / 17  # `Local` divides by the length of the padded batch
        torch.testing.assert_close(torch.tensor(trace.arrays["local"]), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(trace.arrays["own"]), matrix.diagonal(dim1=-2, dim2=-1))
