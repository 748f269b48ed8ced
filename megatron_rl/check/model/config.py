"""Rules on a checkpoint's config.json: values that the trainer, transformers or vLLM refuse at start-up.

Types are compared with the fields of transformers' configuration class, read from the installed source
(see `check.installed_source`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.check.files import FileFindings
from megatron_rl.check.installed_source import class_fields
from megatron_rl.errors import UserError
from megatron_rl.shapes.blocks import MIXERS
from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.family import ROPE_TYPES, Family
from megatron_rl.shapes.multimodal import language_config
from megatron_rl.shapes.pretrained import FAMILIES, PretrainedModel, family_of, read_config
from megatron_rl.shapes.published import read_trainable
from megatron_rl.shapes.quantized import read_quantization

_DTYPES = ("float32", "bfloat16", "float16", "float64")

_LAYER_TYPES = Attention.layer_types

_MAX_COUNTS = {"num_hidden_layers": 10_000, "num_experts": 1 << 16, "n_routed_experts": 1 << 16}
"""Upper bounds of counts: larger counts are mistakes, and later rules loop over every layer and expert."""

_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Type of rotary scaling -> the numbers that it needs in addition to ``rope_theta``."""

_MAX_ROPE_NUMBER = 1e12
"""Upper bound of the numbers of rotary scaling, far above the numbers of any model."""

_MAX_VALUE_CHARACTERS = 200
"""Number of characters to which an error truncates a value."""


def check_model_config(file: Path, files: FileFindings) -> PretrainedModel | None:
    """Check a config.json and return its model, or None if it cannot be trained; errors go into ``files``."""
    try:
        full_config = read_config(file)
        family = family_of(full_config, str(file))
    except UserError:
        # Let `read_trainable` add the error about the file or its architecture.
        return read_trainable(file, files.errors)

    # The rules on values require values of the right types.
    config = language_config(full_config)
    errors = list(_type_errors(config, family, file))
    if not errors:
        errors = list(_value_errors(config, family, file))
    if errors:
        files.errors.extend(errors)
        return None

    # The checkpoint's own modelling code is never run. This package's code for the model's family may compute
    # something else.
    if full_config.get("auto_map"):
        files.warnings.append(
            UserError(
                "the model comes with Python code, which no part of a run executes",
                where=f"{file}: auto_map",
                expected=f"a {family.title} model as transformers and vLLM have it",
                got=str(full_config["auto_map"])[:_MAX_VALUE_CHARACTERS],
                fix="remove auto_map if the model computes the same without that code",
            )
        )
    return read_trainable(file, files.errors)


def _type_errors(config: Mapping[str, Any], family: Family, file: Path) -> Iterator[UserError]:
    """Yield the errors for values whose type differs from the field of transformers' configuration class."""
    # The text model of a multi-modal family has a class with the suffix Text in the family's module.
    module_name = family.model_type.removesuffix("_text")
    class_name = family.architecture.removesuffix("ForCausalLM")
    if family.model_type.endswith("_text"):
        class_name += "Text"
    class_name += "Config"
    module = f"transformers.models.{module_name}.configuration_{module_name}"
    fields = class_fields((module, class_name)) or {}

    for key, value in config.items():
        field = fields.get(key)
        if field is None:
            continue

        # transformers validates strictly (seen in 5.19): a float field accepts an integer only if its
        # annotation contains `int` too.
        annotation = field.annotation_text()
        accepts_only_floats = "float" in annotation and not re.search(r"\bint\b", annotation)
        is_refused_integer = type(value) is int and accepts_only_floats
        if is_refused_integer or not field.accepts(value):
            fix = f"write {key} as {annotation}, or copy config.json again"
            yield _config_error(file, key, annotation, value, fix)


def _value_errors(config: Mapping[str, Any], family: Family, file: Path) -> Iterator[UserError]:
    """Yield the errors for values of a config.json that have the right type but are invalid."""
    model_type = config.get("model_type")
    if model_type not in family.model_types:
        expected = f"{family.model_type}, as {family.architecture} has"
        yield _config_error(file, "model_type", expected, model_type, _model_type_fix(model_type, family))
    try:
        read_quantization(config, str(file))
    except UserError as error:
        yield error

    # transformers 5 writes `dtype`, earlier versions write `torch_dtype`.
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and dtype not in _DTYPES:
        yield _config_error(file, "dtype", f"one of {', '.join(_DTYPES)}", dtype)

    # Sizes, layers and positions.
    for key, maximum in _MAX_COUNTS.items():
        count = config.get(key)
        if isinstance(count, int) and count > maximum:
            yield _config_error(file, key, f"at most {maximum}", count)
    yield from _head_errors(config, file)
    yield from _layer_type_errors(config, file)
    yield from _rope_errors(config, family, file)

    epsilon = config.get("rms_norm_eps", 1e-6)
    if not _is_number(epsilon) or not 0 <= epsilon < 1:
        yield _config_error(file, "rms_norm_eps", "a number from 0 to below 1", epsilon)

    # Labels of a classification head, and token ids.
    for key in ("id2label", "label2id"):
        labels = config.get(key)
        if labels is not None and not isinstance(labels, dict):
            yield _config_error(file, key, "an object", labels)
    yield from _token_id_errors(config, file)


def _token_id_errors(config: Mapping[str, Any], file: Path) -> Iterator[UserError]:
    """Yield the errors for token ids outside the vocabulary."""
    vocabulary_size = config.get("vocab_size")
    if not isinstance(vocabulary_size, int):
        return

    # Checkpoints of transformers before version 5 have -1 for "no padding token".
    minimums = {"pad_token_id": -1, "eos_token_id": 0}
    for key, minimum in minimums.items():
        id_or_ids = config.get(key)
        token_ids = [id_or_ids]
        if isinstance(id_or_ids, list):
            token_ids = id_or_ids

        integer_ids = [token_id for token_id in token_ids if isinstance(token_id, int)]
        if any(not minimum <= token_id < vocabulary_size for token_id in integer_ids):
            expected = f"a token below vocab_size ({vocabulary_size}), or null"
            yield _config_error(file, key, expected, id_or_ids)


def _model_type_fix(model_type: Any, family: Family) -> str:
    """Return the fix for a config.json whose ``model_type`` does not belong to its architecture."""
    if model_type is None:
        return f"write model_type: {family.model_type}"
    if model_type in FAMILIES:
        return (
            f"write model_type: {family.model_type}, or the architecture of {model_type} in `architectures`"
        )
    return (
        f"if the layers are the same as {family.architecture}'s, write model_type: {family.model_type} in a "
        f"copy of the folder; {model_type} itself is not supported, since code that comes with the "
        "checkpoint is not run"
    )


def _head_errors(config: Mapping[str, Any], file: Path) -> Iterator[UserError]:
    """Yield the errors for numbers of attention heads that do not divide evenly, and for an odd head size."""
    num_heads = _positive_integer(config, "num_attention_heads")
    num_key_value_heads = _positive_integer(config, "num_key_value_heads")
    hidden_size = _positive_integer(config, "hidden_size")
    head_size = _positive_integer(config, "head_dim")
    if num_heads is None:
        return  # reported when the model's shape is read

    # Each key-value head serves the same number of query heads.
    if num_key_value_heads is not None and num_heads % num_key_value_heads:
        expected = f"a divisor of num_attention_heads ({num_heads})"
        yield _config_error(file, "num_key_value_heads", expected, num_key_value_heads)
    if config.get("kv_lora_rank"):
        return  # multi-head latent attention has separate head sizes

    # Without head_dim, the head size is hidden_size / num_attention_heads.
    if head_size is None and hidden_size is not None and hidden_size % num_heads:
        expected = f"a divisor of hidden_size ({hidden_size}), or head_dim"
        yield _config_error(file, "num_attention_heads", expected, num_heads)
    if head_size is None:
        head_size = (hidden_size or 0) // num_heads

    if head_size % 2:
        yield _config_error(file, "head_dim", "an even size: rotary embedding rotates pairs", head_size)


def _layer_type_errors(config: Mapping[str, Any], file: Path) -> Iterator[UserError]:
    """Yield the errors for a ``layer_types`` that is not a list with one supported type per layer."""
    layer_types = config.get("layer_types")
    layer_count = config.get("num_hidden_layers")
    if not isinstance(layer_types, list):
        return

    if len(layer_types) != layer_count:
        expected = f"num_hidden_layers ({layer_count}) entries"
        yield _config_error(file, "layer_types", expected, f"{len(layer_types)} entries")
        return

    # A type is allowed if config.json has the sizes of its mixer (attention or a recurrent layer).
    allowed_types: list[str] = []
    for mixer in MIXERS.values():
        if all(config.get(key) for key in mixer.size_keys):
            allowed_types += mixer.layer_types
    if config.get("index_topk"):
        allowed_types = ["indexed_attention"]
    if any(layer_type not in allowed_types for layer_type in layer_types):
        yield _config_error(file, "layer_types", f"entries among {', '.join(allowed_types)}", layer_types)


def _rope_errors(config: Mapping[str, Any], family: Family, file: Path) -> Iterator[UserError]:
    """Yield the errors for the rotary parameters of all layers, or of each type of layer."""
    # transformers 5 writes `rope_parameters`, earlier versions write `rope_scaling`.
    key = "rope_scaling"
    if config.get("rope_parameters") is not None:
        key = "rope_parameters"
    rope_parameters = config.get(key)
    if rope_parameters is not None and not isinstance(rope_parameters, dict):
        yield _config_error(file, key, "an object with rope_type and its numbers", rope_parameters)
        return

    # Models with several attention types may have rope parameters for each layer type.
    rope_parameters = rope_parameters or {}
    layer_type_ropes: list[Any] = []
    for layer_type in _LAYER_TYPES:
        if layer_type in rope_parameters:
            layer_type_ropes.append(rope_parameters[layer_type])
    for rope in layer_type_ropes or [rope_parameters]:
        if isinstance(rope, dict):
            yield from _rope_value_errors(rope, config, family, file, key)
        else:
            yield _config_error(file, key, "an object for each kind of layer", rope)


def _rope_value_errors(
    rope: Mapping[str, Any],
    config: Mapping[str, Any],
    family: Family,
    file: Path,
    key: str,
) -> Iterator[UserError]:
    """Yield the errors for one set of rotary parameters: its type, and the numbers that the type needs."""
    # Before version 5, transformers wrote the type as "type".
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    supported_types = (*ROPE_TYPES, *family.rope_types)
    if rope_type not in supported_types:
        yield _config_error(file, key, f"a rope_type among {', '.join(supported_types)}", rope_type)
        return

    numbers = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}
    for name in _ROPE_NUMBERS.get(rope_type, ()):
        numbers[name] = rope.get(name)

    for name, number in numbers.items():
        if _is_number(number) and 0 < number < _MAX_ROPE_NUMBER:
            continue
        got = number
        if number is None:
            got = "nothing"
        yield _config_error(file, f"{key}.{name}", f"a positive number, with rope_type {rope_type}", got)


def _positive_integer(config: Mapping[str, Any], key: str) -> int | None:
    """Return the positive integer at a key of a config.json, or None for any other value."""
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return None


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a number; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _config_error(file: Path, key: str, expected: str, got: Any, fix: str | None = None) -> UserError:
    """Return the error for the value ``got`` at one key of a config.json.

    ``expected`` describes valid values. Without ``fix``, the error has a general fix.
    """
    if not isinstance(got, str):
        got = repr(got)
    return UserError(
        f"the model's config.json has a `{key}` that transformers, vLLM or the trainer refuses",
        where=f"{file}: {key}",
        expected=expected,
        got=got[:_MAX_VALUE_CHARACTERS],
        fix=fix or f"correct {key} if the file was edited; else the checkpoint cannot be used here",
    )
