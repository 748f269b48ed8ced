"""Reward functions that are broken, hostile, or run programs that are: invalid samples, and nothing else."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_rl.check.rewards import check_reward
from megatron_rl.config.load import dump, without_secrets
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.models import ModelConfig
from megatron_rl.config.sections.rewards import RewardConfig, RewardLimitsConfig
from megatron_rl.config.sections.rollout import EnvironmentConfig, RolloutConfig
from megatron_rl.config.setting import iter_settings
from megatron_rl.contained import process
from megatron_rl.contained.confinement import OTHER_TASKS
from megatron_rl.contained.control_group import ControlGroup
from megatron_rl.errors import UserError
from megatron_rl.redaction import HIDDEN, contains_hidden, is_secret, redact
from megatron_rl.rewards.function import FunctionReward, RewardResult

pytestmark = pytest.mark.starts_contained

HOSTILE = """
import ctypes, json, os, pickle, signal, socket, struct, subprocess, sys, tempfile, time

def judge(*, prompt, response, ground_truth, metadata):
    return ACTS[response](metadata)

def fork(metadata):
    os.fork()
    return 1.0

def bomb(metadata):
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)

def daemon(metadata):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", metadata["seconds"]])
        os._exit(0)
    time.sleep(1000)

def bounds(metadata):
    read = lambda file: float(open(file).read())
    return {"reward": 1.0, "tasks": read("/proc/sys/kernel/pid_max"), "oom": read("/proc/self/oom_score_adj")}

def surrogate_error(metadata):
    raise ValueError("half \\udc00 pair \\0 \\x1b[2J é\\n\\tend")

def memory_of_children(metadata):
    program = "import time; held = bytearray(400 * 2**20); time.sleep(1000)"
    for _ in range(6):
        subprocess.Popen([sys.executable, "-c", program])
    time.sleep(1000)

def connect(metadata):
    socket.create_connection(("127.0.0.1", metadata["port"]), timeout=5)
    return 1.0

def write(metadata):
    return open(metadata["file"], "w").write("x")

def scratch(metadata):
    return tempfile.TemporaryFile().write(b"x")

def spin(metadata):
    while True:
        pass

def kill_parent(metadata):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.5)
    return 1.0

def remount(metadata):
    return ctypes.CDLL(None).mount(None, b"/", None, 32 | 4096, None)

class Evil:
    def __reduce__(self):
        return (open, ("/dev/shm/owned-by-reward", "w"))

def write_to_pipes(data):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("pipe"):
                os.write(int(name), data)
        except OSError:
            pass

def forge(metadata):
    answer = json.dumps({"sample": 7, "kind": "scored", "reward": 9.0, "components": {}}).encode()
    for data in (pickle.dumps(Evil()), answer):
        write_to_pipes(struct.pack("<Q", len(data)) + data)
    return 1.0

def huge_frame(metadata):
    write_to_pipes(struct.pack("<Q", 1 << 60))
    return 1.0

ACTS = {
    "fine": lambda metadata: 1.0,
    "huge": lambda metadata: 1e300,
    "huge component": lambda metadata: {"reward": 1.0, "score": -1e300},
    "huge integer": lambda metadata: 10 ** 400,
    "surrogate name": lambda metadata: {"reward": 1.0, "bad\\ud800name": 2.0},
    "many components": lambda metadata: {"reward": 1.0} | {str(n): 1.0 for n in range(1000)},
    "memory": lambda metadata: len(bytearray(10 * 2**30)),
    "unusual": lambda metadata: float(metadata["raw"] == b"\\x00" and metadata["text"] == "\\ud800"),
}
for act in (fork, bomb, bounds, daemon, surrogate_error, memory_of_children, connect, write, scratch, spin,
            kill_parent, remount, forge, huge_frame):
    ACTS[act.__name__] = act
"""
SMALL = RewardLimitsConfig(memory_gib=1.0, processes=16)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "hostile.py"
    path.write_text(HOSTILE)
    return f"{path}:judge"


def judge(reward: FunctionReward, *responses: str, **metadata) -> RewardResult:
    rest = {"prompt": "p", "ground_truth": "4", "metadata": metadata}
    return reward.score([{"response": response, **rest} for response in responses])


def one(
    file: str, response: str, limits: RewardLimitsConfig = SMALL, timeout: float = 5.0, **metadata
) -> str:
    """Judge a hostile sample between good ones; return the reason and the message of its failure, if any."""
    with FunctionReward(RewardConfig(file, timeout=timeout, limits=limits)) as reward:
        result = judge(reward, "fine", response, "fine", **metadata)
        assert judge(reward, "fine").valid.all()
    assert result.valid[[0, 2]].all() and result.rewards[[0, 2]].tolist() == [1.0, 1.0]
    return " ".join(f"{failure.reason}: {failure.message}" for failure in result.failures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("huge", "not_finite: reward is 1e+300, beyond what float32 holds"),
        ("huge component", "not_finite: score is -1e+300"),
        ("huge integer", "not_finite: reward is inf"),
        ("surrogate_error", "half ? pair \\x00 \\x1b[2J é\n\tend"),
        ("many components", "wrong_type: more than 64 components"),
        ("memory", "MemoryError"),
        ("spin", "timeout: ran longer than 1 s"),
        ("huge_frame", "disorder: the process announced an answer of"),
        ("kill_parent", ""),
    ],
)
def test_a_bad_sample_is_invalid_and_says_why(file: str, response: str, words: str) -> None:
    assert words in one(file, response, timeout=1.0)


def test_names_that_no_file_takes_make_their_sample_invalid(file: str) -> None:
    with FunctionReward(RewardConfig(file)) as reward:
        result = judge(reward, "surrogate name", "fine")
    assert [(failure.row, failure.reason) for failure in result.failures] == [(0, "wrong_type")]
    assert "surrogate" in result.failures[0].message


def test_a_forked_child_that_returns_answers_nothing(file: str) -> None:
    with FunctionReward(RewardConfig(file)) as reward:
        result = judge(reward, *["fork", "fine"] * 10)
    assert result.valid.all() and result.rewards.tolist() == [1.0] * 20


@pytest.mark.slow
def test_limits_of_processes_memory_and_processor_time(file: str) -> None:
    assert "limit: started more than 16 processes" in one(file, "bomb", timeout=60.0)
    assert "limit: held more than 1 GiB" in one(file, "memory_of_children", timeout=60.0)
    quick = RewardLimitsConfig(cpu_seconds=0.5)
    assert "limit: used more than 0.5 s of processor" in one(file, "spin", limits=quick, timeout=30.0)


def test_the_kernel_holds_what_a_busy_supervisor_would_see_too_late(file: str) -> None:
    with FunctionReward(RewardConfig(file, limits=SMALL)) as reward:
        components = judge(reward, "bounds").components
    assert components["oom"].item() == 1000
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 14) and not reward.unenforced_limits:
        assert components["tasks"].item() == OTHER_TASKS + SMALL.processes


@pytest.mark.slow
def test_children_that_leave_their_session_go_too(file: str) -> None:
    seconds = f"1000.{os.getpid()}1"
    assert "timeout" in one(file, "daemon", timeout=1.0, seconds=seconds)
    assert not [other for other in psutil.process_iter(["cmdline"]) if seconds in str(other.info)]


def test_network_and_files_are_out_of_reach_or_it_is_said(file: str, tmp_path: Path) -> None:
    target = tmp_path / "written"
    limits = RewardLimitsConfig(read=(str(tmp_path),))
    with socket.socket() as server, FunctionReward(RewardConfig(file, limits=limits)) as reward:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port, path = server.getsockname()[1], str(target)
        result = judge(reward, "connect", "write", "scratch", "remount", "write", port=port, file=path)
        if reward.unenforced_limits:  # the attacks' own tests say what is left
            assert all("namespaces" in words or "(" in words for words in reward.unenforced_limits)
            return
    assert result.valid.tolist() == [False, False, True, True, False]
    assert result.rewards[3] == -1, "the file system was made writable again"
    messages = [failure.message for failure in result.failures]
    assert "(limits.network is false)" in messages[0] and "(limits.write is false" in messages[1]
    assert not target.exists()


def test_network_and_files_can_be_granted(file: str, tmp_path: Path) -> None:
    granted = RewardLimitsConfig(network=True, write=True, read=(str(tmp_path),))
    with socket.socket() as server, FunctionReward(RewardConfig(file, limits=granted)) as reward:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port, path = server.getsockname()[1], str(tmp_path / "written")
        assert judge(reward, "connect", "write", port=port, file=path).valid.all()


def test_a_forged_answer_runs_nothing_and_counts_for_no_row(file: str) -> None:
    owned = Path("/dev/shm/owned-by-reward")
    owned.unlink(missing_ok=True)
    assert "disorder" in one(file, "forge")
    assert not owned.exists()


def test_values_that_json_does_not_hold_reach_the_function(file: str) -> None:
    with FunctionReward(RewardConfig(file)) as reward:
        assert judge(reward, "unusual", raw=b"\x00", text="\ud800").rewards.tolist() == [1.0]


def test_an_endless_import_is_the_users_error_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process, "LOAD_SECONDS", 1.0)
    path = tmp_path / "endless.py"
    path.write_text("while True:\n    pass\n")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(UserError, match="cannot be loaded") as refused:
        FunctionReward(RewardConfig(f"{path}:judge"))
    assert "still loading after 1 s" in str(refused.value)
    time.sleep(0.1)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_secrets_are_known_by_their_names() -> None:
    hidden = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "apiKey", "password", "Authorization"]
    shown = ["max_prompt_tokens", "TOKENIZERS_PARALLELISM", "keys", "monkey", "author"]
    assert all(map(is_secret, hidden)) and not any(map(is_secret, shown))
    told = redact({"url": "http://x", "headers": [{"api_key": "abc"}], "token": ""})
    assert told == {"url": "http://x", "headers": [{"api_key": HIDDEN}], "token": ""}
    assert contains_hidden(told) and not contains_hidden({"url": ["http://x"]})


def test_a_run_writes_no_secret_down_and_takes_no_hidden_one(file: str) -> None:
    arguments = {"url": "http://x", "api_key": "abc"}
    config = RunConfig(
        model=ModelConfig("m"),
        data=DataConfig("d"),
        reward=RewardConfig(file, arguments),
        run_dir="r",
        steps=1,
        rollout=RolloutConfig(
            environment=EnvironmentConfig("e.py:E", settings={"password": "def", "door": "green"}),
            vllm={"hf_token": "ghi", "seed": 3},
        ),
    )
    written = dump(without_secrets(config))
    assert "abc" not in written and HIDDEN in written and "http://x" in written
    assert "def" not in written and "ghi" not in written and "green" in written and "seed: 3" in written
    names = [path for path, _, _ in iter_settings(config)]
    assert not [path for path in names if is_secret(path.rpartition(".")[2])], "a key of ours would be hidden"
    (error,) = check_reward(replace(config, reward=RewardConfig(file, {"api_key": HIDDEN})))
    assert "hidden" in str(error)


@pytest.mark.parametrize(
    ("version", "refused", "exceeded"), [("1", 0, False), ("1", 3, True), ("2", 0, False), ("2", 3, True)]
)
def test_a_machine_without_memory_is_not_the_limit_of_the_code(
    version: str, refused: int, exceeded: bool, tmp_path: Path
) -> None:
    if version == "1":
        (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
        (tmp_path / "memory.failcnt").write_text(f"{refused}\n")
    else:
        (tmp_path / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom {refused}\noom_kill 1\n")
    group = ControlGroup.__new__(ControlGroup)
    group._folders = {"memory": tmp_path}
    assert group.has_exceeded_memory() is exceeded
