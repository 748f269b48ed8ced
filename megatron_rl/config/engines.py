"""The table of rollout engines and what each of them can do; importable without torch.

Rules, placement and the step never compare an engine's name: they ask its capabilities. So an engine is a
folder of `megatron_rl.rollout.engines`, which has its code, and one line in `ENGINES`, which is enough for
`check`, `plan` and the planner.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCapabilities:
    """Capabilities of a rollout engine, all of them False or 0 unless stated.

    Example:
        >>> ENGINES["server"].capabilities.in_process
        False
    """

    in_process: bool = False
    """The engine runs in the ranks of the job: its memory is theirs and its weights are written in place.
    Without, the ranks send requests to servers, each of which receives weights at a rendezvous."""

    tensor_parallel: bool = False
    """One replica can span several ranks (`rollout.tensor`)."""

    partial: bool = False
    """`Generator.interrupt` returns the tokens sampled so far, as the open order needs."""

    sampling_masks: bool = False
    """`Completion.support` lists the tokens that top-p, top-k and min-p left to each draw."""

    routing_replay: bool = False
    """`Completion.experts` lists the experts that each token was routed to."""

    adapter_sync: bool = False
    """Adapters have storage of their own, beside the weights that they are added to."""

    keeps_cache: bool = False
    """Interrupted requests can keep their key-value cache while weights are updated."""

    host_head_sizes: tuple[int, ...] = ()
    """Sizes of an attention head that the engine computes on a host without accelerator, empty for any."""

    host_latent_size: int = 0
    """Size of the latent cache of a token that it computes there (DeepSeek's 512 and 64), 0 for any."""


@dataclass(frozen=True)
class EngineSpec:
    """Entry of the table of engines.

    Example:
        >>> ENGINES["torch"].module
        'megatron_rl.rollout.engines.torch'
    """

    module: str
    """Import path of the engine's folder. It defines ``make_engine`` (see `rollout.engines.base.make_engine`)
    where the engine is in process, else ``make_server`` (see `rollout.engines.servers.base.Server`)."""

    capabilities: EngineCapabilities

    start_command: str | None = None
    """Path, as ``module:function``, of what returns the lines of the command that starts a server for a
    configuration; None where `check` shows none."""

    health_path: str | None = None
    """Path that every server of this kind answers with status 200; None where any answer will do."""


ENGINES: dict[str, EngineSpec] = {
    "vllm": EngineSpec(
        "megatron_rl.rollout.engines.vllm",
        EngineCapabilities(
            in_process=True,
            tensor_parallel=True,
            partial=True,
            sampling_masks=True,
            routing_replay=True,
            adapter_sync=True,
            keeps_cache=True,
            host_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
            host_latent_size=576,
        ),
    ),
    "torch": EngineSpec(
        "megatron_rl.rollout.engines.torch",
        # Its step answers whole requests, so that an interruption finds none with tokens and loses none.
        EngineCapabilities(in_process=True, partial=True, sampling_masks=True),
    ),
    "server": EngineSpec(
        "megatron_rl.rollout.engines.vllm_server",
        EngineCapabilities(),
        start_command="megatron_rl.check.engine.servers:server_commands",
        health_path="/weight_info",  # with VLLM_SERVER_DEV_MODE=1 alone, which weights need
    ),
}
"""Engines by their name in `rollout.engine`."""

USER_ENGINE = EngineCapabilities(in_process=True, tensor_parallel=True, partial=True, sampling_masks=True)
"""Capabilities of an engine that a user names by path: nothing asks its class before a run starts."""


def engine_capabilities(engine: str) -> EngineCapabilities:
    """Return the capabilities of the engine that `rollout.engine` names.

    Example:
        >>> engine_capabilities("vllm").keeps_cache, engine_capabilities("own.py:Engine").keeps_cache
        (True, False)
    """
    spec = ENGINES.get(engine)
    return USER_ENGINE if spec is None else spec.capabilities


def engines_with(**wanted: bool) -> str:
    """Return the settings that choose an engine with the ``wanted`` capabilities, for an error's text.

    Example:
        >>> engines_with(routing_replay=True), engines_with(in_process=False)
        ('rollout.engine=vllm', 'rollout.engine=server')
    """
    names = [
        name
        for name, spec in ENGINES.items()
        if all(getattr(spec.capabilities, capability) == value for capability, value in wanted.items())
    ]
    return " or ".join(f"rollout.engine={name}" for name in names)
