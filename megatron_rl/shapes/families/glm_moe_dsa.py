"""GLM-5 (Zhipu AI, 2026): GLM-4.7-Flash's layers with sparse attention.

Rows are limited to a length at which sparse attention selects all keys. Layers without an indexer reuse the
keys that an earlier layer's indexer selected.
"""

from megatron_rl.shapes.families import glm4_moe_lite
from megatron_rl.shapes.family import with_sparse_attention

FAMILY = with_sparse_attention(
    glm4_moe_lite.FAMILY,
    dense_layers=3,
    defaults={"q_lora_rank": 2048, "routed_scaling_factor": 2.5},
    title="GLM-5",
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    scalar_architecture="GlmMoeDsaForSequenceClassification",
)
