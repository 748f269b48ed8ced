"""Counter of the bytes of tensors that are alive at once, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live tensors created in its block; ``peak`` is the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view, or an in-place result, has the storage of an input.
        inputs = {value.untyped_storage()._cdata for value in args if isinstance(value, torch.Tensor)}
        results = result if isinstance(result, list | tuple) else [result]
        for value in results:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in inputs:
                storage = value.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

        # Weak references: the counter must not keep a tensor alive.
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
