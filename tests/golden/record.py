"""Record the golden runs: train each run for a few steps and store every resulting number exactly.

    launch/golden.sh record DIR [--only NAME]

``DIR/NAME.json`` contains a run's metrics and digests of its samples and weights, for `compare.py`. The run's
own folder is ``DIR/work/NAME``; ``DIR/revision`` names the code. A recording uses the configurations, the
model maker and the package of this checkout alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Paths of this checkout, independent of the working folder.
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MEASURED = ("time/", "throughput/", "memory/")
"""Prefixes of metrics that are measured on the machine and differ between equal runs."""
WEIGHTS = ("hf", "stages/*/hf", "reward_models/*")
"""Folders of a run with Hugging Face weights."""
RUN_SECONDS = 600.0
"""Seconds after which a run counts as hanging."""
PATIENCE = 30.0
"""Seconds for a launcher to end its ranks after SIGTERM."""


@dataclass(frozen=True)
class GoldenRun:
    """Ranks of a golden run, and its configurations, which run one after another."""

    ranks: int
    configs: tuple[str, ...]


RUNS: Mapping[str, GoldenRun] = {
    # Between them the runs cover every stage, role, placement and engine layout.
    "grpo_tp2pp2": GoldenRun(4, ("grpo_tp2pp2.yaml",)),
    "ppo_apart": GoldenRun(4, ("ppo_apart.yaml",)),
    "dapo_ahead": GoldenRun(3, ("dapo_ahead.yaml",)),
    "dpo": GoldenRun(2, ("dpo.yaml",)),
    "moe_ep2": GoldenRun(2, ("moe_ep2.yaml",)),
    "resume_other_layout": GoldenRun(2, ("resume_other_layout.yaml", "resume_other_layout_then.yaml")),
}


class RunFailed(Exception):
    """A golden run failed; the message names its log."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the runs of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="launch/golden.sh record", description=__doc__)
    parser.add_argument(
        "directory",
        type=Path,
        help="folder to write to; recordings of the same runs are replaced",
    )
    parser.add_argument(
        "--only",
        choices=sorted(RUNS),
        metavar="NAME",
        help="one run: " + ", ".join(RUNS),
    )

    options = parser.parse_args(arguments)
    directory: Path = options.directory.resolve()
    # Old recordings are removed first, so that a failed run leaves none.
    names = list(RUNS)
    if options.only:
        names = [options.only]
    for name in names:
        (directory / f"{name}.json").unlink(missing_ok=True)

    work = directory / "work"
    work.mkdir(parents=True, exist_ok=True)
    (directory / "revision").write_text(revision() + "\n")
    make_material(work)

    failed = [name for name in names if not record(name, directory)]
    if failed:
        print(f"golden: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def record(name: str, directory: Path) -> bool:
    """Train one run and write its recording; return whether it succeeded."""
    started = time.monotonic()
    work = directory / "work"
    try:
        train(name, work)
    except RunFailed as error:
        print(f"golden: {name}: {error}", file=sys.stderr)
        return False

    text = json.dumps(recording(work / name), indent=1) + "\n"
    (directory / f"{name}.json").write_text(text)
    print(
        f"golden: {name} recorded in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return True


def revision() -> str:
    """Return the commit of this checkout, marked if it has uncommitted changes."""
    commit = _git("rev-parse", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if changed:
        return f"{commit} with changes"
    return commit


def _git(*arguments: str) -> str:
    """Return the output of a git command, empty if it fails."""
    result = subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip()


def environment() -> dict[str, str]:
    """Return the environment of a run: this checkout's package, one thread per rank, no network."""
    # Variables of a surrounding torchrun would make the run part of that job.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return inherited | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def make_material(work: Path) -> None:
    """Write the runs' shared data, models and reward function."""
    data = work / "data"
    shutil.rmtree(data, ignore_errors=True)
    command = [sys.executable, "-m", "megatron_rl.data.quickstart", str(data)]

    result = subprocess.run(
        command,
        cwd=work,
        env=environment(),
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise SystemExit(f"golden: {' '.join(command)} failed:\n{result.stdout}{result.stderr}")

    make_moe_model(data / "model", data / "model_moe")
    shutil.copy(HERE / "rewards.py", work / "rewards.py")


def make_moe_model(dense: Path, target: Path) -> None:
    """Write a tiny mixture of experts with the tokenizer of the dense model."""
    make_model("qwen3-moe", dense, target)

    config = json.loads((target / "config.json").read_text())
    # transformers writes its own name of the key; published checkpoints have `num_experts`.
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    (target / "config.json").write_text(json.dumps(config, indent=2))


def make_model(family: str, dense: Path, target: Path, **changes: Any) -> None:
    """Write a family's tiny model with ``changes`` of its config and the tokenizer of the dense model."""
    from transformers.utils import logging

    sys.path.insert(0, str(ROOT / "tests"))
    from hf_models import save_model

    # Progress bars leave a thread, and a process that forks ranks must not have any.
    logging.disable_progress_bar()

    special = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    shape = json.loads((dense / "config.json").read_text())
    changes |= {name: shape[name] for name in special}
    save_model(family, target, dtype="float32", **changes)

    for file in dense.glob("*token*"):
        shutil.copy(file, target)


def train(name: str, work: Path) -> None:
    """Run the configurations of a golden run one after another, in a new run folder."""
    run = RUNS[name]
    shutil.rmtree(work / name, ignore_errors=True)
    for config in run.configs:
        log = work / f"{Path(config).stem}.log"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
        ]
        # The command line of the README, so that a recording covers it too.
        command += [
            "--nproc-per-node",
            str(run.ranks),
            "-m",
            "megatron_rl",
            "train",
            str(HERE / config),
        ]
        # The log contains the output of all ranks; the console only gets its path.
        with log.open("wb") as output:
            launcher = subprocess.Popen(
                command,
                cwd=work,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            code = _wait(launcher)

        if code:
            ending = f"exit code {code}"
            if code < 0:
                ending = "no end"
            raise RunFailed(f"{ending}; see {log}")


def _wait(launcher: subprocess.Popen[bytes]) -> int:
    """Return the launcher's exit code; end it on a timeout (-1) or an interrupt."""
    try:
        return launcher.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        if launcher.poll() is None:
            launcher.terminate()  # torchrun ends its ranks, which lead sessions of their own
            try:
                launcher.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                launcher.kill()


def recording(run: Path) -> dict[str, Any]:
    """Return the recording of a finished run: exact metrics, and digests of samples and weights."""
    # Digests are enough: a difference only has to be noticed and located.
    metrics = {file.name: exact_metrics(file) for file in sorted(run.glob("*.jsonl"))}
    samples = {file.name: column_digests(file) for file in sorted((run / "rollouts").glob("*.parquet"))}
    folders = sorted(folder for pattern in WEIGHTS for folder in run.glob(pattern))
    weights = {folder.relative_to(run).as_posix(): tensor_digests(folder) for folder in folders}
    return {"metrics": metrics, "samples": samples, "weights": weights}


def exact_metrics(file: Path) -> dict[str, dict[str, str | None]]:
    """Return every step's metrics that are not measured, as hexadecimal numbers without loss."""
    steps = {}
    for line in file.read_text().splitlines():
        values = json.loads(line)
        step = str(values.pop("step"))
        steps[step] = {
            name: None if value is None else float(value).hex()
            for name, value in sorted(values.items())
            if not name.startswith(MEASURED)
        }
    return steps


def column_digests(file: Path) -> dict[str, str]:
    """Return a digest of each column's values, independent of the file's encoding."""
    from pyarrow import parquet

    # Encoding and compression of a Parquet file may change without a change of its values.
    table = parquet.read_table(file)
    return {
        name: _digest(json.dumps(table[name].to_pylist(), default=repr).encode())
        for name in sorted(table.column_names)
    }


def tensor_digests(folder: Path) -> dict[str, str]:
    """Return a digest of each tensor of a checkpoint, including its type and shape."""
    import torch
    from safetensors import safe_open

    digests = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(name).contiguous()
                # Type and shape are part of the digest, since equal bytes may mean other numbers.
                head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
                digests[name] = _digest(head + tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return dict(sorted(digests.items()))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
