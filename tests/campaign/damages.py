"""Damage the newest checkpoints of a run: a restart names them and goes on from the newest intact one.

Every tenth damage is of something else that a restart reads back: tokens, or the model that a stage has left.

Most cases ask, in a process of their own and as a user without privileges, which checkpoint a restart would
go on from; every twentieth is a restart to the end, compared with the uninterrupted run.
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
KEPT = 3
"""Checkpoints that the run has kept."""
PATIENCE = 120.0
OF_FILES = (
    "flip", "truncate", "extend", "sparse", "empty", "delete", "garbage", "folder", "dangling", "loop",
    "fifo", "older", "swap", "mode",
)  # fmt: skip
OF_FOLDERS = ("gone", "file", "empty folder", "dangling", "mode")
GONE = "nothing is left to be named"
OF_READ_BACK = ("flip", "truncate", "extend", "empty", "garbage", "older")
READ_BACK = {
    "tokens": "tokens/*.arrow",
    "digest of tokens": "tokens/*.digest",
    "stage": "stages/sft/hf/*",
}
"""What a restart reads beside checkpoints, in folders of the run."""
OF_DIGESTS = ("delete", "garbage", "list", "empty", "flip", "other names", "folder")


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` damages."""
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        if number % 10 == 5:  # always a restart to the end, which takes its time
            kind = source.choice(list(READ_BACK))
            how = source.choice(OF_READ_BACK)
            settings = {"kind": kind, "how": how, "draw": source.random()}
            yield Case(f"{number} {kind} {how}", f"{kind}: {how}", settings)
            continue

        kind = source.choices(("file", "digests", "folder"), (8, 2, 1))[0]
        how = source.choice(
            {
                "file": OF_FILES,
                "digests": OF_DIGESTS,
                "folder": OF_FOLDERS,
            }[kind]
        )

        damaged = source.choices(range(1, KEPT + 1), (7, 2, 1))[0]
        real = number % 20 == 0 and how not in ("mode", "gone")
        settings = {
            "kind": kind,
            "how": how,
            "damaged": damaged,
            "real": real,
            "draw": source.random(),
        }
        yield Case(f"{number} {kind} {how}", f"{kind}: {how}", settings)


def try_case(case: Case, work: Path) -> Result:
    """Damage a copy of the run and see what a restart does with it."""
    settings = case.settings
    expected, _ = kills.uninterrupted(RUN, work)
    whole = kills.whole_folder(RUN, work)
    folder = work / case.name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)

    shutil.copytree(whole / "run", folder / "run")
    if settings["kind"] in READ_BACK:
        result = read_back(settings, folder, expected, work)
        if result.outcome == HELD:
            shutil.rmtree(folder)
        return result

    newest_first = sorted((folder / "run/checkpoints").iterdir(), key=_step, reverse=True)
    assert len(newest_first) == KEPT

    source = random.Random(settings["draw"])
    harmed = {}
    for index in range(settings["damaged"]):
        path = newest_first[index]
        harmed[path.name] = damage(settings["kind"], settings["how"], path, newest_first[-1], source)

    intact = [path.name for path in newest_first if path.name not in harmed]
    result = resumed(folder, intact, expected, work) if settings["real"] else chosen(folder)
    result = judged(result, harmed, intact)
    if result.outcome == HELD:
        shutil.rmtree(folder)
    return result


def damage(kind: str, how: str, path: Path, oldest: Path, source: random.Random) -> str:
    """Damage a checkpoint and return the name that the message must hold, or `GONE`."""
    if kind == "folder":
        _damage_folder(how, path)
        return GONE if how == "gone" else path.name

    if kind == "digests":
        file = path / "checksums.json"
        if how in ("list", "other names"):
            file.write_text("[1]" if how == "list" else '{"no such file": "1:2"}')
        else:
            _damage_file(how, file, file, source)
        return ""  # a damaged digest names the file that it is of, or itself

    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "checksums.json")
    file = source.choice(files)
    other = next(item for item in source.sample(files, len(files)) if item != file)
    name = file.relative_to(path).as_posix()
    _damage_file(how, file, oldest / name if how == "older" else other, source)
    return name


def _damage_file(how: str, file: Path, other: Path, source: random.Random) -> None:
    content = file.read_bytes()
    place = source.randrange(max(1, len(content)))
    if how == "flip":
        flipped = content[place] ^ (1 << source.randrange(8))
        file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
    elif how == "truncate":
        file.write_bytes(content[:place])
    elif how == "extend":
        file.write_bytes(content + b"\0")
    elif how == "sparse":
        os.truncate(file, 2**40)
    elif how == "garbage":
        file.write_bytes(b'{"step": NaN, [' + source.randbytes(200))
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "older":
        file.write_bytes(other.read_bytes() + (b" " if other.read_bytes() == content else b""))
    elif how == "mode":
        file.chmod(0)
    else:
        file.unlink()
        if how == "folder":
            file.mkdir()
        elif how == "fifo":
            os.mkfifo(file)
        elif how in ("dangling", "loop"):
            file.symlink_to(file if how == "loop" else "nowhere")
        elif how == "swap":
            other_content = other.read_bytes()
            file.write_bytes(other_content)
            other.write_bytes(content)


def _damage_folder(how: str, path: Path) -> None:
    if how == "mode":
        path.chmod(0)
        return

    shutil.rmtree(path)
    if how == "file":
        path.write_text("not a folder")
    elif how == "empty folder":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to("nowhere")


def chosen(folder: Path) -> Result:
    """Return which checkpoint a restart goes on from and what it says, as a user without privileges."""
    answer = folder / "answer.json"
    child = os.fork()
    if child == 0:
        try:
            _drop_capabilities()
            answer.write_text(json.dumps(_choose(folder / "run")))
        finally:
            os._exit(0)

    code = kills.wait_for(child, PATIENCE)
    if code is None:
        return Result("hang", f"no answer after {PATIENCE:.0f} s")
    return Result(**json.loads(answer.read_text()))


def _drop_capabilities() -> None:
    """Have the modes of files count for this process as they do for a user, also where that is root."""
    # linux/capability.h
    version = 0x20080522
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(version, 0), nothing):
        raise OSError("privileges cannot be dropped")


def _choose(run: Path) -> dict[str, Any]:
    from megatron_rl.checkpoint import roles as checkpoint
    from megatron_rl.checkpoint.folders import newest_intact
    from megatron_rl.distributed import device
    from megatron_rl.errors import UserError

    words: list[str] = []

    for name in runs.LAUNCHER_NAMES:
        os.environ.pop(name, None)

    try:
        device.initialize()
        path = newest_intact(run / "checkpoints", words.append)
        if path is not None:
            assert checkpoint.read_meta(path)["step"] == _step(path)
        words.append(f"goes on from {path and path.name}")
        return {"outcome": HELD, "detail": "\n".join(words)}
    except UserError as error:
        return {"outcome": HELD, "detail": "\n".join([*words, str(error)])}
    except Exception:
        return {"outcome": "unclear", "detail": "\n".join([*words, traceback.format_exc()])}


def resumed(folder: Path, intact: list[str], expected: Any, work: Path) -> Result:
    """Restart the run, compare what it leaves where it can go on, and return what it said."""
    code, text = _restarted(folder, work)
    if code is None:
        return Result("hang", text)
    if "Traceback" in text.replace("Traceback : ", ""):
        return Result("unclear", text)
    if not intact:
        return Result(HELD if code else "accepted", text)
    if code:
        return Result("lost", text)

    differences = list(kills.differing(expected, runs.recording(folder / "run")))
    words = text.replace(
        f"resumed from {folder / 'run/checkpoints'}/{intact[0]} ", f"goes on from {intact[0]} "
    )
    return Result("lost", "\n".join(differences[:20])) if differences else Result(HELD, words)


def _restarted(folder: Path, work: Path) -> tuple[int | None, str]:
    """Start the run of a folder again; return its exit code, None without an end, and what it said."""
    config = runs.write(RUN, folder, work)
    environment = {"CAMPAIGN_PORT": "9", "CAMPAIGN_LAUNCH": "1"}  # a port that nobody reads
    launcher = runs.launch(config, 1, restarts=0, env=environment)
    code = kills.wait_for(launcher.pid, kills.PATIENCE)
    return code, (folder / "output").read_text()


def read_back(settings: Mapping[str, Any], folder: Path, expected: Any, work: Path) -> Result:
    """Damage what a restart reads beside checkpoints: it is named, and the numbers stay what they were."""
    run = folder / "run"
    kind = settings["kind"]
    source = random.Random(settings["draw"])
    shutil.rmtree(run / "checkpoints")  # before there is one, what a stage has left is read

    if kind != "stage":
        shutil.rmtree(run / "stages")  # tokens of a stage are read where it runs

    candidates = sorted(path for path in run.glob(READ_BACK[kind]) if path.name != "checksums.json")
    file = source.choice(candidates)
    other = source.choice([path for path in candidates if path != file])
    before = file.read_bytes()
    _damage_file(settings["how"], file, other, source)

    if file.read_bytes() == before:
        return Result(HELD, "the damage changed nothing")

    code, text = _restarted(folder, work)
    if code is None:
        return Result("hang", text)
    if "Traceback" in text.replace("Traceback : ", ""):
        return Result("unclear", text)
    if file.stem not in text:
        return Result("accepted", f"not named: {file.name}\n{text}")
    if code:  # refused by the check, which reads some of these files itself
        return Result(HELD if kind == "stage" else "lost", text)

    differences = list(kills.differing(expected, runs.recording(run)))
    return Result("lost", "\n".join(differences[:20])) if differences else Result(HELD, text)


def judged(result: Result, harmed: dict[str, str], intact: list[str]) -> Result:
    """Return the result, with what is missing in the words that a user sees."""
    if result.outcome != HELD:
        return result

    there = {step: file for step, file in harmed.items() if file != GONE}
    missing = [name for step, file in there.items() for name in (step, file) if name not in result.detail]
    end = "every checkpoint to continue from is damaged" if there else "goes on from None"

    end = f"goes on from {intact[0]}" if intact else end
    if end not in result.detail:
        return Result("lost", f"not: {end}\n{result.detail}")
    return Result("unclear", f"not named: {missing}\n{result.detail}") if missing else result


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
