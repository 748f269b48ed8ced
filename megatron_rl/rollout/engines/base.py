"""The protocols of a rollout engine, and the construction of a run's engine.

A `Generator` samples; a `WeightStore` has storage that the hybrid engine writes into. They are separate
protocols because with a server they are in different processes: the ranks of the job have the generator, and
the server's workers have the weights. Further capabilities of an engine are in the table of `config.engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_rl.config.engines import ENGINES
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.types import Completion, GenerationRequest
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.types import TensorBox
from megatron_rl.user_code import load_object

ToolParser = Callable[[str, list[dict[str, Any]]], tuple[str, list[dict[str, Any]]]]
"""Function that parses tool calls: (text of a turn, tools) -> (text without the calls, name and arguments of
each call)."""


class Generator(Protocol):
    """Sampler of token sequences from the weights that the engine has.

    Every call is collective over the tensor-parallel ranks of one replica. These ranks must make the same
    calls in the same order, and get the same completions. The tokens of a completion depend only on its
    request, not on the requests in the same batch.
    """

    # Bounds.

    @property
    def max_model_len(self) -> int | None:
        """Return the maximum number of tokens of a request with its completion, or None if unbounded."""
        ...

    @property
    def most_rows(self) -> int:
        """Return the maximum number of requests that the engine runs concurrently; further requests wait."""
        ...

    # Sampling: submit, step and abort inside the context of `sampling`, and interrupt at its end.

    def sampling(self) -> AbstractContextManager[None]:
        """Return a context for `submit` and `step` that restores the process's random generators.

        The random generators are restored at the end of the context. Open requests are then aborted, since
        the weights may change afterwards. A request that `interrupt` has ended is not open: the engine may
        retain its key-value cache, see `kept`. Raises RuntimeError if the weights are missing.
        """
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request for the next `step`; an invalid request gets a failed completion."""
        ...

    def step(self) -> list[Completion]:
        """Sample further tokens for the open requests; return the completions that are ready."""
        ...

    def abort(self, number: int) -> None:
        """Drop the open request with this number; it gets no completion."""
        ...

    def interrupt(self) -> list[Completion]:
        """End every open request and return its tokens so far, as if it had reached its limit.

        A request without a token gets no completion.
        """
        ...

    @property
    def kept(self) -> Collection[int]:
        """Return the seeds of interrupted requests whose key-value cache the engine retains.

        To resume a sequence from its cache, submit a request with its prompt and all returned tokens before
        the next `step`. The next `step` drops the retained caches of all other sequences.
        """
        ...


Sampler = Generator
"""Former name of the protocol, which users may still import."""


class WeightStore(Protocol):
    """Storage of an engine's weights, which the hybrid engine writes into.

    A store may start without weights: copy every box into ``parameters()``, then call ``finish_update``.
    """

    # State.

    @property
    def weights_version(self) -> int:
        """Return the version of the last finished update, -1 before the first."""
        ...

    @property
    def needs_weights(self) -> bool:
        """Return whether the weights are missing or were dropped, so every box must be written."""
        ...

    # An update: wake, write every box into the storage, finish.

    def boxes(self) -> list[TensorBox]:
        """Return the boxes: regions of Hugging Face tensors, each with its position in ``parameters()``."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage of new weights by name; tied parameters appear once."""
        ...

    def finish_update(self, version: int) -> None:
        """Set the version of the written weights, and drop all caches computed with older weights.

        Raises RuntimeError when requests are still running.
        """
        ...

    # Device memory, which the trainer uses while the engine sleeps.

    def sleep(self) -> None:
        """Release the engine's device memory where the device supports it, else do nothing."""
        ...

    def wake(self) -> None:
        """Make ``parameters()`` writable again; ``needs_weights`` is true if the weights were dropped."""
        ...


class Storage(Protocol):
    """Storage of tensors that the hybrid engine writes into. Unlike a `WeightStore`, it has no version."""

    def boxes(self) -> list[TensorBox]:
        """Return the boxes: regions of tensors, each with its position in ``parameters()``."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage by name."""
        ...


class Engine(Generator, WeightStore, Protocol):
    """Engine in a rank of the job: it samples from weights that are written into this process's memory."""

    @property
    def adapters(self) -> Storage | None:
        """Return the storage of the adapter; None if no adapter is stored separately from the weights."""
        ...

    def close(self) -> None:
        """Release the engine; the job's process groups stay. May be called twice."""
        ...


ENGINE_MEMBERS = tuple(
    name
    for protocol in (Generator, WeightStore, Engine)
    for name in vars(protocol)
    if not name.startswith("_")
)
"""Names of the members of all three protocols, which a user-defined engine must have."""


def make_engine(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    layout: ParallelLayout,
    rank: int,
    dtype: str,
    seed: int,
    max_model_len: int,
    routing_shape: tuple[int, int] | None = None,
    adapters: AdaptedModel | None = None,
) -> Engine | None:
    """Build the in-process engine ``config.engine`` without weights; return None on ranks outside ``layout``.

    ``routing_shape``: (layers, experts per token) of the model if the engine is to record the experts of each
        token, or None. Only for engines that support ``routing_replay``.
    ``adapters``: description of an adapter with separate storage, or None. Only for engines that support
        ``adapter_sync``.

    A user-defined engine does not receive these two arguments. Collective over the world.
    """
    arguments: dict[str, Any] = {
        "layout": layout,
        "rank": rank,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
    }

    spec = ENGINES.get(config.engine)
    if spec is None:
        if rank not in layout.ranks:
            return None
        return _make_user_engine(model_path, config, **arguments)

    # Import only the configured engine. The module of the vLLM engine must prepare the process before the
    # first import of vllm.
    engine_module = import_module(spec.module)
    arguments |= {"routing_shape": routing_shape, "adapters": adapters}
    return engine_module.make_engine(model_path, config, **arguments)


def _make_user_engine(
    model_path: str | Path,
    config: RolloutConfig,
    **arguments: Any,
) -> Engine:
    """Build an engine of the user's class ``config.engine``; raise UserError for a missing attribute."""
    engine_class = load_object(config.engine, "rollout.engine")
    engine = engine_class(model_path, config, **arguments)

    # Check the object, since a class may set attributes in its constructor.
    absent_members = sorted(name for name in ENGINE_MEMBERS if not hasattr(engine, name))
    if absent_members:
        raise UserError(
            f"{config.engine} lacks members of an engine",
            where="rollout.engine",
            expected="the members of megatron_rl.Generator and megatron_rl.WeightStore, adapters and close()",
            got="none called " + ", ".join(absent_members),
        )
    return engine
