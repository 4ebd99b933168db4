"""One thread for tiny models.

    with one_thread(): ...

A call that takes microseconds gains nothing from a second thread, and on a busy machine threads that wait for each
other make it twenty times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread inside the block, and on as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
