"""Colours are distinct, and text on them is readable."""

from __future__ import annotations

import numpy as np
import pytest

from floatscope.reports.palette import LEVELS, MODELS, build_ramp, choose_text_colour


def luminance(colour: str) -> float:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return float(np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("background", ["light", "dark"])
def test_ramp_grows_steadily_away_from_the_page(background):
    levels = build_ramp(background)
    assert len(levels) == len(set(levels)) == LEVELS
    steps = np.diff([luminance(level) for level in levels])
    assert (steps < 0).all() if background == "light" else (steps > 0).all()
    assert contrast(levels[0], levels[-1]) > 12


@pytest.mark.parametrize("background", ["light", "dark"])
def test_text_is_readable_on_every_level(background):
    assert min(contrast(level, choose_text_colour(level)) for level in build_ramp(background)) > 4.2


@pytest.mark.parametrize("background", ["light", "dark"])
def test_models_stand_out_from_the_page(background):
    assert all(contrast(getattr(model, background), build_ramp(background)[0]) > 4.5 for model in MODELS)
