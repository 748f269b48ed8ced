"""Models and data sets on the Hugging Face Hub, with names that begin with ``hf://`` as in huggingface_hub.

When a configuration is loaded, each name is replaced by the path of its copy in the Hub's cache, so all later
code reads only local files. The first use pins the revision: later uses on this machine read the same copy
without a request to the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.source import Origin, Section
from megatron_rl.errors import UserError, first_line
from megatron_rl.shapes.pretrained import read_index, weight_files

PREFIX = "hf://"
_NAME = re.compile(
    r"hf://(?P<data>datasets/)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<path>[^@]+))?"
)
_EXPECTED = "hf://ORG/NAME of a model, or hf://datasets/ORG/NAME/PATH of a data set; @REVISION after NAME"
_WEIGHTS = "*.safetensors"
_IGNORED_FILES = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx*", "*.h5", "*.msgpack", "original/*", "metal/*")
"""Patterns of model files that are never downloaded: the same weights in other formats."""


@dataclass(frozen=True)
class HubCopy:
    """Hub repository, or some of its files, that a configuration uses through a copy on this machine.

    Example: ``hf://datasets/openai/gsm8k/main/train-*.parquet`` is ``HubCopy("openai/gsm8k", "dataset",
    None, "main/train-*.parquet")``.
    """

    repo: str
    """Name of the repository on the Hub, ORG/NAME."""
    kind: str
    """Type of the repository: ``model`` or ``dataset``."""
    revision: str | None = None
    """Branch, tag or commit; None is the default branch at the time of the first use."""
    files: str | None = None
    """File or pattern inside the repository; None for a complete model."""
    reason: str = ""
    """Why the copy on this machine is not complete."""

    @property
    def name(self) -> str:
        """Return the name of the repository as a configuration writes it."""
        name = PREFIX
        if self.kind == "dataset":
            name += "datasets/"
        name += self.repo
        if self.revision is not None:
            name += f"@{self.revision}"
        return name

    @property
    def command(self) -> str:
        """Return the ``hf download`` command that downloads this repository, or the selected files of it."""
        arguments = ["hf download", self.repo]
        if self.kind == "dataset":
            arguments.append("--repo-type dataset")
        if self.revision is not None:
            arguments.append(f"--revision {self.revision}")
        if self.files is not None:
            arguments.append(f'--include "{self.files}"')
        return " ".join(arguments)

    def path(self, snapshot: Path) -> Path:
        """Return the local path of the files; ``snapshot`` is the local folder of the revision."""
        if self.files is None:
            return snapshot
        return snapshot / self.files


def parse_hub_name(name: str) -> HubCopy | None:
    """Parse a ``hf://`` name; return None if it is malformed."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    match = _NAME.fullmatch(name)
    if match is None:
        return None

    # The Hub rejects some names that match the pattern, such as names with `--`, its separator in the cache.
    try:
        validate_repo_id(match["repo"])
    except HFValidationError:
        return None

    kind = "model"
    if match["data"]:
        kind = "dataset"
    # A data set needs a path of files. A model must not have a path: it is downloaded completely.
    if (kind == "dataset") != bool(match["path"]):
        return None
    return HubCopy(match["repo"], kind, match["revision"], match["path"])


def model_source(path: str) -> str:
    """Return the ``hf://`` name of a model in the Hub's cache; return any other path unchanged.

    Example:
        >>> model_source("/cache/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218")
        'hf://Qwen/Qwen3-8B'
        >>> model_source("runs/quickstart/hf")
        'runs/quickstart/hf'
    """
    folder = Path(path)
    repository = folder.parent.parent.name
    # The cache stores a revision in models--ORG--NAME/snapshots/COMMIT.
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return path
    return PREFIX + repository.removeprefix("models--").replace("--", "/", 1)


def resolve_hub_names(tree: Section, errors: list[UserError], with_weights: bool) -> dict[str, HubCopy]:
    """Replace each ``hf://`` name in a configuration by a local path; download missing files.

    Files of data sets and small files of models are always downloaded. Weights are downloaded only if
    ``with_weights`` is true. Errors about malformed names are appended to ``errors``.

    The result contains the repositories that are not completely on this machine. It maps the repository's
    local directory to the repository. If the download failed, the directory may not exist.
    """
    incomplete: dict[str, HubCopy] = {}
    for key, leaf in list(tree.leaves()):
        names = [leaf.value]
        if isinstance(leaf.value, list):
            names = leaf.value
        if not any(_is_hub_name(name) for name in names):
            continue

        resolved_names: list[Any] = []
        for name in names:
            resolved_name = name
            repository = None
            if _is_hub_name(name):
                repository = parse_hub_name(name)
                if repository is None:
                    errors.append(
                        UserError(
                            "the Hugging Face Hub name is malformed",
                            where=key,
                            expected=_EXPECTED,
                            got=name,
                            fix="write the name as the Hub shows it, or the path of a local copy",
                        )
                    )
            if repository is not None:
                resolved_name = str(_local_path(repository, with_weights, incomplete))
            resolved_names.append(resolved_name)

        # Add the original names to the origin, so that `check` can print them.
        names_text = ", ".join(str(name) for name in names)
        leaf.origin = Origin(leaf.origin.kind, f"{leaf.origin.detail}: {names_text}")
        if isinstance(leaf.value, list):
            leaf.value = resolved_names
        else:
            leaf.value = resolved_names[0]
    return incomplete


def _is_hub_name(value: Any) -> bool:
    """Return whether a value is an ``hf://`` name, valid or malformed."""
    return isinstance(value, str) and value.startswith(PREFIX)


def _local_path(repository: HubCopy, with_weights: bool, incomplete: dict[str, HubCopy]) -> Path:
    """Download the missing files of a Hub repository; return the local path of the repository.

    Weights of a model are downloaded only if ``with_weights`` is true. If files are still missing, an entry
    is added to ``incomplete``: local directory -> repository, with the reason.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError

    cache = Path(constants.HF_HUB_CACHE)
    try:
        snapshot = _download_snapshot(repository, cache, with_weights)
    except Exception as error:
        # All types are caught, since the HTTP library, and with it the type of its errors, differs by version
        # of the Hub's client.

        # Return a unique path that does not exist. Its last component is the name of the model: megatron_rl
        # contains the config.json of known models, and finds the file by this name.
        model_name = repository.repo.split("/")[1]
        snapshot = cache / "not-downloaded" / _unique_file_name(repository)[:12] / model_name
        reason = first_line(error)
        if isinstance(error, GatedRepoError):
            reason = f"accept the terms on the page of {repository.repo}, then run: hf auth login"
        incomplete[str(snapshot)] = replace(repository, reason=reason)
        return repository.path(snapshot)

    if repository.kind == "model" and not has_weights(snapshot):
        reason = "no weights in the cache; `train` downloads them"
        incomplete[str(snapshot)] = replace(repository, reason=reason)
    return repository.path(snapshot)


def _unique_file_name(repository: HubCopy) -> str:
    """Return a unique file name for files of a Hub repository: the hash of name, revision and files."""
    # Hash the fields, since they may contain `/`, which a file name cannot. JSON separates the fields, so
    # that different fields have different hashes.
    name = json.dumps([repository.kind, repository.repo, repository.revision, repository.files])
    return hashlib.sha256(name.encode()).hexdigest()


def _download_snapshot(repository: HubCopy, cache: Path, with_weights: bool) -> Path:
    """Download missing files of a Hub repository into ``cache``; return the local folder of its revision.

    The first download pins the revision: later downloads select the same one. Weights of a model are
    downloaded only if ``with_weights`` is true.
    """
    from filelock import FileLock
    from huggingface_hub import snapshot_download

    pins = cache / ".megatron_rl"
    pins.mkdir(parents=True, exist_ok=True)
    # The pin is a text file with the path of the revision's folder.
    pin = pins / _unique_file_name(repository)

    # All ranks of a node load the configuration at the same time. The first rank downloads; the others wait
    # for the lock and then use its copy.
    with FileLock(pin.with_suffix(".lock")):
        revision = repository.revision
        if pin.is_file():
            snapshot = Path(pin.read_text(encoding="utf-8"))
            # Download weights of the same revision as the small files.
            revision = snapshot.name
            needs_weights = with_weights and repository.kind != "dataset"
            if snapshot.is_dir() and (not needs_weights or has_weights(snapshot)):
                return snapshot

        ignored_patterns: list[str] = []
        if repository.kind == "model":
            ignored_patterns += _IGNORED_FILES
            if not with_weights:
                ignored_patterns.append(_WEIGHTS)
        folder = snapshot_download(
            repository.repo,
            repo_type=repository.kind,
            revision=revision,
            allow_patterns=repository.files,
            ignore_patterns=ignored_patterns,
        )

        # Write the pin atomically: an interrupted process must not leave an incomplete path.
        temporary = pin.with_suffix(f".{os.getpid()}")
        temporary.write_text(folder, encoding="utf-8")
        temporary.replace(pin)
        return Path(folder)


def has_weights(snapshot: Path) -> bool:
    """Return whether the folder of a model's revision contains all weight files.

    If the index of the weight files cannot be read, the function returns True: `check` reads the index again
    and reports its error.
    """
    files = weight_files(snapshot)
    if files is None:
        try:
            files = [snapshot / name for name in read_index(snapshot).values()]
        except UserError:
            return True
    return bool(files) and all(file.is_file() for file in files)
