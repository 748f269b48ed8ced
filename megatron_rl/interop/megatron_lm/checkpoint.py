"""A checkpoint that Megatron-LM wrote: its arguments and where its tensors lie, read without running it.

Megatron-LM keeps arguments and the directory of tensors as pickles. Here every name in them stands for a
value that holds what it is given and does nothing, so no checkpoint can run code.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, some_of
from megatron_rl.interop.megatron_lm.optimizer_buffers import (
    FlatParameter,
    flat_parameters,
    orders,
    other_buffers,
    writer_layout,
)
from megatron_rl.interop.megatron_lm.pickles import (
    DIRECTORY,
    MASTERS,
    MOMENTS,
    Bucket,
    StoredTensor,
    read_common,
    read_tensors,
)
from megatron_rl.shapes.layer_weights import Weight, outer_weights
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_json

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
POINTER = "megatron.json"
"""In the folder of a model whose weights lie in a Megatron checkpoint: which, and what its arguments were."""
_CONVERT = (
    "convert it with Megatron-LM: pretrain_gpt.py ARGUMENTS --load {folder} --ckpt-format torch "
    "--ckpt-convert-format torch_dist --ckpt-convert-save NEW"
)
_SHOWN = 6


@dataclass(frozen=True)
class Place:
    """Say which entry of a stored tensor is a parameter: ``index`` counts its layer, and its expert."""

    key: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class MegatronCheckpoint:
    """Hold what one ``iter_*`` folder says of itself: arguments as plain values, and the model's tensors.

    ``states`` are what the optimizer keeps for each tensor, by kind, where they are stored as the tensors
    are, ``buffers`` where they are stored as they lie in the buffers of its ranks; ``sharding`` is how the
    distributed optimizer says that it stored them. ``steps`` are its steps.
    """

    path: Path
    iteration: int
    arguments: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    states: Mapping[str, Mapping[str, StoredTensor]]
    buffers: Mapping[str, Mapping[Bucket, StoredTensor]]
    sharding: str | None
    steps: int | None

    def state(self, name: str) -> MegatronCheckpoint:
        """Return the checkpoint with a kind of the optimizer's states in the place of the weights.

        Biases that balance experts stay: no optimizer steps them.
        """
        biases = {key: value for key, value in self.tensors.items() if key.endswith("expert_bias")}
        return replace(self, tensors={**biases, **self.states[name]})

    def optimizer_words(self) -> str:
        """Say from what Adam goes on, where `optimizer_errors` has none."""
        words = f"Adam goes on from {self.steps} steps"
        if self.states:
            return words
        return f"{words}, in buffers of {writer_layout(self.arguments).short_words()}"

    def optimizer_errors(self, shape: ModelShape, where: str) -> list[UserError]:
        """Return why Adam cannot go on from the checkpoint's moments with a model."""
        held = {*self.states} or {*self.buffers}
        wanted = {*MOMENTS} if self.states else {*MOMENTS, MASTERS[0]}
        if wanted <= held and self.steps is not None:
            if not self.states:
                return self._buffer_errors(shape, where)
            states = [self.state(name) for name in self.states]
            return [
                error for state in states for error in (*state.parameters(shape)[1], *state.file_errors())
            ]
        got, fix = "no optimizer state, or not of Adam", "save it without --no-save-optim"
        if wanted <= held:
            got = "moments without a number of steps"
        elif self.sharding is not None:
            got = f"{self.sharding}, with " + (", ".join(sorted(held)) or "nothing that is known")
            fix = "load and save it with Megatron-LM on its layout, with --dist-ckpt-optim-fully-reshardable"
        return [
            UserError(
                "the optimizer's state in the Megatron checkpoint cannot be gone on with",
                where=where,
                expected="Adam's moments for each tensor: of the distributed optimizer "
                "dp_reshardable or fully_reshardable",
                got=f"{self.path}: {got}",
                fix=f"{fix}; or remove {where}: the optimizer starts anew",
            )
        ]

    def flat_parameters(self, shape: ModelShape) -> list[list[FlatParameter]]:
        """Return where a model's parameters may lie in the optimizer's buffers, the likeliest way first.

        Raises UserError where they cannot: the buffers are of another model or layout than stated.
        """
        sizes = {bucket: tensor.shape[0] for bucket, tensor in self.buffers[MASTERS[0]].items()}
        rows = self.tensors["embedding.word_embeddings.weight"].shape[0]
        ways, refused = [], []
        for order in orders(self.arguments, shape):
            try:
                ways.append(flat_parameters(self.arguments, shape, rows, sizes, order))
            except UserError as error:
                refused.append(error)
        if not ways:
            raise refused[0]
        return ways

    def _buffer_errors(self, shape: ModelShape, where: str) -> list[UserError]:
        """Return why moments in the buffers of a layout are not those of a model."""
        sizes = [
            {bucket: tensor.shape for bucket, tensor in self.buffers[name].items()}
            for name in (MASTERS[0], *MOMENTS)
        ]
        flat = {
            f"{bucket.words()}.bucket_idx_{bucket.number}.{name}": tensor
            for name, buckets in self.buffers.items()
            for bucket, tensor in buckets.items()
        }
        errors = list(replace(self, tensors=flat).file_errors())
        try:
            self.flat_parameters(shape)
            if any(other != sizes[0] for other in sizes):
                raise other_buffers(f"the same buckets of {', '.join(self.buffers)}", "others")
        except UserError as error:
            fix = f"{error.fix}; or remove {where}: the optimizer starts anew"
            errors.append(replace(error, where=where, got=f"{self.path}: {error.got}", fix=fix))
        return errors

    def parameters(self, shape: ModelShape) -> tuple[dict[str, Place], list[UserError]]:
        """Return where each parameter of a model lies, and how the tensors differ from the model's."""
        places, missing, errors = {}, [], []
        for name, keys, expected in _parameters(shape):
            place = next((place for place in keys if place.key in self.tensors), None)
            if place is None:
                missing.append(name)
                continue
            places[name] = place
            stored = self.tensors[place.key].shape
            size = stored[len(place.index) :]
            inside = all(position < extent for position, extent in zip(place.index, stored, strict=False))
            padded = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            if not inside or (
                size[0] < expected[0] or size[1:] != expected[1:] if padded else size != expected
            ):
                errors.append(self._other_shape(name, expected, place, stored, padded))
        unexpected = sorted(set(self.tensors) - {place.key for place in places.values()})
        filled = Counter((place.key, len(place.index)) for place in places.values())
        for (key, depth), count in filled.items():
            entries = math.prod(self.tensors[key].shape[:depth])
            if count < entries:
                errors.append(self._other_count(key, count, entries))
        if missing or unexpected:
            errors.insert(0, self._other_tensors(missing, unexpected))
        return places, errors[:_SHOWN]

    def file_errors(self) -> Iterator[UserError]:
        """Yield the error of files that are missing or shorter than the directory of tensors says."""
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        sizes = {name: _size(self.path / name) for name in ends}
        wrong = [name for name, end in ends.items() if (sizes[name] or 0) < end]
        if wrong:
            shown = [
                f"{name}: " + ("missing" if sizes[name] is None else f"{sizes[name]} bytes of {ends[name]}")
                for name in sorted(wrong)
            ]
            yield UserError(
                "shards of the Megatron checkpoint are missing or cut off",
                where=str(self.path),
                expected=f"{len(ends)} files with the model's tensors, as {DIRECTORY} lists them",
                got=some_of(shown, _SHOWN),
                fix="copy the whole folder again, or name another iteration",
            )
        gaps = [
            name
            for name, tensor in self.tensors.items()
            if sum(math.prod(chunk.size) for chunk in tensor.chunks) != math.prod(tensor.shape)
        ]
        if gaps:
            yield UserError(
                "tensors of the Megatron checkpoint are not whole",
                where=str(self.path / DIRECTORY),
                expected="pieces that make up each tensor",
                got=some_of(gaps, _SHOWN),
                fix="use another iteration: the save of this one did not finish",
            )

    def _other_shape(
        self, name: str, expected: tuple[int, ...], place: Place, stored: tuple[int, ...], padded: bool
    ) -> UserError:
        rows = f"{expected[0]} or more" if padded else str(expected[0])
        return UserError(
            f"the Megatron checkpoint's tensor {place.key} is not of the model's size",
            where=str(self.path),
            expected=f"{name}: [{', '.join((rows, *map(str, expected[1:])))}]",
            got=f"{list(stored)}" + (f", at {list(place.index)}" if place.index else ""),
            fix="name the configuration and the tokenizer that belong to this checkpoint",
        )

    def _other_count(self, key: str, used: int, count: int) -> UserError:
        return UserError(
            "the Megatron checkpoint has more layers or experts than the model",
            where=str(self.path),
            expected=f"{key}: {used}",
            got=str(count),
            fix="name the configuration that belongs to this checkpoint",
        )

    def _other_tensors(self, missing: Sequence[str], unexpected: Sequence[str]) -> UserError:
        return UserError(
            "the Megatron checkpoint's tensors are not those of the model",
            where=str(self.path),
            expected=f"also {some_of(missing, _SHOWN)}" if missing else "no others",
            got=f"others: {some_of(unexpected, _SHOWN)}"
            if unexpected
            else f"{len(self.tensors)} tensors without them",
            fix="name the configuration that belongs to this checkpoint; layers beside GPTModel's own cannot "
            "be read",
        )


def pointer(path: str | Path) -> dict[str, Any] | None:
    """Return what a model's folder says of the Megatron checkpoint with its weights, if not its own."""
    file = Path(path) / POINTER
    return read_json(file) if file.is_file() else None


def is_megatron(path: str | Path) -> bool:
    """Say whether a folder is a checkpoint of Megatron-LM: has a tracker, or is one iteration."""
    folder = Path(path)
    return any((folder / name).is_file() for name in (TRACKER, DIRECTORY)) or _is_legacy(folder)


def read_checkpoint(path: str | Path, where: str) -> MegatronCheckpoint:
    """Return what a folder with a tracker, or one ``iter_*``, holds; no tensor is read.

    ``where`` is the setting that names it. Raises UserError for another format, and what cannot be read.
    """
    folder = _iteration_folder(Path(path), where)
    if _is_legacy(folder):
        raise UserError(
            "the checkpoint is in Megatron-LM's legacy format, which is bound to its layout",
            where=where,
            expected="--ckpt-format torch_dist",
            got=f"mp_rank_* in {folder}",
            fix=_CONVERT.format(folder=folder.parent),
        )
    backend = read_json(folder / FORMAT).get("sharded_backend") if (folder / FORMAT).is_file() else None
    if backend != "torch_dist":
        raise UserError(
            "the checkpoint is not of the format that can be read",
            where=where,
            expected=f'{FORMAT} with "sharded_backend": "torch_dist"',
            got=f"{folder}: " + (repr(backend) if backend else f"no {FORMAT}"),
            fix="save it with --ckpt-format torch_dist",
        )
    common = read_common(folder)
    if common.arguments is None:
        raise UserError(
            "the checkpoint does not hold the arguments it was trained with",
            where=str(folder),
            expected="args, as Megatron-LM saves them",
            got=", ".join(common.names) or "nothing",
            fix="save it with pretrain_gpt.py",
        )
    named = re.fullmatch(r"iter_(\d+)", folder.name)
    iteration = common.iteration if common.iteration is not None else int(named[1]) if named else 0
    stored = read_tensors(folder)
    return MegatronCheckpoint(
        folder,
        iteration,
        common.arguments,
        stored.tensors,
        stored.states,
        stored.buffers,
        common.sharding,
        stored.steps if common.steps is None else common.steps,
    )


def _parameters(shape: ModelShape) -> Iterator[tuple[str, list[Place], tuple[int, ...]]]:
    """Yield each parameter of a model on one rank, the places where it may be stored, and its shape."""
    for weight in outer_weights(shape, True, True):
        yield weight.name, [Place(weight.name)], weight.local_shape(1)
    for layer in range(shape.layers):
        for weight in shape.weights(layer):
            for expert in range(shape.experts) if weight.expert else (None,):
                name = weight.name if expert is None else weight.name.format(expert=expert)
                yield f"decoder.layers.{layer}.{name}", _places(weight, layer, expert), weight.local_shape(1)


def _places(weight: Weight, layer: int, expert: int | None) -> list[Place]:
    """Return the names that Megatron's own layers and Transformer Engine's have for a layer's parameter.

    Layers that are all alike are stored in one tensor, others apart.
    """
    if expert is not None:
        names, index = [weight.name.replace("local_experts.{expert}.", "experts.")], (expert,)
    else:
        names, index = [name for name in (weight.fused, weight.name) if name], ()
    stacked = [Place(f"decoder.layers.{name}", (layer, *index)) for name in names]
    return stacked + [Place(f"decoder.layers.{layer}.{name}", index) for name in names]


def _iteration_folder(path: Path, where: str) -> Path:
    tracker = path / TRACKER
    if not tracker.is_file():
        if (path / DIRECTORY).is_file() or _is_legacy(path):
            return path
        held = sorted(item.name for item in path.iterdir())[:_SHOWN] if path.is_dir() else []
        raise UserError(
            "this is no checkpoint of Megatron-LM",
            where=where,
            expected=f"a folder with {TRACKER}, or one of its iter_* folders",
            got=f"{path}: " + (", ".join(held) or ("an empty folder" if path.is_dir() else "no such folder")),
            fix="name the folder that pretrain_gpt.py had as --save",
        )
    words = tracker.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / (f"iter_{int(words):07d}" if words.isdecimal() else "release")
    if not (words.isdecimal() or words == "release") or not folder.is_dir():
        folders = ", ".join(sorted(item.name for item in path.iterdir() if item.is_dir())) or "no folder"
        raise UserError(
            "the newest iteration of the Megatron checkpoint is not there",
            where=str(tracker),
            expected=f"{folder.name}, as the tracker says ({words[:20]!r})",
            got=folders,
            fix=f"copy {folder.name}, or name one that is there",
        )
    return folder


def _is_legacy(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("mp_rank_*"))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
