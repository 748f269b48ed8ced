"""A user's own model code in one process: requirements and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from megatron_rl import EmbeddedTrainer
from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments
from megatron_rl.checkpoint.tensors import load_tensors, plan_tensor_write
from megatron_rl.config.checkpoint_meta import ANY
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.data import quickstart
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.adoption import adopt_model
from megatron_rl.megatron.model import build_model, live_parameters
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.megatron.optimizer import Optimizer, wrap_in_ddp
from megatron_rl.megatron.parameter_mapping import global_name
from megatron_rl.megatron.provider import load_provider, use_global_groups
from megatron_rl.megatron.schedule import forward_backward
from megatron_rl.metrics import Metrics
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch
from tests.hf_models import save_model
from tests.model_providers import own_groups, set_up

PLACE = "tests.model_providers:"
REWARD = "def parity(response, **_):\n    return float(sum(map(ord, response)) % 2)\n"
RL = """
model: {{path: {folder}/data/model, dtype: float32}}
data: {{train: {folder}/data/train.jsonl, max_prompt_tokens: 8}}
reward: {{function: "{folder}/reward.py:parity"}}
run_dir: {folder}/run
steps: 9
batch: {{prompts_per_step: 4, samples_per_prompt: 4}}
rollout: {{engine: torch, max_response_tokens: 4}}
algorithm: {{name: grpo, kl: none}}
"""


def build(path: Path, name: str | None, names: str | None = None, family: str = "qwen2") -> Any:
    device.initialize()
    config, provider = save_model(family, path).config, None
    if name is not None:
        provider = load_provider(PLACE + name, names, checkpoint_arguments(path)[0])
    groups = ParallelGroups(ParallelLayout((0,)))
    model = build_model(config, groups, dtype=torch.float32, provider=provider)
    load_weights(model, path)
    return model


def batch_of(lengths: list[int]) -> TrainBatch:
    tokens = torch.randint(0, 131, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    return TrainBatch(tokens, torch.tensor(lengths), mask, mask / len(tokens), torch.ones(len(lengths)))


def stepped(model: Any, optimizer: Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return a model's weights by Megatron's names after a step, and the log-probs that it learned from."""
    batch = batch_of([7, 9, 2, 12, 5])
    if optimizer is None:
        wrap_in_ddp(model, True)
        optimizer = Optimizer(model, OptimizerConfig(learning_rate=1e-2, epsilon=1e-2), steps=2)
    optimizer.zero_grad()

    def objective(rows: TrainBatch, log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:
        return -(rows.loss_weights * log_probs).sum(), Metrics()

    scores, _ = forward_backward(model, batch, 20, batch.response_mask, objective)
    optimizer.step()
    told = {f"log_probs {part.rows}": part.outputs[0] for part in scores}
    weights = {global_name(model, name): value for name, value in live_parameters(model).items()}
    return told | {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("older", "qwen2"),
        ("renamed", "qwen2"),
        ("gpt_builder", "qwen3-tied"),
        ("gpt_builder", "qwen3-moe"),
    ],
)
def test_a_step_is_that_of_megatrons_own_model(name: str, family: str, tmp_path: Path) -> None:
    own = build(tmp_path, None, family=family)
    before = {global_name(own, storage): value.clone() for storage, value in live_parameters(own).items()}
    expected, found = stepped(own), stepped(build(tmp_path, name, PLACE + "NAMES", family))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        rows = found[key][: len(value)]  # Megatron-LM pads the vocabulary further
        torch.testing.assert_close(rows, value, rtol=0, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")
        assert key not in before or not torch.equal(before[key], value), key


def test_parameters_that_are_called_otherwise_are_named_by_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"decoder\.layers\.0\.mlp\.down\.weight") as caught:
        build(tmp_path, "renamed")
    assert "mlp.linear_fc2.weight" in str(caught.value) and "model.weights=" in str(caught.value)
    with pytest.raises(UserError, match=r"are called decoder\.layers\.0\.mlp\.linear_fc1\.weight"):
        build(tmp_path, "renamed", PLACE + "TWICE")
    with pytest.raises(UserError, match="not a mapping"):
        build(tmp_path, "renamed", PLACE + "renamed")
    model = build(tmp_path, "renamed", PLACE + "NAMES")
    trained = dict(model.chunks[0].named_parameters())["decoder.layers.3.mlp.down.weight"]
    stored = load_file(tmp_path / "model.safetensors")["model.layers.3.mlp.down_proj.weight"]
    assert torch.equal(trained, stored)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raising", ["raised an error", "KeyError: 'seq_length'", "pre_process, post_process"]),
        ("elsewhere", ["did not return a bare GPTModel", "list"]),
        ("shallower", ["differs from the one that config.json", "num_layers: 4", "num_layers: 2"]),
        ("nowhere", ["has no 'nowhere'", "model.provider"]),
    ],
)
def test_what_is_no_model_of_the_run_is_refused(name: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        build(tmp_path, name)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_groups_are_global_for_as_long_as_the_block(tmp_path: Path) -> None:
    device.initialize()
    groups = ParallelGroups(ParallelLayout((0,)))
    before = dict(vars(parallel_state))
    with pytest.raises(RuntimeError), use_global_groups(groups):
        assert parallel_state.get_tensor_model_parallel_group() is groups.tensor
        assert parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
        assert parallel_state.is_pipeline_last_stage() and parallel_state.is_rank_in_embedding_group()
        raise RuntimeError
    after = dict(vars(parallel_state))
    assert all(after[name] is value for name, value in before.items())


def test_a_scripts_own_model_and_optimizer_take_the_step_of_ours(tmp_path: Path) -> None:
    expected = stepped(build(tmp_path, None))
    with own_groups():
        wrapped, optimizer, scheduler = set_up(tmp_path)
        model = adopt_model(wrapped, read_hf_config(tmp_path))
        load_weights(model, tmp_path)
        optimizer.reload_model_params()
        found = stepped(model, Optimizer.from_script(model, optimizer, scheduler, increment=4))
    assert scheduler.num_steps == 4
    for key, value in expected.items():
        torch.testing.assert_close(found[key][: len(value)], value, rtol=0, atol=2e-6)


def test_a_scripts_model_that_rl_would_train_wrongly_is_refused(tmp_path: Path) -> None:
    config = save_model("qwen2", tmp_path).config
    with own_groups():
        averages, *_ = set_up(tmp_path)
        averages[0].buffers[0].gradient_scaling_factor = 0.5  # as on two data-parallel ranks
        with pytest.raises(UserError, match="are averages") as caught:
            adopt_model(averages, config)
        assert "--calculate-per-token-loss" in str(caught.value)
        config.num_hidden_layers += 1
        with pytest.raises(UserError, match="num_layers: 5"):
            adopt_model(set_up(tmp_path)[0], config)


@pytest.mark.slow
def test_steps_of_rl_are_taken_in_a_scripts_own_loop(tmp_path: Path) -> None:
    quickstart.write_inputs(tmp_path / "data")
    path = tmp_path / "data" / "model"
    (tmp_path / "rl.yaml").write_text(RL.format(folder=tmp_path))
    (tmp_path / "reward.py").write_text(REWARD)
    with own_groups():
        trained = set_up(path)
        load_weights(adopt_model(trained[0], read_hf_config(path)), path)
        trained[1].reload_model_params()
        before = [parameter.clone() for parameter in trained[0][0].parameters()]
        with pytest.raises(UserErrors, match=r"(?s)support actor\.offload.*support critic"):
            words = ["actor.offload=true", "algorithm.name=ppo"]
            EmbeddedTrainer(tmp_path / "rl.yaml", *trained, overrides=words)
        with pytest.raises(UserErrors, match="model is not one of Megatron's") as caught:
            EmbeddedTrainer(
                tmp_path / "rl.yaml", trained[0][0].module, torch.optim.SGD(trained[0][0].parameters()), None
            )
        assert "got:      SGD" in str(caught.value) and "script's scheduler" in str(caught.value)
        trainer = EmbeddedTrainer(tmp_path / "rl.yaml", *trained, increment=4)
        first = trainer.step()
        # The script's own checkpoint of model, optimizer and schedule; ours beside it.
        actor = trainer.roles.actor
        (tmp_path / "saved").mkdir()
        saved = plan_tensor_write(
            tmp_path / "saved", actor.model, actor.optimizer, ANY, copy_host_tensors=False
        )
        saved.write_shards()
        with device.megatron_mode():
            saved.write_tensor_index()
        torch.save((trained[2].state_dict(), trainer.state_dict()), tmp_path / "rl.pt")
        second, third = trainer.step(), trainer.step()
        trainer.close()
        again = set_up(path)
        trainer = EmbeddedTrainer(tmp_path / "rl.yaml", *again, increment=4)
        load_tensors(tmp_path / "saved", trainer.roles.actor.model, trainer.roles.actor.optimizer)
        schedule, state = torch.load(tmp_path / "rl.pt", weights_only=True)
        again[2].load_state_dict(schedule)
        trainer.load_state_dict(state)
        resumed = [trainer.step(), trainer.step()]
        trainer.close()
    after = list(trained[0][0].parameters())
    assert not all(map(torch.equal, before, after)), "the script's own parameters have moved"
    assert all(map(torch.equal, after, again[0][0].parameters()))
    assert trained[2].num_steps == again[2].num_steps == 12 and trainer.state.step == 3
    for metrics in (first, second, third):
        assert metrics["policy/grad_norm"] > 0
        assert metrics["mismatch/abs_diff"] < 1e-5, "the engine samples with the script's weights"
    for metrics, expected in zip(resumed, (second, third), strict=True):
        groups = ("policy/", "reward/", "response/", "mismatch/")
        same = [name for name in expected if name.startswith(groups)]
        assert same and {name: metrics[name] for name in same} == {name: expected[name] for name in same}
