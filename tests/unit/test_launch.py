"""The launch scripts parse, report wrong arguments, and name existing files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_rl.cli.main import main
from megatron_rl.planning.gpu_stack import TORCH_OF_VLLM
from megatron_rl.planning.machine import TESTED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_names_existing_files(script: Path) -> None:
    result = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = script.read_text(encoding="utf-8")
    named = {word.rstrip(".") for word in re.findall(r"\b(?:launch|configs)/[a-z][\w./-]*", text)}
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["launch/setup.sh", "--no-such-option"], "unknown argument --no-such-option"),
        (["launch/local.sh"], "usage: [NPROC=N] launch/local.sh CONFIG"),
        (["launch/slurm.sbatch"], "usage: sbatch"),
    ],
)
def test_wrong_arguments_exit_with_2(command: list[str], message: str) -> None:
    result = subprocess.run(["bash", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart.sh", "local.sh"])
def test_torchrun_starts_the_processes_without_a_warning(name: str, tmp_path: Path) -> None:
    script = (LAUNCH / name).read_text(encoding="utf-8")
    start = script.index("# Rendezvous in a file")
    # The script's own lines, with another program at their end.
    command = script[start:].replace(".venv/bin/python", sys.executable)
    started = r'(-m megatron_rl train .*|"\$\{program\[@\]\}" "\$@")$'
    command = re.sub(started, '"$@"', command, flags=re.MULTILINE)
    program = tmp_path / "ranks.py"
    program.write_text(
        "import os; os.write(1, (os.environ['RANK'] + os.environ['WORLD_SIZE'] + ' ').encode())"
    )

    result = subprocess.run(
        ["bash", "-euc", f"processes=4\n{command}", name, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert sorted(result.stdout.split()) == ["04", "14", "24", "34"], result
    assert result.stderr == ""


def quickstart_commands(folder: Path, gpus: int, **environment: str) -> tuple[int, str, list[list[str]]]:
    """Run a copy of the quickstart as on ``gpus`` GPUs, with programs that only record their arguments.

    Return its exit code, its standard error and the arguments of each started program.
    """
    commands = folder / "commands"
    listing = "\n".join(f"GPU {index}: NVIDIA H100" for index in range(gpus))
    scripts = {
        "launch/quickstart.sh": (LAUNCH / "quickstart.sh").read_text(encoding="utf-8"),
        "launch/setup.sh": "exit 0\n",
        ".venv/bin/python": f'#!/bin/sh\necho "$@" >>{commands}\n',
        "tools/nvidia-smi": f"#!/bin/sh\ncat <<END\n{listing}\nEND\n",
    }
    for name, text in scripts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    done = subprocess.run(
        ["bash", "launch/quickstart.sh", "steps=3"],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder / 'tools'}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
    )
    started = []
    if commands.exists():
        started = [line.split() for line in commands.read_text(encoding="utf-8").splitlines()]
    return done.returncode, done.stderr, started


@pytest.mark.parametrize(("gpus", "processes"), [(0, 4), (1, 1), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_the_quickstart_has_a_layout_for_the_gpus_of_this_machine(
    gpus: int,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, errors, (_, check, train) = quickstart_commands(tmp_path, gpus)
    assert (code, errors) == (0, "")
    assert train[train.index("--nproc-per-node") + 1] == str(processes)
    overrides = train[train.index("configs/quickstart.yaml") + 1 :]
    assert overrides[-1] == "steps=3"
    assert check[2:] == ["check", "configs/quickstart.yaml", "--world-size", str(processes), *overrides]
    monkeypatch.chdir(ROOT)
    assert main(check[2:]) == 0, capsys.readouterr().out


def test_the_quickstart_names_the_numbers_of_processes_that_it_has_a_layout_for(tmp_path: Path) -> None:
    code, errors, started = quickstart_commands(tmp_path, 8, NPROC="3")
    assert code == 2 and not started
    assert "NPROC of 1, 2 or 4" in errors and "got:      3" in errors


@pytest.mark.slow
def test_setup_compares_the_driver_before_it_downloads(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    driver = tools / "nvidia-smi"
    driver.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0" || echo "H100, 81559, 575.57.08, Default"\n')
    driver.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "VENV": str(tmp_path / "environment"),
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
    }
    result = subprocess.run(
        ["bash", "launch/setup.sh"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "575.57.08 does not run CUDA 13" in result.stderr
    assert "launch/setup.sh --gpu --cuda 12" in result.stderr
    assert "nothing was downloaded" in result.stderr


def test_lock_files_pin_every_package_once_and_hold_no_cuda_build() -> None:
    names = []
    for lock in sorted(LAUNCH.glob("requirements-*.txt")):
        for line in lock.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                # A package may have another version on each version of Python.
                pin, _, marker = line.partition("; ")
                assert re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin), f"{lock.name}: {line!r} is not NAME==VERSION"
                if not marker or Requirement(f"any; {marker}").marker.evaluate():  # pyright: ignore
                    names.append(pin.split("==")[0].lower().replace("_", "-"))
    assert len(names) == len(set(names))
    forbidden = {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"}
    assert not forbidden.intersection(names)
    assert not [name for name in names if name.startswith("nvidia-")]


def test_no_pinned_package_wants_another_version_of_one_that_is_installed() -> None:
    locks = [(LAUNCH / f"requirements-{name}.txt").read_text(encoding="utf-8") for name in ("cpu", "dev")]
    lines = [line for lock in locks for line in lock.splitlines() if not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    pins = {
        need.name: str(need.specifier).removeprefix("==")
        for need in requirements
        if need.marker is None or need.marker.evaluate()
    }
    on_path = [*distributions()][::-1]  # the first of a name counts
    installed = {canonicalize_name(each.name): each.version for each in on_path}
    if installed.get("torch") == pins["torch"].removesuffix("+cpu"):
        installed["torch"] = pins["torch"]  # its CUDA build, which setup.sh takes where there is no other
    refused = []
    for name, version in pins.items():
        if installed.get(canonicalize_name(name)) != version:
            continue  # a machine with a stack of its own
        for need in map(Requirement, requires(name) or []):
            other = installed.get(canonicalize_name(need.name))
            asked = need.marker is None or need.marker.evaluate({"extra": ""})
            if (name, need.name) == ("swanlab", "protobuf"):
                continue  # it runs with the newer one: tests/unit/test_trackers.py
            if asked and other is not None and not need.specifier.contains(other, prereleases=True):
                refused.append(f"{name} wants {need}, not {other}")
    assert not refused


@pytest.mark.parametrize("lock", sorted(LAUNCH.glob("constraints-gpu-*.txt")), ids=lambda path: path.stem)
def test_gpu_constraints_pin_every_package_once_at_the_versions_that_are_tried(lock: Path) -> None:
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", line) for line in lines)
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(lines)
    # Megatron-Core is another one on each version of Python, and torch with each series of vLLM.
    python, series = re.findall(r"-(py\d+)-vllm([\d.]+)$", lock.stem)[0]
    wanted = TESTED_VERSIONS | {"megatron-core": {"py311": "0.16.1", "py312": "0.19.2"}[python]}
    wanted |= {"torch": TORCH_OF_VLLM[series], "vllm": f"{series}.0"}
    assert versions.items() >= wanted.items()


def test_kubernetes_job_is_consistent() -> None:
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic = job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    (config,) = [word for word in container["command"] if word.endswith(".yaml")]
    assert (ROOT / config).is_file(), f"{config} is not shipped"
