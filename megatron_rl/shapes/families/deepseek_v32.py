"""DeepSeek V3.2 (arXiv 2512.02556): DeepSeek V3 with sparse attention.

Rows are limited to a length at which sparse attention selects all keys.
"""

from megatron_rl.shapes.families import deepseek_v3
from megatron_rl.shapes.family import with_sparse_attention

FAMILY = with_sparse_attention(
    deepseek_v3.FAMILY,
    dense_layers=3,
    defaults={},
    title="DeepSeek V3.2",
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    scalar_architecture="DeepseekV32ForSequenceClassification",
)
