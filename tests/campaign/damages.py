"""Damage a run's newest checkpoints: a restart must name them and resume from the newest intact one.

Every tenth case damages other files that a restart reads: tokens, or the model that a stage has exported.

Most cases only determine, in a process of their own and as a user without privileges, which checkpoint a
restart would resume from; every twentieth restarts the run and compares its end with the uninterrupted run.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.campaign import kills, runs
from tests.campaign.campaign import HELD, Case, Result

RUN = "alone"
RETAINED = 3
"""Checkpoints of the run, which keeps its newest three."""
PATIENCE = 120.0
"""Seconds to choose a checkpoint in."""
TRACEBACK = "Traceback (most recent call last)"
# Ways to damage a file of a checkpoint, its folder, other files that a restart reads, and its digests.
FILE_DAMAGES = (
    "flip", "truncate", "extend", "sparse", "empty", "delete", "garbage", "folder", "dangling", "loop",
    "fifo", "older", "swap", "mode",
)  # fmt: skip
FOLDER_DAMAGES = ("gone", "file", "empty folder", "dangling", "mode")
GONE = "no file to name"
READ_BACK_DAMAGES = ("flip", "truncate", "extend", "empty", "garbage", "older")
READ_BACK = {
    "tokens": "tokens/*.arrow",
    "digest of tokens": "tokens/*.digest",
    "stage": "stages/sft/hf/*",
}
"""Files other than checkpoints that a restart reads -> their pattern in the run folder."""
DIGEST_DAMAGES = (
    "delete",
    "garbage",
    "list",
    "empty",
    "flip",
    "other names",
    "folder",
)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases."""
    for index in range(count):
        # A generator per case: case 7 is the same whatever the number of cases.
        source = random.Random(f"{seed} {index}")
        if index % 10 == 5:  # these always restart the run to its end, which is slow
            target = source.choice(list(READ_BACK))
            method = source.choice(READ_BACK_DAMAGES)
            settings = {"kind": target, "how": method, "draw": source.random()}
            yield Case(f"{index} {target} {method}", f"{target}: {method}", settings)
            continue

        target = source.choices(("file", "digests", "folder"), (8, 2, 1))[0]
        method = source.choice(
            {
                "file": FILE_DAMAGES,
                "digests": DIGEST_DAMAGES,
                "folder": FOLDER_DAMAGES,
            }[target]
        )

        # Usually the newest checkpoint alone, sometimes the newest two or all three.
        damaged = source.choices(range(1, RETAINED + 1), (7, 2, 1))[0]
        is_full_restart = index % 20 == 0 and method not in ("mode", "gone")
        settings = {
            "kind": target,
            "how": method,
            "damaged": damaged,
            "real": is_full_restart,
            "draw": source.random(),
        }
        yield Case(f"{index} {target} {method}", f"{target}: {method}", settings)


def try_case(case: Case, work: Path) -> Result:
    """Damage a copy of the run and restart it, or choose its checkpoint."""
    settings = case.settings
    # Work on a copy of the uninterrupted run, which all cases share.
    expected, _ = kills.uninterrupted(RUN, work)
    complete = kills.uninterrupted_folder(RUN, work)
    folder = work / case.name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)

    shutil.copytree(complete / "run", folder / "run")
    if settings["kind"] in READ_BACK:
        result = damage_read_back(settings, folder, expected, work)
        if result.outcome == HELD:
            shutil.rmtree(folder)
        return result

    # A restart tries checkpoints from the newest on.
    newest_first = sorted((folder / "run/checkpoints").iterdir(), key=_step, reverse=True)
    assert len(newest_first) == RETAINED

    source = random.Random(settings["draw"])
    damaged_files = {}
    for index in range(settings["damaged"]):
        path = newest_first[index]
        damaged_files[path.name] = damage(settings["kind"], settings["how"], path, newest_first[-1], source)

    # The message has to name every damaged file, and the run to resume from the newest intact checkpoint.
    intact = [path.name for path in newest_first if path.name not in damaged_files]
    if settings["real"]:
        result = restart(folder, intact, expected, work)
    else:
        result = choose_checkpoint(folder)
    result = require_names(result, damaged_files, intact)
    if result.outcome == HELD:
        shutil.rmtree(folder)
    return result


def damage(target: str, method: str, path: Path, oldest: Path, source: random.Random) -> str:
    """Damage a checkpoint; return the file name that the message must contain, or `GONE`."""
    if target == "folder":
        _damage_folder(method, path)
        return GONE if method == "gone" else path.name

    if target == "digests":
        file = path / "checksums.json"
        if method in ("list", "other names"):
            file.write_text("[1]" if method == "list" else '{"no such file": "1:2"}')
        else:
            _damage_file(method, file, file, source)
        return ""  # the message may name the digest, or the file that it belongs to

    # Any file of the checkpoint but its digests; some methods need a second file to swap or copy.
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "checksums.json")
    file = source.choice(files)
    second_file = next(item for item in source.sample(files, len(files)) if item != file)
    name = file.relative_to(path).as_posix()
    _damage_file(
        method,
        file,
        oldest / name if method == "older" else second_file,
        source,
    )
    return name


def _damage_file(method: str, file: Path, second_file: Path, source: random.Random) -> None:
    """Damage a file by ``method``; "older" and "swap" also use the second file."""
    content = file.read_bytes()
    position = source.randrange(max(1, len(content)))
    # One bit, which only a checksum notices.
    if method == "flip":
        flipped = content[position] ^ (1 << source.randrange(8))
        file.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
    elif method == "truncate":
        file.write_bytes(content[:position])
    elif method == "extend":
        file.write_bytes(content + b"\0")
    # A terabyte that occupies no space: reading it whole would exhaust memory.
    elif method == "sparse":
        os.truncate(file, 2**40)
    elif method == "garbage":
        file.write_bytes(b'{"step": NaN, [' + source.randbytes(200))
    elif method == "empty":
        file.write_bytes(b"")
    # Valid content, but of another checkpoint; it must differ to be a damage.
    elif method == "older":
        older = second_file.read_bytes()
        file.write_bytes(older + b" " if older == content else older)
    elif method == "mode":
        file.chmod(0)
    else:
        file.unlink()
        if method == "folder":
            file.mkdir()
        elif method == "fifo":
            os.mkfifo(file)
        elif method in ("dangling", "loop"):
            file.symlink_to(file if method == "loop" else "nowhere")
        elif method == "swap":
            other_content = second_file.read_bytes()
            file.write_bytes(other_content)
            second_file.write_bytes(content)


def _damage_folder(method: str, path: Path) -> None:
    """Damage a checkpoint's folder by ``method``."""
    if method == "mode":
        path.chmod(0)
        return

    # The other methods put something else in the folder's place.
    shutil.rmtree(path)
    if method == "file":
        path.write_text("not a folder")
    elif method == "empty folder":
        path.mkdir()
    elif method == "dangling":
        path.symlink_to("nowhere")


def choose_checkpoint(folder: Path) -> Result:
    """Choose the checkpoint of a restart as a user without privileges; return it with the messages."""
    result_file = folder / "answer.json"
    # Dropping privileges cannot be undone, so it happens in a child process.
    child = os.fork()
    if child == 0:
        try:
            _drop_capabilities()
            result_file.write_text(json.dumps(_choose(folder / "run")))
        finally:
            os._exit(0)

    code = kills.wait_for(child, PATIENCE)
    if code is None:
        return Result("hang", f"no choice after {PATIENCE:.0f} s")
    return Result(**json.loads(result_file.read_text()))


def _drop_capabilities() -> None:
    """Drop all capabilities, so that file modes apply to this process even if it is root."""
    # linux/capability.h:
    # Version 3 of the structure, followed by this process; all sets are empty.
    version = 0x20080522
    no_capabilities = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(version, 0), no_capabilities):
        raise OSError("privileges cannot be dropped")


def _choose(run: Path) -> dict[str, Any]:
    """Return the result of choosing a checkpoint to resume from, with all messages."""
    from megatron_rl.checkpoint import roles as checkpoint
    from megatron_rl.checkpoint.folders import find_newest_intact_checkpoint
    from megatron_rl.distributed import device
    from megatron_rl.errors import UserError

    messages: list[str] = []

    # A single process, not a rank of a surrounding launch.
    for name in runs.LAUNCHER_NAMES:
        os.environ.pop(name, None)

    try:
        device.initialize()
        path = find_newest_intact_checkpoint(run / "checkpoints", messages.append)
        if path is not None:
            assert checkpoint.read_meta(path)["step"] == _step(path)
        messages.append(f"resumes from {path and path.name}")
        return {"outcome": HELD, "detail": "\n".join(messages)}
    except UserError as error:
        return {"outcome": HELD, "detail": "\n".join([*messages, str(error)])}
    except Exception:
        return {
            "outcome": "unclear",
            "detail": "\n".join([*messages, traceback.format_exc()]),
        }


def restart(folder: Path, intact: list[str], expected: Any, work: Path) -> Result:
    """Restart the run and compare its end with the uninterrupted run, if it can resume."""
    code, text = _restarted(folder, work)
    if code is None:
        return Result("hang", text)
    if has_traceback(text):
        return Result("unclear", text)
    if not intact:
        return Result(HELD if code else "accepted", text)
    if code:
        return Result("lost", text)

    differences = list(kills.differing_values(expected, runs.recording(folder / "run")))
    message = text.replace(
        f"resumed from {folder / 'run/checkpoints'}/{intact[0]} ",
        f"resumes from {intact[0]} ",
    )
    if differences:
        return Result("lost", "\n".join(differences[:20]))
    return Result(HELD, message)


def _restarted(folder: Path, work: Path) -> tuple[int | None, str]:
    """Start a folder's run again; return its exit code (None: no end in time) and its output."""
    config = runs.write(RUN, folder, work)
    environment = {
        "CAMPAIGN_PORT": "9",
        "CAMPAIGN_LAUNCH": "1",
    }  # a port without a listener
    launcher = runs.launch(config, 1, restarts=0, env=environment)
    code = kills.wait_for(launcher.pid, kills.PATIENCE)
    return code, (folder / "output").read_text()


def has_traceback(output: str) -> bool:
    """Return whether a rank printed a traceback; torchrun's own, of a failed job, is the last one."""
    if "ChildFailedError" in output:
        output = output[: output.rindex(TRACEBACK)]
    return TRACEBACK in output


def damage_read_back(settings: Mapping[str, Any], folder: Path, expected: Any, work: Path) -> Result:
    """Damage another file that a restart reads: it must be named, and the results must not change."""
    run = folder / "run"
    target = settings["kind"]
    source = random.Random(settings["draw"])
    shutil.rmtree(run / "checkpoints")  # a run with a checkpoint does not read its stages

    if target != "stage":
        shutil.rmtree(run / "stages")  # only a stage that runs reads its tokens

    # Every file of the kind may be damaged, including metadata, but not the list of checksums.
    candidates = sorted(path for path in run.glob(READ_BACK[target]) if path.name != "checksums.json")
    file = source.choice(candidates)
    second_file = source.choice([path for path in candidates if path != file])
    original = file.read_bytes()
    _damage_file(settings["how"], file, second_file, source)

    if file.read_bytes() == original:
        return Result(HELD, "the damage changed nothing")

    code, text = _restarted(folder, work)
    if code is None:
        return Result("hang", text)
    if has_traceback(text):
        return Result("unclear", text)
    if file.stem not in text:
        return Result("accepted", f"not named: {file.name}\n{text}")
    if code:  # `check` reads some of these files and refuses the run
        return Result(HELD if target == "stage" else "lost", text)

    differences = list(kills.differing_values(expected, runs.recording(run)))
    if differences:
        return Result("lost", "\n".join(differences[:20]))
    return Result(HELD, text)


def require_names(result: Result, damaged_files: dict[str, str], intact: list[str]) -> Result:
    """Return the result, or a failure if the message lacks the checkpoint or a damaged file."""
    if result.outcome != HELD:
        return result

    named_files = {step: file for step, file in damaged_files.items() if file != GONE}
    unnamed = [
        name for step, file in named_files.items() for name in (step, file) if name not in result.detail
    ]
    expected_message = "every checkpoint to continue from is damaged" if named_files else "resumes from None"

    expected_message = f"resumes from {intact[0]}" if intact else expected_message
    if expected_message not in result.detail:
        return Result("lost", f"not: {expected_message}\n{result.detail}")
    if unnamed:
        return Result("unclear", f"not named: {unnamed}\n{result.detail}")
    return result


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
