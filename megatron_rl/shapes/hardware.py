"""Hardware and efficiency constants, read from constants.json and an optional override file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.errors import UserError, nearest

GB = 1e9
_FACTOR = 1000.0
"""How far a constant may be from the packaged one, up or down, before it must be a slip."""
_NOTES = ("comment", "calibrated_from", "sources")
PRECISION_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}


@dataclass(frozen=True)
class Gpu:
    """Describe one GPU: FLOP/s, bytes/s and bytes; network is one direction per GPU."""

    name: str
    bf16_flops: float
    fp8_flops: float
    hbm: float
    memory: float
    nvlink: float
    network: float
    gpus_per_node: int
    nvlink_domain: int
    host: float
    gemm_efficiency: float

    @property
    def pace(self) -> float:
        """Return its kernels' share of its peak beside that of the GPUs on which other shares were fitted."""
        return self.gemm_efficiency / 0.7

    def rate_at(self, precision: str, share: float) -> float:
        """Return the FLOP/s of multiplications that reach ``share`` of the peak where shares were fitted."""
        return self.peak(precision) * min(1.0, share * self.pace)

    def peak(self, precision: str) -> float:
        """Return the dense matrix rate of a precision in FLOP/s."""
        return self.fp8_flops if precision == "fp8" else self.bf16_flops


@dataclass(frozen=True)
class Cluster:
    """Describe the GPUs of a job; ``network`` is bytes/s per GPU in one direction."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    network: float

    @property
    def domain(self) -> int:
        """Return how many GPUs reach each other over NVLink."""
        return max(self.gpus_per_node, self.gpu.nvlink_domain)


@dataclass(frozen=True)
class Constants:
    """Hold one constant set; the groups are those of constants.json."""

    gpus: Mapping[str, Gpu]
    aliases: Mapping[str, str]
    efficiency: SimpleNamespace
    decode: SimpleNamespace
    engines: Mapping[str, SimpleNamespace]
    weight_sync: SimpleNamespace
    memory: SimpleNamespace

    def gpu(self, name: str) -> Gpu:
        """Find a GPU by name or alias; raises UserError with the nearest known name."""
        key = name if name in self.gpus else self.aliases.get(name.lower())
        if key is None:
            guess = nearest(name.lower(), list(self.aliases))
            raise UserError(
                f"unknown GPU {name!r}",
                where="cluster.gpu",
                expected="one of " + ", ".join(self.gpus),
                got=name,
                fix=(f"did you mean {guess}? " if guess else "")
                + 'add a GPU with --constants FILE under "gpus" with the fields of constants.json',
            )
        return self.gpus[key]

    def cluster(
        self,
        gpu: str,
        num_gpus: int,
        gpus_per_node: int | None = None,
        gigabits_per_gpu: float | None = None,
        gigabits_per_node: float | None = None,
    ) -> Cluster:
        """Build a cluster; absent values are the GPU's usual machine (see constants.json)."""
        kind = self.gpu(gpu)
        per_node = int(gpus_per_node or kind.gpus_per_node)
        network = kind.network
        if gigabits_per_node is not None:
            network = float(gigabits_per_node) / 8 * GB / per_node
        elif gigabits_per_gpu is not None:
            network = float(gigabits_per_gpu) / 8 * GB
        return Cluster(kind, int(num_gpus), per_node, network)


@dataclass(frozen=True)
class Machine:
    """Hold what every prediction reads: GPUs, how efficiently they work, and the precision of weights."""

    cluster: Cluster
    constants: Constants
    precision: str = "bf16"

    @property
    def gpu(self) -> Gpu:
        """Return the GPU."""
        return self.cluster.gpu

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of one weight."""
        return PRECISION_BYTES.get(self.precision, 2)

    @property
    def usable_memory(self) -> float:
        """Return the bytes of a GPU that a plan may use."""
        return self.gpu.memory * self.constants.memory.usable_share

    @property
    def host_rate(self) -> float:
        """Return achieved bytes/s between a GPU and host memory."""
        return self.gpu.host * self.constants.efficiency.host


def _gpu(name: str, data: Mapping[str, Any]) -> Gpu:
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


def packaged() -> dict[str, Any]:
    """Return the packaged constants.json as a plain mapping."""
    return json.loads(resources.files("megatron_rl.shapes").joinpath("constants.json").read_text())


def merged(base: Mapping[str, Any], override: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Lay an override over a constant mapping, level by level.

    New GPUs may be added under ``gpus`` with every field of one that is there; any other unknown name raises
    UserError with the nearest one, and so does a value that is not of the order of the packaged one.
    """
    result = dict(base)
    for key, value in override.items():
        path = f"{where}{key}"
        if path in _NOTES:
            continue
        if where == "gpus." and key not in base:
            fields = next(iter(base.values()))
            result[key] = merged(fields, {"aliases": [], **_object(value, path)}, f"{path}.")
            missing = sorted(set(fields) - set(value) - {"aliases"})
            if missing:
                raise _value_error(path, f"every field of a GPU; missing: {', '.join(missing)}", value)
            continue
        if key not in base:
            guess = nearest(key, list(base))
            raise UserError(
                f"unknown planner constant {path!r}",
                where=path,
                expected="a name from constants.json",
                got=key,
                fix=f"did you mean {guess}?" if guess else "see megatron_rl/shapes/constants.json",
            )
        old = base[key]
        nested = isinstance(old, Mapping)
        result[key] = merged(old, _object(value, path), f"{path}.") if nested else _stated(value, old, path)
    return result


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _value_error(path, "an object, as in megatron_rl/shapes/constants.json", value)
    return value


def _stated(value: Any, old: Any, path: str) -> Any:
    """Return a value that may stand for the packaged one ``old``; raise UserError for another."""
    if isinstance(old, bool | list):
        texts = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if type(value) is not type(old) or not texts:
            raise _value_error(path, f"a value like {json.dumps(old)}", value)
        return value
    low, high = (old / _FACTOR, old * _FACTOR) if old else (0.0, _FACTOR)
    low = 0.0 if "_seconds" in path else low
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise _value_error(path, f"a number from {low:g} to {high:g} (packaged: {old:g})", value)
    return value


def _value_error(path: str, expected: str, value: Any) -> UserError:
    return UserError(
        f"the planner constant {path!r} cannot have this value" if path else "no constants can be read",
        where=path or "--constants",
        expected=expected,
        got=json.dumps(value)[:200],
        fix="correct it, or leave it out to have the packaged one",
    )


def build(data: Mapping[str, Any]) -> Constants:
    """Type a constant mapping."""
    gpus = {name: _gpu(name, fields) for name, fields in data["gpus"].items()}
    aliases = {name.lower(): name for name in gpus}
    for name, fields in data["gpus"].items():
        aliases |= {alias.lower(): name for alias in fields.get("aliases", ())}
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
    """Load the packaged constants, with an override file (JSON, same structure) laid over them."""
    data = packaged()
    if override is not None:
        path = Path(override)
        if not path.is_file():
            raise UserError(
                f"no constants file {override}",
                where="--constants",
                expected="a JSON file, as plan --calibrate RUN_DIR --out FILE writes one",
                got="no such file",
                fix="correct the path",
            )
        try:
            stated = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise _value_error("", f"a JSON object in {path}", str(error)) from error
        data = merged(data, _object(stated, ""))
    return build(data)
