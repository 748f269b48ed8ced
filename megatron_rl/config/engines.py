"""Table of the rollout engines and the capabilities of each; importable without torch.

Rules, placement and the step read the capabilities of an engine, and never compare its name. So an engine is
a folder of `megatron_rl.rollout.engines` with its code, and one `EngineSpec` in `ENGINES`. `check`, `plan`
and the planner read only the `EngineSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineCapabilities:
    """Capabilities of a rollout engine.

    Example:
        >>> ENGINES["server"].capabilities.in_process
        False
    """

    in_process: bool = False
    """The engine runs inside the ranks of the job, uses their memory, and its weights are written in place.
    Otherwise the ranks send requests to servers, and each server receives weights at a rendezvous."""

    tensor_parallel: bool = False
    """One replica can span several ranks (`rollout.tensor`)."""

    partial: bool = False
    """`Generator.interrupt` returns the tokens sampled so far. `rollout.order: open` needs this: it trains on
    the responses that are complete, and continues the remaining responses with new weights."""

    sampling_masks: bool = False
    """`Completion.support` lists the tokens that passed top-p, top-k and min-p for each sampled token."""

    routing_replay: bool = False
    """`Completion.experts` lists the experts that each token was routed to."""

    adapter_sync: bool = False
    """Adapters are stored separately from the weights that they adapt."""

    keeps_cache: bool = False
    """Interrupted requests can keep their key-value cache while weights are updated."""

    stop_texts: bool = False
    """Responses end at `SamplingParameters.stop_texts`, by `rollout.stopping`."""

    token_history: bool = False
    """Sampling can depend on the earlier tokens of a sequence, as `no_repeat_ngram_size` does, and on their
    number, as a temperature over the tokens of a turn does."""

    host_kernels: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Mixer (`shapes.blocks`) -> sizes (`Mixer.kernel_size`) of its kernels on a host without accelerator.

    A mixer without sizes has no kernel there. An empty mapping means that the engine runs any model."""

    host_expert_rows: int = 0
    """Required divisor of the width of experts with biases on a host without accelerator; 0 for any width."""


@dataclass(frozen=True)
class EngineSpec:
    """Code, capabilities and server commands of one rollout engine.

    Example:
        >>> ENGINES["torch"].module
        'megatron_rl.rollout.engines.torch'
    """

    module: str
    """Import path of the engine's folder. An engine in process defines ``make_engine`` there (see
    `rollout.engines.base.make_engine`), any other engine ``make_server`` (see
    `rollout.engines.servers.Server`)."""

    capabilities: EngineCapabilities
    """Capabilities of the engine, which the rules of `check` and the trainer read."""

    start_command: str | None = None
    """``module:function`` that returns the lines of the command that starts a server for a configuration;
    None if `check` prints no command."""

    health_path: str | None = None
    """URL path at which a healthy server responds with status 200; None if any response is healthy."""


# Engines by their name in `rollout.engine`.
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
            stop_texts=True,
            token_history=True,
            # vLLM's attention on a CPU has kernels only for these sizes. In vLLM 0.32 the kernel of gated
            # delta nets (mamba/ops/cpu/gdn_attention.py) accepts only bfloat16, and reads a packed copy of
            # the convolution's weights, which a sync does not update.
            host_kernels={
                "attention": (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
                "latent_attention": (576,),
            },
            # vLLM does not pad the experts of gpt-oss (fused_moe/experts/cpu_moe.py).
            host_expert_rows=32,
        ),
    ),
    "torch": EngineSpec(
        "megatron_rl.rollout.engines.torch",
        # A step of this engine completes all requests, so an interruption never finds partial responses.
        EngineCapabilities(
            in_process=True, partial=True, sampling_masks=True, stop_texts=True, token_history=True
        ),
    ),
    "server": EngineSpec(
        "megatron_rl.rollout.engines.vllm_server",
        EngineCapabilities(stop_texts=True),
        start_command="megatron_rl.check.engine.servers:server_command_lines",
        # vLLM has this path only with VLLM_SERVER_DEV_MODE=1, which updates of weights need.
        health_path="/weight_info",
    ),
}

# Capabilities of a user's engine, named by its path. The class is not imported before a run starts, so assume
# every capability that is part of the engine interface. Do not assume stop texts and rules that depend on
# earlier tokens: an engine that ignores them would sample from another distribution.
USER_ENGINE = EngineCapabilities(in_process=True, tensor_parallel=True, partial=True, sampling_masks=True)


def engine_capabilities(engine: str) -> EngineCapabilities:
    """Return the capabilities of the engine that `rollout.engine` names.

    Example:
        >>> engine_capabilities("vllm").keeps_cache, engine_capabilities("own.py:Engine").keeps_cache
        (True, False)
    """
    spec = ENGINES.get(engine)
    return USER_ENGINE if spec is None else spec.capabilities


def engines_with(**required: bool) -> str:
    """Return the settings that choose an engine with the ``required`` capabilities, as text for errors.

    Example:
        >>> engines_with(routing_replay=True), engines_with(in_process=False)
        ('rollout.engine=vllm', 'rollout.engine=server')
    """
    choices = []
    for name, spec in ENGINES.items():
        if all(getattr(spec.capabilities, key) == value for key, value in required.items()):
            choices.append(f"rollout.engine={name}")
    return " or ".join(choices)
