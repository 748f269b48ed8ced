"""The shape of a Hugging Face model, read from its config.json as plain JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, nearest


@dataclass(frozen=True)
class Architecture:
    """Say how one architecture's config.json is read; ``experts`` names its expert-count key.

    ``latent``: multi-head latent attention, shared experts and dense first layers, as DeepSeek has them.
    """

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: str | None = None
    expert_width: str = "intermediate_size"
    latent: bool = False
    router_bias: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama"),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True),
    "MistralForCausalLM": Architecture("mistral"),
    "MixtralForCausalLM": Architecture("mixtral", experts="num_local_experts"),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", qk_norm=True, experts="num_experts", expert_width="moe_intermediate_size"
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2", experts="n_routed_experts", expert_width="moe_intermediate_size", latent=True
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        experts="n_routed_experts",
        expert_width="moe_intermediate_size",
        latent=True,
        router_bias=True,
    ),
}
"""The architectures that can be trained; adding one here lets `check` accept it."""


@dataclass(frozen=True)
class ModelShape:
    """Hold the sizes that decide layout, memory and traffic.

    ``experts`` is 0 in a dense model; ``expert_width`` is the MLP width of one expert. ``kv_lora`` above 0
    means latent attention: then ``head_dim`` is not used, the cache holds kv_lora + qk_rope a layer.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    max_positions: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0  # of a layer's shared experts together
    dense_layers: int = 0  # first layers of a mixture-of-experts model that have a plain MLP
    router_bias: bool = False
    q_lora: int = 0  # 0 with latent attention: the query comes straight from the hidden state
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head_dim: int = 0

    def padded_vocab(self, tensor: int) -> int:
        """Return the vocabulary size rounded up so that ``tensor`` ranks hold equal parts."""
        return -(-self.vocab // tensor) * tensor

    @property
    def moe_layers(self) -> int:
        """Return the number of layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of one layer's attention that tensor parallelism cuts."""
        if self.kv_lora:
            query = (self.q_lora or self.hidden) * self.heads * (self.qk_nope + self.qk_rope)
            key_value = self.kv_lora * self.heads * (self.qk_nope + self.v_head_dim)
            return query + key_value + self.heads * self.v_head_dim * self.hidden
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        bias = qkv if self.qkv_bias else 0
        return self.hidden * qkv + bias + self.heads * self.head_dim * self.hidden

    @property
    def key_value_parameters(self) -> int:
        """Return those of them that an engine with more ranks than key-value heads holds several times."""
        if self.kv_lora:
            return 0
        return 2 * self.kv_heads * self.head_dim * (self.hidden + (1 if self.qkv_bias else 0))

    @property
    def cut_parameters(self) -> int:
        """Return the parameters of all layers that tensor parallelism cuts, without routed experts."""
        width = (self.layers - self.moe_layers) * self.mlp_width + self.moe_layers * self.shared_width
        return self.layers * self.attention_parameters + 3 * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all routed experts of all layers."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.expert_width

    @property
    def replicated_parameters(self) -> int:
        """Return the parameters of all layers that every tensor rank holds.

        Norms and routers, and the projections into the latent space.
        """
        layer = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.kv_lora:
            layer += self.hidden * (self.q_lora + self.kv_lora + self.qk_rope) + self.q_lora + self.kv_lora
        router = self.experts * (self.hidden + (1 if self.router_bias else 0))
        return self.layers * layer + self.moe_layers * router

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the checkpoint."""
        layers = self.cut_parameters + self.expert_parameters + self.replicated_parameters
        return layers + self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token passes through."""
        idle = (self.experts - self.experts_per_token) * 3 * self.hidden * self.expert_width
        return self.parameters - self.moe_layers * idle


def read_model_shape(path: Path, errors: list[UserError]) -> ModelShape | None:
    """Read config.json; what is wrong with it is added to ``errors`` and None returned."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        errors.append(
            UserError(
                "the model's config.json cannot be read",
                where=str(path),
                expected="a JSON object",
                got=str(error),
                fix="copy the file again from the checkpoint",
            )
        )
        return None
    if not isinstance(raw, dict):
        errors.append(
            UserError(
                "the model's config.json is not a JSON object",
                where=str(path),
                expected='{"architectures": [...], "hidden_size": ...}',
                got=type(raw).__name__,
                fix="copy the file again from the checkpoint",
            )
        )
        return None
    return _shape(raw, str(path), errors)


def _shape(raw: dict[str, Any], where: str, errors: list[UserError]) -> ModelShape | None:
    name = _architecture_name(raw)
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        close = nearest(name, ARCHITECTURES)
        errors.append(
            UserError(
                f"the model's architecture {name or '(none named)'} is not supported",
                where=f"{where}: architectures",
                expected=f"one of {', '.join(ARCHITECTURES)}",
                got=name or "no `architectures`",
                fix=f"use a {close} checkpoint"
                if close
                else "use a checkpoint of one of these architectures",
            )
        )
        return None
    before = len(errors)
    reader = _Reader(raw, where, errors)
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    mlp_width = reader.size("intermediate_size")
    experts = reader.size(architecture.experts) if architecture.experts else 0
    fallback = hidden // heads if heads else 0
    shape = ModelShape(
        architecture=name,
        hidden=hidden,
        layers=reader.size("num_hidden_layers"),
        heads=heads,
        kv_heads=reader.size("num_key_value_heads", heads),
        head_dim=reader.size("head_dim", fallback),
        mlp_width=mlp_width,
        vocab=reader.size("vocab_size"),
        max_positions=reader.size("max_position_embeddings", 1 << 40),
        tied=raw.get("tie_word_embeddings") is True,
        qkv_bias=architecture.qkv_bias or raw.get("attention_bias") is True,
        qk_norm=architecture.qk_norm,
        experts=experts,
        experts_per_token=reader.size("num_experts_per_tok") if experts else 0,
        expert_width=reader.size(architecture.expert_width) if experts else 0,
        router_bias=architecture.router_bias,
        **(_latent(reader) if architecture.latent else {}),
    )
    return shape if len(errors) == before else None


def _latent(reader: _Reader) -> dict[str, int]:
    """Read what DeepSeek's config.json has beside the usual sizes; `q_lora_rank` may be null."""
    return {
        "shared_width": reader.size("moe_intermediate_size") * reader.count("n_shared_experts"),
        "dense_layers": reader.count("first_k_dense_replace"),
        "q_lora": reader.count("q_lora_rank"),
        "kv_lora": reader.size("kv_lora_rank"),
        "qk_nope": reader.size("qk_nope_head_dim"),
        "qk_rope": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
    }


def _architecture_name(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    for name, architecture in ARCHITECTURES.items():
        if raw.get("model_type") == architecture.model_type:
            return name
    return str(raw.get("model_type") or "")


@dataclass
class _Reader:
    raw: dict[str, Any]
    where: str
    errors: list[UserError]

    def count(self, key: str) -> int:
        """Return a number that may be absent, null or 0."""
        return self.size(key) if self.raw.get(key) else 0

    def size(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return value
        self.errors.append(
            UserError(
                f"the model's config.json has no usable `{key}`",
                where=f"{self.where}: {key}",
                expected="a positive integer",
                got="nothing" if value is None else repr(value)[:80],
                fix="copy config.json again from the checkpoint",
            )
        )
        return 1
