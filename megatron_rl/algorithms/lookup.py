"""Construction of a run's algorithm from its configuration; importable without torch.

A name selects an algorithm or a piece from the tables of `algorithm`. A path, ``file.py:Name`` or
``module:Name``, loads an algorithm or a piece of the user. All errors of a configuration are collected and
raised together.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron_rl.algorithms.algorithm import ALGORITHMS, KINDS, Algorithm, PieceKind
from megatron_rl.algorithms.piece import Piece
from megatron_rl.config.load import to_plain
from megatron_rl.config.other_names import UnknownName
from megatron_rl.config.parse import parse_settings
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import is_setting
from megatron_rl.config.source import describe_value, one_line
from megatron_rl.errors import UserError, UserErrors, nearest, single_errors
from megatron_rl.user_code import load_object

# Megatron's settings that make a forward pass in training differ from one in evaluation mode.
_RANDOM_SETTINGS = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")


def algorithm_of(config: RunConfig) -> Algorithm:
    """Construct the algorithm of a run; raise UserErrors with every error in the ``algorithm`` section."""
    explicit_pieces: dict[str, Any] = {}
    for key in KINDS:
        config_value = getattr(config.algorithm, key)
        if config_value is not None:
            explicit_pieces[key] = config_value
    return get_algorithm(
        config.algorithm.name,
        explicit_pieces,
        max_response_tokens=config.rollout.response_limit,
    )


def write_pieces(config: RunConfig, algorithm: Algorithm) -> tuple[RunConfig, dict[str, str]]:
    """Write an algorithm's pieces with all their settings into the configuration.

    A piece is a component of the algorithm, such as its policy loss. Returns the changed configuration, which
    constructs the same algorithm, and a dictionary. The dictionary maps the key of each piece that the user
    did not choose to the origin of the piece, such as ``algorithm.name=grpo``.

    If the algorithm has no critic, the pieces of the value function are omitted. If a piece has neither a
    name nor settings, it is omitted too; only a user's `Algorithm` can contain such a piece.
    """
    section = config.algorithm
    changes: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, piece in algorithm.pieces().items():
        if key.startswith("value_") and not algorithm.needs_critic:
            continue

        explicit_value = getattr(section, key)
        config_value = _to_config_value(piece, KINDS[key], explicit_value)
        if config_value is None:
            continue

        # A piece that the user chose keeps the origin of that choice.
        changes[key] = config_value
        if explicit_value is None:
            origins[f"algorithm.{key}"] = f"algorithm.name={section.name}"
    return replace(config, algorithm=replace(section, **changes)), origins


def _to_config_value(piece: Piece, kind: PieceKind, explicit_value: Any) -> str | dict[str, Any] | None:
    """Convert a piece to its value in a configuration: its name, or a mapping of its name and settings.

    A piece is a component of an algorithm, such as its policy loss. ``kind``: its kind, such as all policy
    losses. ``explicit_value``: the value that the user configured for the piece, or None. Returns None for a
    piece without a name and without settings.
    """
    name = _piece_name(piece, kind, explicit_value)
    settings: dict[str, Any] = {}
    for piece_field in fields(piece):
        if is_setting(piece_field):
            settings[piece_field.name] = to_plain(getattr(piece, piece_field.name))

    # Omit a missing name and empty settings.
    if not settings:
        return name
    if name is None:
        return settings
    return {"name": name, **settings}


def piece_text(value: Any) -> str:
    """Format one piece of an algorithm, such as its policy loss, as a line of text.

    ``value`` is the piece in a resolved configuration: a name, a mapping of settings, or None.

    Example:
        >>> piece_text({"name": "ppo_clip", "clip_low": 0.2, "dual_clip": None})
        'ppo_clip: clip_low 0.2, dual_clip null'
    """
    if value is None:
        return "the algorithm's own"
    if not isinstance(value, Mapping):
        return str(value)

    settings = {name: one_line(setting) for name, setting in value.items() if name != "name"}
    settings_text = ", ".join(f"{name} {setting}" for name, setting in settings.items())
    piece_name = value.get("name")
    if piece_name is None:
        return settings_text
    return f"{piece_name}: {settings_text}"


def _piece_name(piece: Piece, kind: PieceKind, explicit_value: Any) -> str | None:
    """Return the name or path that the user configured for a piece, else its name in ``kind.named``.

    A piece is a component of an algorithm, such as its policy loss. ``explicit_value``: the value that the
    user configured for the piece, or None. Returns None if the user configured no name, and no piece in
    ``kind.named`` has the same class.
    """
    explicit_name = explicit_value
    if isinstance(explicit_value, Mapping):
        explicit_name = explicit_value.get("name")
    if isinstance(explicit_name, str):
        return explicit_name

    # Several names can have the same class and differ in their settings, such as "token_tis" and "icepop".
    # Prefer a name with the settings of this piece.
    for name, candidate in kind.named.items():
        if candidate == piece:
            return name
    for name, candidate in kind.named.items():
        if type(candidate) is type(piece):
            return name
    return None


def scoring_pass_reason(config: RunConfig, algorithm: Algorithm) -> str | None:
    """Return why the old log-probs need a separate forward pass, or None if the train step computes them.

    With one optimizer step per batch, the train step's own forward pass computes the old log-probs: its
    weights are still the old policy's. A separate pass is needed in three cases: a batch has several
    optimizer steps, a component of the algorithm reads the old log-probs before the loss, or the train step
    has random layers, such as dropout.
    """
    num_updates = config.batch.optimizer_steps * config.batch.epochs
    if num_updates > 1:
        return f"each batch has {num_updates} optimizer steps, and only the first has the old weights"

    if algorithm.needs_scoring_pass:
        keys = " and ".join(f"algorithm.{name}" for name in algorithm.needs_scoring_pass)
        return f"{keys} needs it"

    # A forward pass with dropout would not compute the log-probs of the old policy.
    random_keys = [f"megatron.{name}" for name in _RANDOM_SETTINGS if config.actor.megatron.get(name)]
    if config.actor.lora is not None and config.actor.lora.dropout:
        random_keys.append("lora.dropout")
    if random_keys:
        return f"actor.{random_keys[0]} makes the train step's forward pass random"
    return None


def get_algorithm(
    name: str,
    pieces: Mapping[str, Any] | None = None,
    *,
    max_response_tokens: int | None = None,
) -> Algorithm:
    """Return the algorithm called ``name`` with some of its pieces replaced or their settings changed.

    A piece is a component of the algorithm, such as its policy loss. ``name`` is in `ALGORITHMS`, or the path
    of a user's `Algorithm`. Raises UserErrors with every error.

    ``pieces`` maps a key, such as "policy_loss", to a piece, to the name or path of a piece, or to a mapping
    of settings. A mapping with the key ``name`` changes settings of the named piece. A mapping without it
    changes settings of the piece that the algorithm has by default.

    Example:
        >>> loss = get_algorithm("dapo", {"policy_loss": {"clip_low": 0.1}}).policy_loss
        >>> loss.clip_low, loss.clip_high
        (0.1, 0.28)
    """
    try:
        algorithm = _load_algorithm(name)
    except UserError as error:
        raise UserErrors(single_errors(error)) from error

    # A key with an error keeps the named algorithm's piece, so that the other keys are still validated.
    errors: list[UserError] = []
    changes = {}
    for key, value in (pieces or {}).items():
        try:
            changes[key] = _make_piece(key, value, getattr(algorithm, key, None))
        except UserError as error:
            errors.extend(single_errors(error))
    algorithm = replace(algorithm, **changes)

    # `Algorithm.within` fills in the settings that default to the response limit. The validation reads them.
    if max_response_tokens is not None:
        algorithm = algorithm.within(max_response_tokens)
    errors.extend(algorithm.problems())
    if errors:
        raise UserErrors(errors)
    return algorithm


def load_preference_loss(loss: str, key: str) -> Any:
    """Load the user's preference loss from a path ``file.py:function``; return None for a built-in loss.

    Raises UserError if the path does not lead to a function of one argument.
    """
    if ":" not in loss:
        return None

    function = load_object(loss, key)
    if not callable(function) or isinstance(function, type):
        raise UserError(
            f"{loss} is not a function",
            where=key,
            expected="a function(pairs), which returns one number per pair",
            got=f"{loss}, of type {type(function).__name__}",
            fix="define a function def NAME(pairs): ... and use its name",
        )
    _check_arguments(function, ("pairs",), f"{loss}(pairs)", key)
    return function


def _load_algorithm(name: str) -> Algorithm:
    """Return the algorithm with a name in `ALGORITHMS`, or load it from a user's path.

    Raises UserError for any other name.
    """
    key = "algorithm.name"
    if name in ALGORITHMS:
        return ALGORITHMS[name]

    # A path has the form FILE:NAME or MODULE:NAME.
    if ":" not in name:
        raise _unknown_name_error("algorithm", name, ALGORITHMS, key)

    algorithm = load_object(name, key)
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"{name} is not an Algorithm",
            where=key,
            expected="an instance of megatron_rl.algorithms.Algorithm",
            got=type(algorithm).__name__,
            fix='define NAME = Algorithm("name", "Summary.", ...) and set algorithm.name to FILE:NAME',
        )
    return algorithm


def _make_piece(kind_name: str, value: Any, default_piece: Piece | None) -> Piece:
    """Construct a piece, a component of the algorithm such as its policy loss, from a user's value.

    ``kind_name``: key of the piece in the section ``algorithm``, such as "policy_loss". ``value``: the user's
    value of this key. ``default_piece``: the piece that the algorithm of the run has by default. If ``value``
    is a mapping without ``name``, the result is ``default_piece`` with these settings changed.
    """
    key = f"algorithm.{kind_name}"
    if kind_name not in KINDS or default_piece is None:
        raise _unknown_name_error("piece of an algorithm", kind_name, KINDS, key)

    kind = KINDS[kind_name]
    if isinstance(value, str):
        value = {"name": value}

    # Python callers may pass a piece, a class or a function instead of YAML's names and mappings.
    if not isinstance(value, Mapping):
        piece = convert_user_piece(value, kind, describe_value(value), key)
        if isinstance(piece, type):
            return piece()
        return piece

    settings = dict(value)
    piece_name = settings.pop("name", None)
    piece = default_piece
    if piece_name is not None:
        piece = _load_piece(piece_name, kind, kind_name, key)
    return _change_settings(piece, settings, kind, key)


def _load_piece(
    piece_name: Any,
    kind: PieceKind,
    kind_name: str,
    key: str,
) -> Piece | type[Piece]:
    """Return the piece of an algorithm, such as a policy loss, that has the configured name or path.

    ``piece_name`` is a name in the table ``kind.named``, or the path of a piece or of its class, such as
    ``file.py:Name``. ``kind_name`` (``policy_loss``) and ``key`` (``algorithm.policy_loss``) are for errors.
    Raises UserError for any other value.
    """
    if isinstance(piece_name, str) and piece_name in kind.named:
        return kind.named[piece_name]
    if not isinstance(piece_name, str) or ":" not in piece_name:
        raise _unknown_name_error(kind_name, piece_name, kind.named, key)
    return convert_user_piece(load_object(piece_name, key), kind, piece_name, key)


def _change_settings(
    piece: Piece | type[Piece],
    settings: dict[str, Any],
    kind: PieceKind,
    key: str,
) -> Piece:
    """Return an algorithm's piece, such as its policy loss, with the given settings changed.

    If ``piece`` is a class, an instance is constructed from the settings; settings that are not given have
    the defaults of the class. ``kind`` is the kind of piece, such as all policy losses, and ``key`` is the
    piece's key in the configuration, for errors. Raises UserError or UserErrors for invalid settings.
    """
    piece_class = type(piece)
    defaults = piece
    if isinstance(piece, type):
        piece_class = piece
        defaults = None

    try:
        return parse_settings(piece_class, settings, key, defaults)
    except UserErrors as errors:
        piece_name = piece_class.__name__
        matching_names = [name for name, candidate in kind.named.items() if candidate == piece]
        if matching_names:
            piece_name = matching_names[0]
        raise UserErrors(
            _misplaced_setting_error(error, piece_name, kind) for error in errors.errors
        ) from errors
    except Exception as error:  # a user's class may reject its settings with any exception
        raise UserError(
            f"{piece_class.__name__} cannot be constructed from its settings",
            where=key,
            expected="settings that it accepts",
            got=f"{type(error).__name__}: {error}",
            fix="correct the settings or the class",
        ) from error


def _misplaced_setting_error(error: UserError, piece_name: str, kind: PieceKind) -> UserError:
    """Return a better error for an unknown setting: one that lists the pieces which have this setting.

    A piece is a component of an algorithm, such as its policy loss. ``error``: any error in the settings of a
    piece. ``piece_name``: name of this piece. ``kind``: kind of the piece, such as all policy losses. The
    error is returned unchanged if it is not about an unknown setting, or if no piece of this kind has the
    setting.
    """
    if not isinstance(error, UnknownName):
        return error

    # Most likely the user took the setting from the documentation of another piece.
    pieces_with_setting: list[str] = []
    for name, candidate in kind.named.items():
        setting_names = {piece_field.name for piece_field in fields(candidate) if is_setting(piece_field)}
        if error.key in setting_names:
            pieces_with_setting.append(name)
    if not pieces_with_setting:
        return error

    # `section_keys` are the settings that the piece has, as paths relative to the piece's section.
    expected = f"a piece with it: {', '.join(pieces_with_setting)}"
    if error.section_keys:
        known_settings = ", ".join(name.partition(".")[0] for name in error.section_keys)
        expected += f"; or one of {known_settings}"
    return UserError(
        f"`{error.path}` is not a setting of `{piece_name}`",
        where=error.where,
        expected=expected,
        got=f"`{error.key}` with `{piece_name}`",
        fix=f"set `{error.section}.name` to {' or '.join(pieces_with_setting)}, or remove the line",
    )


def _unknown_name_error(
    subject: str,
    name: Any,
    table: Mapping[str, Any],
    key: str,
) -> UserError:
    """Return the error for a name that is not in a table, with the nearest name as the fix."""
    suggestion = nearest(str(name), table)
    fix = "choose one of these"
    if suggestion:
        fix = f"did you mean {suggestion!r}?"
    return UserError(
        f"unknown {subject} {name!r}",
        where=key,
        expected=f"one of {', '.join(sorted(table))}, or the path of your own: file.py:Name or module:Name",
        got=repr(name),
        fix=fix,
    )


def convert_user_piece(value: Any, kind: PieceKind, path: str, key: str) -> Piece | type[Piece]:
    """Convert a user's object to a piece: a component of an algorithm, such as a policy loss.

    A piece is returned unchanged, and a function is wrapped in a piece. A class is validated and returned;
    the caller constructs the piece from it. Raises UserError for an object of any other type.

    ``kind``: the required kind of piece, such as all policy losses. ``path``: path or text of the object, for
    errors. ``key``: configuration key of the object, such as ``algorithm.policy_loss``.
    """
    # A piece already has its settings. A class gets the configured settings when the caller constructs it.
    if isinstance(value, kind.base):
        return value
    if isinstance(value, type):
        _check_piece_class(value, kind, path, key)
        return value

    # A function has no settings and no requirements, so only some kinds of pieces accept functions.
    arguments = ", ".join(kind.arguments)
    if not callable(value) or kind.make_from_function is None:
        function_text = "" if kind.make_from_function is None else f" or a function({arguments})"
        raise UserError(
            f"{path} cannot be used here",
            where=key,
            expected=f"a class derived from {_base_class_path(kind)}{function_text}",
            got=f"{path}, of type {type(value).__name__}",
            fix=f"derive a class from {_base_class_path(kind)} with a method {_format_method_call(kind)}",
        )

    _check_arguments(value, kind.arguments, f"{path}({arguments})", key)
    return kind.make_from_function(value)


def _check_piece_class(user_class: type, kind: PieceKind, path: str, key: str) -> None:
    """Raise UserError unless a user's class can be a component of the algorithm, such as its policy loss.

    The class must be a dataclass that is derived from ``kind.base`` and defines the method ``kind.method``.
    ``path``: path of the class, as the user wrote it. ``key``: configuration key with this path, such as
    ``algorithm.policy_loss``.
    """
    expected = f"a class derived from {_base_class_path(kind)} with a method {_format_method_call(kind)}"
    bases = ", ".join(base.__name__ for base in user_class.__bases__)
    got = f"class {user_class.__name__}({bases})"

    # A class with abstract methods cannot be constructed, even if its base class is the right one.
    abstract_methods = sorted(getattr(user_class, "__abstractmethods__", ()))
    if abstract_methods:
        raise UserError(
            f"{path} does not define {', '.join(abstract_methods)}",
            where=key,
            expected=expected,
            got=got,
            fix=f"define {_format_method_call(kind)}",
        )
    if not issubclass(user_class, kind.base):
        raise UserError(
            f"{path} is not derived from the base class of this key",
            where=key,
            expected=expected,
            got=got,
            fix=f"derive it from {_base_class_path(kind)}",
        )

    # A subclass of a dataclass is a dataclass, too, but without the decorator its new annotations are plain
    # class attributes.
    annotations = vars(user_class).get("__annotations__", {})
    setting_names = {name for name, hint in annotations.items() if "ClassVar" not in str(hint)}
    has_dataclass_fields = False
    if is_dataclass(user_class):
        field_names = {class_field.name for class_field in fields(user_class)}
        has_dataclass_fields = setting_names <= field_names
    if not has_dataclass_fields:
        raise UserError(
            f"{path} is not a dataclass, so its settings have no effect",
            where=key,
            expected="@dataclass(frozen=True) above the class",
            got=f"class {user_class.__name__}",
            fix=f"write @dataclass(frozen=True) above class {user_class.__name__}",
        )

    # A property, such as DynamicSampling.further_rounds, has no arguments to check.
    method = inspect.getattr_static(user_class, kind.method)
    if not isinstance(method, property):
        function = getattr(user_class, kind.method)
        _check_arguments(function, ("self", *kind.arguments), f"{path}.{_format_method_call(kind)}", key)


def _check_arguments(function: Any, arguments: tuple[str, ...], call_text: str, key: str) -> None:
    """Raise UserError unless a user's function can be called with these positional arguments.

    ``call_text`` is the call, such as ``token_loss(micro, log_probs)``, for the error.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature

    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            "the function does not accept the arguments that the algorithm passes",
            where=key,
            expected=call_text,
            got=f"{signature}: {error}",
            fix=f"give it the parameters {', '.join(arguments)}",
        ) from error


def _format_method_call(kind: PieceKind) -> str:
    """Format the call of a kind's method for errors, such as ``estimate(inputs)``."""
    return f"{kind.method}({', '.join(kind.arguments)})"


def _base_class_path(kind: PieceKind) -> str:
    """Return the import path of a kind's base class, such as ``megatron_rl.algorithms.PolicyLoss``."""
    return f"megatron_rl.algorithms.{kind.base.__name__}"
