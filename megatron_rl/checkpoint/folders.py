"""Checkpoint folders: written under a partial name, published when complete, verified before they are read.

All ranks share the folder's file system, and each rank writes and reads some of the files. A step that fails
on one rank raises on all ranks: the other ranks would otherwise wait for it in the next collective.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl import durable
from megatron_rl.checkpoint.tensors import TensorWrite
from megatron_rl.config.checkpoint_meta import (
    named_checkpoints,
    prune_checkpoints,
    read_meta,
    remove_interrupted_saves,
)
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects, run_on_all_ranks_or_raise
from megatron_rl.errors import UserError, first_line
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.progress import count_progress

_FULL_BYTES = 2**20
"""Free bytes below which a disk counts as full, even if the failed writer reports another reason."""
_SHOWN_PROBLEMS = 5
"""Maximum number of damaged files in a one-line summary."""
_SHOWN_LINES = 8
"""Maximum number of damaged files in a multi-line error."""
_TRUNCATED_WRITE = "unexpected pos"
"""Text in the error of PyTorch's tensor writer after a failed write; the error omits the system's reason."""
_PROGRESS_SECONDS = 1.0
"""Seconds between two checks of whether the files of a background write have grown."""


# --- Steps on all ranks


def compute_on_first_rank(compute: Callable[[], Any]) -> Any:
    """Compute a value on the first rank and return it on all ranks. Collective over the world.

    Use it to read a shared file system: shortly after a write, two ranks can read different states.
    """
    value = None
    if device.rank() == 0:
        value = compute()
    return gather_objects(value)[0]


def run_write_step(
    action: Callable[[], None],
    description: str,
    folder: Path,
) -> None:
    """Run ``action``, which writes to ``folder``, on every rank; raise on all ranks if any rank fails.

    ``description`` names the step in the error, such as "prepare the checkpoint's folder". Collective over
    the world.
    """

    def run_action() -> None:
        try:
            action()
        except Exception as error:
            raise convert_write_error(error, folder) from error

    run_on_all_ranks_or_raise(run_action, f"{description}: {folder}")


def convert_write_error(error: Exception, folder: Path) -> Exception:
    """Return a UserError for a failed write of ``folder`` if disk, memory or the system caused it.

    Other errors are returned unchanged.
    """
    if isinstance(error, UserError):
        return error
    memory_error = durable.memory_error(error, f"the checkpoint {folder.name} was written")
    if memory_error is not None:
        return memory_error

    # A failed write may leave no folder: query the file system of the nearest existing parent.
    existing_folder = folder
    while not existing_folder.exists():
        existing_folder = existing_folder.parent
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or shutil.disk_usage(existing_folder).free < _FULL_BYTES:
        return durable.full_disk_error(folder, f"the checkpoint {folder.name}", first_line(error))

    # The error of torch's writer contains a file position and not the system's reason.
    if isinstance(error, RuntimeError) and _TRUNCATED_WRITE in str(error):
        return UserError(
            f"the checkpoint {folder.name} cannot be written",
            where=str(folder),
            expected="a file system that accepts complete files",
            got=first_line(error),
            fix="check the quota, the limit of file sizes (ulimit -f) and the disk, or set another run_dir",
        )
    if isinstance(error, OSError):
        return durable.file_error(error, folder) or error
    return error


# --- Writing


def partial_path(final: Path) -> Path:
    """Return the path of a checkpoint's folder while it is incomplete: ``final`` + ``.partial``."""
    return final.with_name(final.name + ".partial")


def write_tensors(
    folder: Path,
    model: ParallelModel | None,
    state: dict[str, Any],
    content_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write Megatron's sharded ``state`` into an empty folder, and wait until it is written.

    Ranks outside the model's layout pass None as ``model``. ``content_metadata`` is metadata that Megatron
    stores for readers of the checkpoint, or None. Call it inside `checkpoint.tensors.megatron_scope`.
    Collective over the world.
    """
    tensor_write = TensorWrite(folder, model, state, content_metadata, copy_host_tensors=False)
    run_write_step(tensor_write.write_shards, "write a checkpoint", folder)
    tensor_write.write_tensor_index()


class PendingCheckpoint:
    """A checkpoint in progress: a thread on each rank writes this rank's files into a partial folder.

    `finish` waits for all ranks and publishes the folder. `seconds` is the time that this rank's thread took.

    Arguments:
        final: path of the complete checkpoint.
        writes: planned writes of tensors, in the same order on every rank.
        files: the files of this rank in the partial folder, which the thread flushes to the disk.
        keep: number of checkpoints to retain, or None for all.
        best_steps: steps whose checkpoints are retained in addition.
    """

    def __init__(
        self,
        final: Path,
        writes: Sequence[TensorWrite],
        files: Sequence[Path],
        keep: int | None,
        best_steps: Collection[int],
    ) -> None:
        self.final = final
        self.partial = partial_path(final)
        self.seconds = 0.0
        self._writes = writes
        self._files = files
        self._keep = keep
        self._best_steps = best_steps

        # Results of the thread, which `finish` reads after its end.
        self._digests: dict[str, str] = {}
        self._failure: Exception | None = None
        self._is_finished = False
        self._thread = threading.Thread(target=self._write_files, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Return whether this rank's writer thread has ended.

        The thread may have ended with an error, which `finish` raises.
        """
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written; rename the folder to its final name; prune older checkpoints.

        If a rank failed, raises UserError, or RuntimeError with the failed rank, on all ranks. Collective
        over the world.
        """
        # `save_checkpoint` has already finished the checkpoint, unless it is written in the background.
        if self._is_finished:
            return
        run_write_step(self._wait_for_thread, "write the checkpoint", self.final)

        # Megatron writes the index of all tensors (.metadata) from the results of all ranks.
        try:
            with device.megatron_mode():
                for write in self._writes:
                    write.write_tensor_index()
        except Exception as error:
            raise convert_write_error(error, self.final) from error

        digests = gather_digests(self.partial, self._digests)

        def publish() -> None:
            if device.rank() == 0:
                durable.write_digests(self.partial, digests)
                durable.publish_folder(self.partial, self.final)
                if self._keep is not None:
                    prune_checkpoints(self.final, self._keep, self._best_steps)

        run_write_step(publish, "complete the checkpoint", self.final)
        self._is_finished = True

    def _wait_for_thread(self) -> None:
        """Wait for the thread that writes this rank's files; raise its error if it failed."""
        num_bytes = 0
        while self._thread.is_alive():
            self._thread.join(_PROGRESS_SECONDS)
            new_num_bytes = sum(path.stat().st_size for path in self._files if path.exists())
            if new_num_bytes != num_bytes:
                num_bytes = new_num_bytes
                # Writing may take longer than the hang detector's limit: growing files count as progress.
                count_progress("checks of a growing checkpoint")

        if self._failure is not None:
            raise self._failure

    def _write_files(self) -> None:
        """Write this rank's files and compute their digests, on the writer thread.

        Errors are stored, and `finish` raises them.
        """
        start = time.perf_counter()
        try:
            for write in self._writes:
                write.write_shards()
            names = [path.relative_to(self.partial).as_posix() for path in self._files]
            # `durable.compute_digests` flushes each file to the disk before it reads it.
            self._digests = durable.compute_digests(self.partial, names)
        except Exception as error:
            self._failure = error

        self.seconds = time.perf_counter() - start


def gather_digests(folder: Path, rank_digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of all files of a folder, by file name, the same on every rank.

    ``rank_digests`` are the digests that this rank has computed already. Files without a digest are divided
    among the ranks. Raises on all ranks if a file cannot be read or flushed to the disk. Collective over the
    world.
    """
    digests: dict[str, str] = {}
    for gathered_digests in gather_objects(dict(rank_digests)):
        digests |= gathered_digests

    # Files that Megatron writes itself, such as the index of tensors, have no digest yet.
    names = compute_on_first_rank(lambda: durable.files_below(folder))
    pending_names = [name for name in names if name not in digests]
    new_digests: dict[str, str] = {}

    def compute_rank_digests() -> None:
        rank_names = pending_names[device.rank() :: device.world_size()]
        new_digests.update(durable.compute_digests(folder, rank_names))

    run_write_step(compute_rank_digests, "flush the checkpoint to the disk", folder)
    for gathered_digests in gather_objects(new_digests):
        digests |= gathered_digests
    return digests


# --- Verification


def find_newest_intact_checkpoint(folder: Path, log: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint in ``folder`` whose files match their digests, or None if it has none.

    A save that replaces ``step_N`` first renames the old checkpoint to ``step_N.old``. If the save was killed
    at this point, the old checkpoint is renamed back to ``step_N``. Damaged checkpoints are not deleted.
    ``log`` receives a line for each restored and each damaged checkpoint. If an intact checkpoint exists,
    files of interrupted saves are deleted. Raises UserError if all checkpoints are damaged. Collective over
    the world.
    """
    for path in compute_on_first_rank(lambda: durable.recover_replaced(folder)):
        old_name = durable.replaced_path(path).name
        log(f"{path}: restored from {old_name}: the save that replaced it was interrupted")

    newest_damage = ""
    for path in reversed(compute_on_first_rank(lambda: named_checkpoints(folder))):
        problems = find_damaged_files(path)
        if not problems:
            # Delete the files of an interrupted save here: if it was the last save of a run, no later save
            # deletes them.
            compute_on_first_rank(lambda: remove_interrupted_saves(folder))
            return path

        summary = summarize_damages(problems)
        newest_damage = newest_damage or f"{path.name}: {summary}"
        log(f"{path} is damaged and is not used: {summary}")

    if newest_damage:
        raise UserError(
            "every checkpoint to continue from is damaged",
            where=str(folder),
            expected="a checkpoint whose files match their digests",
            got=newest_damage,
            fix="restore one from a copy, or start over with checkpoint.resume=never",
        )
    return None


def require_intact_checkpoint(path: Path) -> None:
    """Raise UserError unless the files of the checkpoint match their digests. Collective over the world."""
    # A folder without a readable meta.json is not a checkpoint: `read_meta` raises UserError.
    read_meta(path)
    problems = find_damaged_files(path)
    if problems:
        raise UserError(
            "the checkpoint is damaged",
            where=str(path),
            expected="files that match their digests",
            got="\n".join(problems[:_SHOWN_LINES]),
            fix="name another checkpoint, or restore this one from a copy",
        )


def require_intact_models(keys_by_folder: Mapping[str, str]) -> None:
    """Raise UserError for the first model folder whose files do not match their digests.

    ``keys_by_folder`` maps each folder to the configuration key that names it. A folder without digests, such
    as a download, is not verified. Collective over the world.
    """
    for path, key in keys_by_folder.items():
        problems = find_damaged_model_files(Path(path))
        if problems:
            raise UserError(
                "the model folder is damaged",
                where=f"{key}: {path}",
                expected="files that match their digests",
                got=summarize_damages(problems),
                fix="restore it from a copy, or create it again; if the change is intended, remove "
                f"{Path(path) / durable.DIGESTS}, which has the digests of the earlier files",
            )


def find_damaged_model_files(folder: Path) -> list[str]:
    """Return a line for each damaged file of a model folder, or [] if the folder has no digests.

    Collective over the world.
    """
    has_digests = compute_on_first_rank(lambda: durable.is_sealed(folder))
    if not has_digests:
        return []
    return find_damaged_files(folder)


def summarize_damages(problems: Sequence[str]) -> str:
    """Return a one-line summary of ``problems``, the damaged files that `find_damaged_files` returned.

    The summary contains the first problems, and the number of omitted ones.
    """
    summary = "; ".join(problems[:_SHOWN_PROBLEMS])
    if len(problems) > _SHOWN_PROBLEMS:
        summary += f" and {len(problems) - _SHOWN_PROBLEMS} more"
    return summary


def find_damaged_files(path: Path) -> list[str]:
    """Return a line of text for each file of a folder that does not match its digest.

    Each rank verifies a part of the files. All ranks return the same list. Collective over the world.
    """
    digests = compute_on_first_rank(lambda: durable.read_digests(path))
    if digests is None:
        return [f"{durable.DIGESTS} is missing or damaged"]

    names = list(digests)[device.rank() :: device.world_size()]
    problems: list[str] = []
    for lines in gather_objects(durable.describe_damaged_files(path, digests, names)):
        problems += lines
    return problems
