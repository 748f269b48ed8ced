"""Test `check` on invalid inputs generated from the schema: each is READY and can run, or a clear error.

An error is clear if it names the wrong key or file, the expected and the actual value, and a fix.
`bad_inputs` generates the inputs.
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
from tests.campaign.campaign import HELD, Case, Result, incomplete_errors

SECONDS = 5.0
"""Processor seconds that a check may take; it waits for no other process here."""
HANGS = 120
"""Seconds after which a check hangs."""
TRAINED_ROUNDS = 5
"""In one of this many rounds through the groups, valid values also train a step."""
PROCESS_EVERY = 40
"""One of this many cases runs as a process of its own."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases of a seed."""
    # A fixed order of groups in proportion to their shares, so that few cases already cover all groups.
    order = [name for name, (share, _) in GROUPS.items() for _ in range(share)]
    random.Random(0).shuffle(order)
    for index in range(count):
        group = order[index % len(order)]
        generated = draw(GROUPS[group][1](), seed * 1_000_003 + index)
        # Training is slow, so only some of the valid values train.
        is_trained = group == "valid values together" and index // len(order) % TRAINED_ROUNDS == 0
        yield Case(
            f"{index:05d} {group}",
            group,
            {
                **generated,
                "train": is_trained,
                "process": index % PROCESS_EVERY == 0,
            },
        )


def try_case(case: Case, work: Path) -> Result:
    """Check the case's input as the command does, and train some of the inputs that are READY."""
    generated = case.settings
    folder = _workspace(work, generated)
    arguments = ["check", "config.yaml", *generated.get("set", ())]

    if generated.get("world", 1) is not None:
        arguments += ["--world-size", str(generated.get("world", 1))]

    # Paths of the configuration are relative to the folder.
    old_folder = Path.cwd()
    os.chdir(folder)
    try:
        code, output, seconds = _run_command([*arguments, "--json"])
        if isinstance(code, str):
            return Result("hang" if "TimeoutError" in code else "unclear", code)
        if seconds > SECONDS:
            return Result("hang", f"{seconds:.1f} s of processor time")

        problem = _problem_of(code, output, generated)
        if problem is not None:
            return problem

        # Output for people and for machines must agree on the verdict.
        repeated = _run_command(arguments)
        if repeated[0] != code:
            return Result(
                "unclear",
                f"exit code {code} with --json, {repeated[0]} without",
            )
        if generated["process"]:
            process = _run_process(*arguments)
            if process.returncode != code or "Traceback" in process.stderr:
                return Result(
                    "unclear",
                    f"exit code {process.returncode} as a process\n{process.stderr[-2000:]}",
                )

        is_ready = code == 0
        if is_ready and generated["train"]:
            process = _run_process("train", *arguments[1:-2])
            # `train` may still refuse what only the tokenizer shows, such as prompts that are all too long.
            if process.returncode not in (0, 2) or "Traceback" in process.stderr:
                return Result(
                    "accepted",
                    f"READY, and `train` ended with {process.returncode}\n{process.stderr[-3000:]}",
                )

        counts = {"ready": 1} if is_ready else {"refused": 1}
        if is_ready and generated["train"]:
            counts["trained"] = 1
        return Result(HELD, counts=counts)
    finally:
        os.chdir(old_folder)


def _run_command(arguments: list[str]) -> tuple[int | str, str, float]:
    """Return a command's exit code, or its traceback, with its output and processor seconds."""
    output = io.StringIO()
    started = time.process_time()
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(HANGS)

    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code: int | str = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 2
    except BaseException:
        code = traceback.format_exc()
    finally:
        signal.alarm(0)
    return code, output.getvalue(), time.process_time() - started


def _late(*_: Any) -> None:
    raise TimeoutError(f"no end within {HANGS} s")


def _problem_of(code: int, output: str, generated: Any) -> Result | None:
    """Return the problem of a check's output, or None."""
    if code not in (0, 2):
        return Result("broken", f"exit code {code}\n{output[-2000:]}")
    # An input with a wrong name is never READY.
    if code == 0:
        if "names" in generated:
            return Result("accepted", output[:300])
        return None
    if not output.startswith("{"):
        if "usage:" in output:
            return None
        return Result("unclear", output[-2000:])

    errors = json.loads(output)["errors"]
    if incomplete_errors(errors) or not errors:
        return Result(
            "unclear",
            f"an error without all its parts: {json.dumps(incomplete_errors(errors))[:2000]}",
        )

    name = generated.get("names")
    # An error may be about the section instead of the key, for example if two keys contradict.
    section = "" if name is None else name.rpartition(".")[0] or name
    if name is not None and not any(section in error["where"] for error in errors):
        return Result("unclear", f"no error is about {name}: {json.dumps(errors)[:2000]}")

    file = generated.get("file")
    if file is not None and not any(Path(file).parts[0] in str(error) for error in errors):
        return Result("unclear", f"no error is about {file}: {json.dumps(errors)[:2000]}")
    return None


def _run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=900,
        stdin=subprocess.DEVNULL,
    )


def _workspace(work: Path, generated: Any) -> Path:
    """Return a folder with a valid input after the case's damage."""
    base = work / "base"
    folder = work / "case"
    if not (base / "model/config.json").is_file():
        with contextlib.redirect_stderr(io.StringIO()):
            small_data.make(base, "tiny")

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)  # every case starts from a copy of the same valid input
    (folder / "config.yaml").write_text(generated.get("text", BASE), encoding="utf-8")

    if "file" in generated:
        _damage(folder / generated["file"], generated)
    return folder


def _replace(file: Path, replacement: str) -> None:
    """Replace a file by a pipe, a folder, other text, or a link."""
    if file.is_dir():
        shutil.rmtree(file)

    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if replacement == "pipe":
        os.mkfifo(file)
    elif replacement == "folder":
        file.mkdir()
    elif replacement == "file":
        file.write_text("neither a folder nor JSON")
    else:
        file.symlink_to(file if replacement == "loop" else replacement)


def _damage(file: Path, generated: Any) -> None:
    """Damage a file as the generated input describes."""
    if "as" in generated:
        _replace(file, generated["as"])
    elif "key" in generated:
        file.write_text(
            json.dumps(
                {
                    **json.loads(file.read_text()),
                    generated["key"]: generated["value"],
                }
            )
        )
    elif "at" in generated:
        data = file.read_bytes()
        offset = generated["at"] % len(data)
        if generated["bytes"] == "gone":
            file.unlink()
        elif generated["bytes"] == "cut":
            file.write_bytes(data[:offset])
        else:
            file.write_bytes(data[:offset] + bytes.fromhex(generated["bytes"]) + data[offset + 1 :])
    else:
        lines = file.read_bytes().splitlines()
        record = json.loads(lines[generated["row"]])
        if "line" in generated:
            lines[generated["row"]] = generated["line"].encode()
        elif "bytes" in generated:
            lines[generated["row"]] = bytes.fromhex(generated["bytes"]) + lines[generated["row"]][3:]
        else:
            lines[generated["row"]] = json.dumps({**record, generated["field"]: generated["value"]}).encode()
        file.write_bytes(b"\n".join(lines) + b"\n")
