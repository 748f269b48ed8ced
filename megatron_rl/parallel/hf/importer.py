"""The one description of where Hugging Face tensors lie in Megatron's parameters.

`import_parameters` fills parameters with views and ``copy_`` only. Run on meta tensors under the copy
recorder it becomes a map of boxes, which serves import, export and resharding alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_rl.parallel.hf.config import head_dim
from megatron_rl.parallel.hf.families import Family, family_of, has_scalar_head
from megatron_rl.parallel.hf.names import EMBEDDING, FINAL_NORM, OUTPUT, SCALAR


@dataclass(frozen=True)
class Shard:
    """Say which of the equal parts of every parameter a rank holds."""

    tensor: int = 0
    tensor_size: int = 1
    expert: int = 0
    expert_size: int = 1
    expert_tensor: int = 0
    expert_tensor_size: int = 1


@dataclass(frozen=True)
class _Cut:
    """One part of a parameter, ``index`` of ``count``, and the attention shape that orders its rows."""

    index: int
    count: int
    groups: int
    heads_per_group: int
    head_dim: int


Place = Callable[[Tensor, Sequence[Tensor], _Cut], None]


@dataclass(frozen=True)
class _Rule:
    """Fill parameters whose name below their layer matches ``pattern`` from the named tensors.

    Groups of the pattern are inserted into ``sources`` by name; ``expert`` is counted over all ranks.
    """

    pattern: str
    sources: tuple[str, ...]
    place: Place
    is_expert: bool = False


def _whole(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    (source,) = sources
    target.copy_(source)


def _rows(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    (source,) = sources
    if target.shape == source.shape:  # duplicated instead of cut, as Transformer Engine does for MLA
        target.copy_(source)
        return
    rows = source.shape[0] // cut.count
    target.copy_(source.narrow(0, cut.index * rows, rows))


def _columns(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    (source,) = sources
    columns = source.shape[1] // cut.count
    target.copy_(source.narrow(1, cut.index * columns, columns))


def _gate_up(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    for half, source in zip(target.chunk(2), sources, strict=True):
        _rows(half, [source], cut)


def _query_key_value(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    """Interleave by group: the queries of a group, its key, its value, then the next group."""
    rows = target.shape[0]
    begin, position = cut.index * rows, 0
    parts = (cut.heads_per_group * cut.head_dim, cut.head_dim, cut.head_dim)
    for group in range(cut.groups):
        for source, size in zip(sources, parts, strict=True):
            low, high = max(position, begin), min(position + size, begin + rows)
            if low < high:
                piece = source.narrow(0, group * size + low - position, high - low)
                target.narrow(0, low - begin, high - low).copy_(piece)
            position += size


def _vocabulary(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    """Fill the rows that exist; the rest pads the vocabulary to equal parts."""
    (source,) = sources
    begin = cut.index * target.shape[0]
    rows = min(source.shape[0] - begin, target.shape[0])
    if rows > 0:
        target.narrow(0, 0, rows).copy_(source.narrow(0, begin, rows))


_DENSE = (
    _Rule(
        r"(self_attention\.linear_qkv\.layer_norm_|input_layernorm\.)weight",
        ("input_layernorm.weight",),
        _whole,
    ),
    _Rule(
        r"self_attention\.linear_qkv\.(?P<kind>weight|bias)",
        ("self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"),
        _query_key_value,
    ),
    _Rule(r"self_attention\.q_layernorm\.weight", ("self_attn.q_norm.weight",), _whole),
    _Rule(r"self_attention\.k_layernorm\.weight", ("self_attn.k_norm.weight",), _whole),
    _Rule(r"self_attention\.linear_proj\.weight", ("self_attn.o_proj.weight",), _columns),
    _Rule(r"self_attention\.linear_proj\.bias", ("self_attn.o_proj.bias",), _whole),
    _Rule(
        r"(mlp\.linear_fc1\.layer_norm_|pre_mlp_layernorm\.)weight",
        ("post_attention_layernorm.weight",),
        _whole,
    ),
    _Rule(
        r"mlp\.linear_fc1\.(?P<kind>weight|bias)",
        ("mlp.gate_proj.{kind}", "mlp.up_proj.{kind}"),
        _gate_up,
    ),
    _Rule(r"mlp\.linear_fc2\.weight", ("mlp.down_proj.weight",), _columns),
    _Rule(r"mlp\.linear_fc2\.bias", ("mlp.down_proj.bias",), _whole),
)


_SANDWICH = (
    _Rule(
        r"self_attention\.linear_proj\.post_layernorm\.weight",
        ("post_attention_layernorm.weight",),
        _whole,
    ),
    _Rule(r"pre_mlp_layernorm\.weight", ("pre_feedforward_layernorm.weight",), _whole),
    _Rule(r"mlp\.linear_fc2\.post_layernorm\.weight", ("post_feedforward_layernorm.weight",), _whole),
)


_LATENT = (
    _Rule(r"self_attention\.linear_q_proj\.weight", ("self_attn.q_proj.weight",), _rows),
    _Rule(r"self_attention\.linear_q_down_proj\.weight", ("self_attn.q_a_proj.weight",), _rows),
    _Rule(
        r"self_attention\.(q_layernorm\.|linear_q_up_proj\.layer_norm_)weight",
        ("self_attn.q_a_layernorm.weight",),
        _whole,
    ),
    _Rule(r"self_attention\.linear_q_up_proj\.weight", ("self_attn.q_b_proj.weight",), _rows),
    _Rule(r"self_attention\.linear_kv_down_proj\.weight", ("self_attn.kv_a_proj_with_mqa.weight",), _rows),
    _Rule(
        r"self_attention\.(kv_layernorm\.|linear_kv_up_proj\.layer_norm_)weight",
        ("self_attn.kv_a_layernorm.weight",),
        _whole,
    ),
    _Rule(r"self_attention\.linear_kv_up_proj\.weight", ("self_attn.kv_b_proj.weight",), _rows),
)


def _expert_rules(family: Family) -> tuple[_Rule, ...]:
    moe = family.moe
    if moe is None:
        return ()
    # One module per expert, or one grouped module with one weight per expert.
    first = (
        r"mlp\.experts\."
        r"(local_experts\.(?P<expert>\d+)\.linear_fc1\.weight|linear_fc1\.weight(?P<grouped>\d+))"
    )
    shared = moe.shared or ""
    bias = moe.router_bias or ""
    return (
        _Rule(r"mlp\.router\.weight", (moe.router,), _whole),
        _Rule(r"mlp\.router\.expert_bias", (bias,), _whole),
        _Rule(
            r"mlp\.shared_experts\.linear_fc1\.weight",
            (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"),
            _gate_up,
        ),
        _Rule(r"mlp\.shared_experts\.linear_fc2\.weight", (f"{shared}.down_proj.weight",), _columns),
        _Rule(first, (f"{moe.expert}.{moe.gate}", f"{moe.expert}.{moe.up}"), _gate_up, is_expert=True),
        _Rule(first.replace("fc1", "fc2"), (f"{moe.expert}.{moe.down}",), _columns, is_expert=True),
    )


_OUTER = {
    "embedding.word_embeddings.weight": (EMBEDDING, _vocabulary),
    "decoder.final_layernorm.weight": (FINAL_NORM, _whole),
    "output_layer.weight": (OUTPUT, _vocabulary),
}


class UnknownParameterError(RuntimeError):
    """Report a Megatron parameter that the importer has no rule for."""


def import_parameters(
    parameters: Mapping[str, Tensor],
    sources: Mapping[str, Tensor],
    hf_config: Any,
    shard: Shard,
) -> None:
    """Fill Megatron parameters from Hugging Face tensors with views and ``copy_`` alone.

    ``parameters`` are named ``decoder.layers.N.…`` with N counted over the whole model. ``sources`` holds
    whole tensors (or meta stand-ins) by checkpoint name. Rows that pad the vocabulary are left alone.
    Raises UnknownParameterError for a parameter without a rule.
    """
    family = family_of(hf_config)
    special = (*(_LATENT if family.mla else ()), *(_SANDWICH if family.sandwich else ()))
    rules = (*special, *_DENSE, *_expert_rules(family))
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    shape = (groups, heads // groups, head_dim(hf_config))
    for name, target in parameters.items():
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        if layer is None:
            if name not in _OUTER:
                raise UnknownParameterError(name)
            source, place = _OUTER[name]
            if source == OUTPUT and has_scalar_head(hf_config):
                source, place = SCALAR, _whole
            elif source == OUTPUT and hf_config.tie_word_embeddings:
                source = EMBEDDING
            place(target, [sources[source]], _Cut(shard.tensor, shard.tensor_size, *shape))
            continue
        rule, words = _find(rules, name[layer.end() :])
        if rule.is_expert:
            local = int(words.get("expert") or words["grouped"])
            experts = family.settings(hf_config)["num_moe_experts"] // shard.expert_size
            words["expert"] = str(shard.expert * experts + local)
            cut = _Cut(shard.expert_tensor, shard.expert_tensor_size, *shape)
        else:
            cut = _Cut(shard.tensor, shard.tensor_size, *shape)
        prefix = f"model.layers.{layer.group(1)}."
        rule.place(target, [sources[prefix + source.format(**words)] for source in rule.sources], cut)


def _find(rules: Sequence[_Rule], name: str) -> tuple[_Rule, dict[str, Any]]:
    for rule in rules:
        match = re.fullmatch(rule.pattern, name)
        if match:
            return rule, match.groupdict()
    raise UnknownParameterError(name)
