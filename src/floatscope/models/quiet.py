"""transformers, without its progress bars and warnings.

with quiet(): ...
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of transformers or the hub reaches the terminal inside the block; afterwards all is as it was."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as theirs

    level, bars, hub_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled(), not are_progress_bars_disabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            theirs.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()
