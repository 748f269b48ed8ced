"""OLMo 3 (Team OLMo, November 2025): OLMo 2 with a sliding window in three of four layers."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields, olmo_structure, sliding_window_fields


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of OLMo 3 models: fields of `ModelShape`."""
    # Every fourth layer has full attention unless config.json has another pattern.
    reader_with_pattern = ConfigReader(
        {"sliding_window_pattern": 4, **reader.config}, reader.file, reader.errors
    )
    windows = sliding_window_fields(reader_with_pattern, reader.size("num_hidden_layers"))

    return {**olmo_structure(reader), **windows}


FAMILY = Family(
    "OLMo 3",
    "olmo3",
    "Olmo3ForCausalLM",
    "Olmo3ForSequenceClassification",
    _read_structure,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
)
