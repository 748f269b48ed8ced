"""Write tensors in Megatron's distributed format, also while the job goes on.

Megatron's asynchronous save plans a write, copies tensors to the host and hands over the writing. It would
have a process do that: a fork loses the threads of vLLM and gloo, and a spawned one opens a context of its
own on each accelerator, fails without one, and is waited for without end where it dies. Here a thread of this
process writes what was copied: writing files and digests leaves the interpreter to others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import determine_global_metadata

from megatron_rl import durable
from megatron_rl.checkpoint.folders import digests_of_all, disk_or, everywhere
from megatron_rl.config.checkpoint_meta import prune
from megatron_rl.distributed import device
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.progress import advance

WRITERS = 2
"""Files of about one size that a rank's share goes into, written at once: as many as Megatron's own."""

_LOOKS_SECONDS = 1.0
"""Time between two looks at the files that a thread writes."""


class TensorWrite:
    """Plan the write of a state, sharded values and common ones, into an empty folder.

    This rank's share is copied to the host, pinned from an accelerator; with ``keep`` also what lies on the
    host already, which the job may change before it is written. Common values are those of the world's first
    rank, written here; ``content`` is what readers are told of the state. ``model`` is None outside its
    layout. ``files`` are what this rank will write. Call in Megatron's mode. Collective over the world.
    """

    def __init__(
        self,
        folder: Path,
        model: ParallelModel | None,
        state: dict[str, Any],
        content: Mapping[str, Any] | None = None,
        *,
        keep: bool,
    ) -> None:
        strategy: Any = (_Save if model is not None else _OutsideSave)("torch_dist", 1, thread_count=WRITERS)
        if model is not None:
            strategy = FullyParallelSaveStrategyWrapper(strategy, model.groups.data_context)
        self._request: Any = dist_checkpointing.save(
            state,
            str(folder),
            strategy,
            async_sharded_save=True,
            content_metadata=dict(content) if content else None,
        )
        self.files: list[Path] = []
        if self._request.async_fn is None:
            return
        buckets = self._request.async_fn_args[1]
        for _, _, (_, tensors) in buckets if keep else ():
            for place, (item, tensor) in enumerate(tensors):
                if tensor.is_cpu:
                    tensors[place] = (item, tensor.clone())
        buckets[:] = self._request.preload_fn()
        self.files += [Path(path) for path, _, _ in buckets]

    def run(self) -> None:
        """Write what was copied, on any thread, and let go of it; raises what the writing raised."""
        if self._request.async_fn is None:
            return
        transforms = self._request.async_fn.args[0]
        _, buckets, results = self._request.async_fn_args
        # Without Megatron's decorator, which stops the collection of garbage in the whole process.
        writer: Any = filesystem_async.FileSystemWriterAsync
        write_file = writer.write_preloaded_data.__wrapped__

        def written(index: int) -> Any:
            answers: Any = queue.Queue()
            pending: Any = queue.Queue()
            pending.put(index)
            write_file(transforms, index, buckets[index], answers, pending, True)
            buckets[index] = None
            _, outcome = answers.get()
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        with ThreadPoolExecutor(WRITERS) as writers:
            results.put(dict(enumerate(writers.map(written, range(len(buckets))))))

    def finish(self) -> None:
        """Write the directory of what all ranks wrote. Call in Megatron's mode. Collective over the world."""
        for finish in self._request.finalize_fns:
            finish()


def write(
    folder: Path, model: ParallelModel | None, state: dict[str, Any], content: Mapping[str, Any] | None = None
) -> None:
    """Write a state as `TensorWrite` does, at once. Call in Megatron's mode. Collective over the world."""
    written = TensorWrite(folder, model, state, content, keep=False)
    everywhere(written.run, "write a checkpoint", folder)
    written.finish()


def partial_of(final: Path) -> Path:
    """Return where a checkpoint's files lie until it is complete."""
    return final.with_name(final.name + ".partial")


class Saving:
    """Hold a checkpoint that a thread of each rank writes, under another name until `finish`.

    ``files`` are those of this rank, which the thread brings to the disk.
    """

    def __init__(
        self,
        final: Path,
        writes: Sequence[TensorWrite],
        files: Sequence[Path],
        keep: int | None,
        best: Collection[int],
    ) -> None:
        self.final, self.partial = final, partial_of(final)
        self.seconds = 0.0
        """Time that this rank's writing has taken."""
        self._writes, self._files, self._keep, self._best = writes, files, keep, best
        self._digests: dict[str, str] = {}
        self._failure: Exception | None = None
        self._finished = False
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def written(self) -> bool:
        """Say whether this rank has written its share, or failed to."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the ranks' writing, and give the checkpoint its name; prune older ones.

        Raises on all ranks what failed on one: UserError, or RuntimeError with the rank. Collective over the
        world.
        """

        def end() -> None:
            written = 0
            while self._thread.is_alive():
                self._thread.join(_LOOKS_SECONDS)
                size = sum(path.stat().st_size for path in self._files if path.exists())
                if size != written:
                    written = size
                    advance("looks at a growing checkpoint")  # this thread stands still as long as it takes
            if self._failure is not None:
                raise self._failure

        def publish() -> None:
            if device.rank() == 0:
                durable.write_digests(self.partial, known)
                durable.publish(self.partial, self.final)
                if self._keep is not None:
                    prune(self.final, self._keep, self._best)

        if self._finished:
            return
        everywhere(end, "write the checkpoint", self.final)
        try:
            with device.megatron_mode():
                for write in self._writes:
                    write.finish()
        except Exception as error:
            raise disk_or(error, self.final) from error
        known = digests_of_all(self.partial, self._digests)
        everywhere(publish, "complete the checkpoint", self.final)
        self._finished = True

    def _write(self) -> None:
        begun = time.perf_counter()
        try:
            for write in self._writes:
                write.run()
            names = [path.relative_to(self.partial).as_posix() for path in self._files]
            self._digests = durable.digests(self.partial, names)
        except Exception as error:
            self._failure = error
        self.seconds = time.perf_counter() - begun


class _Save(TorchDistSaveShardedStrategy):
    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *asked: Any) -> Any:
        """Return the plan of a write whose results stay in this process, where Megatron starts another.

        Common values go into a file of their own, as all versions of Megatron-Core read them: since 0.19
        they come here as one more value beside the tensors. It then also asks for another package's writer.
        """
        common = sharded_state_dict.pop("common_state", None)
        if common is not None and device.rank() == 0:
            torch.save(common.data, Path(checkpoint_dir) / "common.pt")
        filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().async_save(sharded_state_dict, checkpoint_dir, *("mcore" for _ in asked))
        finally:
            filesystem_async._results_queue = None


class _OutsideSave(_Save):
    """Save nothing, on a rank outside the model's layout."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *asked: Any) -> Any:
        """Join what the members' wrapper gathers over the world, then the save. Collective over the world."""
        determine_global_metadata(sharded_state_dict)
        return super().async_save(sharded_state_dict, checkpoint_dir, *asked)
