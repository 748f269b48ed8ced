"""Checkpoints of Megatron-LM are read, refused with a reason, and written in its format."""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_rl.check.model.megatron_lm import with_megatron_models
from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments, save_megatron
from megatron_rl.config.load import load_text
from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export_model
from megatron_rl.hf.files import CheckpointFiles, read_checkpoint_shapes
from megatron_rl.hf.megatron_source import MegatronFiles
from megatron_rl.hf.peft import add_adapters
from megatron_rl.hf.weights import load_weights
from megatron_rl.interop.megatron_lm.pickles import read_common
from megatron_rl.megatron.lora import adapter_parameters
from megatron_rl.megatron.model import build_model, live_parameters
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.shapes.layout import ParallelLayout
from tests.hf_models import save_model

FIXTURE = Path(__file__).parents[1] / "megatron_lm"


def unpacked(folder: Path) -> Path:
    """Unpack what Megatron-LM wrote: four layers on tensor 2 x pipeline 2."""
    with tarfile.open(FIXTURE / "tp2pp2.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "tiny"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return unpacked(tmp_path)


def opened(folder: Path, hf_path: Path, run_dir: Path, /, **more: object):
    """Return what becomes of a configuration that names a Megatron checkpoint."""
    hf_path.mkdir(exist_ok=True)
    config = {
        "run_dir": str(run_dir),
        "steps": 1,
        "model": {"megatron": str(folder), "hf_path": str(hf_path), "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "reward": {"function": "reward.py:score"},
        **more,
    }
    loaded = load_text(json.dumps(config))
    assert loaded.config is not None and not loaded.errors, loaded.errors
    config, _, refused = with_megatron_models(loaded.config)
    return config, [error for errors in refused.values() for error in errors]


def says(error: object, words: str) -> bool:
    """Return whether an error contains these texts in this order, separated by ``.*``."""
    text, position = str(error).replace("\n", " "), 0
    for word in words.split(".*"):
        position = text.find(word, position)
        if position < 0:
            return False
    return True


def model_at(path: str | Path):
    device.initialize()
    groups = ParallelGroups(ParallelLayout((0,)))
    model = build_model(read_hf_config(path), groups, dtype=torch.float32)
    load_weights(model, path)
    return model


def test_log_probs_are_those_of_megatron_lm(checkpoint, tmp_path):
    config, errors = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run")
    assert not errors and config.model.path == str(tmp_path / "run/megatron/actor")
    model, expected = model_at(config.model.path), load_file(FIXTURE / "logits.safetensors")
    packing = model.pack([expected["tokens"].shape[1]] * len(expected["tokens"]))
    with device.megatron_mode(), torch.no_grad():
        (chunk,) = model.chunks
        hidden = chunk(expected["tokens"].reshape(1, -1), None, None, packed_seq_params=packing)
        weight: Any = chunk.output_layer.weight
        values = hidden.flatten(0, 1) @ weight.T
    vocabulary = model.spec.model.shape.vocab
    assert vocabulary == 62 and expected["logits"].std() > 0.05
    reference = expected["logits"].flatten(0, 1)[:, :vocabulary]
    torch.testing.assert_close(values[:, :vocabulary], reference, atol=1e-6, rtol=0)


def test_arguments_beside_the_tensors_are_those_of_a_file(checkpoint):
    folder = checkpoint / "iter_0000004"
    expected = read_common(folder)
    common = torch.load(folder / "common.pt", weights_only=False)
    (folder / "common.pt").unlink()
    with pytest.raises(UserError, match=r"common\.pt does not exist\n.*common\.pt\n"):
        read_common(folder)
    with open(folder / "__0_0.distcp", "ab") as file:  # as Megatron-Core 0.19 saves them
        begun = file.tell()
        torch.save([common], file)
        place = _StorageInfo("__0_0.distcp", begun, file.tell() - begun)
    directory = pickle.loads((folder / ".metadata").read_bytes())
    directory.storage_data[MetadataIndex("common_state/shard_0_1")] = place
    (folder / ".metadata").write_bytes(pickle.dumps(directory))
    assert read_common(folder) == expected and expected.arguments and expected.iteration == 4


@pytest.mark.parametrize(
    "family", ["qwen2-tied", "qwen3", "llama-bias", "mixtral", "qwen3-moe", "deepseek-v3"]
)
def test_a_written_checkpoint_is_read_again(family, tmp_path):
    save_model(family, tmp_path / "hf")
    model = model_at(tmp_path / "hf")
    arguments, begun = checkpoint_arguments(tmp_path / "hf")
    for iteration in (3, 5, 7):
        save_megatron(tmp_path / "saved", model, arguments, begun + iteration, keep=2)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "iter_0000005", "iter_0000007", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    derived = family != "deepseek-v3"  # which comes with a config.json of its own
    config, errors = opened(tmp_path / "saved", tmp_path / ("none" if derived else "hf"), tmp_path / "run")
    assert not errors
    before, after = CheckpointFiles(tmp_path / "hf"), MegatronFiles(config.model.path)
    assert read_checkpoint_shapes(config.model.path) == before.shapes()  # what vLLM's weights are traced by
    assert after.checkpoint.iteration == 7 and after.names() == before.names()
    for name in before.names():
        shape = before.shape(name)
        assert after.shape(name) == shape
        start, size = [length // 3 for length in shape], [length - length // 3 for length in shape]
        for box in (([0] * len(shape), shape), (start, size)):
            assert torch.equal(after.read(name, *box), before.read(name, *box)), name


def test_adapters_are_added_into_what_is_written(tmp_path):
    save_model("qwen2-tied", tmp_path / "hf")
    model = model_at(tmp_path / "hf")
    add_adapters(model, LoraConfig(rank=3), seed=7, trainable=True)
    for value in adapter_parameters(model).values():
        value.normal_(std=0.1)
    export_model(model, tmp_path / "merged")
    trained = live_parameters(model) | adapter_parameters(model)
    before = {name: value.clone() for name, value in trained.items()}
    arguments, _ = checkpoint_arguments(tmp_path / "hf")
    save_megatron(tmp_path / "saved", model, arguments, 1)
    after = live_parameters(model) | adapter_parameters(model)
    assert model.adapters is not None and after.keys() == before.keys()
    for name, value in after.items():  # what trains on is what was there
        assert value.data_ptr() == trained[name].data_ptr() and torch.equal(value, before[name]), name
    config, errors = opened(tmp_path / "saved", tmp_path / "none", tmp_path / "run")
    written, merged = MegatronFiles(config.model.path), CheckpointFiles(tmp_path / "merged")
    assert not errors and written.names() == merged.names()
    for name in merged.names():
        shape = merged.shape(name)
        assert torch.equal(
            written.read(name, [0] * len(shape), shape), merged.read(name, [0] * len(shape), shape)
        )


def test_roles_start_from_checkpoints_of_their_own(checkpoint, tmp_path):
    roles = {"reference": {"path": str(checkpoint / "iter_0000004")}, "algorithm": {"name": "grpo"}}
    config, errors = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run", **roles)
    assert not errors and config.reference is not None and config.reference.path is not None
    assert config.reference.path == str(tmp_path / "run/megatron/reference")
    assert model_at(config.reference.path).spec.model.shape.vocab == 62


def test_a_run_that_goes_on_keeps_the_iteration_it_began_with(checkpoint, tmp_path):
    config, _ = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run")
    shutil.copytree(checkpoint / "iter_0000004", checkpoint / "iter_0000008")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("8")
    (tmp_path / "run/checkpoints/step_1").mkdir(parents=True)
    opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run")
    assert MegatronFiles(config.model.path).path.name == "iter_0000004"
    opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run", checkpoint={"resume": "never"})
    assert MegatronFiles(config.model.path).path.name == "iter_0000008"


def _without_shard(folder: Path) -> None:
    (folder / "iter_0000004/__1_0.distcp").unlink()


def _cut_off(folder: Path) -> None:
    file = folder / "iter_0000004/__3_1.distcp"
    file.write_bytes(file.read_bytes()[:-200])


def _legacy(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000004")
    (folder / "iter_0000004/mp_rank_00_000").mkdir(parents=True)


def _other_iteration(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("12")


def _no_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder)


def _damaged(folder: Path) -> None:
    (folder / "iter_0000004/.metadata").write_bytes(b"\x80\x04K\x01.")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_shard, "shards of the Megatron checkpoint are missing.*__1_0.distcp: missing"),
        (_cut_off, "shards of the Megatron checkpoint are missing or cut off.*__3_1.distcp: 14894 bytes"),
        (_legacy, "legacy format.*--ckpt-convert-format torch_dist"),
        (_other_iteration, "newest iteration.*iter_0000012.*iter_0000004"),
        (_no_checkpoint, "expected a checkpoint of Megatron-LM.*no such folder"),
        (_damaged, "cannot be read.*copy the whole folder"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(checkpoint, damage, words, tmp_path):
    damage(checkpoint)
    _, errors = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (error,) = errors
    assert says(error, words), error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 6}, "argument `num_layers` cannot be used.*6, by.*config.json.*got:      4"),
        ({"num_key_value_heads": 4}, "argument `num_query_groups` cannot be used"),
        ({"rope_theta": 500000.0}, "argument `rotary_base` cannot be used.*500000.0"),
        ({"tie_word_embeddings": True}, "argument `untie_embeddings_and_output_weights` cannot be used"),
        (
            {"vocab_size": 80},
            "checkpoint's tensor embedding.word_embeddings.weight does not match the model.*80 or more",
        ),
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "Megatron-LM does not train"),
    ],
)
def test_a_configuration_that_contradicts_the_arguments_is_refused(checkpoint, changes, words, tmp_path):
    config, _ = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "first")
    stated = json.loads((Path(config.model.path) / "config.json").read_text())
    if "rope_theta" in changes:
        stated.pop("rope_parameters")
    (tmp_path / "tokenizer/config.json").write_text(json.dumps({**stated, **changes}))
    _, errors = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run")
    assert any(says(error, words) for error in errors), errors


@pytest.mark.parametrize(
    ("argument", "value"),
    [("squared_relu", True), ("normalization", "LayerNorm"), ("mtp_num_layers", 1), ("rotary_percent", 0.5),
     ("window_size", [64, 0]), ("multi_latent_attention", True), ("position_embedding_type", "none")],
)  # fmt: skip
def test_arguments_of_no_model_here_are_refused_by_name(argument, value, tmp_path):
    save_model("qwen3", tmp_path / "hf")
    arguments, _ = checkpoint_arguments(tmp_path / "hf")
    save_megatron(tmp_path / "saved", model_at(tmp_path / "hf"), {**arguments, argument: value}, 1)
    _, errors = opened(tmp_path / "saved", tmp_path / "tokenizer", tmp_path / "run")
    text = f"argument `{argument}` cannot be used"
    assert errors and all(text in error.message for error in errors), errors


def test_checkpoints_of_another_run_are_not_written_over(checkpoint, tmp_path):
    target = {"checkpoint": {"megatron": str(checkpoint)}}
    _, errors = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run", **target)
    assert [error.where for error in errors] == ["checkpoint.megatron"]
    (tmp_path / "run/checkpoints/step_1").mkdir(parents=True)
    assert not opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run", **target)[1]


class _Runs:
    """Leave a file behind where a pickle that holds it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


def test_code_in_a_checkpoint_does_not_run(checkpoint, tmp_path):
    ran = tmp_path / "ran"
    pickle.loads(pickle.dumps(_Runs(ran)))
    assert ran.exists()
    ran.unlink()
    file = checkpoint / "iter_0000004/common.pt"
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in contents if name.endswith("data.pkl"))
    common = torch.load(file, weights_only=False)
    contents[name] = pickle.dumps({**common, "more": _Runs(ran)}, protocol=2)
    with zipfile.ZipFile(file, "w") as archive:
        for item, content in contents.items():
            archive.writestr(item, content)
    directory = checkpoint / "iter_0000004/.metadata"
    metadata = pickle.loads(directory.read_bytes())
    metadata.storage_meta = _Runs(ran)
    directory.write_bytes(pickle.dumps(metadata))
    config, errors = opened(checkpoint, tmp_path / "tokenizer", tmp_path / "run")
    assert not errors
    model_at(config.model.path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("family", "feature"),
    [
        ("gemma2", "norms after attention"),
        ("olmo2", "norms after"),
        ("minimax-m2", "QK norms over all heads"),
        ("smollm3", "layers without rotary angles"),
        ("qwen3-5", "linear attention"),
        ("qwen3-next", "linear attention"),
    ],
)
def test_what_megatron_lm_has_no_arguments_for_is_not_written(family, feature, tmp_path):
    save_model(family, tmp_path)
    with pytest.raises(UserError, match=rf"(?s){feature}.*--format hf"):
        checkpoint_arguments(tmp_path)
