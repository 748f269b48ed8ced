"""Gemma 2 (arXiv 2408.00118)."""

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    gemma_megatron_settings,
    gemma_structure,
    sliding_window_fields,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Gemma 2 models: fields of `ModelShape`."""
    # Every other layer has a sliding window unless config.json has another pattern.
    reader_with_pattern = ConfigReader(
        {"sliding_window_pattern": 2, **reader.config}, reader.file, reader.errors
    )
    return {
        **gemma_structure(reader),
        **sliding_window_fields(reader_with_pattern, reader.size("num_hidden_layers")),
    }


FAMILY = Family(
    "Gemma 2",
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2ForSequenceClassification",
    _read_structure,
    gemma_megatron_settings,
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    features=("scaled_embedding", "capped_scores"),
)
