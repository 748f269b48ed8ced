"""Redaction of secrets: values under names such as ``api_key`` are replaced before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

# Match complete words between underscores: `hf_token` is a secret, and `max_tokens` is not.
_SECRET = re.compile(
    r"(?:^|_)(?:secret|passw(?:or)?d|passphrase|credentials?|token|auth|authorization|bearer|cookie"
    r"|(?:api|access|private|signing|encryption)_?key)(?:$|_)"
)


def is_secret(name: str) -> bool:
    """Return whether the value of a setting or environment variable with this name is likely a secret.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "apiKey", "max_prompt_tokens")]
        [True, True, False]
    """
    # Convert camel case and other separators to underscores.
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name)
    return _SECRET.search(snake_case.lower()) is not None


def redact(value: Any) -> Any:
    """Return a copy of ``value`` in which `HIDDEN` replaces the value of every secret name, at any depth.

    Example:
        >>> redact({"url": "http://host", "auth": {"api_key": "abc"}})
        {'url': 'http://host', 'auth': '(hidden)'}
    """
    if isinstance(value, Mapping):
        redacted_values = {}
        for name, inner_value in value.items():
            # Empty values stay visible: they show that no secret is set.
            is_hidden = isinstance(name, str) and is_secret(name) and bool(inner_value)
            redacted_values[name] = HIDDEN if is_hidden else redact(inner_value)
        return redacted_values
    if isinstance(value, list | tuple):
        return type(value)(redact(inner_value) for inner_value in value)
    return value


def contains_hidden(value: Any) -> bool:
    """Return whether ``value`` contains `HIDDEN`, the replacement of a secret, at any depth."""
    if isinstance(value, Mapping):
        return any(contains_hidden(inner_value) for inner_value in value.values())
    if isinstance(value, list | tuple):
        return any(contains_hidden(inner_value) for inner_value in value)
    return value == HIDDEN
