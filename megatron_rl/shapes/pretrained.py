"""A pretrained model by its config.json: its family, its shape and every tensor of its checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, nearest, raise_errors, unreadable_file_error
from megatron_rl.shapes.families import BY_MODEL_TYPE, FAMILIES
from megatron_rl.shapes.family import ConfigReader, Family
from megatron_rl.shapes.layer_weights import EMBEDDING, OUTPUT, Source, Weight, outer_weights
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.multimodal import MULTIMODAL, Multimodal, language_config, multimodal_of
from megatron_rl.shapes.quantized import (
    MODELOPT_FILE,
    Quantization,
    add_modelopt_quantization,
    read_quantization,
)

LAYER = "model.layers.{layer}."
"""Prefix of the tensor names of a layer."""
SINGLE_FILE = "model.safetensors"
"""Weights file of a Hugging Face checkpoint with a single file."""
INDEX = "model.safetensors.index.json"
"""File that maps tensors to files, in a Hugging Face checkpoint with several files."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "tekken.json", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer.model.v3", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""Files of a checkpoint's folder besides config.json and weights, mostly of the tokenizer."""
TOKENIZER_PATTERNS = ("additional_chat_templates/*.jinja", "*.py", "*.tiktoken")
"""Patterns of files that are copied like `TOKENIZER_FILES`: named chat templates, and the Python code that
``auto_map`` in config.json names, with its vocabularies."""


def tokenizer_files(folder: Path) -> list[str]:
    """Return the paths of the tokenizer's files relative to the checkpoint's folder."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for pattern in TOKENIZER_PATTERNS:
        files = (file for file in folder.glob(pattern) if file.is_file())
        names += sorted(file.relative_to(folder).as_posix() for file in files)
    return names


@dataclass(frozen=True)
class CheckpointTensor:
    """Tensor of a checkpoint, or the rows of a fused tensor that belong to one source."""

    name: str
    """Complete name in the checkpoint."""
    source: Source
    """Source of the tensor in `layer_weights`: its shape and shards."""
    expert: int | None = None
    """Index of the routed expert in its layer; None outside of routed experts."""


@dataclass(frozen=True)
class PretrainedModel:
    """Model that a config.json describes: its family, its sizes and its tensors."""

    family: Family
    """Table entry of the model's family."""
    shape: ModelShape
    """Sizes of the model."""
    config: Mapping[str, Any]
    """The config.json after `Family.normalise_config`: one spelling per key, and defaults for absent keys."""
    multimodal: Multimodal | None = None
    """Type of the multimodal checkpoint that contains this language model; None for a plain checkpoint."""

    @property
    def is_multimodal(self) -> bool:
        """Return whether this is the language model of a multimodal checkpoint."""
        return self.multimodal is not None

    @property
    def engine_keys(self) -> Mapping[str, Any]:
        """Return the keys of config.json that vLLM reads and transformers does not write."""
        return self.family.engine_keys(self.config)

    @property
    def quantization(self) -> Quantization | None:
        """Return the quantisation of the checkpoint's weights; raises UserError for an unsupported one."""
        return read_quantization(self.config)

    def with_scalar_head(self) -> PretrainedModel:
        """Return the same model with a scalar head instead of the output layer."""
        return replace(self, shape=self.shape.with_scalar_head())

    def weights(self, layer: int) -> tuple[Weight, ...]:
        """Return the parameters of a layer, with the source names of this family's checkpoints.

        Sources with the same name are rows of one fused tensor, in order.
        """
        return tuple(
            replace(weight, sources=tuple(self._rename_sources(weight.sources)))
            for weight in self.shape.weights(layer)
        )

    def outer_weights(self, first: bool, last: bool) -> tuple[Weight, ...]:
        """Return the parameters outside the layers; ``first`` and ``last`` select pipeline stages."""
        return outer_weights(self.shape, first, last)

    def _rename_sources(self, sources: Iterable[Source]) -> Iterator[Source]:
        """Yield the checkpoint tensors of a parameter under the names of this family's checkpoints.

        Several sources may be stored in one fused tensor. Then the function sets `Source.first_row`, the row
        of the fused tensor at which the source begins.
        """
        next_row: dict[str, int] = {}
        for source in sources:
            name = self.family.tensor_name(source.name)
            first_row = next_row.get(name, 0)
            yield replace(source, name=name, first_row=first_row)
            # The sources of a fused tensor may be interleaved: some rows of each source, then more rows of
            # each source, and so on. The next source therefore begins after the first contiguous range of
            # this source, which is the complete source unless it is interleaved.
            next_row[name] = first_row + source.rows_per_range

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Yield every tensor of the checkpoint in order; a fused tensor is yielded once per source.

        A tied output layer is omitted: its values are the embedding's.
        """
        # The embedding comes before the layers, the final norm and the output layer after them.
        first_weights = self.outer_weights(True, False)
        all_outer_weights = self.outer_weights(True, True)
        last_weights = all_outer_weights[len(first_weights) :]

        for weight in first_weights:
            for source in weight.sources:
                yield CheckpointTensor(source.name, source)

        # Give the weights of each distinct layer the names of this family's checkpoints. Layers with the same
        # structure share the result, since a model of 100 layers has few distinct structures.
        renamed_weights: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
        for layer in range(self.shape.layers):
            common_weights = self.shape.weights(layer)
            if common_weights not in renamed_weights:
                renamed_weights[common_weights] = self.weights(layer)
            yield from self._list_layer_tensors(layer, renamed_weights[common_weights])

        for weight in last_weights:
            for source in weight.sources:
                yield CheckpointTensor(source.name, source)

    def _list_layer_tensors(self, layer: int, weights: Sequence[Weight]) -> Iterator[CheckpointTensor]:
        """Yield the tensors of a layer: first the tensors outside routed experts, then expert by expert."""
        prefix = LAYER.format(layer=layer)
        for weight in weights:
            if not weight.expert:
                for source in weight.sources:
                    yield CheckpointTensor(prefix + source.name, source)

        expert_sources: list[Source] = []
        for weight in weights:
            if weight.expert:
                expert_sources += weight.sources
        if not expert_sources:
            return
        for expert in range(self.shape.experts):
            for source in expert_sources:
                yield CheckpointTensor(prefix + source.name.format(expert=expert), source, expert)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the checkpoint by name, in order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor in self.tensors():
            # A fused tensor gets its shape from its last source, whose end is the number of rows.
            shapes[tensor.name] = (tensor.source.end, *tensor.source.shape[1:])
        return shapes

    def is_mtp(self, name: str) -> bool:
        """Return whether a checkpoint tensor belongs to a multi-token prediction (MTP) layer."""
        # Qwen3-Next and Qwen3.5 have a separate prefix for these layers, and no key in config.json.
        if name.startswith("mtp."):
            return True
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match is None:
            return False

        # Other families number these layers after the model's layers.
        mtp_layers = self.config.get("num_nextn_predict_layers") or 0
        return 0 <= int(match.group(1)) - self.shape.layers < mtp_layers

    def is_copied(self, name: str) -> bool:
        """Return whether exports copy a checkpoint tensor without training it, such as an indexer weight."""
        return self.is_mtp(name) or any(substring in name for substring in self.family.copied)

    @property
    def loads_as_stored(self) -> bool:
        """Return whether the checkpoint's files can be loaded unchanged into the model that engines build.

        This is false for quantised weights, multimodal checkpoints and families with an `engine_family`.
        """
        is_other_model = self.is_multimodal or bool(self.family.engine_family)
        return self.quantization is None and not is_other_model

    def has_separate_head(self, names: Container[str]) -> bool:
        """Return whether a checkpoint stores an output layer although config.json ties it to the embedding.

        ``names`` are the names of the checkpoint's tensors.
        """
        return self.shape.tied and not self.shape.scalar_head and OUTPUT in names and EMBEDDING in names

    def is_ignorable(self, name: str) -> bool:
        """Return whether a checkpoint tensor that the model does not use is skipped without a warning.

        Ignorable tensors are rotary frequencies of old checkpoints, an output layer that is tied or replaced
        by a scalar head, multi-token prediction layers, and tensors that exports copy without training
        (`is_copied`).
        """
        if self.is_copied(name):
            return True
        output_unused = self.shape.tied or self.shape.scalar_head
        return name.endswith("rotary_emb.inv_freq") or (name == OUTPUT and output_unused)


def weight_files(path: Path) -> list[Path] | None:
    """Return the weight files of a checkpoint's folder, or None if its index lists them.

    The folder may contain other files: merged adapters, Mistral's `consolidated.safetensors`, or the index of
    shards that were merged into one file. The precedence is the same as in transformers: `model.safetensors`
    alone if it exists, otherwise the shards of the index.
    """
    single_file = path / SINGLE_FILE
    # Select a dangling link as well: reading it reports the missing file.
    if os.path.lexists(single_file):
        return [single_file]
    if (path / INDEX).is_file():
        return None

    # Without an index, prefer numbered shards to any other file.
    numbered_shards = sorted(path.glob("model-*.safetensors"))
    if numbered_shards:
        return numbered_shards
    return sorted(path.glob("*.safetensors"))


def read_index(folder: Path) -> dict[str, str]:
    """Read the index of a checkpoint's folder: tensor name -> file name.

    Raises UserError for an index that cannot be read, or that does not map tensors to files of this folder.
    """
    file = folder / INDEX
    try:
        weight_map = read_json_object(file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("no weight_map")

        # A name with a folder could lead out of the checkpoint.
        names = weight_map.values()
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("weight_map names no files of this directory")
        return weight_map
    except (OSError, ValueError) as error:
        expected = 'a JSON object with "weight_map": tensor -> file name'
        fix = "copy the file again from the checkpoint"
        noun = "the model's list of weight files"
        raise unreadable_file_error(noun, file, error, expected=expected, fix=fix) from error


def index_has_metadata(folder: Path) -> bool:
    """Return whether the index of a checkpoint's folder has metadata; true without an index."""
    file = folder / INDEX
    return not file.is_file() or isinstance(read_json_object(file).get("metadata"), dict)


def separate_head_error(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    difference: str,
) -> UserError:
    """Return the error for a stored output layer that config.json ties to the embedding.

    The stored output layer differs from the embedding, and transformers and vLLM load it as a separate
    parameter. ``shapes`` are the stored shapes by tensor name. ``difference`` describes the output layer,
    such as "other values".
    """
    # The output layer can be trained separately only if it fits the vocabulary.
    head = tuple(shapes[OUTPUT])
    embedding = tuple(shapes[EMBEDDING])
    if head == embedding:
        fix = f"set tie_word_embeddings to false in {path / 'config.json'}: {OUTPUT} is then trained as it is"
    else:
        fix = f"use a checkpoint whose {OUTPUT} has the rows of {EMBEDDING}"

    return UserError(
        f"the checkpoint has an output layer of its own, and config.json ties it to {EMBEDDING}",
        where=str(path),
        expected=f"{OUTPUT} equal to {EMBEDDING}, or tie_word_embeddings: false in config.json",
        got=f"tie_word_embeddings: true with {OUTPUT} {list(head)} with {difference}",
        fix=fix,
    )


def parse_pretrained(config: Mapping[str, Any], file: str = "config.json") -> PretrainedModel:
    """Return the model that a config.json describes.

    ``config``: content of a checkpoint's config.json, or of ``PretrainedConfig.to_dict()``. For a multimodal
    config.json the result is its language model. ``file``: path for errors. Raises UserError for a family
    that is not in `FAMILIES`, and UserErrors for missing or unsupported values.
    """
    family = family_of(config, file)
    language_model = language_config(config)
    normalised_config = family.normalise_config(language_model)
    reader = ConfigReader(normalised_config, file)
    shape = family.shape(reader)
    raise_errors(reader.errors)
    return PretrainedModel(family, shape, normalised_config, multimodal_of(config))


def family_of(config: Mapping[str, Any], file: str = "config.json") -> Family:
    """Return the family of a config.json, by its ``architectures`` or else by its ``model_type``.

    A multimodal model has the family of its language model. ``file`` is the path for errors. Raises UserError
    for a family that cannot be trained.
    """
    config = language_config(config)
    architectures = config.get("architectures")
    architecture = None
    if isinstance(architectures, list) and architectures:
        architecture = architectures[0]
    model_type = config.get("model_type")
    supported_architectures = [family.architecture for family in FAMILIES.values()]

    # The model type is compared only without an architecture. `Family.scalar_architecture` is the same model
    # with one number per token as output, for a critic or a reward model.
    for family in FAMILIES.values():
        if architecture is None and model_type in family.model_types:
            return family
        if architecture in (family.architecture, family.scalar_architecture):
            return family

    # Suggest a fix. Unsupported multimodal models also nest their language model under text_config.
    name = str(architecture or model_type or "")
    text_config = config.get("text_config")
    text_family = None
    if isinstance(text_config, Mapping):
        text_family = nearest(str(text_config.get("model_type")), FAMILIES)
    similar_name = nearest(name, [*supported_architectures, *FAMILIES])
    if text_family:
        fix = f"save the language model alone: {FAMILIES[text_family].architecture}.from_pretrained(PATH)"
    elif similar_name:
        fix = f"correct the name, if {similar_name} is intended"
    else:
        fix = "use a checkpoint of one of these architectures; docs/models.md lists the features of each"

    raise UserError(
        f"the model's architecture {name or '(none named)'} is not supported",
        where=f"{file}: architectures",
        expected="one of " + ", ".join(sorted([*supported_architectures, *MULTIMODAL, *FAMILIES])),
        got=name or "no `architectures`",
        fix=fix,
    )


def transformers_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json whose ``model_type`` has a class in transformers.

    A multimodal config.json is replaced by the config.json of its language model (`language_config`).

    >>> transformers_config({"model_type": "kimi_k2", "hidden_size": 7168})
    {'model_type': 'deepseek_v3', 'hidden_size': 7168}
    """
    config = language_config(config)
    model_type = str(config.get("model_type", ""))
    family = BY_MODEL_TYPE.get(model_type)
    if family is None or family.model_type == model_type:
        return config
    return {**config, "model_type": family.model_type}


def engine_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the model that generation engines build: usually `transformers_config`.

    For a family with sparse attention it is the config.json of the dense `Family.engine_family`, since vLLM
    supports sparse attention only on some accelerators.
    """
    config = transformers_config(config)
    family = BY_MODEL_TYPE.get(str(config.get("model_type", "")))
    if family is None or not family.engine_family:
        return config

    normalised_config = family.normalise_config(config)
    dense_family = FAMILIES[family.engine_family]
    dense_config: dict[str, Any] = {}
    for key, value in normalised_config.items():
        # vLLM would build sparse attention for a config.json with `index_topk`.
        if not key.startswith("index") and key not in ("layer_types", "mlp_layer_types"):
            dense_config[key] = value
    return {
        **dense_config,
        **family.engine_keys(normalised_config),
        "model_type": dense_family.model_type,
        "architectures": [dense_family.architecture],
    }


def read_pretrained(path: Path) -> PretrainedModel:
    """Read the model of a config.json file; raises UserError or UserErrors."""
    return parse_pretrained(read_config(path), str(path))


def download_command(path: str) -> str:
    """Return the command that downloads a model to the local folder ``path``."""
    return f"hf download ORGANISATION/{path.rpartition('/')[2]} --local-dir {path}"


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json, and add the quantisation from ModelOpt's file in the same folder if it exists.

    Raises UserError for a missing or malformed file.
    """
    config = read_json(path)
    file = path.with_name(MODELOPT_FILE)
    if not file.is_file():
        return config
    return add_modelopt_quantization(config, read_json(file))


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object of a config.json; raises UserError for a missing or malformed file."""
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        fix = "copy the file again from the checkpoint"
        noun = f"the model's {path.name}"
        raise unreadable_file_error(noun, path, error, expected="a JSON object", fix=fix) from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raises OSError, or ValueError for any other content."""
    # Reading a pipe would block, and reading a device may never end.
    if os.path.lexists(file) and not file.is_file():
        raise ValueError("a folder, a pipe, a device or a link to a missing file")
    return parse_json_object(file.read_text(encoding="utf-8"))


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse the JSON object in ``text``; raises ValueError for any other content.

    All readers of JSON files call this function: it also catches nesting beyond Python's recursion limit.
    """
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error

    if not isinstance(values, dict):
        raise ValueError(f"{type(values).__name__} instead of an object")
    return values
