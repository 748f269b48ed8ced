"""The ``doctor`` command: check the user's environment, and print problems with their fixes."""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_rl.errors import requirement_error
from megatron_rl.launcher import current_launch, process_rank
from megatron_rl.planning.gpu_stack import (
    OLDEST_DRIVER,
    TOOLKIT,
    check_driver,
    check_package_compatibility,
    missing_requirements,
    pinned_versions,
)
from megatron_rl.planning.machine import (
    Finding,
    check_accelerators,
    check_disk,
    check_limits,
    check_optional_packages,
    check_packages,
    check_runtime_compiler,
    check_shared_memory,
    driver_version,
    system_package_versions,
)

_MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "error": "FAIL"}
"""Level of a finding -> mark in front of its line."""
_JOIN_SECONDS = 60.0
"""Timeout of the rendezvous, and of every collective, in seconds."""

Sections = dict[str, list[Finding]]
"""Title of a section -> its findings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``doctor`` to its parser."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for programs")
    parser.add_argument(
        "--quick", action="store_true", help="do not import torch, Megatron-Core, transformers and vLLM"
    )
    # launch/setup.sh uses this option to install only missing packages.
    parser.add_argument(
        "--before-install",
        metavar="FILE",
        help="only compare the machine's driver and installed packages with the GPU stack, and write the "
        "missing packages of --lock to FILE, as pip's requirements",
    )
    parser.add_argument(
        "--lock", metavar="FILE", help="with --before-install: the GPU stack, NAME==VERSION a line"
    )
    parser.add_argument(
        "--cuda",
        dest="toolkit",
        type=int,
        choices=sorted(OLDEST_DRIVER),
        default=TOOLKIT,
        help="with --before-install: CUDA of torch and vLLM (%(default)s)",
    )

    parser.add_argument(
        "--gpu",
        action="store_true",
        help="test the machines: rates of devices and links, accuracy of the log-prob kernel, and small jobs "
        "on one rank and on all, with vLLM, checkpoints and a restart; it stops at the first failure",
    )
    parser.add_argument(
        "--out", default="runs/doctor", metavar="DIR", help="folder for the files of --gpu (%(default)s)"
    )
    parser.epilog = "Under torchrun it also measures an all-reduce between the ranks and compares clocks."


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; return exit code 1 if any finding is an error."""
    if arguments.before_install:
        return _prepare_install(Path(arguments.before_install), arguments.lock, arguments.toolkit)

    # Under torchrun every rank checks its machine, and only the first one prints.
    is_first_rank = process_rank() == 0
    sections: Sections = {
        "packages": check_packages(),
        "optional": check_optional_packages(),
        "accelerators": check_accelerators(),
        "machine": [*check_shared_memory(), *check_disk(), *check_limits()],
    }
    if not arguments.quick:
        sections["imports"] = _check_imports()

    # Other ranks print their errors now: a machine with errors may fail to join the process group.
    errors: list[Finding] = []
    for findings in sections.values():
        errors += [finding for finding in findings if finding.level == "error"]
    if not is_first_rank:
        _print_errors(errors)

    # Measure the links between ranks. The tests of `--gpu` include these measurements.
    world_size = current_launch(joins_group=True).world_size
    should_measure_links = world_size > 1 and not arguments.gpu
    if should_measure_links:
        link_findings, rank_errors = _test_links(errors)
        sections["links between ranks"] = link_findings
        if rank_errors:
            sections["other ranks"] = rank_errors
    elif world_size == 1 and not arguments.quick:
        text = "not measured: start with torchrun --nproc-per-node N -m megatron_rl doctor"
        sections["links between ranks"] = [Finding("note", "all-reduce", text)]

    # Skip the tests of `--gpu` after errors: without packages they would fail with a less helpful message.
    if arguments.gpu and not _has_error(sections):
        print_progress = is_first_rank and not arguments.json
        sections["proof"] = _test_machines(Path(arguments.out), world_size, print_progress=print_progress)

    if is_first_rank and arguments.json:
        record = {name: [vars(finding) for finding in findings] for name, findings in sections.items()}
        print(json.dumps(record, indent=2))
    elif is_first_rank:
        _print_sections(sections)

    if should_measure_links:
        from megatron_rl.distributed import watch

        # Wait for all ranks before this process exits: an error exit of another rank makes the launcher
        # terminate rank 0, which may still be printing.
        sys.stdout.flush()
        watch.leave_job()
    return int(_has_error(sections))


def _has_error(sections: Sections) -> bool:
    """Return whether any finding of any section is an error."""
    all_findings = itertools.chain.from_iterable(sections.values())
    return any(finding.level == "error" for finding in all_findings)


def _print_errors(errors: list[Finding]) -> None:
    """Print the errors that a rank other than the first has found on its machine."""
    for finding in errors:
        line = f"{socket.gethostname()}, rank {process_rank()}: {finding.name}: {finding.text}"
        if finding.fix:
            line += f"; fix: {finding.fix}"
        print(line, file=sys.stderr, flush=True)


def _test_machines(folder: Path, world_size: int, *, print_progress: bool) -> list[Finding]:
    """Test the machines with measurements and small training jobs. Collective over the world.

    Returns the findings. The tests write their files into ``folder``. With ``print_progress``, a line is
    printed after each test.
    """
    # Import here, since the module imports torch, which may not be installed.
    from megatron_rl.planning.proof import validate_machine

    findings = []
    for finding in validate_machine(folder, world_size):
        findings.append(finding)
        if print_progress:
            print(f"{_MARKS[finding.level]}  {finding.name}", flush=True)
        elif finding.level == "error":
            # Print errors on every rank: the launcher may terminate rank 0 before it prints them.
            print(f"rank {process_rank()}: {finding.name}: {finding.text}", file=sys.stderr, flush=True)
    return findings


def _prepare_install(requirements: Path, lock: str | None, toolkit_version: int) -> int:
    """Print conflicts of this machine with the GPU stack, and write missing packages to ``requirements``.

    ``lock`` is the path of the file with the stack's pinned versions, ``toolkit_version`` the major version
    of CUDA. Returns exit code 1 if a conflict is an error, else 0.
    """
    if lock is None:
        raise requirement_error(
            "doctor --before-install", requirements, "--lock", got="no lock file", fix="add --lock FILE"
        )

    lock_text = Path(lock).read_text(encoding="utf-8")
    pinned = pinned_versions(lock_text)
    versions = system_package_versions()
    findings = check_package_compatibility(versions, pinned)
    driver = driver_version()
    if driver is not None:
        driver_finding = check_driver(driver, pinned["torch"], toolkit_version)
        if driver_finding:
            findings.append(driver_finding)
    for finding in findings:
        print(f"{finding.level}: {finding.name}: {finding.text}\n  fix: {finding.fix}")

    # Packages that are already installed, such as a vendor's build of torch, are not installed again.
    to_install = missing_requirements(lock_text, versions, toolkit_version)
    requirements.write_text("".join(f"{requirement}\n" for requirement in to_install), encoding="utf-8")
    return int(any(finding.level == "error" for finding in findings))


def _print_sections(sections: Sections) -> None:
    """Print the findings by section, then the verdict on the environment."""
    for title, findings in sections.items():
        print(title.upper())
        for finding in findings:
            print(f"  {_MARKS[finding.level]}  {finding.name:<20} {finding.text}")
            if finding.fix:
                print(f"{'':28} fix: {finding.fix}")
        print()

    # Print the verdict last: a terminal shows the end of the output.
    count_by_level = dict.fromkeys(_MARKS, 0)
    for findings in sections.values():
        for finding in findings:
            count_by_level[finding.level] += 1
    if count_by_level["error"]:
        print(f"NOT HEALTHY: {count_by_level['error']} to fix, {count_by_level['warning']} warnings")
    else:
        print(f"HEALTHY: {count_by_level['warning']} warnings, {count_by_level['note']} notes")


def _check_imports() -> list[Finding]:
    """Import torch, Megatron-Core, transformers and vLLM; return a finding for each.

    Packages may fail to load even if their version numbers match.
    """
    reinstall = "rm -rf .venv, then launch/setup.sh"
    # (name of the package, function that imports it, fix)
    checks: list[tuple[str, Callable[[], str], str]] = [
        ("torch", _import_torch, reinstall),
        ("Megatron-Core", _import_megatron, reinstall),
        (
            "transformers",
            _import_transformers,
            "remove torchvision, torchaudio and torchcodec of another build",
        ),
        ("vLLM", _import_vllm, "install the vLLM that fits this torch, or train with rollout.engine=torch"),
    ]

    findings = []
    for name, import_package, fix in checks:
        try:
            findings.append(Finding("ok", name, import_package()))
        # The import of another package may raise any exception.
        except Exception as error:
            last_frame = traceback.extract_tb(error.__traceback__)[-1]
            message = (str(error).splitlines() or [""])[0]
            text = f"{type(error).__name__}: {message} ({last_frame.filename}:{last_frame.lineno})"

            # vLLM is optional, since rollout.engine=torch can generate without it.
            level = "error"
            if name == "vLLM":
                level = "warning"
            findings.append(Finding(level, name, text, fix))
    return [*findings, *_check_attention_compiler()]


def _check_attention_compiler() -> list[Finding]:
    """Check the compiler with which cuDNN builds attention kernels.

    Returns an empty list without torch or without a GPU.
    """
    if "torch" not in sys.modules:
        return []

    from megatron_rl.distributed import device

    toolkit = device.toolkit_version()
    if toolkit is None:
        return []
    return [check_runtime_compiler(toolkit)]


def _import_torch() -> str:
    """Import torch and test a matrix product; return a text with the version and the result of the test."""
    import torch

    values = torch.arange(6.0).reshape(2, 3)
    if float((values @ values.T).sum()) != 83.0:
        raise RuntimeError("a matrix product of torch is wrong")
    return f"torch {torch.__version__} computes"


def _import_megatron() -> str:
    """Import Megatron-Core through the module that builds models; return the device as text."""
    from megatron_rl.distributed import device
    from megatron_rl.megatron import model

    return f"{model.__name__} loads; device {device.device()}, communication through {device.backend()}"


def _import_transformers() -> str:
    """Import transformers; return the version as text."""
    import transformers

    return f"transformers {transformers.__version__} loads"


def _import_vllm() -> str:
    """Import vLLM and apply the same preparations as a training rank; return the result as text."""
    from megatron_rl.rollout.engines.vllm.setup import prepare_vllm

    prepare_vllm()
    return "vLLM loads and is prepared for running inside training processes"


def _test_links(errors: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Measure the links between ranks, and gather the errors of all ranks. Collective over the world.

    ``errors`` are the errors of this rank. Returns the findings on the links, and the errors of all ranks but
    rank 0. If several ranks of a machine have the same error, it is reported only for the lowest rank.
    """
    from megatron_rl.distributed import device
    from megatron_rl.distributed.exchange import gather_objects
    from megatron_rl.planning.proof import link_findings, probe_links

    device.initialize(_JOIN_SECONDS)
    links = probe_links(socket.gethostname())

    # Ranks of one machine usually have the same errors, so report each error once per machine.
    rank_by_error: dict[tuple[str, Finding], int] = {}
    for rank, rank_errors in enumerate(gather_objects(errors)):
        for finding in rank_errors:
            rank_by_error.setdefault((links.hosts[rank], finding), rank)

    # Rank 0 prints its own errors with its other findings.
    rank_findings = []
    for (host, finding), rank in rank_by_error.items():
        if rank > 0:
            text = f"{host}, rank {rank}: {finding.text}"
            rank_findings.append(Finding("error", finding.name, text, finding.fix))
    return link_findings(links), rank_findings
