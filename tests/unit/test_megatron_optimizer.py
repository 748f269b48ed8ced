"""Adam resumes from checkpoints of Megatron-LM, in each format of its optimizers."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.folders import write_tensors
from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments, load_optimizer
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.hf.megatron_source import read_pointed_checkpoint
from megatron_rl.interop.megatron_lm.optimizer_buffers import LayerImplementation, arrange_parameters
from megatron_rl.interop.megatron_lm.pickles import Bucket
from megatron_rl.megatron.adoption import adopt_model
from megatron_rl.megatron.model import live_parameters
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.megatron.optimizer import Optimizer, wrap_in_ddp
from megatron_rl.shapes.pretrained import read_pretrained
from tests.hf_models import save_model
from tests.model_providers import own_groups, set_up
from tests.unit.test_megatron_checkpoint import model_at, opened, says, unpacked


def gradients_and_step(wrapped: list[Any], optimizer: Any, seed: int) -> None:
    """Step with gradients that depend on the seed alone; the rows that pad the vocabulary have none."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(wrapped[0].module.named_parameters()):
        rows = 131 if name.endswith(("word_embeddings.weight", "output_layer.weight")) else len(parameter)
        parameter.main_grad.zero_()
        parameter.main_grad[:rows] = torch.randn(rows, *parameter.shape[1:], generator=generator)
    with device.megatron_mode():
        optimizer.step()


def saved_by_a_script(folder: Path, hf: Path, sharding: str | None, **more: Any) -> dict[str, torch.Tensor]:
    """Save after two steps as Megatron-LM does; return the script's weights after a third.

    ``sharding`` is the format of its distributed optimizer; None is for the replicated one. ``more`` are
    arguments that the checkpoint states.
    """
    arguments = {**checkpoint_arguments(hf)[0], "padded_vocab_size": 256, **more}
    metadata = {
        "distrib_optim_sharding_type": sharding or "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    with own_groups():
        wrapped, optimizer, _ = set_up(hf, sharding is not None)
        model = adopt_model(wrapped, read_hf_config(hf))
        for seed in (1, 2):
            gradients_and_step(wrapped, optimizer, seed)
        metadata["dp_cp_group"] = model.groups.data_context
        with device.megatron_mode():
            state: dict[str, Any] = {"model": wrapped[0].module.sharded_state_dict(metadata=metadata)}
            state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
            folder.mkdir()
            write_tensors(folder, model, {**state, "args": Namespace(**arguments), "iteration": 7})
        gradients_and_step(wrapped, optimizer, 3)
        return {name: value.clone() for name, value in live_parameters(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("theirs", ["fully_reshardable", "dp_reshardable", None])
@pytest.mark.parametrize("ours", [True, False])
def test_adam_goes_on_where_the_checkpoint_left_it(theirs, ours, tmp_path):
    save_model("qwen2", tmp_path / "hf")
    expected = saved_by_a_script(tmp_path / "iter_0000007", tmp_path / "hf", theirs)
    path = resumed_from(tmp_path / "iter_0000007", tmp_path / "hf", tmp_path / "run")
    model = model_at(path)
    wrap_in_ddp(model, ours)
    settings = OptimizerConfig(learning_rate=1e-2, epsilon=1e-2, distributed=ours)
    optimizer = Optimizer(model, settings, steps=9)
    load_optimizer(optimizer, path)
    gradients_and_step(model.wrapped, optimizer.megatron, 3)
    rounding = 0.0 if ours == bool(theirs) else 1e-6  # the gradient's norm is summed in another order
    for name, value in live_parameters(model).items():
        torch.testing.assert_close(value, expected[name][: len(value)], rtol=0, atol=rounding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_model_parallel_size": 2}, "do not belong to its model and layout.*where:.*resume_optimizer"
         ".*expected: in chained_0 dp_group_idx_0 gbuf_idx_0 31 parameters with .*got:.*iter_0000007"
         ".*156736 elements.*--dist-ckpt-optim-fully-reshardable; or remove"),
        ({"pipeline_model_parallel_size": 4}, "gbuf_idx_0 8 parameters with "),
        ({"pipeline_model_parallel_size": 3}, "4 layers cannot be distributed over pipeline 3"),
        ({"pipeline_model_parallel_layout": "Et*4L"}, "got:.*pipeline_model_parallel_layout"),
        (None, "where:.*model.resume_optimizer.*got:.*no optimizer state.*without --no-save-optim"),
    ],
)  # fmt: skip
def test_moments_that_cannot_be_read_are_refused_at_once(arguments, words, tmp_path):
    folder = tmp_path / "iter_0000007"
    model = {"resume_optimizer": True, "dtype": "float32", "hf_path": str(tmp_path / "hf")}
    save_model("qwen2", tmp_path / "hf")
    if arguments is not None:
        saved_by_a_script(folder, tmp_path / "hf", "dp_reshardable", **arguments)
    else:
        folder, model["hf_path"] = unpacked(tmp_path), str(tmp_path / "none")
    model["megatron"] = str(folder)
    _, errors = opened(folder, tmp_path / "none", tmp_path / "run", model=model)
    assert len(errors) == 1 and says(errors[0], words), errors
    stage = {"sft": {"data": "sft.jsonl", "steps": 1}, "actor": {"lora": {}}}
    _, errors = opened(folder, tmp_path / "none", tmp_path / "run", model=model, **stage)
    assert [str(error).partition("got:")[2].split()[0] for error in errors[:2]] == ["actor.lora:", "sft:"]


def resumed_from(folder: Path, hf: Path, run_dir: Path) -> str:
    """Return the model folder of a run that resumes the optimizer of a checkpoint."""
    model = {"megatron": str(folder), "dtype": "float32", "resume_optimizer": True, "hf_path": str(hf)}
    config, errors = opened(folder, hf, run_dir, model=model)
    assert not errors
    return config.model.path


def test_buffers_with_other_weights_than_the_model_are_refused(tmp_path):
    save_model("qwen2", tmp_path / "hf")
    saved_by_a_script(tmp_path / "iter_0000007", tmp_path / "hf", "dp_reshardable")
    path = resumed_from(tmp_path / "iter_0000007", tmp_path / "hf", tmp_path / "run")
    checkpoint = read_pointed_checkpoint(path)
    assert checkpoint.describe_optimizer() == "Adam resumes from 2 steps, in buffers of TP1 DP1"
    (bucket,) = checkpoint.buffers["param"].values()
    chunk = bucket.chunks[5]
    with (checkpoint.path / chunk.file).open("r+b") as file:
        file.seek(chunk.offset)
        values = torch.load(io.BytesIO(file.read(chunk.length)))
        values[7] += 1e-3
        content = io.BytesIO()
        torch.save(values, content)
        assert content.tell() == chunk.length
        file.seek(chunk.offset)
        file.write(content.getvalue())
    model = model_at(path)
    wrap_in_ddp(model, True)
    optimizer = Optimizer(model, OptimizerConfig(distributed=True), steps=9)
    with pytest.raises(UserError, match="differ from the weights of its model") as raised:
        load_optimizer(optimizer, path)
    assert says(raised.value, "where:.*model.resume_optimizer.*got:.*model.layers.3.*fix:.*starts from zero")


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3", "llama-bias", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("bucket_size", [None, 9000])
def test_parameters_lie_in_buffers_where_megatron_puts_them(family, bucket_size, tmp_path):
    save_model(family, tmp_path / "hf")
    model = model_at(tmp_path / "hf")
    overlap = {"overlap_grad_reduce": bucket_size is not None, "bucket_size": bucket_size}
    wrap_in_ddp(model, True, overlap)
    (wrapped,), sizes, places = model.wrapped, {}, {}
    names = {parameter: name for name, parameter in model.chunks[0].named_parameters()}
    for part, buffers in enumerate((wrapped.buffers, wrapped.expert_parallel_buffers)):
        for index, buffer in enumerate(buffers):
            keys = [Bucket(part, 0, index, number) for number in range(len(buffer.buckets))]
            sizes |= {key: held.numel_unpadded for key, held in zip(keys, buffer.buckets, strict=True)}
            for parameter, (start, _, number) in buffer.param_index_map.items():
                offset = buffer.buckets[number].offset
                places[names[parameter]] = keys[number], start - offset, tuple(parameter.shape)
    shape, rows = read_pretrained(tmp_path / "hf/config.json").shape, 131
    found = arrange_parameters({}, shape, rows, sizes, LayerImplementation(fused=False, grouped=False))
    assert {item.name: (item.bucket, item.start, item.shape) for item in found} == places
    assert len(found) == len(places) and (len(sizes) > 4) == (bucket_size is not None)
