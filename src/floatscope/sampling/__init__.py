"""forward + canvas + sampler → an iterator of `Step`. Knows nothing of capture or files."""

from floatscope.sampling.autoregress import autoregress
from floatscope.sampling.denoise import denoise
from floatscope.sampling.samplers import SAMPLERS
from floatscope.sampling.settings import PRESETS, Sampling, resolve_sampling

__all__ = ["PRESETS", "SAMPLERS", "Sampling", "autoregress", "denoise", "resolve_sampling"]
