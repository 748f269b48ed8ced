"""Findings about the files that a configuration names: missing files, and files that a command will make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config.hub import HubCopy
from megatron_rl.errors import UserError, describe_missing_path


@dataclass
class FileFindings:
    """Findings about the files that a configuration names.

    Attributes:
        prepare: Directory -> the command that creates it. While the directory does not exist, a missing file
            below it is collected in ``to_be_made`` and is not an error.
        hub: Directory -> incomplete copy of a Hugging Face Hub repository in the directory. Missing files
            below the directory are collected in ``to_be_made`` too.
        allow_missing: Whether missing files are warnings (``missing``) instead of errors.
        errors: Files that are missing, broken or of the wrong kind.
        warnings: Files that are valid but probably a mistake.
        missing: Missing files, if ``allow_missing`` is set.
        to_be_made: (directory, command) -> missing files below the directory; each text has the path of the
            file and the key that names it.

    Example:
        >>> files = FileFindings(prepare={"/nowhere/data": "python make_data.py"})
        >>> path = Path("/nowhere/data/train.jsonl")
        >>> files.record_missing(path, "no data set", "data.train", "a file of records")
        >>> files.errors, list(files.to_be_made.values())
        ([], [['/nowhere/data/train.jsonl (data.train)']])
    """

    prepare: Mapping[str, str] = field(default_factory=dict)
    hub: Mapping[str, HubCopy] = field(default_factory=dict)
    allow_missing: bool = False
    errors: list[UserError] = field(default_factory=list)
    warnings: list[UserError] = field(default_factory=list)
    missing: list[UserError] = field(default_factory=list)
    to_be_made: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def record_missing(
        self, path: Path, message: str, key: str, expected: str, fix: str | None = None
    ) -> None:
        """Record a missing file, as an error unless a preparation command will create its directory.

        ``key`` is the key that names the file; ``message``, ``expected`` and ``fix`` are for the error.
        """
        # A preparation command, or the download of a Hub copy, may still make this file.
        preparation = self._find_preparation(path)
        if preparation is not None:
            directory, command = preparation
            if directory in self.hub or not Path(directory).exists():
                self.to_be_made.setdefault(preparation, []).append(f"{self._source_name(path)} ({key})")
                return
            fix = f"make it with: {command}"

        error = UserError(
            message,
            where=key,
            expected=expected,
            got=describe_missing_path(path),
            fix=fix or "correct the path",
        )

        if self.allow_missing:
            self.missing.append(error)
        else:
            self.errors.append(error)

    def missing_directory_errors(self) -> list[UserError]:
        """Return an error for each missing directory that a preparation command creates."""
        errors: list[UserError] = []
        for (directory, command), paths in self.to_be_made.items():
            message = f"{directory} does not exist yet"
            key = "prepare"
            got = f"no directory {directory}"
            fix = f"run: {command}"
            hub_copy = self.hub.get(directory)
            if hub_copy is not None:
                message = f"{hub_copy.name} is not downloaded yet"
                key = "Hugging Face Hub"
                got = hub_copy.reason
                fix = f"`train` downloads it where the Hub can be reached; or run: {command}"
            errors.append(UserError(message, where=key, expected="\n".join(paths), got=got, fix=fix))
        return errors

    def _source_name(self, path: Path) -> str:
        """Return the name of a missing file for messages: its name on the Hub, or else its path."""
        for directory, hub_copy in self.hub.items():
            if path.is_relative_to(directory):
                return f"{hub_copy.name}/{path.relative_to(directory)}".removesuffix("/.")
        return str(path)

    def _find_preparation(self, path: Path) -> tuple[str, str] | None:
        """Return the directory at or above ``path`` that a preparation command creates, and the command.

        Returns None if no command creates such a directory.
        """
        command_by_directory = dict(self.prepare)
        for directory, hub_copy in self.hub.items():
            command_by_directory[directory] = hub_copy.command
        for directory, command in command_by_directory.items():
            if path.is_relative_to(directory):
                return directory, command
        return None
