"""Prove machines: rates of devices and links, numbers of the kernel, and whole jobs of a small model."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.errors import UserError
from megatron_rl.launcher import leave_with_launcher, process_rank
from megatron_rl.metrics import read_metrics
from megatron_rl.planning.machine import Finding
from megatron_rl.shapes.hardware import GB, Constants, load_constants

STRAGGLER = 0.8
"""Below this share of the median's rate a rank is reported: it sets the pace of all."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far a loss and a gradient norm on all ranks may be from those on one, as a share."""
MAX_CLOCK_SPREAD = 1.0
SLOW_BYTES_PER_SECOND = {True: 50e6, False: 5e9}
"""Below these the links are reported as slow: between host processes, between accelerators."""
_STEPS = 2


@dataclass(frozen=True)
class Task:
    """Describe a job that every rank joins: what it shows, its command and its changes of the settings."""

    name: str
    shows: str
    command: str
    changes: tuple[str, ...]
    fix: str


def tasks(folder: Path, world: int) -> list[Task]:
    """Return the jobs in their order; what each leaves lies in a folder of its name.

    One rank alone has no parallelism to compare.
    """
    warm_up = (f"sft.data={folder / 'material/sft.jsonl'}", f"sft.steps={_STEPS}", "sft.rows_per_step=64")
    one = ("actor.layout={ranks: [0]}",)
    again = "resume a run of your own on one machine, and compare its metrics.jsonl with an uninterrupted one"
    jobs = [
        Task("one_rank", "a training step on one rank", "sft", (*warm_up, *one), "read the log of rank 0"),
        Task(
            "all_ranks",
            "the same step in tensor, pipeline and data parallelism",
            "sft",
            warm_up,
            "set NCCL_DEBUG=INFO and look for the first rank that stops; try fewer ranks",
        ),
        Task(
            "train",
            "rollout by vLLM in the same processes, verified weight transfer, sleep and wake, checkpoints",
            "train",
            (f"steps={_STEPS}",),
            "try rollout.engine=torch: if that passes, vLLM does not fit this machine",
        ),
        Task("train", "resume from the checkpoint", "train", (f"steps={_STEPS + 1}",), again),
    ]
    return [job for job in jobs if world > 1 or job.name != "all_ranks"]


def settings(folder: Path, world: int, *, on_host: bool) -> dict[str, Any]:
    """Return the configuration of the jobs: a small model in as many kinds of parallelism as ranks allow."""
    tensor = 2 if world % 2 == 0 else 1
    pipeline = 2 if world % (2 * tensor) == 0 else 1
    material = folder / "material"
    return {
        "model": {"path": str(material / "model"), "dtype": "float32" if on_host else "bfloat16"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "algorithm": {"name": "grpo"},
        "batch": {"prompts_per_step": 16, "samples_per_prompt": 4, "optimizer_steps": 2},
        "actor": {"layout": {"tensor": tensor, "pipeline": pipeline}, "offload": True},
        "rollout": {"tensor": tensor, "max_response_tokens": 8},
        "checkpoint": {"every": 1, "export": False},
    }


def prove(folder: Path, world: int) -> Iterator[Finding]:
    """Yield what each step found; an error is the last. Collective over the world."""
    from megatron_rl.distributed import device, watch
    from megatron_rl.distributed.exchange import barrier, gather_objects
    from megatron_rl.planning import probe

    leave_with_launcher()
    device.initialize(60.0)
    links = probe.probe_links(socket.gethostname())
    pairs = {name: probe.probe_pairs(ranks) for name, ranks in probe.neighbours(links.hosts).items()}
    devices, kernels = probe.probe_devices(), gather_objects(probe.probe_kernel())
    if device.rank() == 0:
        _write(folder, world, on_host=device.on_host())
    barrier()
    blind = [host for host, sees in gather_objects((links.hosts[device.rank()], _sees(folder))) if not sees]
    watch.leave()
    if world > 1:
        yield from link_findings(links)
        if not links.correct:
            return
    for name, pair in pairs.items():
        text = f"{pair.rate / GB:.2f} GB/s {name}, ranks {pair.slowest[0]} and {pair.slowest[1]} the slowest"
        fix = None if pair.correct else "what arrived is not what was sent: check driver, firmware and cables"
        yield Finding("ok" if pair.correct else "error", "point to point", text, fix)
    yield from rates(devices)
    wrong = [rank for rank, (right, _) in enumerate(kernels) if not right]
    text = kernels[wrong[0] if wrong else 0][1]
    fix = f"on ranks {wrong} torch computes log-probs instead: right, and slower" if wrong else None
    yield Finding("warning" if wrong else "ok", "log-prob kernel", text, fix)
    if blind:
        fix = "name a folder on a file system that all machines share: --out FOLDER"
        yield Finding("error", "shared folder", f"{folder} of rank 0 is not seen on {blind[0]}", fix)
        return
    for task in tasks(folder, world):
        finding = _do(task, folder)
        if finding.level == "ok" and task.name == "all_ranks":
            finding = compare(folder, finding, TOLERANCE["float32" if device.on_host() else "bfloat16"])
        yield finding
        if finding.level == "error":
            return
    yield from measured(folder)
    constants = load_constants()
    override = measured_constants(devices, {name: pair.rate for name, pair in pairs.items()}, constants)
    if override and process_rank() == 0:
        file = folder / "constants.json"
        file.write_text(json.dumps(override, indent=1) + "\n")
        yield Finding("ok", "for plan", f"python -m megatron_rl plan MODEL --gpus {world} --constants {file}")


def link_findings(links: Any) -> list[Finding]:
    """Return what a `LinkProbe` says of the links between ranks and of their clocks."""
    from megatron_rl.distributed import device

    ranks, machines = len(links.hosts), len(set(links.hosts))
    rate = links.bus_bandwidth
    text = (
        f"{ranks} ranks on {machines} machine{'s' if machines > 1 else ''}: {links.bytes / 2**20:.0f} MiB in "
        f"{links.seconds * 1e3:.1f} ms, {rate / 1e9:.2f} GB/s per rank"
    )
    findings = []
    if not links.correct:
        findings.append(
            Finding("error", "all-reduce", f"wrong sum; {text}", "check the network's driver and firmware")
        )
    elif rate < SLOW_BYTES_PER_SECOND[device.on_host()]:
        fix = "check that ranks use the fast network interface, and that nothing else runs on the machines"
        findings.append(Finding("warning", "all-reduce", f"slow: {text}", fix))
    else:
        findings.append(Finding("ok", "all-reduce", text))
    spread = f"clocks differ by at most {links.clock_spread * 1e3:.0f} ms"
    late = links.clock_spread > MAX_CLOCK_SPREAD
    fix = "run a time daemon (chrony, ntpd) on every machine" if late else None
    findings.append(Finding("warning" if late else "ok", "clocks", spread, fix))
    return findings


def rates(devices: Sequence[Any]) -> Iterator[Finding]:
    """Yield the rates of the slowest rank, and a warning where it is far behind the others."""
    for name, field, unit, scale in (
        ("matrix product", "flops", "TFLOP/s bfloat16", 1e12),
        ("memory", "memory", "GB/s", GB),
        ("to the host", "host", "GB/s", GB),
    ):
        values = [getattr(probe, field) for probe in devices]
        if values[0] is None:
            continue
        slowest = min(range(len(values)), key=values.__getitem__)
        late = values[slowest] < STRAGGLER * median(values)
        text = f"{values[slowest] / scale:.3g} {unit} on rank {slowest}, the slowest of {len(values)}"
        if not late:
            yield Finding("ok", name, text)
            continue
        fix = "look for other jobs, clocks that are held back, and a slot that is not the others'"
        yield Finding("warning", name, f"{text}; median {median(values) / scale:.3g}", fix)


def _write(folder: Path, world: int, *, on_host: bool) -> None:
    """Write model, data and configuration anew; what an earlier proof left goes."""
    from megatron_rl.data import quickstart

    if not _sees(folder) and folder.exists() and any(folder.iterdir()):
        raise UserError(
            "the folder of the proof holds something else",
            where="--out",
            expected="an empty folder, or one of an earlier proof",
            got=str(folder),
            fix="name another folder",
        )
    for name in {task.name for task in tasks(folder, 2)} | {"material", "logs"}:
        shutil.rmtree(folder / name, ignore_errors=True)
    quickstart.make(folder / "material", "small" if on_host else "medium")
    (folder / "proof.yaml").write_text(yaml.safe_dump(settings(folder, world, on_host=on_host)))
    (folder / "logs").mkdir(exist_ok=True)


def _sees(folder: Path) -> bool:
    return (folder / "proof.yaml").is_file()


def _do(task: Task, folder: Path) -> Finding:
    """Take part in a job in a process of its own; every rank calls it. The ranks meet as at a restart."""
    begun, log = time.monotonic(), folder / f"logs/{task.name}_{process_rank()}.log"
    run_dir = f"run_dir={folder / task.name}"
    command = [
        sys.executable,
        "-m",
        "megatron_rl",
        task.command,
        str(folder / "proof.yaml"),
        run_dir,
        *task.changes,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    with log.open("wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        said = log.read_text(errors="replace").strip()[-3000:]
        return Finding("error", task.shows, f"exit code {code}; the end of {log}:\n{said}", task.fix)
    return Finding("ok", task.shows, f"{time.monotonic() - begun:.0f} s")


def compare(folder: Path, finding: Finding, tolerance: float) -> Finding:
    """Return how far the steps on all ranks are from those on one; an error beyond ``tolerance``."""
    names = ("sft/loss", "sft/grad_norm")
    alone, together = (
        read_metrics(RunFolder(folder / name).stage_metrics("sft")) for name in ("one_rank", "all_ranks")
    )
    differences = [
        (
            abs(right[name] - left[name]) / abs(left[name]),
            f"{name} of step {left['step']}: {left[name]}, {right[name]}",
        )
        for left, right in zip(alone, together, strict=True)
        for name in names
    ]
    worst, words = max(differences)
    text = f"{finding.text}; loss and gradient norm as on one rank, to {worst:.1g} of them"
    if worst <= tolerance:
        return Finding("ok", finding.name, text)
    fix = "keep both folders and report them: no run on these machines can be trusted"
    return Finding("error", finding.name, f"{words}, which differ by {worst:.2%}", fix)


def measured(folder: Path) -> Iterator[Finding]:
    """Yield the rates of the last step of the small model's run."""
    lines = read_metrics(RunFolder(folder / "train").metrics)
    last = lines[-1]
    # A step's line has what came since the one before: the first that the same process saved.
    checkpoint = next(line["time/checkpoint"] for line in lines if "time/checkpoint" in line)
    sync = last["reshard/bytes_received_max"] + last["reshard/bytes_local_max"]
    yield Finding(
        "ok",
        "a verified weight sync",
        f"{sync / 2**20:.1f} MiB a rank in {last['time/reshard'] * 1e3:.1f} ms",
    )
    yield Finding(
        "ok",
        "trainer and rollout",
        f"log-probs differ by {last['mismatch/abs_diff']:.2g} a token; one step {last['time/step']:.2f} s, "
        f"a checkpoint {checkpoint:.2f} s",
    )


def measured_constants(
    devices: Sequence[Any], pairs: Mapping[str, float], constants: Constants
) -> dict[str, Any]:
    """Return an override of the planner's constants with what was measured, empty for a device unknown to it.

    The planner multiplies a link's nominal rate by the share that is achieved, so the rate that is written is
    the measured one over that share. The slowest rank counts.
    """
    from megatron_rl.planning.probe import ACROSS, WITHIN

    known = [name for name in constants.gpus if name.split("-")[0].lower() in devices[0].name.lower().split()]
    if not known:
        return {}
    gpu, achieved = constants.gpus[known[0]], constants.efficiency
    slowest = {
        field: min(getattr(probe, field) for probe in devices) for field in ("flops", "memory", "host")
    }
    rates = {
        "gemm_efficiency": min(1.0, slowest["flops"] / gpu.bf16_flops),
        "hbm_terabytes_per_second": slowest["memory"] / achieved.hbm / 1e12,
        "host_gigabytes_per_second": slowest["host"] / achieved.host / GB,
    }
    if WITHIN in pairs:
        rates["nvlink_gigabytes_per_second"] = pairs[WITHIN] / achieved.nvlink / GB
    if ACROSS in pairs:
        rates["network_gigabits"] = pairs[ACROSS] / achieved.network / GB * 8
    return {
        "comment": "measured by doctor --gpu",
        "gpus": {gpu.name: {k: round(v, 3) for k, v in rates.items()}},
    }
