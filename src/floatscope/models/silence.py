"""transformers and huggingface_hub without their progress bars and warnings.

with silence_libraries(): ...
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Suppress all output of transformers and the hub inside the block; restore their settings after it."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as hf_logging

    level, has_bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub_has_bars = not are_progress_bars_disabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if has_bars:
            hf_logging.enable_progress_bar()
        if hub_has_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()
