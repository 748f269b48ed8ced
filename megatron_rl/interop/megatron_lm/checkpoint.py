"""Metadata of a checkpoint that Megatron-LM wrote: its arguments and the locations of its tensors.

Megatron-LM stores the arguments and the index of tensors as pickles. They are read without running code: the
reader replaces all functions and classes by inert values (`pickles`). The reader needs no torch, so that
`check` can verify a checkpoint anywhere.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, join_names
from megatron_rl.interop.megatron_lm.optimizer_buffers import (
    FlatParameter,
    arrange_parameters,
    list_possible_implementations,
    mismatched_buffers_error,
    writer_layout,
)
from megatron_rl.interop.megatron_lm.pickles import (
    MASTERS,
    MOMENTS,
    TENSOR_INDEX,
    Bucket,
    StoredTensor,
    read_common,
    read_tensors,
)
from megatron_rl.shapes.layer_weights import Weight, is_buffer, outer_weights
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_json

TRACKER = "latest_checkpointed_iteration.txt"
"""File with the number of the newest iteration."""
FORMAT = "metadata.json"
"""File with the checkpoint's format."""
POINTER = "megatron.json"
"""File in a model's folder that points to the Megatron checkpoint with its weights."""
_CONVERT = (
    "convert it with Megatron-LM: pretrain_gpt.py ARGUMENTS --load {folder} --ckpt-format torch "
    "--ckpt-convert-format torch_dist --ckpt-convert-save NEW"
)
"""Fix in the error for the checkpoint ``folder`` in the legacy format."""
_MAX_LISTED = 6
"""Maximum number of names that an error lists, and of errors that are reported."""


@dataclass(frozen=True)
class Location:
    """Location of a parameter in the stored tensors.

    Example: ``Location("decoder.layers.mlp.linear_fc1.weight", (3,))`` is layer 3 of a stacked tensor.
    """

    key: str
    """Name of the stored tensor."""
    index: tuple[int, ...] = ()
    """Leading indices of a stacked tensor: layer, expert, or both."""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """Metadata of one iteration (``iter_*`` folder) of a Megatron-LM checkpoint, without tensor values.

    Example: ``read_checkpoint("run/checkpoints", "model.megatron").iteration`` is 500.
    """

    path: Path
    """The ``iter_*`` folder."""
    iteration: int
    """Number of the iteration; 0 for a release."""
    arguments: Mapping[str, Any]
    """Megatron-LM's arguments, as plain values."""
    tensors: Mapping[str, StoredTensor]
    """The model's tensors by name."""
    states: Mapping[str, Mapping[str, StoredTensor]]
    """Optimizer states in the shape of the model's tensors: state -> name of the tensor -> tensor."""
    buffers: Mapping[str, Mapping[Bucket, StoredTensor]]
    """Optimizer states in the flat buffers of the ranks: state -> bucket -> tensor."""
    sharding: str | None
    """Format in which the distributed optimizer stored its states, or None if it is not stored."""
    steps: int | None
    """Number of steps of the optimizer, or None if it is not stored."""

    def with_state(self, name: str) -> MegatronCheckpoint:
        """Return the checkpoint with the optimizer state ``name``, such as ``exp_avg``, in place of weights.

        The model's buffers are retained, such as the router's load-balancing biases: no optimizer updates
        them.
        """
        model_buffers: dict[str, StoredTensor] = {}
        for key, tensor in self.tensors.items():
            if is_buffer(key):
                model_buffers[key] = tensor
        return replace(self, tensors=model_buffers | dict(self.states[name]))

    def describe_optimizer(self) -> str:
        """Describe the optimizer state that is restored: the steps of Adam, and the layout of flat buffers.

        Valid only if `optimizer_errors` returns an empty list.
        """
        description = f"Adam resumes from {self.steps} steps"
        if self.states:
            return description
        return f"{description}, in buffers of {writer_layout(self.arguments).short_text()}"

    def optimizer_errors(self, shape: ModelShape, setting: str) -> list[UserError]:
        """Return the errors that prevent Adam from resuming with the checkpoint's optimizer state.

        ``shape`` is the model to train. ``setting`` is the configuration key that requests the resume.
        """
        # Without tensors by name, the moments are in flat buffers. The arrangement of the parameters in these
        # buffers is computed from the sizes and values of the master weights, so they are required, too.
        required_states: set[str] = set(MOMENTS)
        available_states = set(self.states)
        if not self.states:
            required_states.add(MASTERS[0])
            available_states = set(self.buffers)

        if required_states <= available_states and self.steps is not None:
            if not self.states:
                return self._buffer_errors(shape, setting)

            # Each state has one tensor per model tensor, in the same file layout as the weights.
            errors = []
            for state_name in self.states:
                state_checkpoint = self.with_state(state_name)
                _, state_errors = state_checkpoint.locate_parameters(shape)
                errors += state_errors
                errors += state_checkpoint.file_errors()
            return errors

        # The fix depends on the states that the checkpoint has.
        got = "no optimizer state, or the state of an optimizer other than Adam"
        fix = "save the checkpoint without --no-save-optim"
        if required_states <= available_states:
            got = "Adam's moments without its step count"
        elif self.sharding is not None:
            state_names = ", ".join(sorted(available_states)) or "no Adam state"
            got = f"{self.sharding}, with {state_names}"
            fix = (
                "load the checkpoint in Megatron-LM with the parallel layout that it was saved with, and "
                "save it with --dist-ckpt-optim-fully-reshardable"
            )
        return [
            UserError(
                "training cannot resume with the optimizer's state in the Megatron checkpoint",
                where=setting,
                expected="Adam's moments for each tensor; from the distributed optimizer, in the format "
                "dp_reshardable or fully_reshardable",
                got=f"{self.path}: {got}",
                fix=f"{fix}; or remove {setting}: the optimizer starts from zero",
            )
        ]

    def list_arrangements(self, shape: ModelShape) -> list[list[FlatParameter]]:
        """Return the possible orders of parameters in the optimizer buffers, most likely first.

        ``shape`` is the model. The parallel layout is read from the checkpoint's Megatron-LM arguments.
        Raises UserError if the buffers do not match this model and this layout.
        """
        # Megatron-LM's arguments contain neither the sizes of the buckets nor the size of the padded
        # vocabulary: read both from stored tensors.
        bucket_sizes = {bucket: tensor.shape[0] for bucket, tensor in self.buffers[MASTERS[0]].items()}
        vocabulary_rows = self.tensors["embedding.word_embeddings.weight"].shape[0]

        # Several implementations of the layers may fit; the values of the master weights decide later.
        arrangements = []
        errors = []
        for implementation in list_possible_implementations(self.arguments, shape):
            try:
                arrangement = arrange_parameters(
                    self.arguments,
                    shape,
                    vocabulary_rows,
                    bucket_sizes,
                    implementation,
                )
                arrangements.append(arrangement)
            except UserError as error:
                errors.append(error)
        if not arrangements:
            raise errors[0]
        return arrangements

    def _buffer_errors(self, shape: ModelShape, setting: str) -> list[UserError]:
        """Return the errors of optimizer buffers that are damaged, or do not belong to the model."""
        # Describe each bucket as a tensor, so that `file_errors` verifies the buffers like weights.
        flat_tensors: dict[str, StoredTensor] = {}
        for state, buckets in self.buffers.items():
            for bucket, tensor in buckets.items():
                name = f"{bucket.buffer_name()}.bucket_idx_{bucket.number}.{state}"
                flat_tensors[name] = tensor
        errors = list(replace(self, tensors=flat_tensors).file_errors())

        try:
            self.list_arrangements(shape)
            # All states must have the buckets of the master weights.
            master_sizes = self._bucket_sizes(MASTERS[0])
            if any(self._bucket_sizes(state) != master_sizes for state in MOMENTS):
                expected = f"the same buckets of {', '.join(self.buffers)}"
                raise mismatched_buffers_error(expected, "different buckets")
        except UserError as error:
            fix = f"{error.fix}; or remove {setting}: the optimizer starts from zero"
            errors.append(replace(error, where=setting, got=f"{self.path}: {error.got}", fix=fix))
        return errors

    def _bucket_sizes(self, state: str) -> dict[Bucket, tuple[int, ...]]:
        """Return the shape of each stored bucket of an optimizer state."""
        return {bucket: tensor.shape for bucket, tensor in self.buffers[state].items()}

    def locate_parameters(self, shape: ModelShape) -> tuple[dict[str, Location], list[UserError]]:
        """Locate each parameter of a model; also return the errors of tensors that do not match the model."""
        locations: dict[str, Location] = {}
        missing_names: list[str] = []
        errors: list[UserError] = []

        # For each parameter, select the first candidate location whose tensor is in the checkpoint.
        for name, candidates, expected_shape in _possible_locations(shape):
            stored_candidates = [candidate for candidate in candidates if candidate.key in self.tensors]
            if not stored_candidates:
                missing_names.append(name)
                continue

            location = stored_candidates[0]
            locations[name] = location
            stored_shape = self.tensors[location.key].shape
            # Megatron-LM pads the vocabulary, so that tensor-parallel ranks have equal shards.
            is_padded = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            if not _contains_parameter(stored_shape, location.index, expected_shape, is_padded):
                errors.append(self._shape_error(name, expected_shape, location, stored_shape, is_padded))

        # A stacked tensor must not have more layers or experts than the model: compare the number of
        # parameters in each tensor with the size of the tensor's leading dimensions.
        used_keys = {location.key for location in locations.values()}
        used_counts = Counter((location.key, len(location.index)) for location in locations.values())
        for (key, index_length), used_count in used_counts.items():
            stored_count = math.prod(self.tensors[key].shape[:index_length])
            if used_count < stored_count:
                errors.append(self._count_error(key, used_count, stored_count))

        # Report missing and unexpected tensors first: they explain the other errors.
        unexpected_keys = sorted(set(self.tensors) - used_keys)
        if missing_names or unexpected_keys:
            errors.insert(0, self._unmatched_tensors_error(missing_names, unexpected_keys))
        return locations, errors[:_MAX_LISTED]

    def file_errors(self) -> Iterator[UserError]:
        """Yield the errors of missing or truncated files, and of tensors with gaps."""
        # Each file must be at least as long as the largest end of its chunks.
        required_bytes: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                end = chunk.offset + chunk.length
                required_bytes[chunk.file] = max(required_bytes.get(chunk.file, 0), end)

        file_problems: list[str] = []
        for name in sorted(required_bytes):
            file_bytes = _file_size(self.path / name)
            if (file_bytes or 0) >= required_bytes[name]:
                continue
            problem = f"{file_bytes} bytes of {required_bytes[name]}"
            if file_bytes is None:
                problem = "missing"
            file_problems.append(f"{name}: {problem}")
        if file_problems:
            yield UserError(
                "shards of the Megatron checkpoint are missing or cut off",
                where=str(self.path),
                expected=f"{len(required_bytes)} files with the model's tensors, listed in {TENSOR_INDEX}",
                got=join_names(file_problems, _MAX_LISTED),
                fix="copy the whole folder again, or name another iteration",
            )

        # After an interrupted save, the chunks do not cover all elements of a tensor.
        incomplete_names: list[str] = []
        for name, tensor in self.tensors.items():
            stored_elements = sum(math.prod(chunk.size) for chunk in tensor.chunks)
            if stored_elements != math.prod(tensor.shape):
                incomplete_names.append(name)
        if incomplete_names:
            yield UserError(
                "tensors of the Megatron checkpoint are incomplete",
                where=str(self.path / TENSOR_INDEX),
                expected="chunks that cover each tensor",
                got=join_names(incomplete_names, _MAX_LISTED),
                fix="use another iteration: the save of this one did not finish",
            )

    def _shape_error(
        self,
        name: str,
        expected_shape: tuple[int, ...],
        location: Location,
        stored_shape: tuple[int, ...],
        is_padded: bool,
    ) -> UserError:
        """Return the error for a parameter of ``expected_shape`` in a stored tensor of a different shape."""
        size_texts = [str(size) for size in expected_shape]
        if is_padded:
            size_texts[0] += " or more"

        got = str(list(stored_shape))
        if location.index:
            got += f", at {list(location.index)}"
        return UserError(
            f"the shape of the Megatron checkpoint's tensor {location.key} does not match the model",
            where=str(self.path),
            expected=f"{name}: [{', '.join(size_texts)}]",
            got=got,
            fix="name the configuration and the tokenizer that belong to this checkpoint",
        )

    def _count_error(
        self,
        key: str,
        model_count: int,
        stored_count: int,
    ) -> UserError:
        """Return the error for a stacked tensor with more layers or experts than the model has."""
        return UserError(
            "the Megatron checkpoint has more layers or experts than the model",
            where=str(self.path),
            expected=f"{key}: {model_count}",
            got=str(stored_count),
            fix="name the configuration that belongs to this checkpoint",
        )

    def _unmatched_tensors_error(
        self, missing_names: Sequence[str], unexpected_keys: Sequence[str]
    ) -> UserError:
        """Return the error for tensors that are missing, or that the model does not have."""
        expected = "only the model's tensors"
        if missing_names:
            expected = f"tensors with the names {join_names(missing_names, _MAX_LISTED)}"

        got = f"{len(self.tensors)} tensors, but not these"
        if unexpected_keys:
            got = f"unexpected tensors: {join_names(unexpected_keys, _MAX_LISTED)}"
        return UserError(
            "the tensors of the Megatron checkpoint do not match the model",
            where=str(self.path),
            expected=expected,
            got=got,
            fix="name the configuration that belongs to this checkpoint; layers other than GPTModel's cannot "
            "be read",
        )


def read_pointer(path: str | Path) -> dict[str, Any] | None:
    """Read the file in a model's folder that points to a Megatron checkpoint; return None if it is absent."""
    file = Path(path) / POINTER
    if not file.is_file():
        return None
    return read_json(file)


def is_megatron_checkpoint(path: str | Path) -> bool:
    """Return whether a folder is a Megatron-LM checkpoint.

    The folder may be the --save folder of a run, which has a tracker file, or the folder of one iteration.
    """
    folder = Path(path)
    if any((folder / name).is_file() for name in (TRACKER, TENSOR_INDEX)):
        return True
    return _is_legacy(folder)


def read_checkpoint(path: str | Path, setting: str) -> MegatronCheckpoint:
    """Read the metadata of an ``iter_*`` folder, or of the newest iteration in a folder with a tracker.

    ``setting`` is the configuration key of the path. Raises UserError for other formats and damaged files.
    """
    folder = _find_iteration_folder(Path(path), setting)

    # Verify the format before any pickle is read.
    if _is_legacy(folder):
        raise UserError(
            "the checkpoint is in Megatron-LM's legacy format, which is bound to its layout",
            where=setting,
            expected="--ckpt-format torch_dist",
            got=f"mp_rank_* in {folder}",
            fix=_CONVERT.format(folder=folder.parent),
        )
    backend = None
    if (folder / FORMAT).is_file():
        backend = read_json(folder / FORMAT).get("sharded_backend")
    if backend != "torch_dist":
        got = f"no {FORMAT}"
        if backend:
            got = repr(backend)
        raise UserError(
            "the checkpoint has a format that cannot be read",
            where=setting,
            expected=f'{FORMAT} with "sharded_backend": "torch_dist"',
            got=f"{folder}: {got}",
            fix="save it with --ckpt-format torch_dist",
        )

    common_values = read_common(folder)
    if common_values.arguments is None:
        raise UserError(
            "the checkpoint has no training arguments",
            where=str(folder),
            expected="args, as Megatron-LM saves them",
            got=", ".join(common_values.names) or "nothing",
            fix="save it with pretrain_gpt.py",
        )

    # If the checkpoint does not store its iteration, parse the folder's name.
    iteration = common_values.iteration
    if iteration is None:
        iteration = 0
        match = re.fullmatch(r"iter_(\d+)", folder.name)
        if match:
            iteration = int(match[1])

    # With flat buffers the number of steps is stored next to the tensors, not in the common values.
    stored_tensors = read_tensors(folder)
    steps = common_values.steps
    if steps is None:
        steps = stored_tensors.steps
    return MegatronCheckpoint(
        folder,
        iteration,
        common_values.arguments,
        stored_tensors.tensors,
        stored_tensors.states,
        stored_tensors.buffers,
        common_values.sharding,
        steps,
    )


def _possible_locations(shape: ModelShape) -> Iterator[tuple[str, list[Location], tuple[int, ...]]]:
    """Yield the name, the possible locations and the complete shape of each parameter of a model."""
    for weight in outer_weights(shape, True, True):
        yield weight.name, [Location(weight.name)], weight.local_shape(1)

    for layer in range(shape.layers):
        prefix = f"decoder.layers.{layer}"
        for weight in shape.weights(layer):
            complete_shape = weight.local_shape(1)
            if not weight.expert:
                yield f"{prefix}.{weight.name}", _locations_in_layers(weight, layer, None), complete_shape
                continue

            # Megatron names each expert as a separate parameter.
            for expert in range(shape.experts):
                name = weight.name.format(expert=expert)
                yield f"{prefix}.{name}", _locations_in_layers(weight, layer, expert), complete_shape


def _contains_parameter(
    stored_shape: tuple[int, ...],
    index: tuple[int, ...],
    expected_shape: tuple[int, ...],
    is_padded: bool,
) -> bool:
    """Return whether a tensor of ``stored_shape``, indexed by ``index``, has the shape of a parameter.

    ``is_padded``: whether the tensor may have more rows than the parameter.
    """
    if any(position >= size for position, size in zip(index, stored_shape, strict=False)):
        return False

    inner_shape = stored_shape[len(index) :]
    if is_padded:
        return inner_shape[0] >= expected_shape[0] and inner_shape[1:] == expected_shape[1:]
    return inner_shape == expected_shape


def _locations_in_layers(weight: Weight, layer: int, expert: int | None) -> list[Location]:
    """Return the locations at which a checkpoint may have a layer's parameter.

    If all layers have the same modules, Megatron saves the parameter of all layers as one stacked tensor.
    Otherwise each layer has a separate tensor. Stacked tensors come first in the result. The names depend on
    whether the layers are built with Transformer Engine or with Megatron's local layer spec. For a parameter
    outside of experts, pass None as ``expert``.
    """
    expert_index: tuple[int, ...] = ()
    names = [name for name in (weight.fused, weight.name) if name]
    if expert is not None:
        expert_index = (expert,)
        names = [weight.name.replace("local_experts.{expert}.", "experts.")]

    stacked_locations = [Location(f"decoder.layers.{name}", (layer, *expert_index)) for name in names]
    separate_locations = [Location(f"decoder.layers.{layer}.{name}", expert_index) for name in names]
    return stacked_locations + separate_locations


def _find_iteration_folder(path: Path, setting: str) -> Path:
    """Return the folder of the iteration that the tracker file in ``path`` names.

    If ``path`` is itself the folder of an iteration, it is returned unchanged.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        if (path / TENSOR_INDEX).is_file() or _is_legacy(path):
            return path

        content = "no such folder"
        if path.is_dir():
            names = sorted(entry.name for entry in path.iterdir())
            content = ", ".join(names[:_MAX_LISTED]) or "an empty folder"
        raise UserError(
            "expected a checkpoint of Megatron-LM",
            where=setting,
            expected=f"a folder with {TRACKER}, or one of its iter_* folders",
            got=f"{path}: {content}",
            fix="name the folder that pretrain_gpt.py had as --save",
        )

    # Megatron-LM writes the number of an iteration, or the word "release".
    tracker_text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / "release"
    if tracker_text.isdecimal():
        folder = path / f"iter_{int(tracker_text):07d}"
    is_valid = tracker_text.isdecimal() or tracker_text == "release"
    if not is_valid or not folder.is_dir():
        folder_names = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise UserError(
            "the newest iteration of the Megatron checkpoint does not exist",
            where=str(tracker),
            expected=f"{folder.name}, by the tracker ({tracker_text[:20]!r})",
            got=", ".join(folder_names) or "no folder",
            fix=f"copy {folder.name}, or name a folder that exists",
        )
    return folder


def _is_legacy(folder: Path) -> bool:
    """Return whether a folder is an iteration in the legacy format: a folder per model-parallel rank."""
    return folder.is_dir() and any(folder.glob("mp_rank_*"))


def _file_size(path: Path) -> int | None:
    """Return the size of a file in bytes, or None if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return None
