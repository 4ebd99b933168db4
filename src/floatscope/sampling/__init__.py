"""Sampling: forward + canvas + sampler → an iterator of `Step`. It knows nothing of capture or files."""

from floatscope.sampling.autoregression import autoregress
from floatscope.sampling.denoising import denoise
from floatscope.sampling.renoising import renoise
from floatscope.sampling.samplers import SAMPLERS
from floatscope.sampling.settings import BLOCK_PRESETS, CANVAS_PRESETS, PRESETS, Sampling, resolve_sampling

__all__ = [
    "BLOCK_PRESETS",
    "CANVAS_PRESETS",
    "PRESETS",
    "SAMPLERS",
    "Sampling",
    "autoregress",
    "denoise",
    "renoise",
    "resolve_sampling",
]
