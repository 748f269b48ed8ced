"""Rules on a checkpoint's config.json: what trainer, transformers and vLLM would refuse at their start.

Types are those of transformers' own configuration class, read from the installed source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.check.files import Files
from megatron_rl.check.installed_source import class_fields
from megatron_rl.errors import UserError
from megatron_rl.shapes.family import ROPE_TYPES, Family
from megatron_rl.shapes.pretrained import FAMILIES, PretrainedModel, family_of, read_json
from megatron_rl.shapes.published import read_trainable

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_MOST = {"num_hidden_layers": 10_000, "num_experts": 1 << 16, "n_routed_experts": 1 << 16}
"""Upper bounds of counts: a larger one is a slip, and every layer and expert is listed."""
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What each scaling of rotary angles needs beside ``rope_theta``."""


def check_model_config(file: Path, files: Files) -> PretrainedModel | None:
    """Return the model of a config.json that can be trained; else add what is wrong to ``files``."""
    try:
        raw = read_json(file)
        family = family_of(raw, str(file))
    except UserError:
        family, raw = None, {}  # reading it as a model to train says so
    errors = [] if family is None else list(_type_errors(raw, family, file))
    if family is not None and not errors:
        errors = list(_value_errors(raw, family, file))
    if errors:
        files.errors.extend(errors)
        return None
    if raw.get("auto_map"):
        files.warnings.append(
            UserError(
                "the model comes with Python code, which no part of a run executes",
                where=f"{file}: auto_map",
                expected=f"a {family.title if family else ''} model as transformers and vLLM have it",
                got=str(raw["auto_map"])[:200],
                fix="remove auto_map if the model computes nothing else",
            )
        )
    return read_trainable(file, files.errors)


def _type_errors(raw: Mapping[str, Any], family: Family, file: Path) -> Iterator[UserError]:
    """Yield what is of another type than the field of transformers' configuration class."""
    folder, text = family.model_type.removesuffix("_text"), family.model_type.endswith("_text")
    name = family.architecture.removesuffix("ForCausalLM") + ("TextConfig" if text else "Config")
    fields = class_fields((f"transformers.models.{folder}.configuration_{folder}", name)) or {}
    for key, value in raw.items():
        field = fields.get(key)
        if field is None:
            continue
        words = field.words()
        # transformers takes an integer for a number only where it says so.
        whole = type(value) is int and "float" in words and not re.search(r"\bint\b", words)
        if whole or not field.accepts(value):
            yield _error(file, key, words, value, f"write {key} as {words}, or copy config.json again")


def _value_errors(raw: Mapping[str, Any], family: Family, file: Path) -> Iterator[UserError]:
    kind, dtype = raw.get("model_type"), raw.get("dtype", raw.get("torch_dtype"))
    if kind != family.model_type:
        expected = f"{family.model_type}, as {family.architecture} has"
        yield _error(file, "model_type", expected, kind, _model_type_fix(kind, family))
    if raw.get("quantization_config"):
        fix = "use the checkpoint that was quantised, in bfloat16 or float32"
        yield _error(file, "quantization_config", "nothing: quantised weights cannot be trained", "one", fix)
    if dtype is not None and dtype not in _DTYPES:
        yield _error(file, "dtype", f"one of {', '.join(_DTYPES)}", dtype)
    for key, most in _MOST.items():
        if isinstance(raw.get(key), int) and raw[key] > most:
            yield _error(file, key, f"at most {most}", raw[key])
    yield from _head_errors(raw, file)
    yield from _layer_errors(raw, file)
    yield from _rope_errors(raw, file)
    epsilon = raw.get("rms_norm_eps", 1e-6)
    if epsilon is None or not _is_number(epsilon) or not 0 <= epsilon < 1:
        yield _error(file, "rms_norm_eps", "a number from 0 to below 1", epsilon)
    for key in ("id2label", "label2id"):
        if raw.get(key) is not None and not isinstance(raw[key], dict):
            yield _error(file, key, "an object", raw[key])
    vocabulary = raw.get("vocab_size")
    if not isinstance(vocabulary, int):
        return
    for key, least in (("pad_token_id", -1), ("eos_token_id", 0)):  # old checkpoints pad with -1
        stated = raw[key] if isinstance(raw.get(key), list) else [raw.get(key)]
        if any(isinstance(token, int) and not least <= token < vocabulary for token in stated):
            yield _error(file, key, f"a token below vocab_size ({vocabulary}), or null", raw[key])


def _model_type_fix(kind: Any, family: Family) -> str:
    """Return what to do about a model_type that is not the architecture's."""
    if kind is None or kind in FAMILIES:
        return f"write model_type: {family.model_type}, or the architecture of {kind}"
    return (
        f"in a copy of the folder write model_type: {family.model_type}, if its layers are those of "
        f"{family.architecture} unchanged; what is missing for {kind} is code that comes with the "
        "checkpoint, of the model or of its tokenizer, which is not run"
    )


def _head_errors(raw: Mapping[str, Any], file: Path) -> Iterator[UserError]:
    keys = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, groups, hidden, size = (raw[key] if _is_size(raw.get(key)) else None for key in keys)
    if heads is None:
        return  # reading the model's shape says so
    if groups is not None and heads % groups:
        yield _error(file, "num_key_value_heads", f"a divisor of num_attention_heads ({heads})", groups)
    if raw.get("kv_lora_rank"):
        return
    if size is None and hidden is not None and hidden % heads:
        yield _error(file, "num_attention_heads", f"a divisor of hidden_size ({hidden}), or head_dim", heads)
    size = size or (hidden or 0) // heads
    if size % 2:
        yield _error(file, "head_dim", "an even size: rotary angles turn pairs", size)


def _layer_errors(raw: Mapping[str, Any], file: Path) -> Iterator[UserError]:
    kinds, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    if not isinstance(kinds, list):
        return
    if len(kinds) != layers:
        yield _error(file, "layer_types", f"num_hidden_layers ({layers}) entries", f"{len(kinds)} entries")
    elif any(kind not in _LAYER_TYPES for kind in kinds):
        yield _error(file, "layer_types", f"entries among {', '.join(_LAYER_TYPES)}", kinds)


def _rope_errors(raw: Mapping[str, Any], file: Path) -> Iterator[UserError]:
    key = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    stated = raw.get(key)
    if stated is not None and not isinstance(stated, dict):
        yield _error(file, key, "an object with rope_type and its numbers", stated)
        return
    kinds = [stated[kind] for kind in _LAYER_TYPES if kind in stated] if stated else []
    for rope in kinds or [stated or {}]:
        if not isinstance(rope, dict):
            yield _error(file, key, "an object for each kind of layer", rope)
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            yield _error(file, key, f"a rope_type among {', '.join(ROPE_TYPES)}", kind)
            continue
        theta = {"rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0))}
        numbers = theta | {name: rope.get(name) for name in _ROPE_NUMBERS.get(kind, ())}
        for name, value in numbers.items():
            if value is None or not _is_number(value) or not 0 < value < 1e12:
                shown = "nothing" if value is None else value
                yield _error(file, f"{key}.{name}", f"a positive number, with rope_type {kind}", shown)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _error(file: Path, key: str, expected: str, got: Any, fix: str | None = None) -> UserError:
    return UserError(
        f"the model's config.json has a `{key}` that transformers, vLLM or the trainer refuses",
        where=f"{file}: {key}",
        expected=expected,
        got=(got if isinstance(got, str) else repr(got))[:200],
        fix=fix or f"correct {key} if the file was edited; else the checkpoint cannot be used here",
    )
