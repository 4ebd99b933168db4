"""The position profile: against a loop, and on prompts with known profiles."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import ALL_KINDS, END, WITH_END, Decoding, build_trace, canvas, end_answer, random_answer

from floatscope.analysis.position_profile import BINS, position_profile
from pairs import every_pair

pytestmark = pytest.mark.filterwarnings("error")


@every_pair(commits=["answer", "all"], seed=range(3), kind=ALL_KINDS)
def test_the_profile_equals_a_loop(seed, kind, commits):
    decoding = random_answer(seed, kind)
    table = position_profile(build_trace(decoding, "a", special=WITH_END), commits=commits)
    steps = slow.count_steps(decoding, commits, [END])
    expected = [
        {"sample": "a", "layer": layer, "depth": layer / max(1, decoding.layers - 1), "bin": b, "share": share}
        for layer in range(decoding.layers)
        for b, share in enumerate(slow.position_profile(decoding, layer, steps))
    ]
    pd.testing.assert_frame_equal(table, pd.DataFrame(expected), check_dtype=False, rtol=1e-5, atol=1e-7)


def decode(keys: list[int], prompt: int, new: int = 4) -> Decoding:
    """At each step all rows attend to one key, with 1/2, and evenly to all keys."""
    n = prompt + new
    A = np.full((len(keys), 1, 2, n, n), 0.5 / n)
    for t, key in enumerate(keys):
        A[t, :, :, :, key] += 0.5
    return canvas(A, prompt, when=[min(i, len(keys) - 1) for i in range(new)])


def shares(decoding: Decoding, **options: str) -> np.ndarray:
    table = position_profile(build_trace(decoding, special=WITH_END), **options)
    assert table["bin"].tolist() == list(range(BINS))
    return table["share"].to_numpy()


def test_uniform_attention_has_a_flat_profile():
    n = 44
    share = shares(canvas(np.full((4, 1, 1, n, n), 1 / n), 40))
    assert share == pytest.approx(1 / BINS, rel=1e-6)


@pytest.mark.parametrize(("key", "place"), [(0, 0), (1, 0), (2, 1), (19, 9), (39, 19)])
def test_a_sink_is_in_the_bin_of_its_key(key, place):
    """Of 40 prompt tokens each bin has two. The masks receive 4/44 of the even half."""
    share = shares(decode([key] * 4, 40))
    total = 0.5 + 0.5 * 40 / 44
    expected = np.full(BINS, 0.5 * 2 / 44 / total)
    expected[place] += 0.5 / total
    assert share == pytest.approx(expected, rel=1e-5)


def test_attention_outside_the_prompt_does_not_count():
    """All rows attend to a mask; what they give the prompt is even."""
    assert shares(decode([41] * 4, 40)) == pytest.approx(1 / BINS, rel=1e-5)


def test_a_short_prompt_leaves_bins_empty():
    """Ten tokens are in every other bin."""
    share = shares(decode([3] * 4, 10))
    assert (share[1::2] == 0).all()
    assert share.argmax() == 6
    assert share.sum() == pytest.approx(1)


def test_the_profile_is_that_of_the_steps_of_the_answer():
    """Two steps of the answer attend to the first key, two end-of-text steps to the last."""
    decoding = end_answer(decode([0, 0, 39, 39], 40), 2)
    answer, every = (shares(decoding, commits=commits) for commits in ("answer", "all"))
    assert answer[0] > 0.5
    assert answer[-1] == pytest.approx(answer[1], rel=1e-5)
    assert every[0] == pytest.approx(every[-1], rel=1e-5)


def test_without_a_prompt_there_is_no_profile():
    share = shares(canvas(np.full((2, 1, 1, 6, 6), 1 / 6), 0, when=[0, 0, 0, 1, 1, 1]))
    assert np.isnan(share).all()
