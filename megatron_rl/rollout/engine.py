"""What the trainer and the hybrid engine ask of a generation engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.types import FINISH_FAILED, SamplingParameters, TensorBox
from megatron_rl.user_code import load_path

ToolParser = Callable[[str, list[dict[str, Any]]], tuple[str, list[dict[str, Any]]]]
"""Takes a turn and the tools; returns the text beside the calls, and the name and arguments of each call."""


@dataclass(frozen=True)
class Request:
    """Ask for what follows ``tokens``: at most ``limit`` tokens, sampled as ``sampling`` says.

    ``number`` names the request until it is answered. The random numbers are those of the row's ``seed``
    after ``done`` tokens of the row.
    """

    number: int
    tokens: Sequence[int]
    sampling: SamplingParameters
    limit: int
    seed: int
    done: int = 0


@dataclass(frozen=True)
class Completion:
    """Answer a request: the tokens, their log-probs at the sampling temperature, and why they end there.

    A stop token is the last of ``tokens``. Of a failed request (``FINISH_FAILED``) both are empty.
    ``support`` has the token ids that each token was drawn from, where filters left only some; empty where
    none did. ``experts`` [tokens, layers, k] int16 are those that the tokens of the request and then these,
    but for the last, were sent to, of an engine that was asked for them.
    """

    number: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: int
    support: Sequence[Sequence[int]] = ()
    experts: Tensor | None = None


def failed(number: int) -> Completion:
    """Return the answer of an engine that could not sample."""
    return Completion(number, (), (), FINISH_FAILED)


class Sampler(Protocol):
    """Answer requests from the weights that are there.

    Every call is collective over the tensor-parallel ranks of one replica, which must make equal calls in an
    equal order; the answers are equal too. The tokens of an answer depend on its request alone, not on what
    it is batched with.
    """

    @property
    def max_model_len(self) -> int | None:
        """Return the most tokens of a request and its answer together, None for no bound."""
        ...

    @property
    def most_rows(self) -> int:
        """Return how many requests are worked on at once; others wait in the engine."""
        ...

    def sampling(self) -> AbstractContextManager[None]:
        """Return a context for `submit` and `step` that leaves the process's random generators untouched.

        Requests that are still open at its end are aborted: nothing of a request stays in the engine while
        its weights may change, except of `kept` ones. Raises RuntimeError while the engine needs weights.
        """
        ...

    def submit(self, request: Request) -> None:
        """Take a request; one that cannot be answered is answered as failed."""
        ...

    def step(self) -> list[Completion]:
        """Work on the open requests for a while and return the answers that are complete."""
        ...

    def abort(self, number: int) -> None:
        """Forget an open request; it is not answered any more."""
        ...

    def interrupt(self) -> list[Completion]:
        """End every open request where it is; answer what was sampled, as if its limit were reached.

        A request without a token is not answered.
        """
        ...

    @property
    def kept(self) -> Collection[int]:
        """Return the seeds of interrupted requests whose cache the engine still has.

        They go on from it when they are submitted with what was answered before the next `step`, which ends
        the others.
        """
        ...


class WeightStore(Protocol):
    """Say where weights lie that somebody else writes, and take them into use.

    A store may start without weights: copy every box into ``parameters()``, then call ``finish_update``.
    """

    @property
    def weights_version(self) -> int:
        """Return the version of the last finished update, -1 before it."""
        ...

    @property
    def needs_weights(self) -> bool:
        """Say whether there are no weights, or no longer: every box must be written."""
        ...

    def boxes(self) -> list[TensorBox]:
        """Return where each box of a Hugging Face tensor lies in this rank's ``parameters()``."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage to write new weights into, by name; tied parameters appear once."""
        ...

    def finish_update(self, version: int) -> None:
        """Take the written weights into use as ``version`` and forget everything cached from older ones.

        Raises RuntimeError when requests are still running.
        """
        ...

    def sleep(self) -> None:
        """Give the engine's device memory back where the device supports it, else do nothing."""
        ...

    def wake(self) -> None:
        """Make ``parameters()`` writable again; ``needs_weights`` says whether they were lost."""
        ...


class Storage(Protocol):
    """Say where tensors lie that somebody else writes, as a `WeightStore` does."""

    def boxes(self) -> list[TensorBox]:
        """Return where each box of a tensor lies in this rank's ``parameters()``."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage to write into, by name."""
        ...


class Engine(Sampler, WeightStore, Protocol):
    """Sample from weights that somebody else writes into this process's storage."""

    @property
    def adapters(self) -> Storage | None:
        """Return the storage of adapters that are written apart from the weights, None without such."""
        ...

    def close(self) -> None:
        """Release the engine; the job's process groups stay as they are. May be called twice."""
        ...


ENGINE_MEMBERS = tuple(
    name for part in (Sampler, WeightStore, Engine) for name in vars(part) if not name.startswith("_")
)


def make_engine(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    layout: ParallelLayout,
    rank: int,
    dtype: str,
    seed: int,
    max_model_len: int,
    records: tuple[int, int] | None = None,
    adapters: AdaptedModel | None = None,
) -> Engine | None:
    """Build ``config.engine`` for the rank, without weights; None on ranks outside ``layout``.

    A class of the user's own is called with ``model_path``, ``config`` and all that follows but ``records``
    and ``adapters``, which are as in `VllmEngine`: no other engine can. Collective over the world.
    """
    # Each engine is imported where it is chosen: vLLM must not be imported before it is prepared.
    if config.engine == "vllm":
        from megatron_rl.rollout.vllm.engine import VllmEngine
        from megatron_rl.rollout.vllm.setup import join_groups, prepare_vllm

        prepare_vllm()
        join_groups(layout)
        if rank not in layout.ranks:
            return None
        return VllmEngine(
            model_path,
            config,
            layout=layout,
            rank=rank,
            dtype=dtype,
            seed=seed,
            max_model_len=max_model_len,
            records=records,
            adapters=adapters,
        )
    if config.engine == "torch":
        from megatron_rl.rollout.torch import TorchEngine

        if rank not in layout.ranks:
            return None
        return TorchEngine.from_hf(
            model_path, rank=rank, dtype=getattr(torch, dtype), max_model_len=max_model_len
        )
    if rank not in layout.ranks:
        return None
    return _own_engine(
        model_path, config, layout=layout, rank=rank, dtype=dtype, seed=seed, max_model_len=max_model_len
    )


def _own_engine(model_path: str | Path, config: RolloutConfig, **arguments: Any) -> Engine:
    """Build the engine whose class the user names by path, with what `make_engine` is given."""
    engine = load_path(config.engine, "rollout.engine")(model_path, config, **arguments)
    missing = sorted(name for name in ENGINE_MEMBERS if not hasattr(engine, name))
    if missing:
        raise UserError(
            f"{config.engine} lacks what is asked of an engine",
            where="rollout.engine",
            expected="the members of megatron_rl.Sampler and megatron_rl.WeightStore, adapters and close()",
            got="none called " + ", ".join(missing),
        )
    return engine
