"""Checkpoint folders as all ranks see them: agreement on what is written, and on what is whole."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl import durable
from megatron_rl.config.checkpoint_meta import named_checkpoints, read_meta, remove_broken_saves
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects, run_on_all_ranks_or_raise
from megatron_rl.errors import UserError

_FULL_BYTES = 2**20
"""A disk with less room than this is full, whatever a writer that failed on it says."""

_SHOWN_PROBLEMS = 5
"""Damaged files that a message names."""

_CUT_OFF = "unexpected pos"
"""What PyTorch's writer of tensors says of a write that the system refused; why is lost there."""


def first(value: Callable[[], Any]) -> Any:
    """Return what the first rank finds: a shared file system may tell others something else for a while.

    Collective over the world.
    """
    return gather_objects(value() if device.rank() == 0 else None)[0]


def everywhere(action: Callable[[], None], words: str, folder: Path) -> None:
    """Run ``action``; if it fails on one rank, fail on all. Collective over the world."""

    def told() -> None:
        try:
            action()
        except Exception as error:
            raise disk_or(error, folder) from error

    run_on_all_ranks_or_raise(told, f"{words}: {folder}")


def disk_or(error: Exception, folder: Path) -> Exception:
    """Return the error as users are told it: full disks and memory that ran out have many names."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, UserError):
        return error
    no_memory = durable.memory_error(error, f"the checkpoint {folder.name} was written")
    if no_memory is not None:
        return no_memory
    if full or shutil.disk_usage(existing).free < _FULL_BYTES:
        return durable.no_space(folder, f"the checkpoint {folder.name}", str(error).splitlines()[0])
    if isinstance(error, RuntimeError) and _CUT_OFF in str(error):
        return UserError(
            f"the checkpoint {folder.name} cannot be written",
            where=str(folder),
            expected="a file system that takes whole files",
            got=str(error).splitlines()[0],
            fix="look at the quota, the limit of file sizes (ulimit -f) and the disk, or set another run_dir",
        )
    return (durable.file_error(error, folder) if isinstance(error, OSError) else None) or error


def digests_of_all(folder: Path, digests_here: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of a folder's files: those that each rank has, and of the rest each takes its share.

    Fails on all ranks where one cannot bring a file to the disk, or read it. Collective over the world.
    """
    known = {
        name: digest for digests in gather_objects(dict(digests_here)) for name, digest in digests.items()
    }
    names, share = first(lambda: [name for name in durable.files_below(folder) if name not in known]), {}

    def read_share() -> None:
        share.update(durable.digests(folder, names[device.rank() :: device.world_size()]))

    everywhere(read_share, "bring the checkpoint to the disk", folder)
    return known | {name: digest for digests in gather_objects(share) for name, digest in digests.items()}


def newest_intact(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint in ``folder`` whose files are what was written, None where there is none.

    ``say`` is told of damaged ones, which stay where they are, and of those that a kill of their replacement
    had left without their name. Leftovers of killed saves are deleted beside an intact one. Raises UserError
    where there are checkpoints and all are damaged. Collective over the world.
    """
    for path in first(lambda: durable.recover_replaced(folder)):
        say(f"{path}: a kill had left it as {durable.replaced_name(path).name}; it has its name again")
    first_words = ""
    for path in reversed(first(lambda: named_checkpoints(folder))):
        problems = damages(path)
        if not problems:
            # A run that was killed in its last save makes no other one, which would delete the leftovers.
            first(lambda: remove_broken_saves(folder))
            return path
        words = in_short(problems)
        first_words = first_words or f"{path.name}: {words}"
        say(f"{path} is damaged and stays unused: {words}")
    if first_words:
        raise UserError(
            "every checkpoint to continue from is damaged",
            where=str(folder),
            expected="a checkpoint whose files are what was written",
            got=first_words,
            fix="restore one from a copy, or start over with checkpoint.resume=never",
        )
    return None


def require_intact(path: Path) -> None:
    """Raise a UserError unless the checkpoint ``path`` is what was written. Collective over the world."""
    read_meta(path)
    problems = damages(path)
    if problems:
        raise UserError(
            "the checkpoint is damaged",
            where=str(path),
            expected="files that are what was written",
            got="\n".join(problems[:8]),
            fix="name another checkpoint, or restore this one from a copy",
        )


def require_intact_models(folders: Mapping[str, str]) -> None:
    """Raise a UserError for the first model folder whose files are not what was written.

    ``folders`` have the key that names each. A folder without digests, such as one that was downloaded, is
    taken as it is. Collective over the world.
    """
    for path, key in folders.items():
        problems = model_damages(Path(path))
        if problems:
            raise UserError(
                "a model that is to be read is damaged",
                where=f"{key}: {path}",
                expected="files that are what was written",
                got=in_short(problems),
                fix="restore it from a copy, or make it anew; if the change is meant, remove "
                f"{Path(path) / durable.DIGESTS}, which holds the digests of before",
            )


def model_damages(folder: Path) -> list[str]:
    """Return what is wrong with the files of a model folder that has digests; nothing where it has none.

    Collective over the world.
    """
    return damages(folder) if first(lambda: durable.is_sealed(folder)) else []


def in_short(problems: Sequence[str]) -> str:
    """Return the first lines of `damages` as one."""
    more = f" and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + more


def damages(path: Path) -> list[str]:
    """Return what is wrong with a folder's files, of which each rank reads its share.

    Collective over the world.
    """
    known = first(lambda: durable.read_digests(path))
    if known is None:
        return [f"{durable.DIGESTS} is missing or damaged"]
    share = list(known)[device.rank() :: device.world_size()]
    return [line for lines in gather_objects(durable.damages(path, known, share)) for line in lines]
