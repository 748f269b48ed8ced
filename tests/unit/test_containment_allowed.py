"""What contained code has: its imports, its neighbours, what limits name, and temporary folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.sections.rewards import RewardConfig, RewardLimitsConfig
from megatron_rl.contained.confinement import CHILDREN_SEARCHED, NO_ROOT
from megatron_rl.contained.visible import allowed_environment, is_shared, resolve_links
from megatron_rl.rewards.function import FunctionReward, RewardResult
from tests.campaign.attacks import SECRETS

pytestmark = pytest.mark.starts_contained

CODE = """
import os, socket, subprocess, sys, tempfile
from pathlib import Path
import neighbour

def judge(*, prompt, response, ground_truth, metadata):
    return float(ACTS[response](metadata))

def imports(metadata):
    import numpy, sympy, torch, transformers
    return float(torch.ones(2, 2).mm(torch.ones(2, 2)).sum()) == 8 and sympy.sympify("2 + 2") == 4

def workers(metadata):
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    with ProcessPoolExecutor(2) as pool:
        return sum(pool.map(abs, [-1, -2])) == 3

def manager(metadata):
    import multiprocessing
    with multiprocessing.Manager() as shared:
        return shared.list([1])[0]

def programs(metadata):
    shell = subprocess.run(["sh", "-c", "echo $((1 + 1))"], capture_output=True, text=True)
    python = subprocess.run([sys.executable, "-c", "import json; print(3)"], capture_output=True, text=True)
    return (shell.stdout, python.stdout) == ("2\\n", "3\\n")

def temporary(metadata):
    folders = [tempfile.gettempdir(), "/dev/shm", os.path.expanduser("~"), "/var/tmp"]
    for folder in folders:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
    return True

def terminal(metadata):
    import pty
    return bool(pty.openpty())

def pipes_to_itself(metadata):
    import asyncio, mmap
    held = mmap.mmap(-1, 2**20)
    held[0] = 1
    return asyncio.run(asyncio.sleep(0, True))

def itself(metadata):
    import getpass
    return bool(getpass.getuser()) and len(os.listdir("/proc/self/fd")) > 2

def opened(metadata):
    return len(os.listdir("/proc/self/fd"))

ACTS = {
    "data beside the code": lambda _: Path(__file__).with_name("answers.txt").read_text() == "42",
    "neighbour": lambda _: neighbour.ANSWER == 42,
    "read": lambda metadata: bool(Path(metadata["path"]).read_text()),
    "write": lambda metadata: bool(Path(metadata["path"]).write_text("x")),
    "variable": lambda metadata: metadata["name"] in os.environ,
    "names": lambda _: bool(socket.getaddrinfo("localhost", 80)),
    "here": lambda metadata: os.getcwd() == metadata["path"],
}
for act in (imports, workers, manager, programs, temporary, terminal, pipes_to_itself, itself, opened):
    ACTS[act.__name__] = act
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "reward.py").write_text(CODE)
    (folder / "neighbour.py").write_text("ANSWER = 42\n")
    (folder / "answers.txt").write_text("42")
    return f"{folder}/reward.py:judge"


def judge(
    code: str, *responses: str, limits: RewardLimitsConfig | None = None, **metadata: Any
) -> RewardResult:
    config = RewardConfig(code, timeout=120.0, limits=limits or RewardLimitsConfig())
    with FunctionReward(config) as reward:
        sample = {"prompt": "p", "ground_truth": "", "metadata": metadata}
        return reward.score([{"response": response, **sample} for response in responses])


@pytest.mark.slow
def test_usual_code_runs_as_it_did(code: str) -> None:
    names = ["data beside the code", "neighbour", "imports", "workers", "manager", "programs", "temporary"]
    result = judge(code, *names, "terminal", "pipes_to_itself", "itself")
    assert result.rewards.tolist() == [1.0] * len(result.answers), [one.message for one in result.failures]
    assert judge(code, "here", path=os.getcwd()).rewards.tolist() == [1.0]


def test_hidden_files_beside_the_code_leave_no_open_descriptors(code: str, tmp_path: Path) -> None:
    copied = tmp_path / "reward.py"
    copied.write_text(CODE.replace("import neighbour", ""))
    before = judge(f"{copied}:judge", "opened").rewards.tolist()
    for number in range(20):
        (tmp_path / f".hidden{number}").touch()
    assert judge(f"{copied}:judge", "opened").rewards.tolist() == before


def test_a_module_of_an_installed_package_is_imported() -> None:
    result = judge("megatron_rl.rewards.arithmetic:exact_match", "#### 4")
    assert result.valid.all()


@pytest.mark.slow
def test_files_are_read_where_limits_name_them_and_the_error_says_so(code: str, tmp_path: Path) -> None:
    data = tmp_path / "data" / "table.txt"
    data.parent.mkdir()
    data.write_text("x")
    data.chmod(0o600)
    (tmp_path / "link").symlink_to(data.parent)
    through_the_link = str(tmp_path / "link" / "table.txt")
    for read in (data, data.parent, tmp_path / "link"):
        limits = RewardLimitsConfig(read=(str(read),))
        assert judge(code, "read", limits=limits, path=str(data)).rewards.tolist() == [1.0]
        refused = judge(code, "write", limits=limits, path=str(data))
        assert "limits.write is false" in refused.failures[0].message
    assert judge(code, "read", limits=limits, path=through_the_link).rewards.tolist() == [1.0]
    (failure,) = judge(code, "read", path=str(data)).failures
    assert "the paths in limits.read" in failure.message


def test_write_makes_named_folders_and_the_folder_of_the_code_writable(code: str, tmp_path: Path) -> None:
    limits = RewardLimitsConfig(read=(str(tmp_path),), write=True)
    beside = Path(code.partition(":")[0]).with_name("written.txt")
    for target in (tmp_path / "written.txt", beside):
        assert judge(code, "write", limits=limits, path=str(target)).rewards.tolist() == [1.0]
        assert target.read_text() == "x" and target.stat().st_uid == os.getuid()
    system = judge(code, "write", limits=limits, path="/usr/written.txt")
    assert not system.valid.any()


def test_names_are_resolved_where_the_network_is_allowed(code: str) -> None:
    result = judge(code, "names", limits=RewardLimitsConfig(network=True))
    assert result.rewards.tolist() == [1.0], result.failures


@pytest.mark.slow
def test_variables_are_those_that_are_usual_or_named(code: str, monkeypatch) -> None:
    for name in (*SECRETS, "MINE", "OMP_NUM_THREADS", "LC_ALL"):
        monkeypatch.setenv(name, "1")
    limits = RewardLimitsConfig(environment=("MINE", "GH_PAT"))
    for name in ("MINE", "GH_PAT", "OMP_NUM_THREADS", "LC_ALL", "PATH"):
        assert judge(code, "variable", limits=limits, name=name).rewards.tolist() == [1.0], name
    assert not set(SECRETS) & set(allowed_environment(os.environ, network=True))
    proxies = {"HTTPS_PROXY": "http://proxy:3128", "http_proxy": "http://me:secret@proxy:3128"}
    assert allowed_environment(proxies) == {}
    assert allowed_environment(proxies, network=True) == {"HTTPS_PROXY": "http://proxy:3128"}


def test_of_a_home_only_modules_are_seen(monkeypatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "package").mkdir(parents=True)
    (home / "private").mkdir()
    (home / "reward.py").write_text(CODE.replace("import neighbour", "import package as neighbour"))
    (home / "package" / "__init__.py").write_text("ANSWER = 42\n")
    (home / "private" / "diary.txt").write_text("x")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    assert is_shared(str(home)) and is_shared("/tmp") and not is_shared(str(home / "package"))
    result = judge(f"{home}/reward.py:judge", "neighbour", "read", path=str(home / "private" / "diary.txt"))
    assert result.valid.tolist() == [True, False], result.failures


def test_links_on_the_way_to_a_path_are_told(tmp_path: Path) -> None:
    real = tmp_path / "real" / "folder"
    real.mkdir(parents=True)
    (tmp_path / "first").symlink_to("real")
    (tmp_path / "second").symlink_to(tmp_path / "first" / "folder")
    links, end = resolve_links(str(tmp_path / "second"))
    assert end == str(real.resolve())
    assert [Path(link).name for link, _ in links if link.startswith(str(tmp_path))] == ["second", "first"]


def test_code_runs_where_no_root_can_be_built_and_that_is_said(code: str) -> None:
    everything = RewardLimitsConfig(read=("/",))  # `check` refuses it: there is nowhere to mount it
    with FunctionReward(RewardConfig(code, limits=everything)) as reward:
        result = reward.score([{"prompt": "p", "response": "neighbour", "ground_truth": "", "metadata": {}}])
        assert result.rewards.tolist() == [1.0]
        assert any(NO_ROOT in words or CHILDREN_SEARCHED in words for words in reward.unenforced_limits)
