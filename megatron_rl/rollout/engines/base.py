"""The protocols of a rollout engine, and how the engine of a run is built.

A `Generator` samples, a `WeightStore` has storage that the hybrid engine writes into. They are apart because
a server has the first in the job's ranks and the second elsewhere. What an engine can do beyond them is in
the table of `config.engines`.
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
from megatron_rl.user_code import load_path

ToolParser = Callable[[str, list[dict[str, Any]]], tuple[str, list[dict[str, Any]]]]
"""Takes a turn and the tools; returns the text beside the calls, and the name and arguments of each call."""


class Generator(Protocol):
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

    def submit(self, request: GenerationRequest) -> None:
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


Sampler = Generator
"""The name that the protocol had before."""


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


class Engine(Generator, WeightStore, Protocol):
    """Sample from weights that somebody else writes into this process's storage."""

    @property
    def adapters(self) -> Storage | None:
        """Return the storage of adapters that are written apart from the weights, None without such."""
        ...

    def close(self) -> None:
        """Release the engine; the job's process groups stay as they are. May be called twice."""
        ...


ENGINE_MEMBERS = tuple(
    name for part in (Generator, WeightStore, Engine) for name in vars(part) if not name.startswith("_")
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
    """Build the in-process engine ``config.engine`` on the rank, without weights; None outside ``layout``.

    ``records`` are layers and experts per token, for engines with ``routing_replay``; ``adapters`` describes
    those that an engine with ``adapter_sync`` has room for. A class of the user's own is called with the
    other arguments, and on the ranks of ``layout`` alone. Collective over the world.
    """
    spec = ENGINES.get(config.engine)
    common: dict[str, Any] = {
        "layout": layout,
        "rank": rank,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
    }

    if spec is None:
        return _user_engine(model_path, config, **common) if rank in layout.ranks else None
    # The engine's folder is imported once it is chosen: vLLM must not be imported before it is prepared.
    folder = import_module(spec.module)
    return folder.make_engine(model_path, config, **common, records=records, adapters=adapters)


def _user_engine(model_path: str | Path, config: RolloutConfig, **arguments: Any) -> Engine:
    """Build the engine whose class the user names by path, with what `make_engine` is given."""
    engine = load_path(config.engine, "rollout.engine")(model_path, config, **arguments)
    missing = sorted(name for name in ENGINE_MEMBERS if not hasattr(engine, name))
    if missing:
        raise UserError(
            f"{config.engine} lacks what is asked of an engine",
            where="rollout.engine",
            expected="the members of megatron_rl.Generator and megatron_rl.WeightStore, adapters and close()",
            got="none called " + ", ".join(missing),
        )
    return engine
