"""Every damage of a folder is detected from its checksums, and named."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import durable
from megatron_rl.algorithms import AlgorithmState
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import (
    PendingCheckpoint,
    convert_write_error,
    find_newest_intact_checkpoint,
)
from megatron_rl.config.checkpoint_meta import (
    META,
    STATE_FORMAT,
    latest_checkpoint,
    named_checkpoints,
    read_meta,
    write_meta,
)
from megatron_rl.data.sources import PromptSource, ResponseSource, ShuffledOrder
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.rollout.buffer import RolloutBuffer
from megatron_rl.trainer.sample import RolloutSource, SampledBatch
from megatron_rl.trainer.state import STATE_TYPES, Best, TrainerState

STATE_DIGESTS = {2: "cb969db6"}
"""Digest of what says which state is saved, by its number."""


def folder_with(path: Path) -> Path:
    (path / "deep").mkdir(parents=True)
    (path / "a.bin").write_bytes(bytes(range(256)) * 40)
    (path / "deep/b.json").write_text('{"step": 3}')
    (path / "empty").touch()
    durable.write_digests(path, durable.compute_digests(path, durable.files_below(path)))
    return path


def damages(path: Path) -> list[str]:
    known = durable.read_digests(path)
    assert known is not None
    return durable.describe_damaged_files(path, known, list(known))


def test_a_whole_folder_has_no_damage_and_further_files_are_none(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "step_1")
    assert damages(path) == [] and durable.files_below(path) == ["a.bin", "deep/b.json", "empty"]
    (path / "note").write_text("left by somebody")
    assert damages(path) == []


def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "step_1")
    (path / "deep/b.json").unlink()
    with open(path / "a.bin", "r+b") as file:
        file.truncate(704)
    (path / "empty").unlink()
    (path / "empty").mkdir()
    assert damages(path) == [
        "a.bin has 704 bytes instead of 10240",
        "deep/b.json is missing",
        "empty is unreadable: it is not a regular file",
    ]
    (path / "empty").rmdir()
    os.mkfifo(path / "empty")  # would be opened for ever
    os.truncate(path / "a.bin", 2**40)  # would be read for hours
    assert [line.split()[0] for line in damages(path)] == ["a.bin", "deep/b.json", "empty"]
    for text in ("[" * 100_000, "", "[1]", "{", '{"a.bin": 1}', "{}"):
        (path / durable.DIGESTS).write_text(text)
        assert durable.read_digests(path) is None


def test_what_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "step_1")
    with pytest.raises(OSError, match="not a regular file"):
        durable.compute_digests(path, ["a.bin", "deep"])


@given(place=st.integers(0, 10239), bit=st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_one_flipped_bit_is_found(tmp_path_factory, place: int, bit: int) -> None:
    path = folder_with(tmp_path_factory.mktemp("flip") / "step_1")
    content = bytearray((path / "a.bin").read_bytes())
    content[place] ^= 1 << bit
    (path / "a.bin").write_bytes(content)
    assert damages(path) == ["a.bin has different content than when it was written"]


def test_a_folder_replaces_another_of_its_name(tmp_path: Path) -> None:
    folder_with(tmp_path / "step_1")
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside/new").touch()
    durable.publish_folder(tmp_path / "aside", tmp_path / "step_1")
    assert os.listdir(tmp_path) == ["step_1"] and os.listdir(tmp_path / "step_1") == ["new"]
    for make in (Path.touch, lambda path: path.symlink_to("nowhere")):
        shutil.rmtree(tmp_path / "step_1")
        make(tmp_path / "step_1")
        (tmp_path / "aside").mkdir()
        durable.publish_folder(tmp_path / "aside", tmp_path / "step_1")
        assert os.listdir(tmp_path) == ["step_1"] and (tmp_path / "step_1").is_dir()


KILLED_BETWEEN_TWO_RENAMES = """
import os, signal, sys
from pathlib import Path
from megatron_rl import durable

renames = []

def count(event, arguments):
    if event == "os.rename":
        renames.append(arguments)
        if len(renames) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
durable.publish_folder(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_kill_between_the_two_renames_of_a_replacement_loses_no_checkpoint(tmp_path: Path) -> None:
    device.initialize()
    final = folder_with(tmp_path / "step_4")
    write_meta(final, {"step": 4})
    durable.write_digests(final, durable.compute_digests(final, durable.files_below(final)))
    for has_older_leftover in (False, True):
        shutil.copytree(final, tmp_path / "step_4.partial")
        if has_older_leftover:
            shutil.copytree(final, tmp_path / "step_4.old")
        command = [sys.executable, "-c", KILLED_BETWEEN_TWO_RENAMES, f"{final}.partial", str(final)]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        assert sorted(os.listdir(tmp_path)) == ["step_4.old", "step_4.partial"]
        assert named_checkpoints(tmp_path) == [tmp_path / "step_4.old"] == [latest_checkpoint(tmp_path)]
        said: list[str] = []
        assert find_newest_intact_checkpoint(tmp_path, said.append) == final
        assert "step_4.old" in said[0] and damages(final) == []
        assert os.listdir(tmp_path) == ["step_4"]  # a run that has ended makes no save that prunes


def test_a_replacement_keeps_the_only_complete_copy_until_it_has_the_name(tmp_path: Path) -> None:
    folder_with(tmp_path / "step_4.old")
    with pytest.raises(FileNotFoundError):
        durable.publish_folder(tmp_path / "missing", tmp_path / "step_4")
    assert durable.recover_replaced(tmp_path) == [tmp_path / "step_4"] and damages(tmp_path / "step_4") == []


def test_half_of_a_checkpoint_that_was_being_deleted_gets_no_name_back(tmp_path: Path) -> None:
    folder_with(tmp_path / f"step_2{durable.DOOMED}")
    assert durable.recover_replaced(tmp_path) == [] and named_checkpoints(tmp_path) == []


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    durable.require_space(tmp_path, 10, "a file")
    with pytest.raises(UserError, match="too full for a checkpoint") as refused:
        durable.require_space(tmp_path, 2**70, "a checkpoint")
    assert str(tmp_path) in str(refused.value) and "GiB" in str(refused.value)


def test_a_state_that_another_version_saved_is_named(tmp_path: Path) -> None:
    write_meta(tmp_path, {"versions": {"megatron-rl": "0.0.9"}})
    for number in (STATE_FORMAT + 1, 0, None):
        meta = {name: value for name, value in read_meta(tmp_path).items() if name != "state_format"}
        (tmp_path / META).write_text(json.dumps(meta if number is None else {**meta, "state_format": number}))
        with pytest.raises(UserError, match=f"format {number or 0}, saved by .*0.0.9") as refused:
            checkpoint.read_state(tmp_path)
        assert refused.value.where == str(tmp_path) and "export" in str(refused.value.fix)
        assert refused.value.expected == f"state of format {STATE_FORMAT}"


class _WriteWithoutMemory:
    def __init__(self, allocator: str) -> None:
        self._allocator = allocator

    def write_shards(self) -> None:
        if self._allocator == "torch":
            torch.empty(2**40, dtype=torch.uint8)
        else:
            bytearray(2**60)


@pytest.mark.parametrize("allocator", ["torch", "python"])
def test_memory_that_runs_out_while_a_thread_writes_is_told_as_that(allocator: str, tmp_path: Path) -> None:
    device.initialize()
    writes: list[Any] = [_WriteWithoutMemory(allocator)]
    pending = PendingCheckpoint(tmp_path / "step_3", writes, [], None, ())
    with pytest.raises(UserError) as told:
        pending.finish()
    assert "the host's memory ran out while the checkpoint step_3 was written" in str(told.value)
    assert "checkpoint.asynchronous=false" in str(told.value)


def _function(function: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def test_a_change_of_the_state_raises_its_format() -> None:
    """Methods that define a checkpoint's content, whatever their layout, and the fields of its values."""
    saved_by = (
        AlgorithmState,
        ShuffledOrder,
        PromptSource,
        ResponseSource,
        RolloutBuffer,
        RolloutSource,
        TrainerState,
    )
    bodies = [" ".join(map(ast.unparse, _function(one.state_dict).body[1:])) for one in saved_by]
    fields = [f"{one.__name__} {list(one.__annotations__)}" for one in (*STATE_TYPES, Best, SampledBatch)]
    digest = hashlib.sha256("\n".join(bodies + fields).encode()).hexdigest()[:8]
    assert digest == STATE_DIGESTS[STATE_FORMAT], (
        f"raise STATE_FORMAT where old checkpoints would be misread; its digest is {digest}"
    )


def test_a_write_that_the_system_cuts_off_is_told_as_one(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(RuntimeError) as cut:
            torch.save(torch.zeros(2**16), tmp_path / "tensors.pt")
        with pytest.raises(OSError) as refused:
            (tmp_path / "text").write_bytes(bytes(2**17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for error in (cut.value, refused.value):
        told = convert_write_error(error, tmp_path / "step_2")
        assert isinstance(told, UserError) and "ulimit -f" in str(told)
