"""Keep a vLLM engine equal to your own Megatron model in the same processes, without this project's trainer.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 launch/examples/hybrid_engine/colocated.py [CHECKPOINT]

The model is an ordinary GPTModel in Megatron's own process groups (tensor parallel 2), the engine an ordinary
``vllm.LLM`` (two replicas), and the weights go through vLLM's weight-transfer calls. CHECKPOINT is a
Hugging Face directory of a Qwen3 model; without one a tiny random model is made.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_rl.distributed import device
from megatron_rl.hf.weights import load_weights
from megatron_rl.hybrid_engine import weight_transfer

TINY = Qwen3Config(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=307,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def megatron_model(config: Any) -> Any:
    """Build a GPTModel as any Megatron program does; replace it by yours."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group(device.backends())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    # For machines without an accelerator.
    device.prepare_megatron()
    device.seed_generators(1, parallel_state.get_tensor_model_parallel_rank())

    settings = TransformerConfig(
        tensor_model_parallel_size=2,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )

    with device.megatron_mode():
        return GPTModel(
            settings,
            get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
            vocab_size=config.vocab_size + config.vocab_size % 2,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=1000000,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
        )


def vllm_engine(checkpoint: Path, **changes: Any) -> Any:
    """Build an engine that gets its weights from the trainer; replace it by yours."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    # "dummy" skips loading, since the first transfer replaces all weights.
    settings: dict[str, Any] = {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": 1,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 384,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**26,
    }
    transfer = WeightTransferConfig(backend="megatron_rl")
    return LLM(str(checkpoint), weight_transfer_config=transfer, **settings | changes)


def generate(llm: Any, tokens: list[int]) -> list[int]:
    """Continue a prompt greedily."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    (answer,) = llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


def main(checkpoint: Path) -> None:
    """Change the weights as a training step would, transfer them and generate, twice."""
    weight_transfer.register()
    config = AutoConfig.from_pretrained(checkpoint)
    model = weight_transfer.TrainedModel.of([megatron_model(config)], config)
    # Or your own way to initialise it.
    load_weights(model, checkpoint)

    llm = vllm_engine(checkpoint)
    llm.init_weight_transfer_engine({"init_info": {"model": model, "staging_bytes": 2**20}})
    for step in range(2):
        # In place of your optimizer's step.
        with torch.no_grad():
            for parameter in model.chunks[0].parameters():
                parameter.mul_(1.0 + 0.5 * step)

        # vLLM's own calls. Cached keys and values belong to the old weights.
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": step}})
        llm.finish_weight_update(str(step))
        llm.reset_prefix_cache(reset_running_requests=True)

        answer = generate(llm, [1, 2, 3])
        print(f"rank {dist.get_rank()}, weights {llm.get_weight_version()}: {answer}", flush=True)
    dist.barrier()


def tiny_checkpoint() -> Path:
    """Return a checkpoint of random weights, the same on every rank."""
    path = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    Qwen3ForCausalLM(TINY).save_pretrained(path)
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_checkpoint())
