"""Checkpoints with weights of 8 or 4 bits and scales, which are loaded as bfloat16 or float32.

A weight is its stored numbers times its scales. The formats differ in the entries that share a scale:

- 8 bits: a block of 128 x 128 entries, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and Qwen3's FP8
  checkpoints; or a row; or the complete tensor.
- mxfp4, the format of gpt-oss: 32 entries of a row (OCP Microscaling Formats 1.0).
- NVFP4, which NVIDIA's ModelOpt writes: 16 entries of a row. A second scale applies to the complete tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

MXFP4_BLOCK = 32
"""Entries of a row that share a scale in mxfp4."""
FP8 = "F8_E4M3"
"""dtype of quantised weights, as safetensors spells it."""
BYTES = "U8"
"""dtype of bytes that store two numbers of 4 bits, and of mxfp4 scales, as safetensors spells it."""
_SCALE_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E8M0")
"""dtypes of scales of 8-bit weights, as safetensors spells them."""
MODELOPT_FILE = "hf_quant_config.json"
"""File in which ModelOpt describes a quantisation; since 0.31 ModelOpt also describes it in config.json."""

_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that describe a quantisation; old versions of compressed-tensors write the second."""
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Possible suffixes of scales: the name of the scales is the name of their weight plus a suffix."""
_ACTIVATION_SCALES = (
    ".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale",
)  # fmt: skip
"""Suffixes of the names of activation scales, which a model in bfloat16 does not need."""
_TENSOR_SCALE_SUFFIX = "_scale_2"
"""Suffix of the second scale in NVFP4, whose name is the name of its weight plus the suffix.

The second scale is one number for the complete tensor."""
_MODELOPT_ALGORITHMS = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
}
"""``quant_algo`` of ModelOpt -> `Quantization.method`. NVFP4 and W4A16_NVFP4 differ only in activations."""
_NVFP4_BLOCK = 16
"""Entries of a row that share a scale in NVFP4, unless config.json has a ``group_size``."""
_SUPPORTED = (
    "fp8 with weight_block_size or weight_scale, compressed-tensors with weights of float 8 bits, mxfp4 "
    f"of gpt-oss, or modelopt with quant_algo {', '.join(_MODELOPT_ALGORITHMS)}"
)
"""Supported quantisations, for errors."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """Quantisation of a checkpoint's weights.

    Example:
        >>> quantization = Quantization("fp8", (128, 128))
        >>> quantization.scale_block((200, 128), (2, 1))
        (128, 128)
    """

    method: str
    """``quant_method`` of config.json; ``nvfp4`` for weights of 4 bits by ModelOpt."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None for one scale per row or per tensor."""
    cache: str = ""
    """Quantisation of the key-value cache, whose scales in the checkpoint are ignored."""

    @property
    def has_tensor_scales(self) -> bool:
        """Return whether a second scale per tensor exists, as in NVFP4."""
        return self.method == "nvfp4"

    def supports_dtypes(self, weight: str, scales: str) -> bool:
        """Return whether a weight of dtype ``weight`` may have scales of dtype ``scales``."""
        if self.has_tensor_scales:
            return (weight, scales) == (BYTES, FP8)
        return weight == FP8 and scales in _SCALE_DTYPES

    @property
    def text(self) -> str:
        """Describe the quantisation for the output of `check`."""
        description = f"{self.method} weights of 8 bits with a scale per tensor or row"
        if self.method == "mxfp4":
            description = f"mxfp4 weights of 4 bits with a scale per {MXFP4_BLOCK} entries"
        elif self.block is not None and self.has_tensor_scales:
            description = (
                f"NVFP4 weights of 4 bits with a scale per {self.block[1]} entries and one per tensor"
            )
        elif self.block is not None:
            rows, columns = self.block
            description = f"{self.method} weights of 8 bits with a scale per {rows} x {columns} entries"

        if self.cache:
            description += f" (the cache's {self.cache} is ignored)"
        return description

    def scale_block(self, weight: Shape, scales: Shape) -> Shape | None:
        """Return the size, in each dimension of a weight, of the block of entries that share a scale.

        ``weight`` and ``scales`` are shapes. Scales may have fewer dimensions than the weight; the absent
        last dimensions then have size 1. Returns None if the shapes do not match.
        """
        if len(scales) > len(weight):
            return None

        # Only the last two dimensions, rows and columns of a matrix, have blocks of the configured size.
        block: list[int] = []
        padded_scales = scales + (1,) * (len(weight) - len(scales))
        row_dim = len(weight) - 2
        for dim, (entries, scale_count) in enumerate(zip(weight, padded_scales, strict=True)):
            size = None
            if self.block is not None and dim >= row_dim >= 0:
                size = self.block[dim - row_dim]
            if size is not None and scale_count == math.ceil(entries / size):
                block.append(size)
            elif scale_count == 1:
                block.append(entries)
            elif size is None and scale_count == entries:
                block.append(1)
            else:
                return None
        return tuple(block)


def quantization_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json that describe a quantisation."""
    return [key for key in _KEYS if config.get(key)]


def remove_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that describe a quantisation."""
    keys = quantization_keys(config)
    return {key: value for key, value in config.items() if key not in keys}


def read_quantization(config: Mapping[str, Any], file: str = "config.json") -> Quantization | None:
    """Read the quantisation that a config.json describes; return None for weights that are not quantised.

    ``file`` is the path for errors. Raises UserError for an unsupported quantisation.
    """
    keys = quantization_keys(config)
    if not keys:
        return None
    key = keys[0]
    settings = config[key]
    path = f"{file}: {key}"
    if not isinstance(settings, Mapping):
        raise _unsupported_error(path, repr(settings))

    method = settings.get("quant_method")
    if method == "fp8":
        return Quantization("fp8", _fp8_block(settings, path))
    # Only gpt-oss is supported: its fused experts have this format, see `shapes.fused_experts`.
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return Quantization("mxfp4", (1, MXFP4_BLOCK))
    if method == "compressed-tensors":
        return Quantization("compressed-tensors", _compressed_block(settings, path))
    if str(method).startswith("modelopt"):
        return _modelopt_quantization(settings, path, file)
    raise _unsupported_error(path, f"quant_method: {method}")


def add_modelopt_quantization(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the quantisation in ModelOpt's file to a config.json that does not describe one itself.

    ``settings``: content of `MODELOPT_FILE`.
    """
    if quantization_keys(config):
        return dict(config)
    # The file has no quant_method: use the name of the library that wrote it.
    method = None
    producer = settings.get("producer")
    if isinstance(producer, Mapping):
        method = producer.get("name")
    return {**config, "quantization_config": {"quant_method": method, **settings}}


def scales_by_weight(names: Iterable[str]) -> dict[str, str]:
    """Map each quantised weight of a checkpoint to the name of its scales, given all tensor names."""
    stored_names = set(names)
    scales: dict[str, str] = {}
    for suffix in _SCALE_SUFFIXES:
        scales = _match_suffixed_names(stored_names, suffix) | scales
    return scales


def tensor_scales_by_weight(names: Iterable[str]) -> dict[str, str]:
    """Map each NVFP4 weight of a checkpoint to the name of its second, per-tensor scale."""
    return _match_suffixed_names(set(names), _TENSOR_SCALE_SUFFIX)


def _match_suffixed_names(stored_names: set[str], suffix: str) -> dict[str, str]:
    """Map each weight to the stored tensor with its name plus ``suffix``, if that tensor exists."""
    suffixed_by_weight: dict[str, str] = {}
    for name in stored_names:
        weight = name.removesuffix(suffix)
        if weight != name and weight in stored_names:
            suffixed_by_weight[weight] = name
    return suffixed_by_weight


def is_activation_scale(name: str) -> bool:
    """Return whether a tensor of a quantised checkpoint scales activations or the cache."""
    return name.endswith(_ACTIVATION_SCALES)


def scale_shape_error(file: str, name: str, scales: Shape, weight: Shape) -> UserError:
    """Return the error for scales whose shape does not fit their weight; ``file`` contains the scales."""
    return UserError(
        f"the scales {name} do not belong to their weight",
        where=file,
        expected=f"a scale per block (as in config.json), row or tensor of a weight of {list(weight)}",
        got=str(list(scales)),
        fix="use the config.json that belongs to these weights",
    )


def mxfp4_error(file: str, name: str, blocks: Shape, scales: Shape | None) -> UserError:
    """Return the error for a matrix in mxfp4 without a scale for each of its blocks.

    ``blocks``, ``scales``: stored shapes; None for absent scales.
    """
    got = "no scales"
    if scales is not None:
        got = f"blocks {list(blocks)} with scales {list(scales)}"
    return UserError(
        f"the blocks of mxfp4 in {name} do not have one scale each",
        where=file,
        expected=f"blocks of {MXFP4_BLOCK // 2} bytes, with a scale of 1 byte for each",
        got=got,
        fix="download the checkpoint again, with all its files",
    )


def has_mxfp4_scales(blocks: Shape, scales: Shape | None) -> bool:
    """Return whether each block of a matrix in mxfp4 has a scale, given the stored shapes of both."""
    return len(blocks) == 4 and blocks[3] == MXFP4_BLOCK // 2 and scales == blocks[:3]


def nvfp4_error(file: str, name: str, weight: Shape, scale: Shape | None) -> UserError:
    """Return the error for a matrix in NVFP4 whose scale per tensor is absent or not a single number.

    NVFP4 has a scale per block and, as the second scale, one for the complete tensor. ``weight``, ``scale``:
    shapes of the matrix and of its scale per tensor; None for an absent scale.
    """
    got = "no such tensor"
    if scale is not None:
        got = f"{list(scale)} for a weight of {list(weight)}"
    return UserError(
        f"the matrix {name} has no scale of the whole tensor",
        where=file,
        expected=f"one number in {name}{_TENSOR_SCALE_SUFFIX}",
        got=got,
        fix="download the checkpoint again, with all its files",
    )


def has_one_element(shape: Shape | None) -> bool:
    """Return whether a tensor with this shape has one element; false for None, an absent tensor."""
    return shape is not None and all(size == 1 for size in shape)


def _modelopt_quantization(settings: Mapping[str, Any], path: str, file: str) -> Quantization | None:
    """Read the quantisation of ``quant_method: modelopt``, or of `MODELOPT_FILE` in the folder of ``file``.

    Returns None for ``quant_algo: null``, with which ModelOpt exports a model that is not quantised.
    """
    # The file nests the values; config.json has them at the top level.
    nested_settings = settings.get("quantization")
    if isinstance(nested_settings, Mapping):
        path = f"{Path(file).with_name(MODELOPT_FILE)}: quantization"
        settings = nested_settings

    has_cache_scales = bool(settings.get("kv_cache_quant_algo") or settings.get("kv_cache_scheme"))
    if "quant_algo" in settings and settings["quant_algo"] is None and not has_cache_scales:
        return None

    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm not in _MODELOPT_ALGORITHMS:
        raise _unsupported_error(path, f"quant_algo: {settings.get('quant_algo')}")

    block = None
    method = _MODELOPT_ALGORITHMS[algorithm]
    if method == "nvfp4":
        columns = settings.get("group_size") or _NVFP4_BLOCK
        block = _parse_block([1, columns], f"{path}.group_size")

    # In config.json the cache's quantisation has the format of compressed-tensors.
    cache_text = settings.get("kv_cache_quant_algo") or ""
    if settings.get("kv_cache_scheme"):
        cache_text = "kv_cache_scheme"
    elif cache_text:
        cache_text = f"kv_cache_quant_algo {cache_text}"
    return Quantization(method, block, cache_text)


def _fp8_block(settings: Mapping[str, Any], path: str) -> tuple[int, int] | None:
    """Read the block size of ``quant_method: fp8``; None if each scale applies to a tensor or a row."""
    number_format = settings.get("fmt") or "e4m3"
    if number_format != "e4m3":
        raise _unsupported_error(path, f"fmt: {number_format}")

    block = settings.get("weight_block_size")
    if block is None:
        return None
    return _parse_block(block, f"{path}.weight_block_size")


def _compressed_block(settings: Mapping[str, Any], path: str) -> tuple[int, int] | None:
    """Read the block size of ``compressed-tensors``; None if each scale applies to a tensor or a row."""
    # Refuse sparsity and transforms: such weights are not the product of stored numbers and scales.
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _unsupported_error(path, f"sparsity_config.format: {sparsity['format']}")
    if settings.get("transform_config"):
        raise _unsupported_error(path, "transform_config")

    # Each group of layers has a separate description; all groups must have the same block size.
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported_error(path, "no config_groups")
    blocks: set[tuple[int, int] | None] = set()
    for name, group in groups.items():
        group_path = f"{path}.config_groups.{name}.weights"
        weight_settings: Any = False
        if isinstance(group, Mapping):
            weight_settings = group.get("weights")
        if not isinstance(weight_settings, Mapping):
            raise _unsupported_error(group_path, repr(weight_settings))

        # Only symmetric scales of 8-bit floats are supported: symmetric scales have no zero point.
        scheme = {key: weight_settings.get(key) for key in ("type", "num_bits", "strategy", "symmetric")}
        if (scheme["type"], scheme["num_bits"]) != ("float", 8) or scheme["symmetric"] is False:
            raise _unsupported_error(group_path, str(scheme))
        if scheme["strategy"] == "block":
            blocks.add(_parse_block(weight_settings.get("block_structure"), f"{group_path}.block_structure"))
        elif scheme["strategy"] in ("tensor", "channel"):
            blocks.add(None)
        else:
            raise _unsupported_error(group_path, str(scheme))

    if len(blocks) > 1:
        got = "groups with different block sizes, or with and without blocks"
        raise _unsupported_error(f"{path}.config_groups", got)
    return blocks.pop()


def _parse_block(value: Any, path: str) -> tuple[int, int]:
    """Parse a block's rows and columns; raises UserError unless ``value`` has two positive integers."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if is_pair and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    raise _unsupported_error(path, repr(value), "two counts: rows and columns that share a scale")


def _unsupported_error(path: str, got: str, expected: str = _SUPPORTED) -> UserError:
    """Return the error for an unsupported quantisation; ``path`` is its key in config.json."""
    return UserError(
        "the model's weights are quantised in a way that cannot be read",
        where=path,
        expected=expected,
        got=got[:200],
        fix="use the original checkpoint in bfloat16 or float32, from which this one was quantised",
    )
