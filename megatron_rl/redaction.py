"""Tell names of secrets from other names, and keep their values out of what is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET = re.compile(
    r"(?:^|_)(?:secret|passw(?:or)?d|passphrase|credentials?|token|auth|authorization|bearer|cookie"
    r"|(?:api|access|private|signing|encryption)_?key)(?:$|_)"
)


def is_secret(name: str) -> bool:
    """Say whether a setting or environment variable of this name looks like a secret.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "apiKey", "max_prompt_tokens")]
        [True, True, False]
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name)
    return _SECRET.search(words.lower()) is not None


def redacted(value: Any) -> Any:
    """Return ``value`` with what stands under names of secrets replaced by `HIDDEN`, at any depth."""
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if isinstance(name, str) and is_secret(name) and content else redacted(content)
            for name, content in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(redacted(content) for content in value)
    return value


def is_hidden(value: Any) -> bool:
    """Say whether something in ``value`` was hidden by `redacted`."""
    if isinstance(value, Mapping):
        return any(map(is_hidden, value.values()))
    return any(map(is_hidden, value)) if isinstance(value, list | tuple) else value == HIDDEN
