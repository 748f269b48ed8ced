"""Settings whose defaults differ between accelerators and hosts.

They are fields of Megatron's configurations, choices of layers, and environment variables. The table
`DEFAULTS` has one row per default: key, value, condition and reason. Settings of the user take precedence,
and no row applies on a host. Models, DDP and jobs are built with `accelerator_defaults`; `check` prints the
same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

MEGATRON = "megatron"
"""Section of fields of Megatron's TransformerConfig."""
DDP = "ddp"
"""Section of fields of Megatron's DistributedDataParallelConfig."""
LAYERS = "layers"
"""Section of choices between layer implementations, for which Megatron has no field."""
ENVIRONMENT = "environment"
"""Section of environment variables."""

HOPPER = 90
"""Compute capability x 10 that is assumed for an accelerator of unknown kind."""

_CAPABILITIES = {"A100": 80, "H100": 90, "H200": 90, "H800": 90, "H20-": 90, "B200": 100, "GB200": 100}
"""Prefix of a GPU's name in constants.json -> its compute capability x 10."""

_LARGEST_FUSED_HEAD = {90: 256, 100: 128}
"""Lowest compute capability x 10 -> largest head size for which cuDNN has a fused kernel over packed rows.

Source: Transformer Engine 2.20.2 with cuDNN 9.20 (launch/fused_attention). From 90 to 103, latent attention
with heads of size 192 for queries and 128 for values also has a fused kernel.
"""
_LATENT_HEADS = (192, 128)
"""DeepSeek's head sizes: (queries and keys, values)."""


def capability_of(gpu: str | None) -> int:
    """Return the compute capability x 10 of a GPU, such as 90; `HOPPER` for an unknown GPU.

    ``gpu``: name in constants.json, or None if unknown.
    """
    for prefix, capability in _CAPABILITIES.items():
        if (gpu or "").upper().startswith(prefix):
            return capability
    return HOPPER


@dataclass(frozen=True)
class AcceleratedRole:
    """Properties of a role's model that decide which accelerator defaults apply to the model.

    Example: ``AcceleratedRole(shape, layout, fused=True, half_precision=True)``.
    """

    shape: ModelShape
    """Sizes of the model."""
    layout: ParallelLayout
    """Parallel layout of the role."""
    fused: bool
    """Whether the model has Transformer Engine's layers."""
    half_precision: bool
    """Whether the model computes in bfloat16 or float16."""
    capability: int = HOPPER
    """Compute capability x 10."""
    deterministic: bool = False
    """Whether every run must compute the same bits."""
    has_flash_attention: bool = False
    """Whether the package flash-attn is installed."""
    distributed: bool = True
    """Whether the role has Megatron's distributed optimizer."""
    replays_routing: bool = False
    """Whether the model's routers replay recorded choices."""
    adapted: bool = False
    """Whether the model has low-rank adapters."""

    @property
    def sets_attention_backend(self) -> bool:
        """Return whether the model sets ``attention_backend``, which selects Transformer Engine's kernel.

        The setting applies to the whole process, which may contain several models. A model that cannot have
        Transformer Engine's layers (`needs_plain_layers`) therefore sets it as well.
        """
        return self.half_precision and (self.fused or self.shape.needs_plain_layers)

    @property
    def attention_kernel(self) -> str:
        """Return the attention kernel of packed rows: ``fused`` (cuDNN), ``flash`` or ``torch``.

        ``torch`` is PyTorch's ``varlen_attn``. It is always available, since PyTorch's wheels contain its
        FlashAttention kernels; ``flash`` needs the package flash-attn.
        """
        # Attention sinks of Transformer Engine are untested here, so models with sinks use torch's kernel.
        if self.shape.sinks:
            return "torch"

        # Sizes of keys and values of each kind of attention in the model.
        shape = self.shape
        head_sizes = [
            (mixer.key_size(shape), mixer.value_size(shape))
            for mixer in shape.mixers
            if mixer.key_value_heads(shape)
        ]
        key_and_value_sizes = list(chain.from_iterable(head_sizes))

        # The table ascends by capability: the last match applies.
        max_head_size = 0
        for capability, head_size in _LARGEST_FUSED_HEAD.items():
            if capability <= self.capability:
                max_head_size = head_size
        has_kernel = max(key_and_value_sizes, default=0) <= max_head_size
        if head_sizes == [_LATENT_HEADS] and HOPPER <= self.capability < 120:
            has_kernel = True

        # cuDNN's backward pass has a deterministic kernel only for Hopper.
        if self.deterministic and not HOPPER <= self.capability < 100:
            has_kernel = False

        # cuDNN's kernels need heads whose size is a multiple of 8.
        if has_kernel and not any(head_size % 8 for head_size in key_and_value_sizes):
            return "fused"
        if self.capability < HOPPER and self.has_flash_attention:
            return "flash"
        return "torch"


@dataclass(frozen=True)
class AcceleratedJob:
    """Properties of a job that decide which environment variables get an accelerator default."""

    layouts: Mapping[str, ParallelLayout]
    """Role -> layout of its model, for roles whose models Megatron computes (not vLLM)."""
    captures_all_reduce: bool
    """Whether vLLM shares buffers of CUDA graphs between tensor-parallel ranks for its own all-reduce, which
    needs memory without expandable segments."""


@dataclass(frozen=True)
class AcceleratorDefault:
    """Default of one setting on accelerators: a row of `DEFAULTS`.

    Example: ``moe_permute_fusion`` of `MEGATRON` is true for experts in Transformer Engine's layers.
    """

    section: str
    """`MEGATRON`, `DDP`, `LAYERS` or `ENVIRONMENT`."""
    key: str
    """Name of the field or variable."""
    value: Any
    """Default value on an accelerator."""
    condition: str
    """Condition under which the default applies, as text."""
    applies: Callable[[Any], bool]
    """The condition as a function of an `AcceleratedRole`; in `ENVIRONMENT`, of an `AcceleratedJob`."""
    reason: str
    """Cost that the default saves, or problem that it avoids."""


DEFAULTS: tuple[AcceleratorDefault, ...] = (
    AcceleratorDefault(
        MEGATRON,
        "attention_backend",
        "fused",
        "Transformer Engine's layers in half precision",
        lambda role: role.sets_attention_backend and role.attention_kernel != "flash",
        "without a fused kernel Transformer Engine raises an error, instead of storing the attention scores "
        "of complete rows",
    ),
    AcceleratorDefault(
        MEGATRON,
        "attention_backend",
        "flash",
        "Transformer Engine's layers in half precision below compute capability 9.0, with flash-attn "
        "installed",
        lambda role: role.sets_attention_backend and role.attention_kernel == "flash",
        "cuDNN has no fused kernel for packed rows on these GPUs",
    ),
    AcceleratorDefault(
        LAYERS,
        "core_attention",
        "torch",
        "Transformer Engine's layers in half precision without a fused kernel",
        lambda role: role.fused and role.half_precision and role.attention_kernel == "torch",
        "torch's varlen_attn is FlashAttention and needs no further package",
    ),
    AcceleratorDefault(
        MEGATRON,
        "gradient_accumulation_fusion",
        True,
        "Transformer Engine's layers",
        lambda role: role.fused,
        "the matrix product adds weight gradients directly to the float32 buffer",
    ),
    AcceleratorDefault(
        MEGATRON,
        "apply_rope_fusion",
        True,
        "Transformer Engine's layers without latent attention",
        lambda role: role.fused and all(mixer.fuses_rotary for mixer in role.shape.mixers),
        "one kernel rotates queries and keys instead of five passes over them",
    ),
    AcceleratorDefault(
        MEGATRON,
        "moe_permute_fusion",
        True,
        "experts in Transformer Engine's layers",
        lambda role: role.fused and role.shape.experts > 0,
        "one kernel sorts tokens by expert, and their order stays on the device",
    ),
    AcceleratorDefault(
        MEGATRON,
        "moe_router_fusion",
        True,
        "experts in Transformer Engine's layers without routing replay",
        lambda role: role.fused and role.shape.experts > 0 and not role.replays_routing,
        "one kernel computes scores, groups and the top-k",
    ),
    AcceleratorDefault(
        MEGATRON,
        "moe_shared_expert_overlap",
        True,
        "shared experts in Transformer Engine's layers with expert parallelism, without adapters",
        lambda role: role.fused and role.shape.shared_width and role.layout.expert > 1 and not role.adapted,
        "shared experts are computed while tokens are sent to the routed experts",
    ),
    AcceleratorDefault(
        MEGATRON,
        "batch_p2p_sync",
        False,
        "pipeline parallelism without virtual stages",
        lambda role: role.layout.pipeline > 1 and role.layout.virtual_pipeline == 1,
        "waiting for the device after every transfer only works around a bug of older PyTorch versions",
    ),
    AcceleratorDefault(
        DDP,
        "overlap_grad_reduce",
        True,
        "every trained role",
        lambda role: True,
        "gradients are reduced while the gradients of other layers are computed",
    ),
    AcceleratorDefault(
        DDP,
        "overlap_param_gather",
        True,
        "a distributed optimizer",
        lambda role: role.distributed,
        "weights are gathered while the forward pass computes earlier layers",
    ),
    AcceleratorDefault(
        ENVIRONMENT,
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "unless vLLM captures its own all-reduce in CUDA graphs",
        lambda job: not job.captures_all_reduce,
        "rows of different lengths do not fragment the memory",
    ),
    AcceleratorDefault(
        ENVIRONMENT,
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "tensor or context parallelism",
        lambda job: any(layout.tensor * layout.context > 1 for layout in job.layouts.values()),
        "communication starts before the matrix product that it overlaps with; without communication the "
        "setting would only delay kernels",
    ),
)  # fmt: skip
"""All defaults; at most one of the rows with the same key applies."""

STAYS_OFF: Mapping[str, str] = {
    "use_precision_aware_optimizer": "Megatron does not update its main weights after the model's weights "
    "are overwritten, as later stages and resumed runs do; it would save 2 bytes per parameter",
    "tp_comm_overlap": "only Megatron-LM's training script allocates its buffers, for rows of one length",
    "cuda_graph_impl": "CUDA graphs need fixed shapes, and packed micro-batches differ in length",
    "moe_token_dispatcher_type: flex": "it needs DeepEP or HybridEP, which are separate packages",
}
"""Settings that other projects use for speed and that stay off here -> reason."""

CHANGED_FIELDS = frozenset(row.key for row in DEFAULTS if row.section == MEGATRON)
"""Fields of TransformerConfig that differ between hosts and accelerators."""


def applicable_rows(
    subject: AcceleratedRole | AcceleratedJob,
    section: str | None = None,
    explicit: Mapping[str, Any] | None = None,
) -> Iterator[AcceleratorDefault]:
    """Yield the rows of `DEFAULTS` that apply to a role or a job.

    ``section``: section of the rows, or None for all sections. ``explicit``: settings of the user, whose keys
    are omitted.
    """
    explicit_keys = set(explicit or {})
    is_job = isinstance(subject, AcceleratedJob)
    for row in DEFAULTS:
        # Environment variables belong to a job, all other rows to a role.
        is_job_row = row.section == ENVIRONMENT
        if is_job_row != is_job or row.key in explicit_keys:
            continue
        if section is not None and row.section != section:
            continue
        if row.applies(subject):
            yield row


def accelerator_defaults(
    subject: AcceleratedRole | AcceleratedJob, section: str, explicit: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings of a section, completed with the defaults of an accelerator.

    ``subject``: role or job to which the settings apply; `ENVIRONMENT`, the section of environment variables,
    applies to a job, and every other section applies to a role. ``explicit``: the user's settings, which take
    precedence and are part of the result.

    Example:
        >>> job = AcceleratedJob({"actor": ParallelLayout((0, 1), tensor=2)}, captures_all_reduce=True)
        >>> accelerator_defaults(job, ENVIRONMENT)
        {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
    """
    defaults = {row.key: row.value for row in applicable_rows(subject, section, explicit)}
    return {**defaults, **(explicit or {})}
