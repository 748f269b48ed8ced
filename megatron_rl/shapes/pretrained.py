"""A pretrained model by its config.json: its family, its shape and every tensor of its checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, nearest, require_none
from megatron_rl.shapes.families import FAMILIES
from megatron_rl.shapes.family import ConfigReader, Family
from megatron_rl.shapes.layer_weights import EMBEDDING, OUTPUT, Source, Weight, outer_weights
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.refused import REFUSED

LAYER = "model.layers.{layer}."
SINGLE = "model.safetensors"
"""The file of a Hugging Face checkpoint that is not divided."""
INDEX = "model.safetensors.index.json"
"""Which file of a Hugging Face checkpoint holds which tensor, where there are several."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "tekken.json", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer.model.v3",
)  # fmt: skip
"""What a checkpoint's folder may hold beside config.json and weights."""
TOKENIZER_PATTERNS = ("additional_chat_templates/*.jinja", "*.py", "*.tiktoken")
"""More of it: chat templates by name, and the code that ``auto_map`` names, with vocabularies of its own."""


def tokenizer_files(folder: Path) -> list[str]:
    """Return the files of a checkpoint's folder that belong to its tokenizer, relative to it."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for pattern in TOKENIZER_PATTERNS:
        names += sorted(
            file.relative_to(folder).as_posix() for file in folder.glob(pattern) if file.is_file()
        )
    return names


@dataclass(frozen=True)
class CheckpointTensor:
    """Name a tensor of a checkpoint, with what the table says of it and the number of its expert."""

    name: str
    source: Source
    expert: int | None = None


@dataclass(frozen=True)
class PretrainedModel:
    """Hold what a config.json says: ``config`` has every key in one spelling, and defaults."""

    family: Family
    shape: ModelShape
    config: Mapping[str, Any]

    def with_scalar_head(self) -> PretrainedModel:
        """Return the same model with a head of one number in the place of the output layer."""
        return replace(self, shape=self.shape.with_scalar_head())

    def weights(self, layer: int) -> tuple[Weight, ...]:
        """Return the parameters of a layer, their sources named as this family's checkpoints do.

        Sources that get one name lie in one tensor, row after row.
        """
        return tuple(
            replace(weight, sources=tuple(self._named(weight.sources)))
            for weight in self.shape.weights(layer)
        )

    def outer(self, first: bool, last: bool) -> tuple[Weight, ...]:
        """Return the parameters that the first and the last pipeline stage hold outside the layers."""
        return outer_weights(self.shape, first, last)

    def _named(self, sources: Iterable[Source]) -> Iterator[Source]:
        rows: dict[str, int] = {}
        for source in sources:
            name = self.family.tensor_name(source.name)
            yield replace(source, name=name, first=rows.get(name, 0))
            rows[name] = rows.get(name, 0) + source.shape[0]

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Yield every tensor of the checkpoint, in the order in which it lists them, fused ones in parts.

        A tied output layer is not among them: its values are the embedding's.
        """
        shape = self.shape
        before, ends = self.outer(True, False), self.outer(True, True)
        for weight in before:
            yield from (CheckpointTensor(source.name, source) for source in weight.sources)
        kinds: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
        for layer in range(shape.layers):
            common = shape.weights(layer)
            if common not in kinds:
                kinds[common] = self.weights(layer)
            weights, prefix = kinds[common], LAYER.format(layer=layer)
            for weight in weights:
                if not weight.expert:
                    for source in weight.sources:
                        yield CheckpointTensor(prefix + source.name, source)
            sources = [source for weight in weights if weight.expert for source in weight.sources]
            for expert in range(shape.experts if sources else 0):
                for source in sources:
                    yield CheckpointTensor(prefix + source.name.format(expert=expert), source, expert)
        for weight in ends[len(before) :]:
            yield from (CheckpointTensor(source.name, source) for source in weight.sources)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the checkpoint by name, in order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor in self.tensors():
            rows, *rest = tensor.source.shape
            shapes[tensor.name] = (tensor.source.first + rows, *rest)
        return shapes

    def is_further(self, name: str) -> bool:
        """Say whether a checkpoint tensor is of a layer that predicts further tokens (MTP)."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        further = self.config.get("num_nextn_predict_layers") or 0
        return bool(layer) and 0 <= int(layer.group(1)) - self.shape.layers < further

    def has_separate_head(self, names: Container[str]) -> bool:
        """Say whether these names of tensors have an output layer beside the embedding that it is tied to."""
        return self.shape.tied and not self.shape.scalar_head and OUTPUT in names and EMBEDDING in names

    def is_ignorable(self, name: str) -> bool:
        """Say whether a checkpoint tensor that the model does not use may be skipped without a word.

        These are rotary frequencies of old checkpoints, an output layer that is tied or replaced by a head
        of one number, and layers that predict further tokens, which follow the model's own.
        """
        if self.is_further(name):
            return True
        unused = self.shape.tied or self.shape.scalar_head
        return name.endswith("rotary_emb.inv_freq") or (name == OUTPUT and unused)


def weight_files(path: Path) -> list[Path] | None:
    """Return the files that hold the weights of a checkpoint's folder, None where its index names them.

    A folder may hold further tensors that are not the model's: adapters that were merged into it, Mistral's
    `consolidated.safetensors`, the index of shards that were joined. The order is that of transformers:
    `model.safetensors` alone where there is one, else the shards of the index.
    """
    single = path / SINGLE
    if os.path.lexists(single):
        return [single]
    if (path / INDEX).is_file():
        return None
    numbered = sorted(path.glob("model-*.safetensors"))
    return numbered or sorted(path.glob("*.safetensors"))


def separate_head_error(path: Path, shapes: Mapping[str, Sequence[int]], what: str) -> UserError:
    """Return the error of a checkpoint whose output layer is not the embedding that config.json ties it to.

    transformers and vLLM do not tie the two then, and train or sample with the output layer. ``shapes`` are
    those of the stored tensors by name; ``what`` says how the two differ.
    """
    head, embedding = (tuple(shapes[name]) for name in (OUTPUT, EMBEDDING))
    if head == embedding:
        fix = f"set tie_word_embeddings to false in {path / 'config.json'}: {OUTPUT} is then trained as it is"
    else:
        fix = f"use a checkpoint whose {OUTPUT} has the rows of {EMBEDDING}"
    return UserError(
        f"the checkpoint has an output layer of its own, and config.json ties it to {EMBEDDING}",
        where=str(path),
        expected=f"{OUTPUT} equal to {EMBEDDING}, or tie_word_embeddings: false in config.json",
        got=f"tie_word_embeddings: true beside {OUTPUT} {list(head)} with {what}",
        fix=fix,
    )


def describe(config: Mapping[str, Any], place: str = "config.json") -> PretrainedModel:
    """Return the model of a config.json, as a checkpoint or ``PretrainedConfig.to_dict()`` has it.

    Raises UserError for a family that is not in the table, and UserErrors for values that are missing or not
    supported.
    """
    family = family_of(config, place)
    normal = family.normal(config)
    reader = ConfigReader(normal, place)
    shape = family.shape(reader)
    require_none(reader.errors)
    return PretrainedModel(family, shape, normal)


def family_of(config: Mapping[str, Any], place: str = "config.json") -> Family:
    """Return the family of a config.json, by its ``architectures``, else by its ``model_type``."""
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    kind = config.get("model_type")
    for family in FAMILIES.values():
        if architecture is None and kind == family.model_type:
            return family
        if architecture in (family.architecture, family.scalar_architecture):
            return family
    for refused in REFUSED:
        if architecture == refused.architecture or (architecture is None and kind == refused.model_type):
            raise UserError(
                f"{refused.title} cannot be trained",
                where=f"{place}: architectures",
                expected="one of " + ", ".join(sorted(family.architecture for family in FAMILIES.values())),
                got=f"{refused.architecture}; missing: {refused.missing}",
                fix="use a checkpoint of another family",
            )
    name, known = str(architecture or kind or ""), [family.architecture for family in FAMILIES.values()]
    close = nearest(name, [*known, *FAMILIES])
    inner = config.get("text_config")
    text = nearest(str(inner.get("model_type")), FAMILIES) if isinstance(inner, Mapping) else None
    if text:
        fix = f"save the language model alone: {FAMILIES[text].architecture}.from_pretrained(PATH)"
    else:
        fix = "use a checkpoint of one of these architectures; docs/models.md says what each can do"
        if close:
            fix = f"correct the name, if {close} is meant"
    raise UserError(
        f"the model's architecture {name or '(none named)'} is not supported",
        where=f"{place}: architectures",
        expected="one of " + ", ".join(sorted([*known, *FAMILIES])),
        got=name or "no `architectures`",
        fix=fix,
    )


def read_pretrained(path: Path) -> PretrainedModel:
    """Return the model of a config.json file; raises UserError or UserErrors."""
    return describe(read_json(path), str(path))


def download_command(path: str) -> str:
    """Return the command that fetches a model to the folder where it is looked for."""
    return f"hf download ORGANISATION/{path.rpartition('/')[2]} --local-dir {path}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a config.json; raises UserError where there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "the model's config.json cannot be read",
            where=str(path),
            expected="a JSON object",
            got=str(error),
            fix="copy the file again from the checkpoint",
        ) from error
    if not isinstance(raw, dict):
        raise UserError(
            "the model's config.json is not a JSON object",
            where=str(path),
            expected='{"architectures": [...], "hidden_size": ...}',
            got=type(raw).__name__,
            fix="copy the file again from the checkpoint",
        )
    return raw
