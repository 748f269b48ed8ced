"""Import of large libraries without the garbage collections that would slow it down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_libraries() -> Iterator[None]:
    """Import torch, Megatron-Core or vLLM inside the block without garbage collection.

    Their imports make a million objects that remain. Collections would visit them again and again, a third of
    the time of the imports. After the block no collection visits them, nor anything else that exists by then.
    """
    # Inside another block, or in a process that never collects.
    if not gc.isenabled():
        yield
        return

    # What is garbage by now would otherwise keep its memory, also that of a device.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
