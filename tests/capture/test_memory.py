"""No allocation of a watched forward grows with T²: the tests measure the largest tensor any operation returns."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from floatscope.canvas import CanvasState, Commits, Regions
from floatscope.capture import attention, blocked, visibility
from floatscope.capture.hooks import attach
from floatscope.capture.watcher import Watch, Watcher
from floatscope.schema import State
from pairs import slow_except

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2**14,
}
BUDGET = 4 * blocked.CPU_BLOCK  # bytes of one block of fp32 probabilities
LENGTHS = (512, 1024, 2048, 4096)


class LargestStorage(TorchDispatchMode):
    """The largest storage any operation has returned, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


def make_canvas(T: int, padded: bool) -> CanvasState:
    states = torch.full((2, T), int(State.PROMPT))
    states[:, -8:] = int(State.MASKED)
    if padded:
        states[1, : T // 3] = int(State.PAD)
    regions = Regions.from_spans([{"question": [(T // 2, T - 8)], "answer": [(T - 8, T)]}] * 2, T)
    return CanvasState(torch.randint(0, 16, (2, T)), states, regions=regions)


def peak_bytes(model: torch.nn.Module, T: int, causal: bool, padded: bool, level: str = "summary") -> int:
    state, watcher = make_canvas(T, padded), Watcher(Watch(level=level), predicting_rows=True)
    last = torch.tensor([T - 1])
    with torch.no_grad(), attach(model, watcher), LargestStorage() as largest:
        watcher.begin(state)
        model(input_ids=state.tokens, attention_mask=state.valid.long(), is_causal=causal, use_cache=False)
        watcher.finish(Commits(last * 0, last, last, last, torch.ones(1)))
    return largest.bytes


def is_linear(peaks: dict[int, int], budget: int) -> bool:
    """Whether the peak at most doubles from one length to the next, or stays below `budget`."""
    return all(b <= max(2.1 * a, budget) for a, b in zip(peaks.values(), list(peaks.values())[1:], strict=False))


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_watched_forward_grows_with_the_length_not_its_square(causal, padded):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    peaks = {T: peak_bytes(model, T, causal, padded) for T in LENGTHS}
    assert is_linear(peaks, BUDGET), peaks
    assert peaks[4096] < 4096**2, peaks  # not even one byte for each pair


def test_level_rows_grows_with_the_length_too():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    peaks = {T: peak_bytes(model, T, causal=False, padded=True, level="rows") for T in LENGTHS}
    assert is_linear(peaks, BUDGET), peaks


@pytest.mark.parametrize("padded", slow_except([False, True], True))
def test_the_mask_of_a_window_is_expanded_by_blocks(padded, monkeypatch):
    """Windows have no kernel of their own: their mask is expanded a few rows at a time."""
    monkeypatch.setattr(attention, "MASK_BLOCK", 2**16)
    monkeypatch.setattr(visibility, "PAIR_BLOCK", 2**16)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=100)).eval()
    peaks = {T: peak_bytes(model, T, True, padded) for T in LENGTHS[:3]}
    assert is_linear(peaks, BUDGET), peaks
    assert peaks[2048] < 2048**2, peaks


def test_level_full_grows_with_the_square():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    peaks = {T: peak_bytes(model, T, causal=False, padded=False, level="full") for T in (1024, 2048)}
    assert not is_linear(peaks, BUDGET)
    assert peaks[2048] >= 4 * 2048**2
