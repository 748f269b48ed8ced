"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905)."""

from megatron_rl.shapes.family import Family

FAMILY = Family(
    "Phi-3/4",
    "phi3",
    "Phi3ForCausalLM",
    "Phi3ForSequenceClassification",
    defaults={"rms_norm_eps": 1e-5},
    # Stored fused: query, key and value in one tensor, gate and up in another.
    renamed=(
        (".q_proj", ".qkv_proj"),
        (".k_proj", ".qkv_proj"),
        (".v_proj", ".qkv_proj"),
        (".gate_proj", ".gate_up_proj"),
        (".up_proj", ".gate_up_proj"),
    ),
    partial_rotary=True,
)
