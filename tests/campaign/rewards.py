"""Judge with hostile reward functions: invalid samples with a reason, good neighbours, nothing left over.

What attacks get hold of, as this user and another one, with namespaces and without, is named as not enforced.
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
from tests.campaign.attackers import NOBODY, as_user, attack, unnamed, without_namespaces
from tests.campaign.attacks import ATTACKS
from tests.campaign.campaign import HELD, Case, Result
from tests.campaign.hostile import ACTS, HARMLESS, VEHICLES

TIMEOUT = 3.0
"""Seconds of a call: long beside the start of a thread, short beside the patience of a campaign."""
PATIENCE = 300.0
TAMPERS = ("broken", "forged", "close all", "noise", "frame")
"""Words of acts that disturb the interpreter or the pipe that later samples of the worker share."""
WITH_NAMESPACES = ""
WITHOUT_NAMESPACES = ", without namespaces"
FOLDERS = (".", "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"))


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield every act as it is, all attacks, then acts in threads and processes that the function starts."""
    source = random.Random(seed)
    acts = source.sample(list(ACTS), len(ACTS))
    indirect = list(itertools.product(acts, [name for name in VEHICLES if name != "direct"]))
    pairs = [(act, "direct") for act in acts] + source.sample(indirect, len(indirect))
    every = [Case(f"{act}, {vehicle}", vehicle, {"act": act, "vehicle": vehicle}) for act, vehicle in pairs]
    yield from [*every[: len(acts)], *_attack_cases(), *every[len(acts) :]][:count]


def _attack_cases() -> Iterator[Case]:
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
    """Judge two good samples around a hostile one, in a process of its own, and look for what is left."""
    if "attack" in case.settings:
        return _attack(case.settings)

    mark = f"campaign-{os.getpid()}-{time.time_ns()}"
    answer = work / "answer.json"
    answer.unlink(missing_ok=True)

    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for stream in (1, 2):  # where the functions' noise would go
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            runs.adopt_orphans()
            result = _judge(case.settings["act"], case.settings["vehicle"], mark)
        except BaseException:
            result = Result("unclear", traceback.format_exc())

        answer.write_text(json.dumps(vars(result)))
        os._exit(0)

    code = kills.wait_for(child, PATIENCE)
    if code is None:
        return Result("hang", f"no answer after {PATIENCE:.0f} s")

    left = [str(path) for folder in FOLDERS if (path := Path(folder, mark)).exists()]
    if left:
        return Result("left over", "\n".join(left))
    if code or not answer.exists():
        return Result("lost", f"the trainer's process ended with {code}")
    return Result(**json.loads(answer.read_text()))


def _attack(settings: Mapping[str, Any]) -> Result:
    """Make one attack, in a folder that every user reaches."""
    name = settings["attack"]
    kernel = settings["kernel"]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)

        def make() -> Any:
            return attack([name], Path(folder))

        answer = as_user(settings["user"], make if kernel == WITH_NAMESPACES else without_namespaces(make))

    words = f"{answer['ended'][name]}; not enforced: {answer['missing']}"
    if unnamed(answer):
        return Result("accepted", words)
    return Result(HELD, words, {"attacks that the kernel's words name": float(bool(answer["through"]))})


def _judge(act: str, vehicle: str, mark: str) -> Result:
    from megatron_rl.config.sections.rewards import RewardConfig, RewardLimitsConfig
    from megatron_rl.rewards.function import FunctionReward

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
        facts = {"mark": mark, "port": server.getsockname()[1], "vehicle": "direct"}
        fine = {
            "prompt": "p",
            "response": "fine",
            "ground_truth": "4",
            "metadata": facts,
        }
        hostile = {
            **fine,
            "response": act,
            "metadata": {**facts, "vehicle": vehicle},
        }
        result = reward.score([fine, hostile, fine])
        again = reward.score([fine])
        missing = reward.missing

    time.sleep(0.1)
    left = [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]
    if left:
        return Result("left over", "\n".join(str(child) for child in left))
    return _verdict(act, vehicle, result, bool(again.valid.all()), missing)


def _verdict(act: str, vehicle: str, result: Any, again: bool, missing: Any) -> Result:
    words = "; ".join(
        f"row {failure.row} {failure.reason}: {failure.message}"[:300] for failure in result.failures
    )

    harmed = [row for row in (0, 2) if not result.valid[row] or result.rewards[row] != 1.0]
    if (harmed and not any(word in act for word in TAMPERS)) or 0 in harmed or not again:
        return Result("lost", f"good samples are invalid: {harmed}, afterwards {again}; {words}")

    invalid = [failure for failure in result.failures if failure.row == 1]
    if invalid and not invalid[0].message.strip():
        return Result("unclear", f"no reason: {invalid[0]}")
    if "AssertionError" in words and not missing:
        return Result("accepted", words)
    # What is done beside the call need not make it fail; done in it, it must.
    if not invalid and vehicle == "direct" and act not in HARMLESS:
        return Result("accepted", f"valid with reward {float(result.rewards[1])}")

    reason = invalid[0].reason if invalid else "valid"
    return Result(HELD, words, {f"samples {reason}": 1.0})
