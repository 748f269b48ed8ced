"""Compute rewards with hostile functions: samples are invalid with a reason, others valid, nothing remains.

Attacks that succeed, as this user and as another one, with namespaces and without, are announced as not
enforced.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.campaign import kills, runs
from tests.campaign.attackers import (
    NOBODY,
    attack,
    run_as_user,
    unannounced,
    without_namespaces,
)
from tests.campaign.attacks import ATTACKS
from tests.campaign.campaign import HELD, Case, Result
from tests.campaign.hostile import ACTS, HARMLESS, VEHICLES

TIMEOUT = 3.0
"""Seconds that a call may take: long compared with the start of a thread, short for a campaign."""
PATIENCE = 300.0
TAMPERING = ("broken", "forged", "close all", "noise", "frame")
"""Parts of the names of acts that disturb later samples, through the shared interpreter or pipe."""
WITH_NAMESPACES = ""
WITHOUT_NAMESPACES = ", without namespaces"
FOLDERS = (".", "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"))


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield every direct act, all attacks, then acts in threads and processes that the function starts."""
    source = random.Random(seed)
    acts = source.sample(list(ACTS), len(ACTS))
    indirect = list(itertools.product(acts, [name for name in VEHICLES if name != "direct"]))
    pairs = [(act, "direct") for act in acts] + source.sample(indirect, len(indirect))
    act_cases = [_act_case(act, vehicle) for act, vehicle in pairs]
    direct = act_cases[: len(acts)]
    indirect_cases = act_cases[len(acts) :]
    yield from [*direct, *_attack_cases(), *indirect_cases][:count]


def _act_case(act: str, vehicle: str) -> Case:
    return Case(f"{act}, {vehicle}", vehicle, {"act": act, "vehicle": vehicle})


def _attack_cases() -> Iterator[Case]:
    """Yield every attack as every possible user, with namespaces and without."""
    # root can also attack as another user; a user without privileges only as itself.
    users = {"root": 0, "nobody": NOBODY} if os.getuid() == 0 else {"this user": os.getuid()}
    for kernel in (WITH_NAMESPACES, WITHOUT_NAMESPACES):
        for user, number in users.items():
            for name in ATTACKS:
                group = f"attack as {user}{kernel}"
                yield Case(
                    f"{name}, {group}",
                    group,
                    {
                        "attack": name,
                        "user": number,
                        "kernel": kernel,
                    },
                )


def try_case(case: Case, work: Path) -> Result:
    """Compute rewards of two valid samples around a hostile one, in a process of its own."""
    if "attack" in case.settings:
        return _attack(case.settings)

    # Acts write files with this name, so that leftovers can be found.
    mark = f"campaign-{os.getpid()}-{time.time_ns()}"
    result_file = work / "answer.json"
    result_file.unlink(missing_ok=True)

    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for stream in (
                1,
                2,
            ):  # the functions' output would reach the terminal
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            # Orphans of the function become children of this process, where they are found.
            runs.adopt_orphans()
            result = _score_around(case.settings["act"], case.settings["vehicle"], mark)
        except BaseException:
            result = Result("unclear", traceback.format_exc())

        result_file.write_text(json.dumps(vars(result)))
        os._exit(0)

    code = kills.wait_for(child, PATIENCE)
    if code is None:
        return Result("hang", f"no result after {PATIENCE:.0f} s")

    remaining = [str(path) for folder in FOLDERS if (path := Path(folder, mark)).exists()]
    if remaining:
        return Result("left over", "\n".join(remaining))
    if code or not result_file.exists():
        return Result("lost", f"the trainer's process ended with {code}")
    return Result(**json.loads(result_file.read_text()))


def _attack(settings: Mapping[str, Any]) -> Result:
    """Run one attack in a folder that every user can reach."""
    name = settings["attack"]
    kernel = settings["kernel"]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)

        def run() -> Any:
            return attack([name], Path(folder))

        if kernel == WITHOUT_NAMESPACES:
            run = without_namespaces(run)
        result = run_as_user(settings["user"], run)

    detail = f"{result['ended'][name]}; not enforced: {result['missing']}"
    if unannounced(result):
        return Result("accepted", detail)
    return Result(
        HELD,
        detail,
        {"attacks that a notice announces": float(bool(result["through"]))},
    )


def _score_around(act: str, vehicle: str, mark: str) -> Result:
    """Compute rewards of two valid samples around a hostile one; report leftovers of the act."""
    from megatron_rl.config.sections.rewards import (
        RewardConfig,
        RewardLimitsConfig,
    )
    from megatron_rl.rewards.function import FunctionReward

    # Limits that acts exceed quickly.
    limits = RewardLimitsConfig(
        memory_gib=1.0,
        processes=16,
        cpu_seconds=20.0,
        file_gib=0.05,
    )

    spec = f"{Path(__file__).with_name('hostile.py')}:judge"
    with (
        socket.socket() as server,
        FunctionReward(RewardConfig(spec, timeout=TIMEOUT, limits=limits)) as reward,
    ):
        server.bind(("127.0.0.1", 0))
        server.listen()
        facts = {
            "mark": mark,
            "port": server.getsockname()[1],
            "vehicle": "direct",
        }
        valid = {
            "prompt": "p",
            "response": "fine",
            "ground_truth": "4",
            "metadata": facts,
        }
        hostile = {
            **valid,
            "response": act,
            "metadata": {**facts, "vehicle": vehicle},
        }
        result = reward.score([valid, hostile, valid])
        repeated = reward.score([valid])
        notices = reward.unenforced_limits

    # Processes that were just killed need a moment to end.
    time.sleep(0.1)
    remaining = [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]
    if remaining:
        return Result("left over", "\n".join(str(child) for child in remaining))
    return _verdict(act, vehicle, result, bool(repeated.valid.all()), notices)


def _verdict(act: str, vehicle: str, result: Any, is_usable: bool, notices: Any) -> Result:
    """Return whether the valid samples stayed valid and the hostile one is invalid with a reason."""
    detail = "; ".join(
        f"row {failure.row} {failure.reason}: {failure.message}"[:300] for failure in result.failures
    )

    # Valid samples before and after the hostile one must not suffer, unless it shares their interpreter.
    invalid_rows = [row for row in (0, 2) if not result.valid[row] or result.rewards[row] != 1.0]
    if (
        (invalid_rows and not any(marker in act for marker in TAMPERING))
        or 0 in invalid_rows
        or not is_usable
    ):
        return Result(
            "lost",
            f"valid samples became invalid: {invalid_rows}, afterwards {is_usable}; {detail}",
        )

    invalid = [failure for failure in result.failures if failure.row == 1]
    if invalid and not invalid[0].message.strip():
        return Result("unclear", f"no reason: {invalid[0]}")
    if "AssertionError" in detail and not notices:
        return Result("accepted", detail)
    # An act in a thread or process need not fail the call; a direct one must.
    if not invalid and vehicle == "direct" and act not in HARMLESS:
        return Result("accepted", f"valid with reward {float(result.rewards[1])}")

    reason = invalid[0].reason if invalid else "valid"
    return Result(HELD, detail, {f"samples {reason}": 1.0})
