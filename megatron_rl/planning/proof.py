"""Test machines: rates of devices and links, accuracy of the log-prob kernel, and small training jobs.

`doctor --gpu` runs `validate_machine` on every rank. It first measures devices and links over its own process
group (`probe_links`, `probe_pairs`, `probe_devices`, `probe_log_prob_kernels`), then trains a small model.
Each training job runs in separate processes, so that a job that hangs or crashes becomes a finding and does
not end the test.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.data import quickstart
from megatron_rl.distributed import device, watch
from megatron_rl.distributed.exchange import barrier, gather_objects
from megatron_rl.errors import UserError
from megatron_rl.launcher import process_rank, watch_launcher
from megatron_rl.megatron.log_probs import kernels_work, measure_kernel_errors
from megatron_rl.metrics import read_metrics
from megatron_rl.planning.machine import Finding
from megatron_rl.shapes.hardware import GB, Constants, load_constants

WITHIN = "within a machine"
ACROSS = "across machines"
STRAGGLER = 0.8
"""Fraction of the median rate below which there is a warning: the slowest rank delays all others."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Tolerated relative difference of loss and gradient norm between all ranks and one rank, by dtype."""
MAX_CLOCK_SPREAD = 1.0
"""Difference of the machines' clocks, in seconds, above which there is a warning."""
SLOW_HOST_LINK = 50e6
"""Bytes per second below which links between processes on the host are reported as slow."""
SLOW_LINK = 5e9
"""Bytes per second below which links between accelerators are reported as slow."""
_REPEATS = 5
"""Number of timed repetitions of a measurement, after one repetition to warm up."""
_MIB = 2**20
_JOIN_SECONDS = 60.0
"""Timeout in seconds of the rendezvous and of each collective of the measurements."""
_STEPS = 2
"""Number of training steps of each small job."""
_LOG_TAIL = 3000
"""Maximum number of characters of a failed job's log that are printed."""


# ---------------------------------------------------------------- measurements


@dataclass(frozen=True)
class LinkProbe:
    """Measurement of all-reduces over all ranks, and of the differences between the ranks' clocks.

    Example: 16 MiB in 0.7 ms between two machines, ``LinkProbe(2**24, 7e-4, True, 0.01, ("a", "b"))``.
    """

    bytes: int
    """Bytes of one all-reduce."""
    seconds: float
    """Median seconds of one all-reduce, on the slowest rank."""
    correct: bool
    """Whether the sum of the all-reduce was correct on every rank."""
    clock_spread: float
    """Largest difference between the ranks' wall clocks in seconds, accurate to the duration of a barrier."""
    hosts: tuple[str, ...]
    """Machine names by rank."""

    @property
    def bus_bandwidth(self) -> float:
        """Return the bus bandwidth in bytes/s: each of n ranks in a ring sends 2 (n - 1) / n of the data."""
        ranks = len(self.hosts)
        return 2 * (ranks - 1) / ranks * self.bytes / self.seconds


def probe_links(host_name: str, mebibytes: int = 16) -> LinkProbe:
    """Time all-reduces over all ranks, and compare the ranks' clocks. Collective over the world.

    ``host_name`` is the name of this rank's machine, and ``mebibytes`` the size of an all-reduce.
    """
    # Rank r contributes r + 1 to every element (float32), so n ranks have the sum n (n + 1) / 2.
    num_elements = mebibytes * _MIB // 4
    expected_sum = device.world_size() * (device.world_size() + 1) / 2
    rank_seconds = []
    is_correct = True
    for _ in range(_REPEATS + 1):
        values = torch.full((num_elements,), float(device.rank() + 1), device=device.device())
        barrier()
        seconds = _time_call(lambda values=values: dist.all_reduce(values))
        rank_seconds.append(seconds)
        is_correct = is_correct and bool((values == expected_sum).all())

    # Read the clocks right after a barrier, so that all ranks read them at the same time. The first
    # all-reduce was a warm-up.
    barrier()
    clocks = gather_objects(time.time())
    return LinkProbe(
        bytes=num_elements * 4,
        seconds=max(gather_objects(median(rank_seconds[1:]))),
        correct=all(gather_objects(is_correct)),
        clock_spread=max(clocks) - min(clocks),
        hosts=tuple(gather_objects(host_name)),
    )


def neighbour_pairs(hosts: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Divide the ranks into pairs `WITHIN` machines and pairs `ACROSS` machines.

    ``hosts`` are machine names by rank. A pair within a machine consists of neighbouring ranks. A pair across
    machines consists of the ranks with the same index on two machines. A rank without a partner is in no
    pair. The result maps `WITHIN` and `ACROSS` to their pairs; a kind without pairs is omitted.
    """
    ranks_by_host: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        ranks_by_host[host].append(rank)
    machines = list(ranks_by_host.values())

    # `zip` drops the last rank of an odd number of ranks, which has no partner.
    pairs_within: list[tuple[int, int]] = []
    for ranks in machines:
        pairs_within += zip(ranks[::2], ranks[1::2], strict=False)
    pairs_across: list[tuple[int, int]] = []
    for first_ranks, second_ranks in zip(machines[::2], machines[1::2], strict=False):
        pairs_across += zip(first_ranks, second_ranks, strict=False)

    pairs_by_kind = {WITHIN: pairs_within, ACROSS: pairs_across}
    return {kind: pairs for kind, pairs in pairs_by_kind.items() if pairs}


@dataclass(frozen=True)
class PairProbe:
    """Measurement of messages between the ranks of all pairs at the same time.

    Example: ``PairProbe(rate=180e9, slowest=(2, 3), correct=True)``.
    """

    rate: float
    """Bytes per second in one direction of the slowest pair."""
    slowest: tuple[int, int]
    """Ranks of the slowest pair."""
    correct: bool
    """Whether every rank received the data that its partner sent."""


def probe_pairs(pairs: Sequence[tuple[int, int]], mebibytes: int = 16) -> PairProbe:
    """Time messages between the ranks of each pair, all pairs at the same time. Collective over the world.

    ``mebibytes`` is the size of a message. Call `probe_links` before: a collective of all ranks must have
    initialised the communicator.
    """
    num_elements = mebibytes * _MIB // 4
    rank = device.rank()
    partner = _partner_of(rank, pairs)
    outgoing = torch.full((num_elements,), float(rank), device=device.device())
    incoming = torch.empty_like(outgoing)

    def exchange(partner: int) -> None:
        send = dist.P2POp(dist.isend, outgoing, partner)
        receive = dist.P2POp(dist.irecv, incoming, partner)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    rank_seconds = []
    is_correct = True
    for _ in range(_REPEATS + 1):
        # The barrier is collective over the world, so ranks without a partner take part.
        barrier()
        if partner is not None:
            rank_seconds.append(_time_call(lambda: exchange(partner)))
            is_correct = is_correct and bool((incoming == partner).all())

    # Find the slowest pair. A rank without a partner has no measurement.
    median_seconds = 0.0
    if rank_seconds:
        median_seconds = median(rank_seconds[1:])
    seconds = gather_objects(median_seconds)
    slowest_pair = max(pairs, key=lambda pair: max(seconds[pair[0]], seconds[pair[1]]))
    slowest_seconds = max(seconds[rank] for rank in slowest_pair)
    return PairProbe(
        rate=num_elements * 4 / slowest_seconds,
        slowest=slowest_pair,
        correct=all(gather_objects(is_correct)),
    )


def _partner_of(rank: int, pairs: Sequence[tuple[int, int]]) -> int | None:
    """Return the partner of ``rank`` in its pair, or None for a rank without a pair."""
    for first, second in pairs:
        if rank == first:
            return second
        if rank == second:
            return first
    return None


@dataclass(frozen=True)
class DeviceProbe:
    """Rates of one rank's device.

    Example: ``DeviceProbe("NVIDIA H100 80GB HBM3", flops=650e12, memory=2.9e12, host=22e9)``.
    """

    name: str
    """Name that the device reports."""
    flops: float
    """FLOP/s of a large matrix product in bfloat16."""
    memory: float
    """Bytes per second of its memory."""
    host: float | None
    """Bytes per second from the device to host memory, or None if the device is the host."""


def probe_devices() -> list[DeviceProbe]:
    """Measure the rates of all devices at the same time; return them by rank. Collective over the world."""
    # A GPU reaches its full rate only with large matrices, for which a host would take minutes.
    size = 8192
    block_bytes = 1024 * _MIB
    if device.on_host():
        size = 512
        block_bytes = 32 * _MIB

    # Use random values: with constant values, GPUs draw less power and run at higher clocks than in training.
    matrix = torch.randn(size, size, device=device.device()).to(torch.bfloat16)
    other_matrix = torch.randn(size, size, device=device.device()).to(torch.bfloat16)
    block = torch.zeros(block_bytes, dtype=torch.uint8, device=device.device())
    copy = torch.empty_like(block)

    # Start all measurements at the same time: devices may share power, memory or a link to the host.
    barrier()

    # A product of n x n matrices takes 2 n^3 FLOPs. A copy reads and writes each byte.
    product_seconds = _median_call_seconds(lambda: matrix @ other_matrix)
    copy_seconds = _median_call_seconds(lambda: copy.copy_(block))
    host_rate = None
    if not device.on_host():
        buffer = device.allocate_host_buffer(len(block) // 4)
        host_seconds = _median_call_seconds(lambda: buffer.copy_(block[: len(buffer)], non_blocking=True))
        host_rate = len(buffer) / host_seconds

    probe = DeviceProbe(
        device.product_name(),
        flops=2 * size**3 / product_seconds,
        memory=2 * len(block) / copy_seconds,
        host=host_rate,
    )
    return gather_objects(probe)


def probe_log_prob_kernels() -> tuple[bool, str]:
    """Return whether the log-prob kernels are accurate on this rank's device, and their errors as text."""
    if device.on_host():
        return True, "no accelerator: log-probs are computed by torch"

    # The reference is a computation in float64. The gradient has one error for each class of tokens:
    # "certain" tokens have a probability above 0.99, "rare" tokens a probability below 0.01.
    value_error, gradient_errors = measure_kernel_errors(torch.bfloat16)
    gradient_text = ", ".join(
        f"{token_class} tokens {error:.2%}" for token_class, error in gradient_errors.items()
    )
    text = f"log-probs within {value_error:.2g} of float64; gradients: {gradient_text}"
    return kernels_work(torch.bfloat16), text


def _median_call_seconds(call: Callable[[], object]) -> float:
    """Return the median seconds of several calls of a function, after one call to warm up."""
    seconds = [_time_call(call) for _ in range(_REPEATS + 1)]
    return median(seconds[1:])


def _time_call(call: Callable[[], object]) -> float:
    """Return the seconds of one call of a function, with the device synchronised before and after it."""
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - start


# ---------------------------------------------------------------- small jobs


@dataclass(frozen=True)
class SmallJob:
    """Small job in which every rank takes part, in a separate process.

    Example: ``SmallJob("train", "resume from the checkpoint", "train", ("steps=3",), "compare metrics")``.
    """

    name: str
    """Name of the job's run folder in the folder of the test (``--out``)."""
    capability: str
    """Description of what the job tests, which is the name of its finding."""
    command: str
    """Command of megatron_rl, such as ``train``."""
    overrides: tuple[str, ...]
    """Overrides of the configuration of `job_settings`."""
    fix: str
    """Fix in the finding if the job fails."""


def list_small_jobs(folder: Path, world: int) -> list[SmallJob]:
    """Return the small training jobs that `validate_machine` runs, in their order.

    ``folder`` contains their data and runs, and ``world`` is the number of ranks. With a single rank, the job
    that compares all ranks with one rank is omitted.
    """
    sft_settings = (
        f"sft.data={folder / 'material/sft.jsonl'}",
        f"sft.steps={_STEPS}",
        "sft.rows_per_step=64",
    )

    # The first two jobs train the same steps, so that `compare_steps` can compare them.
    jobs = [
        SmallJob(
            "one_rank",
            "a training step on one rank",
            "sft",
            (*sft_settings, "actor.layout={ranks: [0]}"),
            "read the log of rank 0",
        ),
        SmallJob(
            "all_ranks",
            "the same step in tensor, pipeline and data parallelism",
            "sft",
            sft_settings,
            "set NCCL_DEBUG=INFO and look for the first rank that stops; try fewer ranks",
        ),
        SmallJob(
            "train",
            "rollout by vLLM in the same processes, verified weight transfer, sleep and wake, checkpoints",
            "train",
            (f"steps={_STEPS}",),
            "try rollout.engine=torch: if that passes, vLLM does not fit this machine",
        ),
        # This job has the run folder of the previous job, so that it resumes from its checkpoint.
        SmallJob(
            "train",
            "resume from the checkpoint",
            "train",
            (f"steps={_STEPS + 1}",),
            "resume a run of your own on one machine and compare its metrics.jsonl with an uninterrupted one",
        ),
    ]

    # With a single rank, the second job would repeat the first job.
    return [job for job in jobs if world > 1 or job.name != "all_ranks"]


def job_settings(folder: Path, world: int, *, on_host: bool) -> dict[str, Any]:
    """Return the configuration of the training jobs that test a machine (`list_small_jobs`).

    The jobs use tensor and pipeline parallelism if ``world``, the number of ranks, is large enough.
    ``folder`` contains the data and the runs of the jobs. ``on_host``: whether the jobs run on CPUs instead
    of GPUs.
    """
    # Tensor parallelism 2 needs two ranks; together with pipeline parallelism 2 it needs four.
    tensor = 1
    if world % 2 == 0:
        tensor = 2
    pipeline = 1
    if world % (2 * tensor) == 0:
        pipeline = 2

    inputs = folder / "material"
    return {
        "model": {"path": str(inputs / "model"), "dtype": _training_dtype(on_host)},
        "data": {"train": str(inputs / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "algorithm": {"name": "grpo"},
        "batch": {"prompts_per_step": 16, "samples_per_prompt": 4, "optimizer_steps": 2},
        "actor": {"layout": {"tensor": tensor, "pipeline": pipeline}, "offload": True},
        "rollout": {"tensor": tensor, "max_response_tokens": 8},
        "checkpoint": {"every": 1, "export": False},
    }


def _training_dtype(on_host: bool) -> str:
    """Return the dtype of the training jobs that test a machine: float32 on CPUs, bfloat16 on GPUs."""
    if on_host:
        return "float32"
    return "bfloat16"


def validate_machine(folder: Path, world: int) -> Iterator[Finding]:
    """Test a machine with measurements and small training jobs; yield a finding for each.

    The data, configuration and runs of the jobs are written to ``folder``, and ``world`` is the number of
    ranks. The test ends after a job with an error. Collective over the world.
    """
    # Measure before the small jobs, which run without this process group.
    watch_launcher()
    device.initialize(_JOIN_SECONDS)
    links = probe_links(socket.gethostname())
    pairs = {kind: probe_pairs(ranks) for kind, ranks in neighbour_pairs(links.hosts).items()}
    devices = probe_devices()
    kernel_results = gather_objects(probe_log_prob_kernels())

    # Rank 0 writes the files of the jobs, which must be visible to every rank.
    if device.rank() == 0:
        _write_job_files(folder, world, on_host=device.on_host())
    barrier()
    ranks_with_files = gather_objects(_has_job_files(folder))
    hosts_without_files = [
        host for host, has_files in zip(links.hosts, ranks_with_files, strict=True) if not has_files
    ]

    # Destroy the process group: the small jobs run in other processes, with separate process groups.
    watch.leave_job()

    if world > 1:
        yield from link_findings(links)
        if not links.correct:
            return
    yield from _pair_findings(pairs)
    yield from rate_findings(devices)
    yield _kernel_finding(kernel_results)
    if hosts_without_files:
        fix = "name a folder on a file system that all machines share: --out FOLDER"
        text = f"{folder} of rank 0 is not visible on {hosts_without_files[0]}"
        yield Finding("error", "shared folder", text, fix)
        return

    for job in list_small_jobs(folder, world):
        finding = _run_small_job(job, folder)
        if finding.level == "ok" and job.name == "all_ranks":
            tolerance = TOLERANCE[_training_dtype(device.on_host())]
            finding = compare_steps(folder, finding, tolerance)
        yield finding
        if finding.level == "error":
            return
    yield from run_findings(folder)

    # Write the measured rates to a file for the planner.
    pair_rates = {kind: pair.rate for kind, pair in pairs.items()}
    override = measured_constants(devices, pair_rates, load_constants())
    if override and process_rank() == 0:
        file = folder / "constants.json"
        file.write_text(json.dumps(override, indent=1) + "\n")
        yield Finding("ok", "for plan", f"megatron-rl plan MODEL --gpus {world} --constants {file}")


def _write_job_files(folder: Path, world: int, *, on_host: bool) -> None:
    """Write the model, data and configuration of the training jobs that test a machine (`list_small_jobs`).

    The runs of an earlier test in ``folder`` are removed. ``on_host``: whether the jobs run on CPUs instead
    of GPUs. Raises UserError for a folder with files that no earlier test has written.
    """
    if not _has_job_files(folder) and folder.exists() and any(folder.iterdir()):
        raise UserError(
            "the folder contains files that doctor --gpu has not written",
            where="--out",
            expected="an empty folder, or the folder of an earlier doctor --gpu",
            got=str(folder),
            fix="name another folder",
        )

    # Remove the runs of all jobs, including the job that a test with one rank omits.
    job_names = {job.name for job in list_small_jobs(folder, 2)}
    for name in job_names | {"material", "logs"}:
        shutil.rmtree(folder / name, ignore_errors=True)

    # Choose a model that trains in seconds: medium on GPUs, small on CPUs.
    model_size = "medium"
    if on_host:
        model_size = "small"
    quickstart.write_inputs(folder / "material", model_size)

    config = job_settings(folder, world, on_host=on_host)
    (folder / "proof.yaml").write_text(yaml.safe_dump(config))
    (folder / "logs").mkdir(exist_ok=True)


def _has_job_files(folder: Path) -> bool:
    """Return whether the files that `_write_job_files` writes are visible in ``folder`` on this machine."""
    return (folder / "proof.yaml").is_file()


def _run_small_job(job: SmallJob, folder: Path) -> Finding:
    """Run this rank's process of a job as a subprocess, and return the finding.

    The subprocesses of all ranks form the job.
    """
    start = time.monotonic()
    log = folder / f"logs/{job.name}_{process_rank()}.log"
    command = [
        sys.executable,
        "-m",
        "megatron_rl",
        job.command,
        str(folder / "proof.yaml"),
        f"run_dir={folder / job.name}",
        *job.overrides,
    ]
    # Unset the error file: the launcher would attribute an error of the job to this process.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}

    with log.open("wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        tail = log.read_text(errors="replace").strip()[-_LOG_TAIL:]
        return Finding("error", job.capability, f"exit code {code}; the end of {log}:\n{tail}", job.fix)
    return Finding("ok", job.capability, f"{time.monotonic() - start:.0f} s")


# ---------------------------------------------------------------- findings


def link_findings(links: LinkProbe) -> list[Finding]:
    """Return a finding on the rate and correctness of all-reduces, and a finding on the clocks."""
    num_machines = len(set(links.hosts))
    noun = "machine"
    if num_machines > 1:
        noun = "machines"
    rate = links.bus_bandwidth
    text = (
        f"{len(links.hosts)} ranks on {num_machines} {noun}: {links.bytes / _MIB:.0f} MiB in "
        f"{links.seconds * 1e3:.1f} ms, {rate / 1e9:.2f} GB/s per rank"
    )
    slow_rate = SLOW_LINK
    if device.on_host():
        slow_rate = SLOW_HOST_LINK

    # A wrong sum is an error, a slow link only a warning.
    if not links.correct:
        fix = "check the network's driver and firmware"
        reduce_finding = Finding("error", "all-reduce", f"wrong sum; {text}", fix)
    elif rate < slow_rate:
        fix = "check that ranks use the fast network interface, and that nothing else runs on the machines"
        reduce_finding = Finding("warning", "all-reduce", f"slow: {text}", fix)
    else:
        reduce_finding = Finding("ok", "all-reduce", text)

    spread = f"clocks differ by at most {links.clock_spread * 1e3:.0f} ms"
    clock_finding = Finding("ok", "clocks", spread)
    if links.clock_spread > MAX_CLOCK_SPREAD:
        fix = "run a time daemon (chrony, ntpd) on every machine"
        clock_finding = Finding("warning", "clocks", spread, fix)
    return [reduce_finding, clock_finding]


def _pair_findings(pairs: Mapping[str, PairProbe]) -> Iterator[Finding]:
    """Yield a finding on the messages between ranks for each kind of pairs: within and across machines."""
    for kind, pair in pairs.items():
        text = f"{pair.rate / GB:.2f} GB/s {kind}, ranks {pair.slowest[0]} and {pair.slowest[1]} the slowest"
        if pair.correct:
            yield Finding("ok", "point to point", text)
        else:
            fix = "the received data differ from those sent: check driver, firmware and cables"
            yield Finding("error", "point to point", text, fix)


def rate_findings(devices: Sequence[DeviceProbe]) -> Iterator[Finding]:
    """Yield a finding on the slowest rank for each rate: a warning if it is far below the median."""
    for name, attribute, unit, scale in (
        ("matrix product", "flops", "TFLOP/s bfloat16", 1e12),
        ("memory", "memory", "GB/s", GB),
        ("to the host", "host", "GB/s", GB),
    ):
        values = [getattr(probe, attribute) for probe in devices]
        if values[0] is None:
            continue

        slowest = min(range(len(values)), key=values.__getitem__)
        text = f"{values[slowest] / scale:.3g} {unit} on rank {slowest}, the slowest of {len(values)}"
        if values[slowest] >= STRAGGLER * median(values):
            yield Finding("ok", name, text)
        else:
            fix = "look for other jobs, throttled clocks, and a slot with fewer lanes than the others"
            yield Finding("warning", name, f"{text}; median {median(values) / scale:.3g}", fix)


def _kernel_finding(kernel_results: Sequence[tuple[bool, str]]) -> Finding:
    """Return the finding on the log-prob kernels from the results of `probe_log_prob_kernels`, by rank."""
    inaccurate_ranks: list[int] = []
    for rank, (is_accurate, _) in enumerate(kernel_results):
        if not is_accurate:
            inaccurate_ranks.append(rank)

    if not inaccurate_ranks:
        _, text = kernel_results[0]
        return Finding("ok", "log-prob kernel", text)
    _, text = kernel_results[inaccurate_ranks[0]]
    fix = f"none needed: on ranks {inaccurate_ranks} torch computes log-probs instead, correct but slower"
    return Finding("warning", "log-prob kernel", text, fix)


def compare_steps(folder: Path, finding: Finding, tolerance: float) -> Finding:
    """Compare the losses and gradient norms of training on all ranks with training on one rank.

    Returns an error if a relative difference is larger than ``tolerance``, otherwise ``finding`` with the
    largest relative difference added to its text.
    """
    one_rank_metrics = read_metrics(RunFolder(folder / "one_rank").stage_metrics("sft"))
    all_rank_metrics = read_metrics(RunFolder(folder / "all_ranks").stage_metrics("sft"))

    # Find the largest relative difference over all steps and both metrics.
    differences = []
    for expected_metrics, actual_metrics in zip(one_rank_metrics, all_rank_metrics, strict=True):
        for name in ("sft/loss", "sft/grad_norm"):
            expected = expected_metrics[name]
            actual = actual_metrics[name]
            difference = abs(actual - expected) / abs(expected)
            text = f"{name} of step {expected_metrics['step']}: {expected}, {actual}"
            differences.append((difference, text))

    largest_difference, text = max(differences)
    if largest_difference <= tolerance:
        agreement = f"loss and gradient norm within {largest_difference:.1g} (relative) of those on one rank"
        return Finding("ok", finding.name, f"{finding.text}; {agreement}")
    fix = "keep both folders and report them: no run on these machines can be trusted"
    return Finding("error", finding.name, f"{text}, which differ by {largest_difference:.2%}", fix)


def run_findings(folder: Path) -> Iterator[Finding]:
    """Yield findings on the weight sync, the step and the checkpoint in the small model's run."""
    # Read the last step, whose times include no compilation or other warm-up.
    step_metrics = read_metrics(RunFolder(folder / "train").metrics)
    last_step = step_metrics[-1]
    # This metric of a step is the time of the checkpoint before the step, so the first step lacks it.
    checkpoint_seconds = next(
        metrics["time/checkpoint"] for metrics in step_metrics if "time/checkpoint" in metrics
    )

    sync_bytes = last_step["reshard/bytes_received_max"] + last_step["reshard/bytes_local_max"]
    yield Finding(
        "ok",
        "a verified weight sync",
        f"{sync_bytes / _MIB:.1f} MiB a rank in {last_step['time/reshard'] * 1e3:.1f} ms",
    )
    yield Finding(
        "ok",
        "trainer and rollout",
        f"log-probs differ by {last_step['mismatch/abs_diff']:.2g} a token; "
        f"one step {last_step['time/step']:.2f} s, a checkpoint {checkpoint_seconds:.2f} s",
    )


def measured_constants(
    devices: Sequence[DeviceProbe], pair_rates: Mapping[str, float], constants: Constants
) -> dict[str, Any]:
    """Return an override of the planner's constants with the measured rates, empty for an unknown device.

    The planner multiplies a nominal rate by an efficiency, so the override is the measured rate divided by
    the efficiency. ``pair_rates`` maps `WITHIN` and `ACROSS` to bytes per second.
    """
    # A device reports a name such as "NVIDIA H100 80GB HBM3", which is "H100-80GB" in constants.json.
    name_parts = devices[0].name.lower().split()
    names = [name for name in constants.gpus if name.split("-")[0].lower() in name_parts]
    if not names:
        return {}

    # The slowest device determines the speed of the job.
    gpu = constants.gpus[names[0]]
    efficiency = constants.efficiency
    flops = min(probe.flops for probe in devices)
    memory_rate = min(probe.memory for probe in devices)
    host_rate = min(probe.host for probe in devices if probe.host is not None)
    rates = {
        "gemm_efficiency": min(1.0, flops / gpu.bf16_flops),
        "hbm_terabytes_per_second": memory_rate / efficiency.hbm / 1e12,
        "host_gigabytes_per_second": host_rate / efficiency.host / GB,
    }
    if WITHIN in pair_rates:
        rates["nvlink_gigabytes_per_second"] = pair_rates[WITHIN] / efficiency.nvlink / GB
    if ACROSS in pair_rates:
        rates["network_gigabits"] = pair_rates[ACROSS] / efficiency.network / GB * 8

    rounded_rates = {name: round(rate, 3) for name, rate in rates.items()}
    return {"comment": "measured by doctor --gpu", "gpus": {gpu.name: rounded_rates}}
