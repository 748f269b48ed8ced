"""From what a configuration says to an algorithm, the user's own by path; importable without torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron_rl.algorithms.algorithm import ALGORITHMS, KINDS, Algorithm, Kind
from megatron_rl.algorithms.piece import Piece
from megatron_rl.config.parse import parse_settings
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import is_setting
from megatron_rl.config.source import describe
from megatron_rl.config.unknown import UnknownName
from megatron_rl.errors import UserError, UserErrors, each, nearest
from megatron_rl.user_code import load_path

NOISE = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
"""Megatron's settings by which a forward pass differs between training and scoring."""


def algorithm_of(config: RunConfig) -> Algorithm:
    """Return the algorithm of a run; raises UserErrors with every mistake at once."""
    pieces = {key: getattr(config.algorithm, key) for key in KINDS}
    stated = {key: value for key, value in pieces.items() if value is not None}
    return get_algorithm(
        config.algorithm.name, stated, max_response_tokens=config.rollout.max_response_tokens
    )


def scoring_reason(config: RunConfig, algorithm: Algorithm) -> str | None:
    """Return why the actor scores a batch in a pass of its own before it learns from it.

    None where the learn pass says the same: its weights are still those that the old log-probs are of, and
    nothing asks for them earlier.
    """
    updates = config.batch.optimizer_steps * config.batch.epochs
    if updates > 1:
        return f"a batch is learned from in {updates} optimizer steps, and only the first has the old policy"
    if algorithm.needs_scoring_pass:
        return " and ".join(f"algorithm.{name}" for name in algorithm.needs_scoring_pass) + " asks for it"
    noise = [f"megatron.{name}" for name in NOISE if config.actor.megatron.get(name)]
    if config.actor.lora is not None and config.actor.lora.dropout:
        noise.append("lora.dropout")
    return f"actor.{noise[0]} makes the learn pass random" if noise else None


def get_algorithm(
    name: str, pieces: Mapping[str, Any] | None = None, *, max_response_tokens: int | None = None
) -> Algorithm:
    """Return the algorithm called ``name`` with some of its pieces replaced or set otherwise.

    ``name`` is in `ALGORITHMS`, or the path of an `Algorithm` of the user's own. ``pieces`` maps keys of
    `KINDS` to a piece, a piece's name or path, or a mapping of settings with or without ``name``: with a name
    the settings not stated have that piece's defaults, without one those of the algorithm's own piece.
    Raises UserErrors with every mistake.

    Example:
        >>> get_algorithm("dapo", {"policy_loss": {"clip_low": 0.1}}).policy_loss
        PpoClip(entropy_coef=0.0, opsm_delta=None, clip_low=0.1, clip_high=0.28, dual_clip=10.0)
    """
    try:
        algorithm = _named(name)
    except UserError as error:
        raise UserErrors(each(error)) from error
    errors: list[UserError] = []
    changes = {}
    for key, value in (pieces or {}).items():
        try:
            changes[key] = _piece(key, value, getattr(algorithm, key, None))
        except UserError as error:
            errors.extend(each(error))
    algorithm = replace(algorithm, **changes)
    if max_response_tokens is not None:
        algorithm = algorithm.within(max_response_tokens)
    errors.extend(algorithm.problems())
    if errors:
        raise UserErrors(errors)
    return algorithm


def _named(name: str) -> Algorithm:
    where = "algorithm.name"
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        raise _unknown("algorithm", name, ALGORITHMS, where)
    algorithm = load_path(name, where)
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"{name} is not an Algorithm",
            where=where,
            expected="an instance of megatron_rl.algorithms.Algorithm",
            got=type(algorithm).__name__,
            fix='write NAME = Algorithm("name", "Summary.", ...) and name that',
        )
    return algorithm


def _piece(key: str, value: Any, current: Piece | None) -> Piece:
    """Return the piece that a key's value stands for; ``current`` is the algorithm's own."""
    where = f"algorithm.{key}"
    if key not in KINDS or current is None:
        raise _unknown("piece of an algorithm", key, KINDS, where)
    kind = KINDS[key]
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        piece = own_piece(value, kind, describe(value), where)
        return piece() if isinstance(piece, type) else piece
    settings = dict(value)
    name = settings.pop("name", None)
    piece = current if name is None else _named_piece(name, kind, key, where)
    return _with_settings(piece, settings, kind, where)


def _named_piece(name: Any, kind: Kind, key: str, where: str) -> Piece | type[Piece]:
    if isinstance(name, str) and name in kind.named:
        return kind.named[name]
    if not isinstance(name, str) or ":" not in name:
        raise _unknown(key, name, kind.named, where)
    return own_piece(load_path(name, where), kind, name, where)


def _with_settings(piece: Piece | type[Piece], settings: dict[str, Any], kind: Kind, where: str) -> Piece:
    """Return a piece with settings changed, or made of a class of pieces."""
    cls, defaults = (piece, None) if isinstance(piece, type) else (type(piece), piece)
    try:
        return parse_settings(cls, settings, where, defaults)
    except UserErrors as errors:
        name = next((name for name, named in kind.named.items() if named == piece), cls.__name__)
        raise UserErrors(_of_another_piece(error, name, kind) for error in errors.errors) from errors
    except Exception as error:  # a class of the user's own may refuse its settings in any way
        raise UserError(
            f"{cls.__name__} cannot be made of its settings",
            where=where,
            expected="settings that it accepts",
            got=f"{type(error).__name__}: {error}",
            fix="correct the settings or the class",
        ) from error


def _of_another_piece(error: UserError, piece: str, kind: Kind) -> UserError:
    """Return the error of a setting that ``piece`` has not and other named pieces of its kind have.

    Every other error is returned as it is.
    """
    if not isinstance(error, UnknownName):
        return error
    having = [
        name
        for name, other in kind.named.items()
        if error.key in {item.name for item in fields(other) if is_setting(item)}
    ]
    if not having:
        return error
    expected = f"a piece with it: {', '.join(having)}"
    if error.below:
        settings = ", ".join(name.partition(".")[0] for name in error.below)
        expected += f"; or one of {settings}"
    return UserError(
        f"`{error.path}` is no setting of `{piece}`",
        where=error.where,
        expected=expected,
        got=f"`{error.key}` with `{piece}`",
        fix=f"set `{error.section}.name` to {' or '.join(having)}, or remove the line",
    )


def _unknown(what: str, name: Any, known: Mapping[str, Any], where: str) -> UserError:
    close = nearest(str(name), known)
    return UserError(
        f"unknown {what} {name!r}",
        where=where,
        expected=f"one of {', '.join(sorted(known))}, or the path of your own: file.py:Name or module:Name",
        got=repr(name),
        fix=f"did you mean {close!r}?" if close else "choose one of these",
    )


def own_piece(value: Any, kind: Kind, path: str, where: str) -> Piece | type[Piece]:
    """Return a piece, or a class of pieces, of what the user wrote; raises UserError for the wrong form."""
    if isinstance(value, kind.base):
        return value
    if isinstance(value, type):
        _check_class(value, kind, path, where)
        return value
    if not callable(value) or kind.of_function is None:
        function = "" if kind.of_function is None else f" or a function({', '.join(kind.arguments)})"
        raise UserError(
            f"{path} cannot be used here",
            where=where,
            expected=f"a class derived from {_name(kind)}{function}",
            got=f"{path}, of type {type(value).__name__}",
            fix=f"derive a class from {_name(kind)} with a method {_call(kind)}",
        )
    _check_call(value, kind.arguments, f"{path}({', '.join(kind.arguments)})", where)
    return kind.of_function(value)


def _check_class(value: type, kind: Kind, path: str, where: str) -> None:
    """Raise UserError unless a class derives from the kind's, is a dataclass, and defines its method."""
    missing = sorted(getattr(value, "__abstractmethods__", ()))
    if not issubclass(value, kind.base) or missing:
        raise UserError(
            f"{path} does not define {', '.join(missing)}" if missing else f"{path} is of another kind",
            where=where,
            expected=f"a class derived from {_name(kind)} with a method {_call(kind)}",
            got=f"class {value.__name__}({', '.join(base.__name__ for base in value.__bases__)})",
            fix=f"define {_call(kind)}" if missing else f"derive it from {_name(kind)}",
        )
    written = {
        name for name, hint in vars(value).get("__annotations__", {}).items() if "ClassVar" not in str(hint)
    }
    if not is_dataclass(value) or written - {item.name for item in fields(value)}:
        raise UserError(
            f"{path} is not a dataclass, so its settings have no effect",
            where=where,
            expected="@dataclass(frozen=True) above the class",
            got=f"class {value.__name__}",
            fix=f"write @dataclass(frozen=True) above class {value.__name__}",
        )
    method = inspect.getattr_static(value, kind.method)
    if not isinstance(method, property):
        _check_call(getattr(value, kind.method), ("self", *kind.arguments), f"{path}.{_call(kind)}", where)


def _check_call(function: Any, arguments: tuple[str, ...], call: str, where: str) -> None:
    """Raise UserError unless a function can be called with so many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions do not say
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            "a piece of the algorithm takes other arguments than it is given",
            where=where,
            expected=call,
            got=f"{signature}: {error}",
            fix=f"let it take {', '.join(name for name in arguments)}",
        ) from error


def _call(kind: Kind) -> str:
    return f"{kind.method}({', '.join(kind.arguments)})"


def _name(kind: Kind) -> str:
    return f"megatron_rl.algorithms.{kind.base.__name__}"
