"""Kill runs at random points, again and again: what they leave equals the uninterrupted run to the last bit.

A case is a chain: one run under torchrun with restarts, and several signals, each to a rank or to torchrun
itself, in a phase of the run and at a moment inside it. A torchrun that ends is started again, as a person
would. Most chains fork their ranks (`forked`), every eighth executes all as a user does.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign import runs
from tests.campaign.campaign import HELD, Case, Result

PATIENCE = 600.0
"""Seconds without a sign of life after which a run hangs."""
LEAVING = 60.0
"""Seconds that the ranks have to end in, on a busy machine, when torchrun is gone."""
KEPT_BY_OTHERS = re.compile(r"torchelastic_.*|torchinductor_.*|tmp.*wandb-\w+")
"""Folders that others leave in the temporary one: torchrun its logs, torch its cache, and wandb, which
Megatron-Core imports where it is installed, those that it makes at its import, if it is killed."""
REPLACEMENT = "replacement"
"""The moment between two renames that `rank.py` announces as a phase."""
STEP_PHASES = ("generate", "reward", "score", "estimate", "learn", "evaluate", "checkpoint", "")
SIGNALS = {
    "rank": (["SIGKILL", "SIGUSR1"], [9, 1]),
    "torchrun": (["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"], [6, 2, 1, 1]),
}


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield chains with ``count`` kills in all, or a few more."""
    names = list(runs.RUNS)
    number = 0
    while count > 0:
        source = random.Random(f"{seed} {number}")
        # In another order in each round, so that few cases are of all kinds.
        name = random.Random(f"{seed} {number // len(names)}").sample(names, len(names))[number % len(names)]
        kills = [_kill(source, name, place) for place in sorted(source.random() for _ in range(6))]
        forked = number % 8 != 7
        yield Case(
            f"{number} {name}",
            name,
            {
                "run": name,
                "kills": kills,
                "forked": forked,
            },
            weight=len(kills),
        )
        number += 1
        count -= len(kills)


def _kill(source: random.Random, name: str, place: float) -> dict[str, Any]:
    """Draw a kill at a ``place`` of the run, from 0 at its start to 1 at its end."""
    ranks, changes = runs.RUNS[name]
    if place < 0.1:
        phase = source.choice(["data", "build"])
        step = 0
    elif place < 0.26:
        phase = source.choice(["sft", "sft", "sft", "checkpoint"])
        step = round(place * 15)
    elif place < 0.3:
        phase = "export"
        step = 0
    elif place < 0.45 and "models" in changes.get("reward", {}):
        phase = source.choice(["reward_judge", "reward_judge", "export"])
        step = 1 + round(place * 5)
    elif place < 0.95:
        step = 1 + int((place - 0.3) / 0.65 * 6)
        phase = source.choice([*STEP_PHASES, "build", "resume"] if step > 2 else STEP_PHASES)
        step = 0 if phase in ("build", "resume") else step
    elif "same" in str(changes.get("checkpoint")):  # its last checkpoint is replaced by one for any layout
        phase = source.choice(["export", REPLACEMENT])
        step = 6
    else:
        phase = "export"
        step = 6

    victim = "torchrun" if source.random() < 0.2 else f"rank {source.randrange(ranks)}"
    victim = "rank 0" if phase == REPLACEMENT else victim  # who renames
    names, weights = SIGNALS[victim.split()[0]]
    sent = source.choices(names, weights)[0]

    return {
        "phase": phase,
        "step": step,
        "after": round(source.random(), 3),
        "victim": victim,
        "signal": sent,
    }


@dataclass
class Chain:
    """Hold one run while it is killed: its launcher, which start of it counts, and what it has announced."""

    config: Path
    ranks: int
    forked: bool
    ears: socket.socket
    durations: Mapping[str, float]
    launches: int = 0
    restarts: int = 0
    landed: list[str] = field(default_factory=list)
    launcher: subprocess.Popen[bytes] | None = None
    launchers: list[int] = field(default_factory=list)
    processes: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Start torchrun, as a person would after it ended."""
        self.launches = self.launches + 1
        self.restarts = 0
        port = self.ears.getsockname()[1]
        environment = {"CAMPAIGN_PORT": str(port), "CAMPAIGN_LAUNCH": str(self.launches)}
        self.launcher = runs.launch(self.config, self.ranks, forked=self.forked, env=environment)
        self.launchers.append(self.launcher.pid)

    def heard(self, seconds: float) -> dict[str, Any] | None:
        """Return the next announcement of this start's ranks, None when none comes in time."""
        self.ears.settimeout(seconds)
        try:
            message = json.loads(self.ears.recv(4096))
        except TimeoutError:
            return None

        if message["launch"] != self.launches or message["restart"] < self.restarts:
            return None
        if message["restart"] > self.restarts:
            raise Lost(f"ranks failed by themselves after {self.landed[-1:]}")

        self.processes[message["rank"]] = message["process"]
        return message


class Lost(Exception):
    """Say that a run failed though nothing was done to it."""


class Hang(Exception):
    """Say that a run gave no sign of life."""


def try_case(case: Case, work: Path) -> Result:
    """Run a chain and compare what it left with what the uninterrupted run left."""
    settings = case.settings
    expected, durations = uninterrupted(settings["run"], work)
    folder = work / case.name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    config = runs.write(settings["run"], folder, work)

    ranks = runs.RUNS[settings["run"]][0]
    with socket.socket(type=socket.SOCK_DGRAM) as ears:
        ears.bind(("127.0.0.1", 0))
        chain = Chain(config, ranks, settings["forked"], ears, durations)
        try:
            for kill in settings["kills"]:
                if not land(chain, kill):
                    break
            code = to_the_end(chain)
        except (Hang, Lost) as error:
            outcome = "hang" if isinstance(error, Hang) else "lost"
            return Result(outcome, f"{tail(folder)}\n{chain.landed}\n{error}", _counts(chain))
        finally:
            left = leave(chain)

    counts = _counts(chain)
    if code:
        return Result("lost", f"{tail(folder)}\n{chain.landed}\nexit code {code}", counts)

    differences = list(differing(expected, runs.recording(folder / "run")))
    if differences:
        return Result("lost", "\n".join([*chain.landed, *differences[:20]]), counts)

    left += [str(path) for path in (folder / "run").rglob("*") if path.suffix in runs.INCOMPLETE]
    left += [str(path) for path in (folder / "tmp").iterdir() if not KEPT_BY_OTHERS.fullmatch(path.name)]
    left += [name for name in os.listdir("/dev/shm") for pid in chain.launchers if f"-{pid}-" in name]
    if left:
        return Result("left over", "\n".join(left), counts)

    shutil.rmtree(folder)
    return Result(HELD, "; ".join(chain.landed), counts)


def land(chain: Chain, kill: Mapping[str, Any]) -> bool:
    """Wait for the kill's moment and send it; return False when the run ends before it comes."""
    if not await_moment(chain, kill["phase"], kill["step"]):
        return False

    time.sleep(kill["after"] * chain.durations.get(kill["phase"], 0.5))
    launcher = chain.launcher
    assert launcher is not None

    rank = None if kill["victim"] == "torchrun" else int(kill["victim"].split()[1])
    number = signal.Signals[kill["signal"]]
    if rank is None:
        if launcher.poll() is not None:
            return False
        launcher.send_signal(number)
        chain.landed.append(_words(kill))
        _await_end(chain)
        chain.launcher = None
        return True

    target = chain.processes.get(rank) or next(iter(chain.processes.values()))
    if _send(target, number):
        chain.landed.append(_words(kill))
        chain.restarts = chain.restarts + 1
        chain.processes = {}
    return True


def await_moment(chain: Chain, phase: str, step: int) -> bool:
    """Return True when a rank enters the phase at the step or later, False when the run ends before."""
    if chain.launcher is None:
        chain.start()

    limit = time.monotonic() + PATIENCE
    while True:
        message = chain.heard(0.5)
        if message is None:
            assert chain.launcher is not None
            if chain.launcher.poll() is not None:
                if chain.launcher.returncode == 0:
                    return False
                raise Lost(f"torchrun gave up with {chain.launcher.returncode}")
            if time.monotonic() > limit:
                raise Hang(f"nothing heard for {PATIENCE:.0f} s, waiting for {phase!r} of step {step}")
            continue

        limit = time.monotonic() + PATIENCE
        if message["phase"] == (phase or message["phase"]) and message["step"] >= step:
            return True


def to_the_end(chain: Chain) -> int:
    """Let the run end and return its exit code."""
    while chain.launcher is None or chain.launcher.poll() is None:
        await_moment(chain, "no such phase", 0)
    return chain.launcher.returncode


def _await_end(chain: Chain) -> None:
    """Wait until torchrun and its ranks have ended after a signal to torchrun."""
    assert chain.launcher is not None
    try:
        chain.launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise Hang(f"torchrun goes on after {chain.landed[-1]}") from None

    limit = time.monotonic() + LEAVING
    while left := runs.descendants(chain.launcher):
        if time.monotonic() > limit:
            raise Hang(f"{left} went on without torchrun after {chain.landed[-1]}")
        time.sleep(0.1)


def leave(chain: Chain) -> list[str]:
    """End whatever still runs and return what it was."""
    limit = time.monotonic() + 5
    launcher = chain.launcher
    while launcher is not None and (left := runs.descendants(launcher)) and time.monotonic() < limit:
        time.sleep(0.1)

    left = [] if launcher is None else runs.descendants(launcher)
    if launcher is not None and launcher.poll() is None:
        launcher.kill()
        launcher.wait()

    words = [f"process {process.pid}: {' '.join(process.cmdline())[:200]}" for process in left]
    for process in left:
        process.kill()
    return words


def uninterrupted(name: str, work: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what a run leaves that nothing interrupts, and its phases' seconds; made once per code."""
    folder = whole_folder(name, work)
    result = folder / "result.json"
    if not result.exists():
        shutil.rmtree(folder, ignore_errors=True)
        config = runs.write(name, folder, work)
        with socket.socket(type=socket.SOCK_DGRAM) as ears:
            ears.bind(("127.0.0.1", 0))
            chain = Chain(config, runs.RUNS[name][0], True, ears, {})
            chain.start()
            begun: list[tuple[str, float]] = []
            while chain.launcher is not None and chain.launcher.poll() is None:
                message = chain.heard(0.2)
                if message is not None and message["rank"] == 0:
                    begun.append((message["phase"], time.monotonic()))
            leave(chain)

        if chain.launcher is None or chain.launcher.returncode:
            raise RuntimeError(f"the uninterrupted run failed:\n{tail(folder)}")

        seconds: dict[str, list[float]] = {}
        for (phase, start), (_, end) in itertools.pairwise(begun):
            seconds.setdefault(phase, []).append(end - start)

        durations = {phase: sum(values) / len(values) for phase, values in seconds.items()}
        result.write_text(json.dumps([runs.recording(folder / "run"), durations]))

    expected, durations = json.loads(result.read_text())
    return expected, durations


def whole_folder(name: str, work: Path) -> Path:
    """Return where `uninterrupted` runs."""
    return work / "whole" / f"{name.replace(' ', '_')}_{runs.code_digest()}"


def wait_for(process: int, seconds: float) -> int | None:
    """Return the exit code of a child; None when it is killed after some time without an end."""
    limit = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.02)


def differing(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each value of nested mappings that differs, is missing or is too much."""
    if not isinstance(expected, dict) or not isinstance(found, dict):
        if expected != found:
            yield f"{place}: {str(expected)[:100]} became {str(found)[:100]}"
        return

    for name in sorted({*expected, *found}):
        # A run that has just resumed syncs what was synced before, and offloads other buffers; what an
        # attempt without a checkpoint wrote is kept under a numbered name.
        if name.startswith(("reshard/", "rows/", "offload/")) or re.search(r"\.\d+(\.jsonl)?$", name):
            continue
        inner = f"{place} {name}".strip()
        if name not in expected or name not in found:
            yield f"{inner}: {'missing' if name in expected else 'too much'}"
        else:
            yield from differing(expected[name], found[name], inner)


def _send(process: int, number: int) -> bool:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


def _words(kill: Mapping[str, Any]) -> str:
    return f"{kill['signal']} to {kill['victim']} in {kill['phase'] or 'any phase'} of step {kill['step']}"


def _counts(chain: Chain) -> dict[str, float]:
    kinds: Sequence[str] = [words.split(" in ")[0] for words in chain.landed]
    phases = [words.split(" in ")[1].split(" of ")[0] for words in chain.landed]
    who = [words.split()[0] + (" to torchrun" if "torchrun" in words else " to a rank") for words in kinds]
    how = "forked" if chain.forked else "executed"
    counts = {name: float(who.count(name)) for name in set(who)}
    counts |= {f"in {phase}": float(phases.count(phase)) for phase in set(phases)}
    return counts | {"kills in all": float(len(who)), f"kills of {how} ranks": float(len(who))}


def tail(folder: Path) -> str:
    """Return the end of what a run said."""
    return "\n".join((folder / "output").read_text(errors="replace").splitlines()[-60:])
