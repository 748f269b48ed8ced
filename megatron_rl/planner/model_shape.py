"""Shapes, parameter counts and FLOPs of a model, read from a Hugging Face config.json.

Sources: the reference implementations of each ``model_type`` in Hugging Face transformers (matrix
shapes); Korthikanti et al. 2022 (arXiv 2205.05198) and Narayanan et al. 2021 (arXiv 2104.04473) for
FLOPs. Totals equal the published checkpoint sizes (tests/unit/test_planner_models.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

_TWO_MATRIX = ("gpt", "gpt2", "gpt_neox", "opt", "falcon", "phi", "starcoder2", "bloom")
_QKV_BIAS_ONLY = ("qwen2", "qwen2_moe", "glm4", "glm4_moe")
_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "gemma3", "gemma3_text")


@dataclass(frozen=True)
class ModelShape:
    """Hold the sizes that fix a transformer's parameters, FLOPs and cache; lengths are in elements."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_parameters: int = 1  # per element: 1 RMSNorm, 2 LayerNorm with bias
    norms_per_layer: int = 2
    qk_norm: bool = False
    positions: int = 0  # learned position embeddings
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    moe_layers: int = 0
    q_lora: int = 0
    kv_lora: int = 0  # > 0: multi-head latent attention
    qk_nope: int = 0
    qk_rope: int = 0
    v_head_dim: int = 0
    output_gate: bool = False
    linear_layers: int = 0  # gated delta-net layers instead of attention
    linear_qk: int = 0  # key heads x key head dim
    linear_v: int = 0
    linear_v_heads: int = 0
    linear_v_head_dim: int = 0
    linear_conv: int = 0
    sliding_window: int = 0
    sliding_layers: int = 0

    @property
    def mla(self) -> bool:
        """Say whether attention is multi-head latent attention."""
        return self.kv_lora > 0

    @property
    def attention_layers(self) -> int:
        """Count layers with softmax attention."""
        return self.layers - self.linear_layers

    @cached_property
    def attention_matrices(self) -> int:
        """Count matrix parameters of one softmax attention layer.

        GQA: h(a d)(q, out) + 2 h kv d. MLA: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
        """
        h, a = self.hidden, self.heads
        if self.mla:
            qk = self.qk_nope + self.qk_rope
            query = h * self.q_lora + self.q_lora * a * qk if self.q_lora else h * a * qk
            key_value = h * (self.kv_lora + self.qk_rope) + self.kv_lora * a * (
                self.qk_nope + self.v_head_dim
            )
            return query + key_value + a * self.v_head_dim * h
        query = h * a * self.head_dim * (2 if self.output_gate else 1)
        return query + 2 * h * self.kv_heads * self.head_dim + a * self.head_dim * h

    @cached_property
    def attention_small(self) -> int:
        """Count bias and norm parameters of one softmax attention layer."""
        extra = 0
        if self.qkv_bias:
            extra += (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.output_bias:
            extra += self.hidden
        if self.qk_norm and not self.mla:
            extra += 2 * self.head_dim
        if self.mla:
            extra += self.q_lora + self.kv_lora
        return extra

    @cached_property
    def linear_attention_parameters(self) -> int:
        """Count parameters of one gated delta-net layer (arXiv 2412.06464; transformers qwen3_next)."""
        h = self.hidden
        projections = h * (2 * self.linear_qk + 2 * self.linear_v) + h * 2 * self.linear_v_heads
        convolution = (2 * self.linear_qk + self.linear_v) * self.linear_conv
        return (
            projections + convolution + 2 * self.linear_v_heads + self.linear_v_head_dim + self.linear_v * h
        )

    def _feed_forward(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @cached_property
    def dense_ffn_parameters(self) -> int:
        """Count parameters of one dense feed-forward layer, biases included."""
        bias = (self.ffn * (2 if self.gated else 1) + self.hidden) if self.mlp_bias else 0
        return self._feed_forward(self.ffn) + bias

    @cached_property
    def expert_parameters(self) -> int:
        """Count parameters of one routed expert."""
        bias = (self.expert_ffn * (2 if self.gated else 1) + self.hidden) if self.expert_bias else 0
        return self._feed_forward(self.expert_ffn) + bias

    @cached_property
    def moe_shared_parameters(self) -> int:
        """Count the parameters of one MoE layer outside its routed experts: router and shared experts."""
        router = self.hidden * self.experts + (self.experts if self.router_bias else 0)
        shared = self._feed_forward(self.shared_ffn) if self.shared_ffn else 0
        return router + shared + (self.hidden if self.shared_gate else 0)

    @cached_property
    def embedding_parameters(self) -> int:
        """Count one vocabulary embedding."""
        return self.vocab * self.hidden

    @cached_property
    def routed_expert_parameters(self) -> int:
        """Count all routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_parameters

    @cached_property
    def layer_dense_total(self) -> int:
        """Count everything in the layers except routed experts."""
        norms = self.layers * self.norms_per_layer * self.hidden * self.norm_parameters
        attention = self.attention_layers * (self.attention_matrices + self.attention_small)
        linear = self.linear_layers * self.linear_attention_parameters
        ffn = (self.layers - self.moe_layers) * self.dense_ffn_parameters
        return norms + attention + linear + ffn + self.moe_layers * self.moe_shared_parameters

    @cached_property
    def total(self) -> int:
        """Count all parameters, both embeddings included."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        final_norm = self.hidden * self.norm_parameters
        return embeddings + final_norm + self.layer_dense_total + self.routed_expert_parameters

    @cached_property
    def active(self) -> int:
        """Count the parameters a token meets: all but the experts it skips."""
        skipped = self.moe_layers * (self.experts - self.experts_per_token) * self.expert_parameters
        return self.total - skipped

    @cached_property
    def tensors(self) -> int:
        """Estimate how many named tensors a checkpoint has (what a per-tensor transfer pays for)."""
        attention = 7 if self.mla else 4 + (3 if self.qkv_bias else 0) + (2 if self.qk_norm else 0)
        per_ffn = 3 if self.gated else 2
        dense = (self.layers - self.moe_layers) * per_ffn
        moe = self.moe_layers * (self.experts * per_ffn + 1 + (per_ffn if self.shared_ffn else 0))
        return self.layers * (attention + self.norms_per_layer) + dense + moe + (2 if self.tied else 3)

    def attention_flops(self, context: float) -> float:
        """Forward FLOPs of one token's softmax attention in all layers at a mean context length.

        ``context`` is how many keys the token attends to: s for the full convention, s/2 causal.
        Score and value products: 2 (d_qk + d_v) a context; gated delta-net layers do a constant amount.
        """
        per_key = (
            2
            * self.heads
            * (self.qk_nope + self.qk_rope + self.v_head_dim if self.mla else 2 * self.head_dim)
        )
        full_layers = self.attention_layers - self.sliding_layers
        window = min(context, self.sliding_window) if self.sliding_layers else 0
        linear = self.linear_layers * 6.0 * self.linear_qk * self.linear_v_head_dim
        return per_key * (full_layers * context + self.sliding_layers * window) + linear

    @cached_property
    def layer_flops(self) -> float:
        """Forward FLOPs per token of all matrix products in the layers, two per active parameter."""
        active_experts = self.moe_layers * self.experts_per_token * self.expert_parameters
        return 2.0 * (self.layer_dense_total + active_experts)

    @cached_property
    def head_flops(self) -> float:
        """Forward FLOPs per token of the output projection."""
        return 2.0 * self.embedding_parameters

    def forward_flops(self, context: float) -> float:
        """Forward FLOPs per token: layers, attention at ``context`` keys, and output projection."""
        return self.layer_flops + self.head_flops + self.attention_flops(context)

    @cached_property
    def kv_elements(self) -> int:
        """Count cache elements per token: 2 L kv d, or (c_kv + rope) L for MLA."""
        if self.mla:
            return self.attention_layers * (self.kv_lora + self.qk_rope)
        return self.attention_layers * 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_gpu(self, tensor: int, bytes_per_element: float = 2.0) -> float:
        """Cache bytes per token on one GPU; key-value heads divide over tensor ranks, MLA does not."""
        share = 1 if self.mla else min(tensor, self.kv_heads)
        return self.kv_elements * bytes_per_element / share


def _moe_fields(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    experts = int(
        config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0
    )
    if not experts:
        return {}
    model_type = str(config.get("model_type", ""))
    expert_ffn = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    first_dense = int(config.get("first_k_dense_replace") or 0)
    if config.get("mlp_only_layers"):
        moe_layers = layers - len(config["mlp_only_layers"])
    else:
        step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
        moe_layers = (layers - first_dense) // step
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    gate = shared > 0
    if config.get("n_shared_experts"):
        shared, gate = int(config["n_shared_experts"]) * expert_ffn, False
    if model_type.startswith("llama4"):
        shared, gate = expert_ffn, False
    router_bias = config.get("router_bias")
    if router_bias is None:
        router_bias = model_type in ("deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss")
    return {
        "experts": experts,
        "experts_per_token": int(config.get("num_experts_per_tok") or config.get("experts_per_token") or 2),
        "expert_ffn": expert_ffn,
        "shared_ffn": shared,
        "shared_gate": gate,
        "router_bias": bool(router_bias),
        "expert_bias": model_type == "gpt_oss",
        "moe_layers": moe_layers,
    }


def _attention_fields(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if config.get("kv_lora_rank"):
        fields = {
            "q_lora": int(config.get("q_lora_rank") or 0),
            "kv_lora": int(config["kv_lora_rank"]),
            "qk_nope": int(config["qk_nope_head_dim"]),
            "qk_rope": int(config["qk_rope_head_dim"]),
            "v_head_dim": int(config["v_head_dim"]),
        }
    interval = int(config.get("full_attention_interval") or 0)
    if interval and config.get("linear_num_value_heads"):
        value_heads, value_dim = int(config["linear_num_value_heads"]), int(config["linear_value_head_dim"])
        fields |= {
            "linear_layers": layers - layers // interval,
            "linear_qk": int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"]),
            "linear_v": value_heads * value_dim,
            "linear_v_heads": value_heads,
            "linear_v_head_dim": value_dim,
            "linear_conv": int(config.get("linear_conv_kernel_dim", 4)),
            "output_gate": bool(config.get("attn_output_gate", True)),
        }
    window = int(config.get("sliding_window") or 0)
    if window and config.get("use_sliding_window", True):
        kinds = config.get("layer_types")
        pattern = int(config.get("sliding_window_pattern") or 0)
        if kinds:
            count = sum(kind == "sliding_attention" for kind in kinds)
        elif pattern:
            count = layers - layers // pattern
        else:
            count = layers // 2 if config.get("model_type") == "gemma2" else layers
        fields |= {"sliding_window": window, "sliding_layers": count}
    return fields


def shape_from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Read a model's shape from the fields of a config.json (and the presets' additions to them).

    Defaults where a field is absent: kv heads = heads, head_dim = hidden / heads, untied embeddings,
    intermediate_size = 4 hidden, three feed-forward matrices unless ``hidden_act`` is a plain gelu.
    Raises UserError naming the first missing field.
    """
    config = config.get("text_config") or config
    model_type = str(config.get("model_type", "llama"))
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, vocab = int(config["num_attention_heads"]), int(config["vocab_size"])
    except KeyError as missing:
        raise UserError(
            f"model configuration of {name} has no field {missing}",
            where=f"{name}: {missing}",
            expected="a Hugging Face config.json of a decoder model",
            got=f"fields {sorted(config)[:12]}",
            fix="give a config.json with hidden_size, num_hidden_layers, num_attention_heads and vocab_size",
        ) from None
    gemma = model_type.startswith("gemma")
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")
    gated = gemma or not (activation.startswith(("gelu", "relu")) or model_type in _TWO_MATRIX)
    bias = bool(config.get("attention_bias", model_type in ("qwen2", "qwen2_moe")))
    layernorm = config.get("norm") == "layernorm" or (not gated and config.get("norm") is None)
    learned = config.get("position_embedding_type") == "learned"
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn=int(config.get("intermediate_size_mlp") or config.get("intermediate_size") or 4 * hidden),
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", gemma)),
        gated=gated,
        qkv_bias=bias,
        output_bias=bias and model_type not in _QKV_BIAS_ONLY,
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_parameters=2 if layernorm else 1,
        norms_per_layer=4 if model_type in ("gemma2", "gemma3", "gemma3_text") else 2,
        qk_norm=bool(config.get("qk_norm", config.get("use_qk_norm", model_type in _QK_NORM))),
        positions=int(config.get("max_position_embeddings", 0)) if learned else 0,
        **_moe_fields(config, layers),
        **_attention_fields(config, layers),
    )


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the packaged model presets by name."""
    return json.loads(resources.files("megatron_rl.planner").joinpath("models.json").read_text())


def _nearest(name: str, names: list[str]) -> str:
    import difflib

    found = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {found[0]}? " if found else ""


def load_model(reference: str | Mapping[str, Any]) -> ModelShape:
    """Find a model by preset name, inline configuration, HF directory, or path of a config.json.

    Raises UserError naming the nearest preset when nothing is found.
    """
    if isinstance(reference, Mapping):
        config = reference.get("config", reference)
        return shape_from_config(
            config, str(reference.get("name", config.get("_name_or_path") or "inline model"))
        )
    known = {name.lower(): name for name in presets()}
    short = reference.lower().rsplit("/", 1)[-1]
    for candidate in (reference.lower(), short):
        if candidate in known:
            return shape_from_config(presets()[known[candidate]]["config"], known[candidate])
    path = Path(reference)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return shape_from_config(json.loads(path.read_text()), str(reference))
    names = sorted(presets())
    raise UserError(
        f"unknown model {reference!r}",
        where="MODEL",
        expected="a preset name, a Hugging Face directory, or a config.json",
        got=reference,
        fix=f"{_nearest(reference, names)}presets: {', '.join(names)}",
    )
