"""The model that every role starts from: its checkpoint, and what builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.setting import required, setting


@dataclass(frozen=True)
class ModelConfig:
    """Name the checkpoint that every role starts from: a Hugging Face model's, or one of Megatron-LM."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str = required(
        "Directory with config.json, safetensors and tokenizer files; with `megatron` it is written, in "
        "run_dir where nothing is stated, with config.json and tokenizer alone.",
        example="models/Qwen2.5-7B-Instruct",
        also_called={
            "NeMo-RL": "model_name, tokenizer.name",
            "TRL": "model_name_or_path",
            "OpenRLHF": "pretrain",
            "slime": "hf_checkpoint",
            "common": "model.name, model_path, model_id, tokenizer_path, tokenizer_name",
        },
        conversion={
            "tokenizer.name": "the tokenizer is the model's own",
            "tokenizer_path": "the tokenizer is the model's own",
            "tokenizer_name": "the tokenizer is the model's own",
        },
    )
    megatron: str | None = setting(
        None,
        "Checkpoint of Megatron-LM (torch_dist) with the weights: the folder of --save, or one iter_* in it.",
        unset="the weights are those in `path`",
        also_called={"Megatron-LM": "load", "verl": "dist_checkpointing_path"},
    )
    resume_optimizer: bool = setting(
        False,
        "With `megatron`: let the actor's Adam go on from the checkpoint's moments and steps; learning rate "
        "and decay are those of actor.optimizer.",
        also_called={"Megatron-LM": "no_load_optim"},
        their_values={"no_load_optim": {True: False, False: True}},
    )
    hf_path: str | None = setting(
        None,
        "With `megatron`: directory with the tokenizer, and config.json if it is not to be derived.",
        unset="the tokenizer's directory that the checkpoint's arguments name",
    )
    dtype: str = setting(
        "bfloat16",
        "Type of weights and activations in training and rollout.",
        choices=("bfloat16", "float32"),
        spelled={"bf16": "bfloat16", "fp32": "float32", "float": "float32"},
        refused={"float16": "it needs loss scaling, bfloat16 does not"},
        also_called={
            "NeMo-RL": "precision",
            "transformers": "torch_dtype",
            "OpenRLHF": "param_dtype",
            "TRL": "bf16",
            "Megatron-LM": "params_dtype",
        },
        their_values={"bf16": {True: "bfloat16", False: "float32"}},
    )
    provider: str | None = setting(
        None,
        "Your function that builds a pipeline stage's GPTModel: module:function or path/to/file.py:function, "
        "with any of pre_process, post_process, vp_stage, config, pg_collection and args.",
        unset="Megatron's GPTModel",
        also_called={"Megatron-LM": "model_provider, gpt_builder", "slime": "custom_model_provider_path"},
    )
    weights: str | None = setting(
        None,
        "With `provider`: module:NAME or path/to/file.py:NAME of a mapping of your names of parameters to "
        "Megatron's, both below decoder.layers.N.",
        unset="the provider's parameters are called as Megatron's",
    )
    attention: str | None = setting(
        None,
        "Implementation of attention in the trained models.",
        unset="transformer_engine where it is installed, else torch",
        choices=("transformer_engine", "torch"),
        spelled={"te": "transformer_engine"},
        also_called={
            "transformers": "attn_implementation",
            "Megatron-LM": "attention_backend",
            "OpenRLHF": "flash_attn",
        },
    )
