"""forward + canvas + sampler → an iterator of `Step`. Knows nothing of capture or files."""

from floatscope.decode.autoregress import autoregress
from floatscope.decode.canvas import canvas_of
from floatscope.decode.denoise import denoise
from floatscope.decode.samplers import SAMPLERS
from floatscope.decode.sampling import PRESETS, Sampling, sampling
from floatscope.decode.step import Forward, Step

__all__ = [
    "PRESETS",
    "SAMPLERS",
    "Forward",
    "Sampling",
    "Step",
    "autoregress",
    "canvas_of",
    "denoise",
    "sampling",
]
