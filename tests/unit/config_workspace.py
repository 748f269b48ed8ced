"""Complete tiny inputs of a configuration: model, data and reward function."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.shapes.pretrained import parse_pretrained

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 21,
}

CONFIG = """\
model:
  path: model
  dtype: float32
data:
  train: train.jsonl
  max_prompt_tokens: 8
reward:
  function: reward.py:score
evaluation: {sets: {held_out: eval.jsonl}}
run_dir: run
steps: 10
world_size: 4
batch:
  prompts_per_step: 16
  samples_per_prompt: 4
actor:
  layout:
    tensor: 2
    pipeline: 2
rollout:
  tensor: 2
  max_response_tokens: 8
"""

REWARD = """\


def score(prompt, response, ground_truth, metadata):
    return 1.0


def other(prompt):
    return 0.0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


def with_bonus(bonus, **rest):
    return bonus


async def of_a_group(prompt, response, group, **rest):
    return [0.0] * len(group)


partial = score
"""


TOKENS = [*"0123456789+-*/=,.", "<pad>", "<eos>", "<bos>", "<unk>"]


def write_safetensors(path: Path, shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> None:
    """Write a valid safetensors file of zeros; it is sparse and occupies no disk space."""
    header = {}

    end = 0
    for name, shape in shapes.items():
        begin = end
        end = end + 4 * math.prod(shape)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }

    # The format: length of the header in 8 bytes, the header, the tensors' bytes.
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


def write_model(path: Path, **changes: Any) -> None:
    """Write a model folder with config, weights and tokenizer files."""
    path.mkdir(parents=True)
    shape = {name: value for name, value in {**SHAPE, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(shape))
    # One token per character of the quickstart's problems.
    vocabulary = {text: number for number, text in enumerate(TOKENS)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))

    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    try:
        write_safetensors(path / "model.safetensors", parse_pretrained(shape).tensor_shapes())
    except UserError:  # a broken config has no shapes
        write_safetensors(path / "model.safetensors", {"weight": [1]})


def write_lines(path: Path, count: int = 32) -> None:
    """Write records with every field that a run reads."""
    record = {"prompt": "1+1=", "ground_truth": "2", "response": "2", "task": "sum"}
    path.write_text("".join(json.dumps(record) + "\n" for _ in range(count)))


def write_workspace(root: Path) -> None:
    """Write the files that `CONFIG` names, and models and data that are each broken in one way."""
    write_model(root / "model")
    for name in ("train.jsonl", "eval.jsonl", "sft.jsonl"):
        write_lines(root / name)

    (root / "config.yaml").write_text(CONFIG)
    (root / "reward.py").write_text(REWARD)
    (root / "own_loss.py").write_text("def summed(micro, log_probs):\n    return log_probs.sum()\n")
    (root / "broken_reward.py").write_text("def score(:\n")
    _write_broken_models(root)
    _write_broken_data(root)


def _write_broken_models(root: Path) -> None:
    """Write model folders that each have one error."""
    write_model(
        root / "shared",
        num_attention_heads=12,
        num_key_value_heads=3,
        head_dim=32,
    )

    write_model(
        root / "wide",
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
    )

    write_model(root / "narrow", num_key_value_heads=1)
    write_model(root / "five_layers", num_hidden_layers=5)
    write_model(root / "bert", architectures=["BertForMaskedLM"], model_type="bert")
    write_model(root / "classifier", architectures=["Qwen2ForCausalLn"])
    write_model(
        root / "no_text",
        architectures=["X"],
        model_type="x",
        text_config=3,
    )

    write_model(root / "no_vocab", vocab_size=None)
    write_model(root / "text_size", hidden_size="128")
    write_model(root / "other_vocabulary", vocab_size=77)
    write_model(root / "not_json")
    (root / "not_json/config.json").write_text("{")

    write_model(root / "list_json")
    (root / "list_json/config.json").write_text("[]")
    write_model(root / "no_config")
    (root / "no_config/config.json").unlink()
    write_model(root / "no_weights")

    (root / "no_weights/model.safetensors").unlink()
    write_model(root / "half")
    # A download that stopped early.
    half = root / "half/model.safetensors"
    os.truncate(half, half.stat().st_size - 2)
    write_model(root / "pointer")

    # A clone without Git LFS.
    (root / "pointer/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    write_model(root / "missing_shard")
    index = {"weight_map": {"weight": "model-1.safetensors", "other": "model-2.safetensors"}}
    (root / "missing_shard/model.safetensors.index.json").write_text(json.dumps(index))
    (root / "missing_shard/model.safetensors").rename(root / "missing_shard/model-1.safetensors")

    write_model(root / "bad_index")
    (root / "bad_index/model.safetensors").rename(root / "bad_index/model-1.safetensors")
    (root / "bad_index/model.safetensors.index.json").write_text("{}")
    write_model(root / "no_tokenizer")
    (root / "no_tokenizer/tokenizer.json").unlink()


def _write_broken_data(root: Path) -> None:
    """Write data sets that each have one error."""
    (root / "empty.jsonl").write_text("\n \n")
    (root / "link.jsonl").symlink_to("link.jsonl")
    (root / "endless.jsonl").symlink_to("/dev/zero")
    (root / "taken").mkdir()
    (root / "taken/checkpoints").write_text("no folder")

    (root / "broken.jsonl").write_text('{"prompt": "a", "ground_truth": "b"}\n{"prompt": "a"\n')
    (root / "lists.jsonl").write_text('["a", "b"]\n')
    (root / "question.jsonl").write_text('{"prompts": "a", "ground_truth": "b"}\n')
    (root / "null.jsonl").write_text('{"prompt": null, "ground_truth": "b"}\n')
    (root / "null_truth.jsonl").write_text('{"prompt": "a", "ground_truth": null}\n')

    (root / "half.jsonl").write_text('{"prompt": "1+1 \\ud800", "ground_truth": "2"}\n')
    (root / "messages.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "a"}], "ground_truth": "b"}\n'
    )
    (root / "no_truth.jsonl").write_text('{"prompt": "a"}\n')

    (root / "data.csv").write_text("prompt,ground_truth\n")
    (root / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    (root / "empty.parquet").write_bytes(b"")
    (root / "folder").mkdir()
    (root / "folder/part.jsonl").write_text("{}\n")

    (root / "splits/train").mkdir(parents=True)
    (root / "splits/train/state.json").write_text("{}")
    (root / "a_file").write_text("")
