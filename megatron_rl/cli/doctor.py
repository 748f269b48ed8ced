"""Check the environment as a user has it, and say what to fix."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_rl.launcher import launch, process_rank
from megatron_rl.planning.machine import (
    Finding,
    accelerators,
    disk,
    limits,
    machines_packages,
    optional_packages,
    packages,
    shared_memory,
    unfit,
)

_MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "error": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument("--json", action="store_true", help="print findings for machines")
    parser.add_argument(
        "--quick", action="store_true", help="do not import torch, Megatron-Core, transformers and vLLM"
    )
    parser.add_argument(
        "--before-install",
        metavar="FILE",
        help="only say which of this machine's own packages do not go with the GPU stack, and write the "
        "others to FILE as pip's constraints",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="prove the machines: rates of devices and links, numbers of the kernel, and small jobs on one "
        "rank and on all, with vLLM, checkpoints and a restart; it stops at the first failure",
    )
    parser.add_argument("--out", default="runs/doctor", metavar="DIR", help="where --gpu works (%(default)s)")
    parser.epilog = "Under torchrun it also measures an all-reduce between the ranks and compares clocks."


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; the exit code is 1 where something cannot work."""
    if arguments.before_install:
        return _before_install(Path(arguments.before_install))
    speaks = process_rank() == 0
    sections: dict[str, list[Finding]] = {
        "packages": packages(),
        "optional": optional_packages(),
        "accelerators": accelerators(),
        "machine": [*shared_memory(), *disk(), *limits()],
    }
    if not arguments.quick:
        sections["imports"] = _imports()
    errors = [finding for section in sections.values() for finding in section if finding.level == "error"]
    if not speaks:  # at once: a machine with errors may not come to meet the others
        for finding in errors:
            fix = f"; fix: {finding.fix}" if finding.fix else ""
            place = f"{socket.gethostname()}, rank {process_rank()}"
            print(f"{place}: {finding.name}: {finding.text}{fix}", file=sys.stderr, flush=True)
    world = launch(joins=True).world_size
    together = world > 1 and not arguments.gpu
    if together:
        sections["links between ranks"], others = _links(errors)
        if others:
            sections["other ranks"] = others
    elif world == 1 and not arguments.quick:
        text = "not measured: start with torchrun --nproc-per-node N -m megatron_rl doctor"
        sections["links between ranks"] = [Finding("note", "all-reduce", text)]
    if arguments.gpu and not _failed(sections):
        sections["proof"] = _proof(Path(arguments.out), world, shown=speaks and not arguments.json)
    if speaks and arguments.json:
        print(
            json.dumps({name: [vars(item) for item in found] for name, found in sections.items()}, indent=2)
        )
    elif speaks:
        _print(sections)
    if together:
        from megatron_rl.distributed import watch

        sys.stdout.flush()
        watch.leave()  # the launcher ends rank 0 when another has ended with an error
    return 1 if _failed(sections) else 0


def _failed(sections: dict[str, list[Finding]]) -> bool:
    return any(finding.level == "error" for section in sections.values() for finding in section)


def _proof(folder: Path, world: int, *, shown: bool) -> list[Finding]:
    """Prove the machines, with a line as each step ends. Collective over the world."""
    from megatron_rl.planning.proof import prove  # what a machine lacks is said before anything is installed

    findings = []
    for finding in prove(folder, world):
        findings.append(finding)
        if shown:
            print(f"{_MARKS[finding.level]}  {finding.name}", flush=True)
        elif finding.level == "error":  # the launcher ends the others, and rank 0 may not come to its own
            print(f"rank {process_rank()}: {finding.name}: {finding.text}", file=sys.stderr, flush=True)
    return findings


def _before_install(constraints: Path) -> int:
    """Print what does not fit, and write what must stay; the exit code is 1 where anything is wrong."""
    versions = machines_packages()
    findings = unfit(versions)
    for finding in findings:
        print(f"{finding.name}: {finding.text}\n  fix: {finding.fix}")
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))
    return 1 if findings else 0


def _print(sections: dict[str, list[Finding]]) -> None:
    findings = [finding for section in sections.values() for finding in section]
    for name, of_section in sections.items():
        print(f"{name.upper()}")
        for finding in of_section:
            print(f"  {_MARKS[finding.level]}  {finding.name:<20} {finding.text}")
            if finding.fix:
                print(f"{'':28} fix: {finding.fix}")
        print()
    count = {level: sum(finding.level == level for finding in findings) for level in _MARKS}
    if count["error"]:
        print(f"NOT HEALTHY: {count['error']} to fix, {count['warning']} warnings")
    else:
        print(f"HEALTHY: {count['warning']} warnings, {count['note']} notes")


def _imports() -> list[Finding]:
    """Import what training imports, as versions that fit on paper may still not load together."""

    def torch_version() -> str:
        import torch

        value = torch.arange(6.0).reshape(2, 3)
        if float((value @ value.T).sum()) != 83.0:
            raise RuntimeError("a matrix product of torch is wrong")
        return f"torch {torch.__version__} computes"

    def megatron() -> str:
        from megatron_rl.distributed import device
        from megatron_rl.megatron import model

        return f"{model.__name__} loads; device {device.device()}, communication through {device.backend()}"

    def tokenizers() -> str:
        import transformers

        return f"transformers {transformers.__version__} loads"

    def engine() -> str:
        from megatron_rl.rollout.engines.vllm.setup import prepare_vllm

        prepare_vllm()
        return "vLLM loads and is prepared for running inside training processes"

    checks: list[tuple[str, Callable[[], str], str]] = [
        ("torch", torch_version, "install as launch/setup.sh does"),
        ("Megatron-Core", megatron, "install as launch/setup.sh does"),
        ("transformers", tokenizers, "remove torchvision, torchaudio and torchcodec of another build"),
        ("vLLM", engine, "install the vLLM that fits this torch, or train with rollout.engine=torch"),
    ]
    findings = []
    for name, check, fix in checks:
        try:
            findings.append(Finding("ok", name, check()))
        except Exception as error:  # anything may go wrong inside a foreign package's import
            last = traceback.extract_tb(error.__traceback__)[-1]
            first = (str(error).splitlines() or [""])[0]
            text = f"{type(error).__name__}: {first} ({last.filename}:{last.lineno})"
            level = "warning" if name == "vLLM" else "error"
            findings.append(Finding(level, name, text, fix))
    return findings


def _links(errors: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Measure the links between ranks; return what they are, and the ``errors`` of ranks but the first.

    What several ranks of a machine say is of the lowest of them. Collective over the world.
    """
    from megatron_rl.distributed import device
    from megatron_rl.distributed.exchange import gather_objects
    from megatron_rl.planning import probe
    from megatron_rl.planning.proof import link_findings

    device.initialize(60.0)
    links = probe.probe_links(socket.gethostname())
    said: dict[tuple[str, Finding], int] = {}
    for rank, findings in enumerate(gather_objects(errors)):
        for finding in findings:
            said.setdefault((links.hosts[rank], finding), rank)
    others = [
        Finding("error", finding.name, f"{host}, rank {rank}: {finding.text}", finding.fix)
        for (host, finding), rank in said.items()
        if rank > 0
    ]
    return link_findings(links), others
