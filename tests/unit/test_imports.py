"""Import of large libraries without garbage collections."""

from __future__ import annotations

import gc
import weakref

import pytest

from megatron_rl.imports import import_libraries


def test_nothing_is_collected_inside_and_what_exists_is_not_visited_after() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError), import_libraries():
        assert not gc.isenabled()
        kept = [[] for _ in range(100)]
        raise ModuleNotFoundError
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_a_process_that_does_not_collect_stays_so() -> None:
    gc.disable()
    try:
        with import_libraries():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_from_before_keeps_no_memory() -> None:
    class Cycle:
        """An object that refers to itself, which only a collection frees."""

        def __init__(self) -> None:
            self.itself = self

    freed = weakref.ref(Cycle())
    with import_libraries():
        pass
    assert freed() is None
