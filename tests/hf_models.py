"""Tiny Hugging Face checkpoints of every supported family, whose random weights make mistakes visible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

# 131 is prime, so every tensor-parallel layout pads the vocabulary.
COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
RESCALING_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 8,
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    # Biases on every linear layer.
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    # Output layer shares the embedding's weights.
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    # Latent attention, grouped routing and shared experts.
    "deepseek-v3": (
        "DeepseekV3",
        {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "rope_parameters": YARN_ROPE,
        },
    ),
    # One group of experts, and queries that are not compressed.
    "moonlight": (
        "DeepseekV3",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    # Sparse attention, which is dense on the rows of tests. Some layers of the second have no indexer.
    "deepseek-v32": (
        "DeepseekV32",
        {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "rope_parameters": YARN_ROPE,
            "index_topk": 200,
            "index_head_dim": 72,
            "index_n_heads": 2,
        },
    ),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "index_topk": 200,
            "index_head_dim": 72,
            "index_n_heads": 2,
            "indexer_types": ["full", "full", "shared", "full"],
        },
    ),
    # Latent attention without compressed queries.
    "deepseek-v2": (
        "DeepseekV2",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    # A window of 8 tokens is shorter than the test rows, so it changes their log-probs.
    "mistral": ("Mistral", {"sliding_window": 8, "rope_parameters": RESCALING_ROPE}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 1000000.0,
                    "factor": 8.0,
                },
            },
        },
    ),
    # Layers with full attention have larger heads, of which there is one key-value head, without values.
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 1.5,
        },
    ),
    "phi3": (
        "Phi3",
        {
            "sliding_window": 8,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "partial_rotary_factor": 0.5,
        },
    ),
    # Low caps, so that they change the logits of a tiny model.
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.5,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
        },
    ),
    "ministral": (
        "Ministral",
        # transformers 5.19 computes with `head_dim` of config.json, and fails where it is null.
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "residual_dropout": 0.0, "attention_dropout": 0.0}),
    "qwen3-5": ("Qwen3_5", DELTA_NETS),
    "qwen3-5-moe": ("Qwen3_5Moe", DELTA_NETS | SHARED_EXPERT),
    # Projections that are interleaved by key head; layer 2 is dense.
    "qwen3-next": ("Qwen3Next", DELTA_NETS | SHARED_EXPERT | {"mlp_only_layers": [2]}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0, "eos_token_id": 1}),
    # Windows shorter than the test rows, and YaRN that does not round its bounds.
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": RESCALING_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0, "eos_token_id": 1}),
    # Layers with a window rotate by other angles, which are not rescaled as those of YaRN are.
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "full_attention": {**RESCALING_ROPE, "rope_theta": 500000.0},
            },
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    # Queries of positions from 8 on have factors.
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "rope_parameters": {
                **YARN_ROPE,
                "original_max_position_embeddings": 8,
                "max_position_embeddings": 256,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    # Layer 1 is dense, the other layers have experts.
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}


QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
SIGLIP_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [4, 6, 6]}
"""Rotary positions of images, in a head of 32."""
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3-vision": (
        "Gemma3",
        FAMILIES["gemma3"][1],
        {"vision_config": SIGLIP_VISION, "mm_tokens_per_image": 1},
    ),
    "gemma4-vision": (
        "Gemma4",
        FAMILIES["gemma4"][1],
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 8,
            }
        },
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {key: value for key, value in FAMILIES["gemma4"][1].items() if "per_layer" not in key},
        {
            "vision_config": {
                "patch_size": 2,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 32,
                "mm_posemb_size": 8,
                "output_proj_dims": 32,
            }
        },
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 32, "tie_word_embeddings": False},
        {
            "vision_config": SIGLIP_VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "ministral3-vision": (
        "Mistral3",
        {"model_type": "ministral3", "tie_word_embeddings": False, **FAMILIES["ministral3"][1]},
        {
            "vision_config": SIGLIP_VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2-5-vl": (
        "Qwen2_5_VL",
        {"hidden_size": 128, "rope_parameters": SECTIONS},
        {"vision_config": QWEN_VISION | {"out_hidden_size": 128}},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": SECTIONS},
        {"vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            # Sizes that show whether experts are stored transposed.
            "moe_intermediate_size": 96,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
            "rope_parameters": SECTIONS,
        },
        {
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-5-vision": ("Qwen3_5", FAMILIES["qwen3-5"][1], {"vision_config": QWEN_VISION}),
    "qwen3-5-moe-vision": ("Qwen3_5Moe", FAMILIES["qwen3-5-moe"][1], {"vision_config": QWEN_VISION}),
}
"""Tiny multimodal models: prefix of the class, settings of the language model, settings of the whole."""


def save_multimodal(name: str, path: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a tiny multimodal checkpoint and return its model; ``changes`` are of the language model."""
    class_prefix, settings, outer = MULTIMODAL[name]
    inner = {**COMMON, **settings, **changes}
    config = getattr(transformers, f"{class_prefix}Config")(text_config=inner, **outer)
    model = getattr(transformers, f"{class_prefix}ForConditionalGeneration")(config).float().eval()
    model.set_attn_implementation("eager")
    randomize(model, seed)
    model.save_pretrained(path)
    if name == "qwen3-vl-moe":
        transpose_experts(path / "model.safetensors")
    return model


def transpose_experts(file: Path) -> None:
    """Store the experts of each layer [experts, in, out], as Qwen3-VL-MoE is published, or back again."""
    tensors = load_file(file)
    for key in tensors:
        if ".mlp.experts." in key:
            tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def config_of(family: str, **changes: Any) -> Any:
    """Return the transformers config of a family's tiny model, with ``changes`` of its values."""
    class_prefix, settings = FAMILIES[family]
    name = f"{class_prefix}Config"
    if class_prefix in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe"):
        name = f"{class_prefix}TextConfig"
    return getattr(transformers, name)(**{**COMMON, **settings, **changes})


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny float32 transformers model in which all parameters are random and distinct."""
    class_prefix, _ = FAMILIES[family]
    model = getattr(transformers, f"{class_prefix}ForCausalLM")(config_of(family, **changes)).float().eval()
    # Of transformers' implementations only the eager one applies softcapping to attention scores.
    model.set_attn_implementation("eager")
    use_epsilon_of_config(model)
    randomize(model, seed)
    return model


def randomize(model: Any, seed: int) -> None:
    """Fill every parameter and stored buffer of a model with random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            # These buffers are computed from the config, and a checkpoint does not contain them.
            if "rotary" in name or "embed_scale" in name:
                continue

            # Norm weights stay near 1, so that activations keep their scale through the layers.
            if "norm" in name or name.endswith("layer_scalar"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            # Logits of attention sinks as large as scores, so that they take their part of the softmax.
            elif "sinks" in name:
                parameter.uniform_(-1.0, 3.0, generator=generator)
            # Inputs of gpt-oss's activation on both sides of its limits.
            elif name.endswith("gate_up_proj_bias"):
                parameter.normal_(std=4.0, generator=generator)
            elif parameter.is_floating_point():
                parameter.normal_(std=0.1, generator=generator)


def use_epsilon_of_config(model: Any) -> None:
    """Set the epsilon of the norms inside latent attention from config.json, as vLLM and Megatron do.

    transformers 5.19 makes them with the default of their class, 1e-6, whatever config.json says.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps


def save_model(family: str, path: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a tiny checkpoint at ``path`` and return its model."""
    model = make_model(family, seed, **changes)
    model.save_pretrained(path)
    return model


def as_kimi_k2(path: Path) -> None:
    """Change a saved checkpoint of DeepSeek V3 to the model type that Kimi-K2 is published with."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))


def in_eight_bits(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a matrix as float8 and the scale of each block, as DeepSeek-V3 is published."""
    rows, columns = (-(-size // edge) for size, edge in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            first = row * block[0]
            second = column * block[1]
            piece = weight[first : first + block[0], second : second + block[1]].float()
            scales[row, column] = piece.abs().max() / 448
            box = (slice(first, first + block[0]), slice(second, second + block[1]))
            quantised[box] = (piece / scales[row, column]).to(torch.float8_e4m3fn)
    return quantised, scales


BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
"""``quantization_config`` of DeepSeek-V3, Kimi-K2 and Qwen3-FP8."""


def quantise(path: Path, config: dict[str, Any] = BLOCKS, suffix: str = "_scale_inv") -> None:
    """Quantise the projections of a saved checkpoint: in the blocks of ``config``, without any row by row."""
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        stored[name] = weight
        if name.endswith("_proj.weight"):
            rows, columns = config.get("weight_block_size") or (1, weight.shape[1])
            stored[name], stored[name + suffix] = in_eight_bits(weight, (rows, columns))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))


def in_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """Return a matrix in NVFP4, by the ends of the names of its tensors, as ModelOpt's NVFP4QTensor does."""
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows, columns // 16, 16)
    second = weight.float().abs().max() / (6 * 448)
    scales = (blocks.abs().amax(-1) / (6 * second)).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() * second)[..., None]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1) + 8 * (scaled < 0)
    numbers = numbers.reshape(rows, columns).byte()
    packed = (numbers[:, 1::2] << 4) | numbers[:, ::2]
    return {"": packed, "_scale": scales, "_scale_2": second}


def as_modelopt(path: Path, algorithm: str, *, in_config: bool) -> None:
    """Quantise the projections of a saved checkpoint as NVIDIA's ModelOpt exports it.

    ``algorithm`` is FP8 or NVFP4. Up to version 0.29 ModelOpt described it in hf_quant_config.json alone,
    later in config.json too.
    """
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        stored[name] = weight
        if not name.endswith("_proj.weight"):
            continue
        if algorithm == "NVFP4":
            stored |= {name + end: tensor for end, tensor in in_nvfp4(weight).items()}
        else:
            stored[name], scales = in_eight_bits(weight, (weight.shape[0], weight.shape[1]))
            stored[f"{name}_scale"] = scales.reshape(())
        module = name.removesuffix("weight")
        stored[f"{module}input_scale"] = torch.tensor(0.25)
        for letter in "kv":
            if f".{letter}_proj." in name:
                stored[f"{module}{letter}_scale"] = torch.tensor(1.0)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    producer = {"name": "modelopt", "version": "0.29.0"}
    details = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    bits = {"dynamic": False, "num_bits": 8, "type": "float"}
    if algorithm == "NVFP4":
        details["group_size"] = 16
        bits["num_bits"] = 4
    file = {"producer": producer, "quantization": details}
    (path / "hf_quant_config.json").write_text(json.dumps(file))
    if not in_config:
        return
    group = {"input_activations": bits, "weights": bits, "targets": ["Linear"]}
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quant_algo": algorithm,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": producer,
        "quant_method": "modelopt",
    }
    (path / "config.json").write_text(json.dumps(settings))


def in_four_bits(path: Path, seed: int = 5) -> None:
    """Replace the experts of a saved gpt-oss by random numbers in mxfp4, as it is published."""
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        # Stored transposed: [experts, outputs, blocks of 32 inputs, bytes of two numbers].
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
        # Scales around 2 ** -5.
        stored[f"{name}_scales"] = torch.randint(120, 125, shape, generator=generator).byte()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (path / "config.json").write_text(json.dumps(settings))
