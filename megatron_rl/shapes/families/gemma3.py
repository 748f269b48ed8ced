"""Gemma 3, the language model (arXiv 2503.19786)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields, gemma_megatron_settings, gemma_structure


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Gemma 3 models: fields of `ModelShape`."""
    return {**gemma_structure(reader), "qk_norm": True}


FAMILY = Family(
    "Gemma 3",
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    _read_structure,
    gemma_megatron_settings,
    # Published multimodal checkpoints of 4B and larger omit most of these keys.
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    # transformers writes this older key with an underscore, beside the ``layer_types`` that replaced it.
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    features=("scaled_embedding", "capped_scores"),
)
