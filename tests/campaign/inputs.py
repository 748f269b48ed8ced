"""Inputs that a user got wrong, generated from the schema: each is READY and can run, or a clear error.

An error is clear when it names the key or file that is wrong, what was expected, what was found and what to
do. `bad_inputs` makes them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.cli.main import main
from tests import small_data
from tests.campaign.bad_inputs import BASE, GROUPS, draw
from tests.campaign.campaign import HELD, Case, Result, vague

SECONDS = 5.0
"""Processor time that a check has; it waits for no other process here."""
HANGS = 120
TRAINED_EVERY, PROCESS_EVERY = 20, 40
"""Of the cases of small valid values one in so many takes a step; of all one in so many is a process."""


def cases(number: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases of a seed."""
    order = [name for name, (share, _) in GROUPS.items() for _ in range(share)]
    random.Random(0).shuffle(order)
    for index in range(count):
        group = order[index % len(order)]
        made = draw(GROUPS[group][1](), number * 1_000_003 + index)
        trained = group == "valid values together" and index // len(order) % (TRAINED_EVERY // 4) == 0
        yield Case(
            f"{index:05d} {group}", group, {**made, "train": trained, "process": index % PROCESS_EVERY == 0}
        )


def try_case(case: Case, work: Path) -> Result:
    """Check the case's input as the command does, and run some of those that are ready."""
    made = case.settings
    folder = _workspace(work, made)
    words = ["check", "config.yaml", *made.get("set", ())]
    if made.get("world", 1) is not None:
        words += ["--world-size", str(made.get("world", 1))]
    before = Path.cwd()
    os.chdir(folder)
    try:
        code, shown, seconds = _called([*words, "--json"])
        if isinstance(code, str):
            return Result("hang" if "TimeoutError" in code else "unclear", code)
        if seconds > SECONDS:
            return Result("hang", f"{seconds:.1f} s of processor time")
        problem = _unclear(code, shown, made)
        if problem is not None:
            return problem
        again = _called(words)
        if again[0] != code:
            return Result("unclear", f"{code} for machines, {again[0]} for people")
        if made["process"]:
            done = _process(*words)
            if done.returncode != code or "Traceback" in done.stderr:
                return Result("unclear", f"exit code {done.returncode} as a process\n{done.stderr[-2000:]}")
        ready = code == 0
        if ready and made["train"]:
            done = _process("train", *words[1:-2])
            # What only the tokenizer shows, such as prompts that are all too long, `train` says clearly.
            if done.returncode not in (0, 2) or "Traceback" in done.stderr:
                return Result(
                    "accepted", f"READY, and `train` ended with {done.returncode}\n{done.stderr[-3000:]}"
                )
        counts = {"ready": 1} if ready else {"refused": 1}
        return Result(HELD, counts=counts | ({"trained": 1} if ready and made["train"] else {}))
    finally:
        os.chdir(before)


def _called(words: list[str]) -> tuple[int | str, str, float]:
    """Return the exit code of a command, or its traceback, with what it printed and its processor time."""
    output = io.StringIO()
    begun = time.process_time()
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(HANGS)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code: int | str = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 2
    except BaseException:
        code = traceback.format_exc()
    finally:
        signal.alarm(0)
    return code, output.getvalue(), time.process_time() - begun


def _late(*_: Any) -> None:
    raise TimeoutError(f"no end within {HANGS} s")


def _unclear(code: int, shown: str, made: Any) -> Result | None:
    """Return what is wrong with the answer of a check, None where nothing is."""
    if code not in (0, 2):
        return Result("broken", f"exit code {code}\n{shown[-2000:]}")
    if code == 0:
        return Result("accepted", shown[:300]) if "names" in made else None
    if not shown.startswith("{"):
        return None if "usage:" in shown else Result("unclear", shown[-2000:])
    errors = json.loads(shown)["errors"]
    if vague(errors) or not errors:
        return Result("unclear", f"an error without all its parts: {json.dumps(vague(errors))[:2000]}")
    name = made.get("names")
    section = "" if name is None else name.rpartition(".")[0] or name
    if name is not None and not any(section in error["where"] for error in errors):
        return Result("unclear", f"no error is about {name}: {json.dumps(errors)[:2000]}")
    file = made.get("file")
    if file is not None and not any(Path(file).parts[0] in str(error) for error in errors):
        return Result("unclear", f"no error is about {file}: {json.dumps(errors)[:2000]}")
    return None


def _process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl", *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=900,
        stdin=subprocess.DEVNULL,
    )


def _workspace(work: Path, made: Any) -> Path:
    """Return a folder with a good input in which the case's damage is done."""
    base, folder = work / "base", work / "case"
    if not (base / "model/config.json").is_file():
        with contextlib.redirect_stderr(io.StringIO()):
            small_data.make(base, "tiny")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    (folder / "config.yaml").write_text(made.get("text", BASE), encoding="utf-8")
    if "file" in made:
        _damage(folder / made["file"], made)
    return folder


def _replace(file: Path, kind: str) -> None:
    """Put what is no file of the run into its place."""
    if file.is_dir():
        shutil.rmtree(file)
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "file":
        file.write_text("no folder, and no JSON")
    else:
        file.symlink_to(file if kind == "loop" else kind)


def _damage(file: Path, made: Any) -> None:
    if "as" in made:
        _replace(file, made["as"])
    elif "key" in made:
        file.write_text(json.dumps({**json.loads(file.read_text()), made["key"]: made["value"]}))
    elif "at" in made:
        data = file.read_bytes()
        at = made["at"] % len(data)
        if made["bytes"] == "gone":
            file.unlink()
        elif made["bytes"] == "cut":
            file.write_bytes(data[:at])
        else:
            file.write_bytes(data[:at] + bytes.fromhex(made["bytes"]) + data[at + 1 :])
    else:
        lines = file.read_bytes().splitlines()
        record = json.loads(lines[made["row"]])
        if "line" in made:
            lines[made["row"]] = made["line"].encode()
        elif "bytes" in made:
            lines[made["row"]] = bytes.fromhex(made["bytes"]) + lines[made["row"]][3:]
        else:
            lines[made["row"]] = json.dumps({**record, made["field"]: made["value"]}).encode()
        file.write_bytes(b"\n".join(lines) + b"\n")
