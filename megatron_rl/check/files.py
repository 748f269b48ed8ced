"""What is there of the files that a configuration names, and what is still to be made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.errors import UserError, neighbours


@dataclass
class Files:
    """Collect findings about files.

    ``prepare`` maps a directory to the command that makes it; what is missing below one that is not there
    yet is collected in ``to_be_made``. Other missing files are errors, or with ``absent`` warnings.
    """

    prepare: Mapping[str, str] = field(default_factory=dict)
    absent: bool = False
    errors: list[UserError] = field(default_factory=list)
    warnings: list[UserError] = field(default_factory=list)
    missing: list[UserError] = field(default_factory=list)
    to_be_made: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def miss(self, path: Path, message: str, where: str, expected: str, fix: str | None = None) -> None:
        """Record a missing file, as a warning where its directory is still to be made."""
        command = self._command(path)
        error = UserError(
            message,
            where=where,
            expected=expected,
            got=neighbours(path),
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
