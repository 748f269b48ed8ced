"""Kill runs at random points, repeatedly: their result equals the uninterrupted run's to the last bit.

A case is a chain: one run under torchrun with restarts, and several signals, each to a rank or to torchrun,
in a phase of the run and at a moment inside it. A torchrun that ends is started again, as a person would do.
Most chains fork their ranks (`forked`); every eighth executes Python as a user does.
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
"""Seconds without a message after which a run counts as hanging."""
END_SECONDS = 60.0
"""Seconds for the ranks to end in after torchrun has ended, on a busy machine."""
FOREIGN_FOLDERS = re.compile(r"torchelastic_.*|torchinductor_.*|tmp.*wandb-\w+")
"""Temporary folders of other programs: torchrun's logs, torch's cache, and wandb's, which a kill leaves over.

Megatron-Core imports wandb if it is installed, and wandb creates folders at its import.
"""
REPLACEMENT = "replacement"
"""Name of the moment between two renames, which `rank.py` announces as a phase."""
STEP_PHASES = (
    "generate",
    "reward",
    "score",
    "estimate",
    "learn",
    "evaluate",
    "checkpoint",
    "",
)
SIGNALS = {
    "rank": (["SIGKILL", "SIGUSR1"], [9, 1]),
    "torchrun": (["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"], [6, 2, 1, 1]),
}


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield chains with at least ``count`` kills in total."""

    names = list(runs.RUNS)
    index = 0
    while count > 0:
        source = random.Random(f"{seed} {index}")
        # Each round has an order of its own, so that few cases already cover every kind of run.
        name = random.Random(f"{seed} {index // len(names)}").sample(names, len(names))[index % len(names)]
        # Six kills at sorted moments, from the start of the run to its end.
        kills = [_kill(source, name, progress) for progress in sorted(source.random() for _ in range(6))]
        forked = index % 8 != 7
        yield Case(
            f"{index} {name}",
            name,
            {
                "run": name,
                "kills": kills,
                "forked": forked,
            },
            weight=len(kills),
        )
        index += 1
        count -= len(kills)


def _kill(source: random.Random, name: str, progress: float) -> dict[str, Any]:
    """Draw a kill at a ``progress`` of the run, from 0 at its start to 1 at its end."""
    ranks, changes = runs.RUNS[name]
    # The stretches of progress follow the phases of a run: set-up, SFT, reward model, steps, export.
    if progress < 0.1:
        phase = source.choice(["data", "build"])
        step = 0
    elif progress < 0.26:
        phase = source.choice(["sft", "sft", "sft", "checkpoint"])
        step = round(progress * 15)
    elif progress < 0.3:
        phase = "export"
        step = 0
    elif progress < 0.45 and "models" in changes.get("reward", {}):
        phase = source.choice(["reward_judge", "reward_judge", "export"])
        step = 1 + round(progress * 5)
    elif progress < 0.95:
        step = 1 + int((progress - 0.3) / 0.65 * 6)
        # A resumed run builds its models again, so "build" and "resume" also occur after step 2.
        phase = source.choice([*STEP_PHASES, "build", "resume"] if step > 2 else STEP_PHASES)
        if phase in ("build", "resume"):
            step = 0
    elif "same" in str(
        changes.get("checkpoint")
    ):  # its last checkpoint is replaced by one that any layout can load
        phase = source.choice(["export", REPLACEMENT])
        step = 6
    else:
        phase = "export"
        step = 6

    # One signal in five goes to torchrun, whose ranks must end with it.
    victim = "torchrun" if source.random() < 0.2 else f"rank {source.randrange(ranks)}"
    if phase == REPLACEMENT:
        victim = "rank 0"  # the rank that renames
    names, weights = SIGNALS[victim.split()[0]]
    signal_name = source.choices(names, weights)[0]

    return {
        "phase": phase,
        "step": step,
        "after": round(source.random(), 3),
        "victim": victim,
        "signal": signal_name,
    }


@dataclass
class Chain:
    """One run while it is killed."""

    config: Path
    ranks: int
    forked: bool
    listener: socket.socket
    durations: Mapping[str, float]
    """Phase -> its mean seconds in the uninterrupted run."""
    launches: int = 0
    """Number of times that torchrun was started; older starts' messages are ignored."""
    restarts: int = 0
    """Restarts by torchrun that this start's kills explain."""
    sent: list[str] = field(default_factory=list)
    """Descriptions of the signals that were sent."""
    launcher: subprocess.Popen[bytes] | None = None
    launchers: list[int] = field(default_factory=list)
    """Process IDs of all launchers."""
    processes: dict[int, int] = field(default_factory=dict)
    """Rank -> its process ID, as announced since the last restart."""

    def start(self) -> None:
        """Start torchrun, as a person would after it ended."""
        self.launches = self.launches + 1
        self.restarts = 0
        port = self.listener.getsockname()[1]
        environment = {
            "CAMPAIGN_PORT": str(port),
            "CAMPAIGN_LAUNCH": str(self.launches),
        }
        self.launcher = runs.launch(self.config, self.ranks, forked=self.forked, env=environment)
        self.launchers.append(self.launcher.pid)

    def next_message(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message of this start's ranks, or None if none arrives in time."""

        self.listener.settimeout(seconds)
        try:
            message = json.loads(self.listener.recv(4096))
        except TimeoutError:
            return None

        # Messages of an older start or restart may arrive late.
        if message["launch"] != self.launches or message["restart"] < self.restarts:
            return None
        # torchrun restarts ranks only after a failure: a restart without a signal is one.
        if message["restart"] > self.restarts:
            raise Lost(f"ranks failed by themselves after {self.sent[-1:]}")

        self.processes[message["rank"]] = message["process"]
        return message


class Lost(Exception):
    """A run failed without a signal."""


class Hang(Exception):
    """A run sent no message for `PATIENCE` seconds."""


def try_case(case: Case, work: Path) -> Result:
    """Run a chain and compare its result with the uninterrupted run's."""
    settings = case.settings
    # Phases of the uninterrupted run are as long as those of this one.
    expected, durations = uninterrupted(settings["run"], work)
    folder = work / case.name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    config = runs.write(settings["run"], folder, work)

    ranks = runs.RUNS[settings["run"]][0]
    with socket.socket(type=socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        chain = Chain(config, ranks, settings["forked"], listener, durations)
        try:
            for kill in settings["kills"]:
                if not send_kill(chain, kill):
                    break
            code = wait_for_end(chain)
        except (Hang, Lost) as error:
            outcome = "hang" if isinstance(error, Hang) else "lost"
            return Result(
                outcome,
                f"{tail(folder)}\n{chain.sent}\n{error}",
                _counts(chain),
            )
        finally:
            remaining = end_run(chain)

    counts = _counts(chain)
    if code:
        return Result("lost", f"{tail(folder)}\n{chain.sent}\nexit code {code}", counts)

    differences = list(differing_values(expected, runs.recording(folder / "run")))
    if differences:
        return Result("lost", "\n".join([*chain.sent, *differences[:20]]), counts)

    # Nothing may remain: incomplete files, temporary files, shared memory of the launchers.
    remaining += [str(path) for path in (folder / "run").rglob("*") if path.suffix in runs.INCOMPLETE]
    remaining += [
        str(path) for path in (folder / "tmp").iterdir() if not FOREIGN_FOLDERS.fullmatch(path.name)
    ]
    remaining += [name for name in os.listdir("/dev/shm") for pid in chain.launchers if f"-{pid}-" in name]
    if remaining:
        return Result("left over", "\n".join(remaining), counts)

    shutil.rmtree(folder)
    return Result(HELD, "; ".join(chain.sent), counts)


def send_kill(chain: Chain, kill: Mapping[str, Any]) -> bool:
    """Wait for the kill's moment and send the signal; return False if the run ends before."""
    if not await_moment(chain, kill["phase"], kill["step"]):
        return False

    # A random moment inside the phase.
    time.sleep(kill["after"] * chain.durations.get(kill["phase"], 0.5))
    # A signal to torchrun ends it with its ranks, and the chain starts it again.
    launcher = chain.launcher
    assert launcher is not None

    rank = None if kill["victim"] == "torchrun" else int(kill["victim"].split()[1])
    signal_number = signal.Signals[kill["signal"]]
    if rank is None:
        if launcher.poll() is not None:
            return False
        launcher.send_signal(signal_number)
        chain.sent.append(_describe(kill))
        _await_end(chain)
        chain.launcher = None
        return True

    # A rank that has sent no message yet is replaced by one that has.
    target = chain.processes.get(rank) or next(iter(chain.processes.values()))
    if _send(target, signal_number):
        chain.sent.append(_describe(kill))
        chain.restarts = chain.restarts + 1
        chain.processes = {}
    return True


def await_moment(chain: Chain, phase: str, step: int) -> bool:
    """Wait until a rank enters the phase at the step or later; return False if the run ends before."""
    if chain.launcher is None:
        chain.start()

    limit = time.monotonic() + PATIENCE
    while True:
        message = chain.next_message(0.5)
        if message is None:
            assert chain.launcher is not None
            if chain.launcher.poll() is not None:
                if chain.launcher.returncode == 0:
                    return False
                raise Lost(f"torchrun gave up with {chain.launcher.returncode}")
            if time.monotonic() > limit:
                raise Hang(f"no message for {PATIENCE:.0f} s, waiting for {phase!r} of step {step}")
            continue

        limit = time.monotonic() + PATIENCE
        if message["phase"] == (phase or message["phase"]) and message["step"] >= step:
            return True


def wait_for_end(chain: Chain) -> int:
    """Wait for the end of the run and return its exit code."""
    while chain.launcher is None or chain.launcher.poll() is None:
        await_moment(chain, "no such phase", 0)
    return chain.launcher.returncode


def _await_end(chain: Chain) -> None:
    """Wait until torchrun and its ranks have ended after a signal to torchrun."""
    assert chain.launcher is not None
    try:
        chain.launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise Hang(f"torchrun still runs after {chain.sent[-1]}") from None

    limit = time.monotonic() + END_SECONDS
    while remaining := runs.descendants(chain.launcher):
        if time.monotonic() > limit:
            raise Hang(f"{remaining} still run without torchrun after {chain.sent[-1]}")
        time.sleep(0.1)


def end_run(chain: Chain) -> list[str]:
    """Kill all remaining processes and return a description of each."""
    limit = time.monotonic() + 5
    launcher = chain.launcher
    while launcher is not None and (remaining := runs.descendants(launcher)) and time.monotonic() < limit:
        time.sleep(0.1)

    if launcher is None:
        return []

    remaining = runs.descendants(launcher)
    if launcher.poll() is None:
        launcher.kill()
        launcher.wait()

    lines = [f"process {process.pid}: {' '.join(process.cmdline())[:200]}" for process in remaining]
    for process in remaining:
        process.kill()
    return lines


def uninterrupted(name: str, work: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the uninterrupted run's recording and the seconds of its phases; it runs once per code state."""
    folder = uninterrupted_folder(name, work)
    result = folder / "result.json"
    if not result.exists():
        shutil.rmtree(folder, ignore_errors=True)
        config = runs.write(name, folder, work)
        with socket.socket(type=socket.SOCK_DGRAM) as listener:
            listener.bind(("127.0.0.1", 0))
            chain = Chain(config, runs.RUNS[name][0], True, listener, {})
            chain.start()
            phase_starts: list[tuple[str, float]] = []
            while chain.launcher is not None and chain.launcher.poll() is None:
                message = chain.next_message(0.2)
                if message is not None and message["rank"] == 0:
                    phase_starts.append((message["phase"], time.monotonic()))
            end_run(chain)

        if chain.launcher is None or chain.launcher.returncode:
            raise RuntimeError(f"the uninterrupted run failed:\n{tail(folder)}")

        seconds: dict[str, list[float]] = {}
        # A phase ends where the next one of rank 0 starts.
        for (phase, start), (_, end) in itertools.pairwise(phase_starts):
            seconds.setdefault(phase, []).append(end - start)

        durations = {phase: sum(values) / len(values) for phase, values in seconds.items()}
        result.write_text(json.dumps([runs.recording(folder / "run"), durations]))

    expected, durations = json.loads(result.read_text())
    return expected, durations


def uninterrupted_folder(name: str, work: Path) -> Path:
    """Return the folder in which `uninterrupted` runs."""
    return work / "whole" / f"{name.replace(' ', '_')}_{runs.code_digest()}"


def wait_for(process: int, seconds: float) -> int | None:
    """Return the exit code of a child process, or None after killing it at the end of ``seconds``."""
    limit = time.monotonic() + seconds
    while True:
        finished, status = os.waitpid(process, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.02)


def differing_values(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value of nested mappings that differs, is missing or is superfluous."""
    if not isinstance(expected, dict) or not isinstance(actual, dict):
        if expected != actual:
            yield f"{path}: {str(expected)[:100]} became {str(actual)[:100]}"
        return

    for name in sorted({*expected, *actual}):
        # A run that has just resumed syncs weights again and offloads other buffers. Files of an attempt
        # without a checkpoint are renamed with a number.
        if name.startswith(("reshard/", "rows/", "offload/")) or re.search(r"\.\d+(\.jsonl)?$", name):
            continue
        inner = f"{path} {name}".strip()
        if name not in expected or name not in actual:
            yield f"{inner}: {'missing' if name in expected else 'too much'}"
        else:
            yield from differing_values(expected[name], actual[name], inner)


def _send(process: int, signal_number: int) -> bool:
    try:
        os.kill(process, signal_number)
    except ProcessLookupError:
        return False
    return True


def _describe(kill: Mapping[str, Any]) -> str:
    return f"{kill['signal']} to {kill['victim']} in {kill['phase'] or 'any phase'} of step {kill['step']}"


def _counts(chain: Chain) -> dict[str, float]:
    """Return the sums for the table: kills by victim, by phase and in total."""
    signals: Sequence[str] = [description.split(" in ")[0] for description in chain.sent]
    phases = [description.split(" in ")[1].split(" of ")[0] for description in chain.sent]
    # The table counts ranks together.
    victims = [re.sub(r" to rank \d+", " to a rank", description) for description in signals]
    start_method = "forked" if chain.forked else "executed"
    counts = {name: float(victims.count(name)) for name in set(victims)}
    counts |= {f"in {phase}": float(phases.count(phase)) for phase in set(phases)}
    return counts | {
        "kills in all": float(len(victims)),
        f"kills of {start_method} ranks": float(len(victims)),
    }


def tail(folder: Path) -> str:
    """Return the last lines of a run's output."""
    return "\n".join((folder / "output").read_text(errors="replace").splitlines()[-60:])
