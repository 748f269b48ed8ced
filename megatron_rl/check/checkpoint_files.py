"""Rules on the model's files, read without torch: what is there, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.errors import UserError, nearest
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import read_trainable


@dataclass
class Files:
    """Collect findings about files.

    ``prepare`` maps a directory to the command that makes it; what is missing below one that is not there
    yet is collected in ``to_be_made``. Other missing files are errors, or with ``absent`` warnings.
    """

    prepare: Mapping[str, str] = field(default_factory=dict)
    absent: bool = False
    errors: list[UserError] = field(default_factory=list)
    missing: list[UserError] = field(default_factory=list)
    to_be_made: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def miss(self, path: Path, message: str, where: str, expected: str, fix: str | None = None) -> None:
        """Record a missing file, as a warning where its directory is still to be made."""
        command = self._command(path)
        error = UserError(
            message,
            where=where,
            expected=expected,
            got=_neighbours(path),
            fix=f"make it with: {command[1]}" if command else fix or "correct the path",
        )
        if command is not None and not Path(command[0]).exists():
            self.to_be_made.setdefault(command, []).append(f"{path} ({where})")
        else:
            (self.missing if self.absent else self.errors).append(error)

    def unmade(self) -> list[UserError]:
        """Return one finding for each directory that its command has still to make."""
        return [
            UserError(
                f"{directory} is not there yet",
                where="prepare",
                expected="\n".join(paths),
                got=f"no directory {directory}",
                fix=f"run: {command}",
            )
            for (directory, command), paths in self.to_be_made.items()
        ]

    def _command(self, path: Path) -> tuple[str, str] | None:
        for directory, command in self.prepare.items():
            root = Path(directory)
            if path == root or root in path.parents:
                return directory, command
        return None


def _neighbours(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        while parent.parent != parent and not parent.parent.is_dir():
            parent = parent.parent
        return f"no directory {parent}"
    close = nearest(path.name, [item.name for item in parent.iterdir()])
    return f"no {path.name} in {parent}" + (f"; there is {close}" if close else "")


def check_model_files(
    path: Path, where: str, files: Files, shipped: Path | None = None, weights: bool = True
) -> ModelShape | None:
    """Check a Hugging Face checkpoint and return its shape.

    ``shipped`` is a config.json to take the shape from where the checkpoint is not on this machine.
    """
    if not path.is_dir():
        if path.is_file():
            files.errors.append(
                UserError(
                    "the model path is a file",
                    where=where,
                    expected="a directory with config.json, *.safetensors and tokenizer files",
                    got=str(path),
                    fix="name the directory that holds the checkpoint",
                )
            )
            return None
        download = f"hf download ORGANISATION/{path.name} --local-dir {path}, or correct the path"
        files.miss(
            path,
            f"the model directory {path} does not exist",
            where,
            "a directory with config.json, *.safetensors and tokenizer files",
            download,
        )
        return read_trainable(shipped, files.errors) if shipped is not None and shipped.is_file() else None
    config = path / "config.json"
    shape = None
    if config.is_file():
        shape = read_trainable(config, files.errors)
    else:
        files.miss(
            config,
            "the model has no config.json",
            where,
            "a Hugging Face checkpoint directory",
            "name the directory that holds config.json",
        )
    if weights:
        _check_weights(path, where, files)
        _check_tokenizer(path, where, files)
    return shape


def _check_weights(path: Path, where: str, files: Files) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            shards = [path / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            files.errors.append(
                UserError(
                    "the model's list of weight files cannot be read",
                    where=str(index),
                    expected='a JSON object with "weight_map"',
                    got=f"{type(error).__name__}: {error}",
                    fix="copy the file again from the checkpoint",
                )
            )
            return
    else:
        shards = sorted(path.glob("*.safetensors"))
    if not shards:
        others = [item.name for item in path.glob("*.bin")][:3]
        files.miss(
            path / "model.safetensors",
            "the model has no weights",
            where,
            "one or more .safetensors files",
            "convert the .bin files: load with transformers and save_pretrained(safe_serialization=True)"
            if others
            else "copy the weight files into the directory",
        )
    for shard in shards:
        if not shard.is_file():
            files.miss(
                shard,
                f"a weight file is missing: {shard.name}",
                where,
                "every file that model.safetensors.index.json names",
                "download the checkpoint again",
            )
        else:
            _check_shard(shard, files)


def _check_shard(path: Path, files: Files) -> None:
    """Compare a safetensors file's size with its header, so that half a download is seen."""
    problem = None
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                problem = f"{size} bytes, which do not hold its header"
                if size < 1024 and b"git-lfs" in path.read_bytes():
                    problem = "a Git LFS pointer instead of the weights"
            else:
                header = json.loads(stream.read(length))
                end = max(
                    (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
                    default=0,
                )
                if 8 + length + end != size:
                    problem = f"{size} bytes where its header says {8 + length + end}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        files.errors.append(
            UserError(
                "a weight file is broken",
                where=str(path),
                expected="a complete safetensors file",
                got=problem,
                fix="download or copy the file again",
            )
        )


def _check_tokenizer(path: Path, where: str, files: Files) -> None:
    kinds = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
    if not any(all((path / name).is_file() for name in names) for names in kinds):
        files.miss(
            path / "tokenizer.json",
            "the model has no tokenizer",
            where,
            "tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
            "copy the tokenizer files of the model into its directory",
        )
    settings = path / "tokenizer_config.json"
    if settings.is_file():
        try:
            json.loads(settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            files.errors.append(
                UserError(
                    "the model's tokenizer_config.json cannot be read",
                    where=str(settings),
                    expected="a JSON object",
                    got=str(error),
                    fix="copy the file again from the checkpoint",
                )
            )


def has_chat_template(path: Path) -> bool:
    """Return whether a checkpoint directory comes with a chat template."""
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
