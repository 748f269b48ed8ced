"""Which fields of Megatron's TransformerConfig the roles' ``megatron`` may set, and what it refuses.

Names and types are compared with the installed sources. Then a process of its own makes the TransformerConfig
of every role, while the other rules run: see `megatron.trial`.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.check.installed_source import class_fields, field_error
from megatron_rl.config.engines import engines_with
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.user_code import find_module

TRANSFORMER_CONFIG = (
    ("megatron.core.model_parallel_config", "ModelParallelConfig"),
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
)
PATIENCE, LONG_PATIENCE = 30.0, 120.0
"""Seconds after the start of a check at which it stops waiting for Megatron: alone, and before a run."""

DERIVED: Mapping[str, str] = {
    "tensor_model_parallel_size": "actor.layout.tensor",
    "pipeline_model_parallel_size": "actor.layout.pipeline",
    "virtual_pipeline_model_parallel_size": "actor.layout.virtual_pipeline",
    "context_parallel_size": "actor.layout.context",
    "expert_model_parallel_size": "actor.layout.expert",
    "expert_tensor_parallel_size": "actor.layout.expert_tensor",
    "sequence_parallel": "actor.layout.sequence_parallel",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "num_moe_experts",
            "moe_ffn_hidden_size",
        ),
        "model.path",
    ),
}
"""Fields that follow from the checkpoint and the layout, and the key that sets them."""

_AUXILIARY = (
    "Megatron multiplies auxiliary losses by the tokens of a micro-batch, to divide all gradients by those "
    "of the batch, which losses here do without"
)
SET_BY_RUN: Mapping[str, str] = {
    "moe_aux_loss_coeff": _AUXILIARY,
    "moe_z_loss_coeff": _AUXILIARY,
    "calculate_per_token_loss": "losses are sums with global weights, whose denominators are known before",
    "variable_seq_lengths": "packed micro-batches differ in length",
    "overlap_p2p_comm": "interleaved schedules give wrong results without it",
    "batch_p2p_comm": "interleaved schedules give wrong results with it",
    "deallocate_pipeline_outputs": "interleaved schedules free with it what they are still sending",
    "pipeline_model_parallel_layout": "pipeline stages are stated by their ends, "
    "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage, which weight syncs follow",
}
"""Further fields that the run sets, and why."""
_DROPPED: Mapping[str, str] = {
    "context parallelism gathers keys and values around attention, in one way": """
        cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel
        max_seqlen_per_dp_cp_rank""",
    "layers that predict further tokens are exported as they were and not built": """
        mtp_num_layers mtp_loss_scaling_factor mtp_standalone""",
    "the buffers for it are made by Megatron-LM's own training script": """
        tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bulk_dgrad tp_comm_bulk_wgrad
        tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend""",
    "a graph holds one shape, and packed micro-batches differ in length": """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps""",
    "the rollout engine samples, and Megatron does not": """
        flash_decode cache_mla_latents inference_fuse_tp_communication inference_rng_tracker
        inference_sampling_seed use_inference_optimized_layers symmetric_ar_type mlp_chunks_for_prefill""",
    "log-probs come from kernels of the project's own, and no cross entropy is computed": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl""",
    "routers repeat what actor.routing_replay says": "moe_enable_routing_replay",
    "weights come from a checkpoint": """
        init_method output_layer_init_method embedding_init_method embedding_init_method_std
        perform_initialization use_cpu_initialization init_model_with_meta_device""",
    "the schedule brings its own functions and timers": """
        grad_scale_func no_sync_func grad_sync_func param_sync_func finalize_model_grads_func timers
        barrier_with_L1_time""",
}
DROPPED: Mapping[str, str] = {name: reason for reason, names in _DROPPED.items() for name in names.split()}
"""Field -> why it would have no effect, and so is refused."""
OPTIMIZER_CONFIG = (("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),)
OPTIMIZER_KEYS: Mapping[str, str] = {
    "optimizer": "name",
    "lr": "learning_rate",
    "min_lr": "minimum_learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_eps": "epsilon",
    "clip_grad": "clip_grad",
    "use_distributed_optimizer": "distributed",
    "optimizer_cpu_offload": "offload",
}
"""Fields that a key of the section sets."""
OPTIMIZER_SET: Mapping[str, str] = {
    **dict.fromkeys(("bf16", "fp16", "params_dtype"), "it follows from `model.dtype`"),
    "overlap_param_gather": "it follows from the role's `ddp`",
    "overlap_param_gather_with_optimizer_step": "weights are read as soon as a step is done",
    "optimizer_offload_fraction": "with `offload` all states are on the host, without it none",
}
_DDP_MODULE = "megatron.core.distributed.distributed_data_parallel_config"
DDP_CONFIG = ((_DDP_MODULE, "DistributedDataParallelConfig"),)
_EIGHT_BITS = "weights of 8 bits are not synced"
_FSDP = "Megatron-FSDP keeps weights in buffers of its own, which weight syncs and checkpoints do not read"
DDP_SET: Mapping[str, str] = {
    "use_distributed_optimizer": "it follows from `optimizer.distributed`",
    "average_in_collective": "loss weights are global already, and gradients are sums",
    "align_param_gather": "the forward pass of each stage gathers its own",
    "num_distributed_optimizer_instances": "a layout has one group of data-parallel ranks",
    "fp8_param_gather": _EIGHT_BITS,
    "reuse_grad_buf_for_mxfp8_param_ag": _EIGHT_BITS,
    "use_megatron_fsdp": _FSDP,
    "use_custom_fsdp": _FSDP,
    "data_parallel_sharding_strategy": _FSDP,
    "outer_dp_sharding_strategy": _FSDP,
}


def check_optimizer(optimizer: OptimizerConfig, path: str, ddp: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield the errors of the optimizer at ``path``, and of its role's ``ddp``."""
    where = f"{path.removesuffix('.optimizer')}.ddp"
    keys = {name: f"{path}.{key}" for name, key in OPTIMIZER_KEYS.items()}
    yield from _errors(optimizer.megatron, f"{path}.megatron", OPTIMIZER_CONFIG, keys, OPTIMIZER_SET)
    yield from _errors(ddp, where, DDP_CONFIG, {}, DDP_SET)
    if optimizer.offload:
        yield from _host_errors(optimizer, path)
    elif optimizer.name == "sgd" and optimizer.distributed:
        yield UserError(
            "Megatron-Core's distributed optimizer saves the state of Adam alone",
            where=f"{path}.distributed",
            expected="false with name: sgd",
            got="true",
            fix=f"set {path}.distributed to false",
        )
    precise = optimizer.megatron.get("use_precision_aware_optimizer") and not optimizer.offload
    if precise and find_module("transformer_engine")[1]:
        yield UserError(
            "only Transformer Engine's FusedAdam keeps its state in fewer bits",
            where=f"{path}.megatron.use_precision_aware_optimizer",
            expected="an installed transformer_engine",
            got="none",
            fix="install it, or remove the setting",
        )
    reduces = optimizer.distributed and ddp.get("overlap_grad_reduce", True)
    if ddp.get("overlap_param_gather") and not reduces:
        yield UserError(
            "weights are gathered in the forward pass where gradients are reduced in the backward pass",
            where=f"{where}.overlap_param_gather",
            expected="a distributed optimizer, and overlap_grad_reduce",
            got="true without them",
            fix=f"remove `{where}.overlap_param_gather`",
        )


def _host_errors(optimizer: OptimizerConfig, path: str) -> Iterator[UserError]:
    """Yield what cannot be said of an optimizer that steps on the host."""
    stated = optimizer.megatron
    refused = (
        ("name", optimizer.name, "adam", optimizer.name != "adam"),
        ("distributed", "false", "true, also with one data-parallel rank", not optimizer.distributed),
        *(
            (f"megatron.{name}", stated.get(name), "no value", stated.get(name) is value)
            for name, value in (("use_precision_aware_optimizer", True), ("decoupled_weight_decay", False))
        ),
    )
    for key, got, expected, wrong in refused:
        if wrong:
            yield UserError(
                "the optimizer that steps on the host is the distributed one, AdamW with float32 states",
                where=f"{path}.{key}",
                expected=f"{expected}, with {path}.offload",
                got=str(got),
                fix=f"remove `{path}.{key}`, or set {path}.offload=false",
            )


def check_routing(config: RunConfig, shape: ModelShape) -> Iterator[UserError]:
    """Yield the errors of what is said of a mixture's routers."""
    actor, where = config.actor, "actor.routing_replay"
    replay = actor.routing_replay
    stated = {where: replay} if replay != "none" else {}
    stated |= {"actor.freeze_router": "true"} if actor.freeze_router else {}
    if not shape.experts:
        for path, value in stated.items():
            yield UserError(
                "a model without experts has no routers",
                where=path,
                expected="a mixture of experts",
                got=f"{value}, and {shape.name} without experts",
                fix=f"remove `{path}`",
            )
        return
    fused = bool(actor.megatron.get("moe_router_fusion"))
    sinkhorn = actor.megatron.get("moe_router_load_balancing_type") == "sinkhorn"
    if replay != "none" and (fused or sinkhorn):
        name = "moe_router_fusion" if fused else "moe_router_load_balancing_type"
        yield UserError(
            "routers that choose in a kernel of their own cannot be told what to choose",
            where=f"actor.megatron.{name}",
            expected=f"no fused or Sinkhorn routers with {where}",
            got=f"{actor.megatron[name]} with {where}: {replay}",
            fix=f"remove one of the two, or set {where}=none",
        )
    elif replay == "rollout" and not config.rollout.capabilities.routing_replay:
        yield UserError(
            "this rollout engine does not say which experts its tokens went to",
            where=where,
            expected=f"{engines_with(routing_replay=True)}, or another replay",
            got=f"rollout with rollout.engine={config.rollout.engine}",
            fix=f"set {engines_with(routing_replay=True)}, or actor.routing_replay=update",
        )


def check_model_settings(values: Mapping[str, Any], path: str = "actor.megatron") -> list[UserError]:
    """Return the errors of a role's settings at ``path``, compared with the installed version's fields."""
    role = path.removesuffix("megatron")
    keys = {name: key.replace("actor.layout", f"{role}layout") for name, key in DERIVED.items()}
    keys["pipeline_model_parallel_layout"] = f"{path}.num_layers_in_first_pipeline_stage"
    keys["recompute_granularity"] = "actor.recompute"
    dropped = {name for name, value in values.items() if name in DROPPED and not is_off(value)}
    others = {name: value for name, value in values.items() if name not in dropped}
    errors = _errors(others, path, TRANSFORMER_CONFIG, keys, SET_BY_RUN)
    for name in sorted(dropped):
        errors.append(
            UserError(
                f"`{path}.{name}` would have no effect: {DROPPED[name]}",
                where=f"{path}.{name}",
                expected="no value",
                got=f"`{name}: {values[name]}`",
                fix=f"remove `{path}.{name}`",
            )
        )
    return errors


def _errors(
    values: Mapping[str, Any],
    path: str,
    classes: Sequence[tuple[str, str]],
    keys: Mapping[str, str],
    reasons: Mapping[str, str],
) -> list[UserError]:
    """Return the errors of fields that the run sets, by a key of its own or not, or that no class has."""
    installed = class_fields(*classes) if values else None
    errors = []
    for name, value in values.items():
        where, key = f"{path}.{name}", keys.get(name)
        reason = reasons.get(name) or (f"it is called `{key}` here" if key else None)
        if reason is not None:
            error = UserError(
                f"`{where}` is set by the run itself: {reason}",
                where=where,
                expected=f"`{key}`" if key else "no value",
                got=f"`{name}: {value}`",
                fix=f"write `{key}`" if key else f"remove `{where}`",
            )
        else:
            owner = f"Megatron-Core's {classes[-1][1].removeprefix('MLA')}"
            error = None if installed is None else field_error(path, name, value, installed, owner)
        errors += [] if error is None else [error]
    return errors


@dataclass(frozen=True)
class TriedRole:
    """Say what a role's model is made of: ``model`` is a config.json."""

    role: str
    model: Path
    layout: ParallelLayout
    scalar_head: bool
    recompute: str
    fused: bool
    """Its layers are Transformer Engine's."""
    where: str
    """The path at which its settings stand."""
    settings: Mapping[str, Any]
    optimizer: OptimizerConfig | None


class Trial:
    """Have Megatron make the configurations of every role in a process that is started at once.

    ``paths`` are those of all settings: where there are none nothing is tried. ``missing`` is the package
    that trying needs and that is not installed, if any. ``patience`` in seconds counts from the start of the
    process.
    """

    def __init__(self, paths: list[str], patience: float) -> None:
        self._paths = paths
        self._patience = patience
        self._start = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        self.missing = next((name for name in ("torch", "megatron.core") if find_module(name)[1]), None)
        if paths and self.missing is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.megatron.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def result(self, roles: list[TriedRole], dtype: str) -> tuple[list[UserError], list[UserError]]:
        """Return errors and warnings: what Megatron refuses, and that it could not be asked."""
        if not self._paths:
            return [], []
        if self._process is None:
            return [], [self._untried(f"{self.missing} is not installed here")]
        request = [
            {
                "role": role.role,
                "model": str(role.model),
                "layout": dataclasses.asdict(role.layout),
                "scalar_head": role.scalar_head,
                "recompute": role.recompute,
                "fused": role.fused,
                "dtype": dtype,
                "overrides": dict(role.settings),
                "optimizer": None if role.optimizer is None else dataclasses.asdict(role.optimizer),
            }
            for role in roles
        ]
        left = max(0.1, self._patience - (time.monotonic() - self._start))
        try:
            answer, problem = self._process.communicate(json.dumps(request), timeout=left)
        except subprocess.TimeoutExpired:
            self.stop()
            return [], [self._untried(f"Megatron did not answer within {self._patience:g} seconds")]
        if self._process.returncode != 0:
            return [], [self._untried(problem.strip().rpartition("\n")[2] or "the process died")]
        try:
            refused = json.loads(answer)
        except ValueError:  # a package of the user's environment that prints when it is imported
            return [], [self._untried(f"what is no answer: {answer[:80]!r}")]
        errors = []
        for role in roles:
            tried = {role.role: (role.where, role.settings)}
            if role.optimizer is not None:
                path = f"{role.layout.path.removesuffix('layout')}optimizer.megatron"
                tried[f"{role.role} optimizer"] = path, role.optimizer.megatron
            errors += [_refusal(role, refused[key], *tried[key]) for key in tried if key in refused]
        return errors, []

    def stop(self) -> None:
        """End the process, if it is still there."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def _untried(self, reason: str) -> UserError:
        return UserError(
            f"the values of {', '.join(self._paths)} were not tried",
            where=self._paths[0],
            expected="torch and megatron-core, to make the TransformerConfig of every role",
            got=reason,
            fix="check again where the run will be, or with more time; `train` makes the same test",
        )


def _refusal(role: TriedRole, message: str, path: str, values: Mapping[str, Any]) -> UserError:
    named = next((name for name in values if name in message or len(values) == 1), None)
    what = "optimizer" if path.endswith("optimizer.megatron") else "model"
    return UserError(
        f"Megatron refuses the settings of the {role.role}'s {what}",
        where=f"{path}.{named}" if named else path,
        expected=f"values that fit the model and {role.layout.path}: {role.layout.words()}",
        got=message,
        fix="correct or remove " + (f"`{path}.{named}`" if named else "one of " + ", ".join(values)),
    )


def is_off(value: Any) -> bool:
    """Say whether a value asks for nothing: null, false, 0, "none" or "auto", or no items."""
    return value is None or value in (False, "none", "auto", [], {})
