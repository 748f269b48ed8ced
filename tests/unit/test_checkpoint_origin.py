"""A checkpoint that could run code is refused, however it hides that, and is never read to find out."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_rl.checkpoint.untrusted import refuse_code
from megatron_rl.errors import UserError


class Runs:
    """Write a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a distributed checkpoint with a tensor and a value in it."""
    folder = tmp_path / "actor"
    dcp.save({"weight": torch.ones(3), "common": io.BytesIO()}, checkpoint_id=folder)
    torch.save({}, folder / "common.pt")
    put(folder, saved({"step": 1}))
    return folder


def put(folder: Path, content: bytes, **described: Any) -> None:
    """Set the directory's value to ``content``; ``described`` are further attributes."""
    directory = pickle.loads((folder / ".metadata").read_bytes())
    name = next(
        n for n, entry in directory.state_dict_metadata.items() if type(entry) is BytesStorageMetadata
    )
    vars(directory.state_dict_metadata[name]).update(described)
    info = next(info for index, info in directory.storage_data.items() if index.fqn == name)
    info.relative_path, info.offset, info.length = "value", 0, len(content)
    directory.storage_meta = None  # Megatron writes none; torch's own names the folder
    (folder / "value").write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(directory))


def test_plain_values_and_tensors_pass(folder: Path) -> None:
    put(folder, saved({"step": 1, "weight": torch.ones(2), "rates": [1e-3]}))
    refuse_code(folder, trusted=False)


@pytest.mark.parametrize("described", [{}, {"chunks": []}], ids=["a value", "a value that poses as a tensor"])
def test_a_value_that_runs_is_refused_and_not_run(folder: Path, tmp_path: Path, described: Any) -> None:
    put(folder, saved(Runs(tmp_path / "mark")), **described)
    with pytest.raises(UserError, match=r"could run code[^§]*value[^§]*mkdir[^§]*--trust"):
        refuse_code(folder, trusted=False)
    assert not (tmp_path / "mark").exists()
    refuse_code(folder, trusted=True)


def test_the_directory_itself_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "mark")))
    with pytest.raises(UserError, match=r"could run code[^§]*\.metadata[^§]*mkdir"):
        refuse_code(folder, trusted=False)
    assert not (tmp_path / "mark").exists()


def test_what_torch_would_read_as_another_format_is_refused(folder: Path, tmp_path: Path) -> None:
    old = saved(Runs(tmp_path / "mark"), _use_new_zipfile_serialization=False)
    put(folder, old + saved({"step": 1}))  # an archive to those who look for its table at the end
    with pytest.raises(UserError, match=r"cannot be read[^§]*no archive begins there"):
        refuse_code(folder, trusted=False)
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), program)
    put(folder, program.getvalue())
    with pytest.raises(UserError, match=r"cannot be read[^§]*TorchScript"):
        refuse_code(folder, trusted=False)


@pytest.mark.parametrize("content", [b"", b"none", pickle.dumps({"a": 1}), None])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "value"])
def test_damage_names_the_file(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read[^§]*" + name):
        refuse_code(folder, trusted=False)
