"""forward + canvas + sampler → an iterator of `Step`. Knows nothing of capture or files."""

from floatscope.decode.denoise import canvas_of, denoise
from floatscope.decode.step import Step

__all__ = ["Step", "canvas_of", "denoise"]
