"""Hardware and efficiency constants: the packaged constants.json, and an optional file that overrides it.

The override file has the structure of constants.json and may omit any value; ``plan --calibrate`` writes
such a file from the measurements of a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.errors import (
    UserError,
    missing_file_error,
    nearest,
    unknown_choice_error,
    unreadable_file_error,
)
from megatron_rl.shapes.pretrained import read_json_object

GB = 1e9
"""Bytes of a gigabyte in powers of ten, as vendors give memory and rates."""
_LARGEST_FACTOR = 1000.0
"""Largest factor between a constant and the packaged value, up or down; beyond it the unit must be wrong."""
_REFERENCE_GEMM_EFFICIENCY = 0.7
"""GEMM efficiency of the reference GPUs in constants.json."""
_NOTES = ("comment", "calibrated_from", "sources")
"""Keys of a constants file that contain notes for readers instead of constants."""
PRECISION_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}
"""Precision -> bytes of one model weight."""


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU type, and of the nodes in which it is usually sold."""

    name: str
    """Name in constants.json."""
    bf16_flops: float
    """Dense peak in bfloat16, FLOP/s."""
    fp8_flops: float
    """Dense peak in FP8, FLOP/s."""
    hbm: float
    """Memory bandwidth, bytes/s."""
    memory: float
    """Memory, bytes."""
    nvlink: float
    """NVLink bandwidth, bytes/s."""
    network: float
    """Network bandwidth per GPU in one direction, bytes/s."""
    gpus_per_node: int
    """GPUs of a node."""
    nvlink_domain: int
    """GPUs that NVLink connects, if it connects several nodes."""
    host: float
    """Bandwidth to host memory, bytes/s."""
    gemm_efficiency: float
    """Fraction of the peak that large matrix multiplications reach."""

    @property
    def relative_efficiency(self) -> float:
        """Return the GEMM efficiency relative to the reference GPUs, on which the constants were fitted."""
        return self.gemm_efficiency / _REFERENCE_GEMM_EFFICIENCY

    def achieved_flops(self, precision: str, reference_efficiency: float) -> float:
        """Return the FLOP/s that GEMMs reach on this GPU.

        ``reference_efficiency`` is the fraction of the peak that GEMMs reach on the reference GPUs, see
        `relative_efficiency`.
        """
        # A product of efficiencies above 1 would exceed the peak.
        return self.peak_flops(precision) * min(1.0, reference_efficiency * self.relative_efficiency)

    def peak_flops(self, precision: str) -> float:
        """Return the dense peak of a precision in FLOP/s."""
        if precision == "fp8":
            return self.fp8_flops
        return self.bf16_flops


@dataclass(frozen=True)
class Cluster:
    """Homogeneous GPUs of a job: their type and number, and the network between their nodes."""

    gpu: Gpu
    num_gpus: int
    """Number of GPUs of the job."""
    gpus_per_node: int
    """GPUs of a node."""
    network: float
    """Network bandwidth per GPU in one direction, bytes/s."""

    @property
    def domain(self) -> int:
        """Return the number of GPUs in one NVLink domain, which spans a node or several nodes."""
        return max(self.gpus_per_node, self.gpu.nvlink_domain)


@dataclass(frozen=True)
class Constants:
    """Constants for predicting seconds and memory, grouped as in constants.json."""

    gpus: Mapping[str, Gpu]
    """Name -> GPU."""
    aliases: Mapping[str, str]
    """Name or alias of a GPU in lower case -> its name in ``gpus``."""
    efficiency: SimpleNamespace
    """Fractions of a peak that kernels and links reach."""
    decode: SimpleNamespace
    """Constants of decoding that are equal for all engines."""
    engines: Mapping[str, SimpleNamespace]
    """Constants of decoding by engine."""
    weight_sync: SimpleNamespace
    """Constants of the weight transfer from the actor to the engine."""
    memory: SimpleNamespace
    """Constants of the memory that a plan may use."""

    def gpu(self, name: str) -> Gpu:
        """Return a GPU by name or alias; raises UserError with the nearest name for an unknown one."""
        # Aliases match in upper and lower case.
        key: str | None = name
        if name not in self.gpus:
            key = self.aliases.get(name.lower())

        if key is None:
            fix = 'add a GPU with --constants FILE under "gpus" with the fields of constants.json'
            raise unknown_choice_error("gpu", name, list(self.gpus), fallback_fix=fix)
        return self.gpus[key]

    def cluster(
        self,
        gpu: str,
        num_gpus: int,
        gpus_per_node: int | None = None,
        gigabits_per_gpu: float | None = None,
        gigabits_per_node: float | None = None,
    ) -> Cluster:
        """Return a cluster of ``num_gpus`` GPUs; nodes and network default to the GPU's usual machine.

        The network bandwidth is in gigabits per second, per node or per GPU; the value per node has
        precedence.
        """
        gpu_type = self.gpu(gpu)
        node_size = int(gpus_per_node or gpu_type.gpus_per_node)

        # From gigabits to bytes; the GPUs of a node share its bandwidth.
        network = gpu_type.network
        if gigabits_per_node is not None:
            network = float(gigabits_per_node) / 8 * GB / node_size
        elif gigabits_per_gpu is not None:
            network = float(gigabits_per_gpu) / 8 * GB
        return Cluster(gpu_type, int(num_gpus), node_size, network)


@dataclass(frozen=True)
class Machine:
    """GPUs that a prediction assumes: the cluster, its efficiency constants, and the precision of weights."""

    cluster: Cluster
    constants: Constants
    precision: str = "bf16"
    """Key of `PRECISION_BYTES`."""

    @property
    def gpu(self) -> Gpu:
        """Return the type of the cluster's GPUs."""
        return self.cluster.gpu

    @property
    def bytes_per_weight(self) -> int:
        """Return the bytes of one model weight in the machine's precision."""
        return PRECISION_BYTES.get(self.precision, 2)

    @property
    def usable_memory(self) -> float:
        """Return the bytes of a GPU's memory that a plan may use."""
        return self.gpu.memory * self.constants.memory.usable_share

    @property
    def host_rate(self) -> float:
        """Return the achieved bandwidth between a GPU and host memory, bytes/s."""
        return self.gpu.host * self.constants.efficiency.host


def _convert_gpu(name: str, data: Mapping[str, Any]) -> Gpu:
    """Convert a GPU's fields in constants.json from units such as teraFLOP/s to FLOP/s, bytes/s and bytes."""
    return Gpu(
        name=name,
        bf16_flops=data["bf16_tflops"] * 1e12,
        fp8_flops=data["fp8_tflops"] * 1e12,
        hbm=data["hbm_terabytes_per_second"] * 1e12,
        memory=data["memory_gigabytes"] * GB,
        nvlink=data["nvlink_gigabytes_per_second"] * GB,
        network=data["network_gigabits"] / 8 * GB,
        gpus_per_node=int(data["gpus_per_node"]),
        nvlink_domain=int(data["nvlink_domain"]),
        host=data["host_gigabytes_per_second"] * GB,
        gemm_efficiency=data["gemm_efficiency"],
    )


def read_packaged_constants() -> dict[str, Any]:
    """Return the packaged constants.json as a plain mapping."""
    return json.loads(resources.files("megatron_rl.shapes").joinpath("constants.json").read_text())


def merge_constants(base: Mapping[str, Any], override: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Override constants with the values of ``override``, level by level; return the merged constants.

    ``prefix``: path of this level, such as "gpus." or empty. New GPUs may be added under ``gpus`` with every
    field of a packaged GPU. Raises UserError with the nearest name for any other unknown name, and for a
    value whose order of magnitude differs from the packaged value.
    """
    merged = dict(base)
    for key, value in override.items():
        path = f"{prefix}{key}"
        if path in _NOTES:
            continue

        # A new GPU has no packaged values: use any GPU for the fields and their orders of magnitude.
        if prefix == "gpus." and key not in base:
            template_gpu = next(iter(base.values()))
            new_gpu = {"aliases": [], **_require_object(value, path)}
            merged[key] = merge_constants(template_gpu, new_gpu, f"{path}.")
            missing_fields = sorted(set(template_gpu) - set(value) - {"aliases"})
            if missing_fields:
                raise _value_error(path, f"every field of a GPU; missing: {', '.join(missing_fields)}", value)
            continue

        if key not in base:
            similar_name = nearest(key, list(base))
            fix = "see megatron_rl/shapes/constants.json"
            if similar_name:
                fix = f"did you mean {similar_name}?"
            raise UserError(
                f"unknown planner constant {path!r}",
                where=path,
                expected="a name from constants.json",
                got=key,
                fix=fix,
            )

        packaged_value = base[key]
        if isinstance(packaged_value, Mapping):
            merged[key] = merge_constants(packaged_value, _require_object(value, path), f"{path}.")
        else:
            merged[key] = _check_value(value, packaged_value, path)
    return merged


def _require_object(value: Any, path: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a JSON object, else raise UserError; ``path`` is its key."""
    if not isinstance(value, Mapping):
        raise _value_error(path, "an object, as in megatron_rl/shapes/constants.json", value)
    return value


def _check_value(value: Any, packaged_value: Any, path: str) -> Any:
    """Return ``value`` if it is a valid override of the packaged value at ``path``, else raise UserError."""
    # Flags and lists of aliases have no order of magnitude.
    if isinstance(packaged_value, bool | list):
        has_only_strings = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if type(value) is not type(packaged_value) or not has_only_strings:
            raise _value_error(path, f"a value like {json.dumps(packaged_value)}", value)
        return value

    # A value far from the packaged one has the wrong unit, such as GB/s for TB/s.
    min_value = packaged_value / _LARGEST_FACTOR
    max_value = packaged_value * _LARGEST_FACTOR
    if not packaged_value:
        max_value = _LARGEST_FACTOR
    if "_seconds" in path:
        min_value = 0.0  # an overhead may be zero

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not min_value <= value <= max_value:
        expected = f"a number from {min_value:g} to {max_value:g} (packaged: {packaged_value:g})"
        raise _value_error(path, expected, value)
    return value


def _value_error(path: str, expected: str, value: Any) -> UserError:
    """Return the error for an invalid value of the planner constant at ``path``."""
    return UserError(
        f"the planner constant {path!r} cannot have this value",
        where=path,
        expected=expected,
        got=json.dumps(value)[:200],
        fix="correct it, or leave it out to use the packaged one",
    )


def build_constants(data: Mapping[str, Any]) -> Constants:
    """Build `Constants` from a mapping with the structure of constants.json."""
    gpus = {name: _convert_gpu(name, fields) for name, fields in data["gpus"].items()}

    # A GPU is found by its name and its aliases, in upper and lower case.
    aliases = {name.lower(): name for name in gpus}
    for name, fields in data["gpus"].items():
        aliases |= {alias.lower(): name for alias in fields.get("aliases", ())}

    # Separate the constants of each engine from the constants that are equal for all engines.
    engines = {name: SimpleNamespace(**fields) for name, fields in data["decode"]["engines"].items()}
    decode = SimpleNamespace(**{name: value for name, value in data["decode"].items() if name != "engines"})

    return Constants(
        gpus=gpus,
        aliases=aliases,
        efficiency=SimpleNamespace(**data["efficiency"]),
        decode=decode,
        engines=engines,
        weight_sync=SimpleNamespace(**data["weight_sync"]),
        memory=SimpleNamespace(**data["memory"]),
    )


@lru_cache(maxsize=8)
def load_constants(override: str | None = None) -> Constants:
    """Load the packaged constants, overridden by a JSON file of the same structure if given."""
    data = read_packaged_constants()
    if override is not None:
        path = Path(override)
        if not path.is_file():
            expected = "a JSON file, such as the output of plan --calibrate RUN_DIR --out FILE"
            raise missing_file_error(path, where="--constants", expected=expected, fix="correct the path")
        try:
            data = merge_constants(data, read_json_object(path))
        except (OSError, ValueError) as error:
            noun = "the constants file"
            fix = "correct the file"
            raise unreadable_file_error(noun, path, error, expected="a JSON object", fix=fix) from error

    return build_constants(data)
