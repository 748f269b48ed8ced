"""A role that offloads moves the tensors of its current use, and no others."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.tensors import load_tensors, plan_tensor_write
from megatron_rl.config.checkpoint_meta import ANY
from megatron_rl.config.sections.models import LoraConfig, OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.hf.peft import add_adapters
from megatron_rl.hf.weights import load_weights
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.lora import adapter_parameters, policy_weights, share_base
from megatron_rl.megatron.model import ParallelModel, build_model, live_parameters
from megatron_rl.megatron.optimizer import Optimizer, wrap_in_ddp
from megatron_rl.megatron.residency import Residency, ResidencyLevel
from megatron_rl.metrics import Metrics
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch
from tests.hf_models import save_model


def trained(path: Path, lora: LoraConfig | None = None) -> Residency:
    """Return a model's residency after its first step."""
    device.initialize()
    config = save_model("llama", path).config
    model = build_model(config, ParallelGroups(ParallelLayout((0,))), dtype=torch.bfloat16)
    load_weights(model, path)
    if lora is not None:
        add_adapters(model, lora, seed=1, trainable=True)
    wrap_in_ddp(model, True)
    residency = Residency(model, offload=True)
    residency.optimizer = Optimizer(model, OptimizerConfig(), steps=2)
    for buffer in gradients(model):
        buffer.fill_(0.5)
    residency.optimizer.step()
    return residency


@pytest.fixture
def learner(tmp_path: Path) -> Residency:
    return trained(tmp_path)


def gradients(model: ParallelModel) -> list[torch.Tensor]:
    return [buffer.grad_data for wrapped in model.wrapped for buffer in wrapped.buffers]  # pyright: ignore[reportGeneralTypeIssues]


def main_weights(residency: Residency) -> list[torch.Tensor]:
    assert residency.optimizer is not None
    optimizer = residency.optimizer.megatron
    (part,) = getattr(optimizer, "chained_optimizers", [optimizer])
    return [value for group in part.optimizer.param_groups for value in group["params"]]


def moved(residency: Residency) -> float:
    """Return the bytes since the last call."""
    return residency.metrics().values()["offload/bytes_max"]


def on_device(tensors: list[torch.Tensor]) -> set[bool]:
    return {bool(tensor.untyped_storage().nbytes()) for tensor in tensors}


def test_only_what_is_used_moves(learner: Residency) -> None:
    assert learner.model is not None
    weights, mains = list(live_parameters(learner.model).values()), main_weights(learner)
    before = [tensor.clone() for tensor in (*weights, *mains)]
    size = 2 * sum(tensor.numel() for tensor in weights)  # bfloat16
    states = 6 * size  # the weights in float32 and Adam's two moments
    learner.offload_all()
    assert moved(learner) == pytest.approx(size + states, rel=0.01)
    assert on_device([*weights, *mains, *gradients(learner.model)]) == {False}
    for _ in range(2):
        with learner.resident(ResidencyLevel.READ_WEIGHTS), learner.resident(ResidencyLevel.READ_WEIGHTS):
            assert moved(learner) == pytest.approx(size, rel=0.01)
            assert on_device(weights) == {True}
            assert on_device([*mains, *gradients(learner.model)]) == {False}
        assert on_device(weights) == {False} and moved(learner) == 0, "nobody had written them"
    with learner.resident(ResidencyLevel.WEIGHTS_AND_OPTIMIZER):
        assert moved(learner) == pytest.approx(size + states, rel=0.01)
        assert on_device(gradients(learner.model)) == {False}
    assert moved(learner) == pytest.approx(size + states, rel=0.01)
    with learner.resident(ResidencyLevel.READ_WEIGHTS):
        with learner.resident(ResidencyLevel.TRAINING):
            assert not any(buffer.any() for buffer in gradients(learner.model))
            gradients(learner.model)[0].fill_(1.0)
            weights[0].fill_(3.0)
        assert on_device(weights) == {True} and on_device([*mains, *gradients(learner.model)]) == {False}
    assert moved(learner) == pytest.approx(2 * (size + states), rel=0.01), "gradients never travel"
    with learner.resident(ResidencyLevel.TRAINING):
        assert not any(buffer.any() for buffer in gradients(learner.model))
        assert bool((weights[0] == 3.0).all())
        for tensor, value in zip((*weights[1:], *mains), before[1:], strict=True):
            assert torch.equal(tensor, value)


def test_a_plan_stays_compiled_while_weights_come_and_go(learner: Residency, tmp_path: Path) -> None:
    assert learner.model is not None
    engine = TorchEngine.from_hf(tmp_path, dtype=torch.bfloat16)
    learner.offload_all()
    hybrid = HybridEngine(
        learner.model, engine, resident=partial(learner.resident, ResidencyLevel.READ_WEIGHTS)
    )
    with hybrid.generation_mode():
        first = hybrid._transfers[0]._execution
    with learner.resident(ResidencyLevel.WEIGHTS_AND_OPTIMIZER), torch.no_grad():
        for value in live_parameters(learner.model).values():
            value.mul_(2.0)
    hybrid.mark_updated()
    held = torch.empty(1 << 20)  # what was freed is another's
    with hybrid.generation_mode() as synced:
        assert synced.values() and hybrid._transfers[0]._execution is first is not None
    assert held.numel()


class Sleeper(TorchEngine):
    """Lose the weights in sleep, as vLLM does on an accelerator."""

    def sleep(self) -> None:
        self.needs_weights = True
        for weights in self.parameters().values():
            weights.data.fill_(math.nan)

    def finish_update(self, version: int) -> None:
        super().finish_update(version)
        self.needs_weights = False


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_that_stays_awake_has_its_weights(learner: Residency, tmp_path: Path, sleeps: bool) -> None:
    engine = Sleeper.from_hf(tmp_path, dtype=torch.bfloat16)
    hybrid = HybridEngine(learner.model, engine, sleeps=sleeps)
    for number in range(2):
        with hybrid.generation_mode() as synced:
            assert bool(synced.values()) == (sleeps or not number)
            assert not any(weights.isnan().any() for weights in engine.parameters().values())
        assert engine.needs_weights == sleeps


def adapted_roles(path: Path, shared: bool) -> list[ModelRole]:
    """Return a policy and a critic with adapters over one base, or over a copy each, that both offload."""
    roles: list[ModelRole] = []
    for name, head in (("actor", "lm"), ("critic", "value")):
        config, groups = save_model("llama", path).config, ParallelGroups(ParallelLayout((0,)))
        model = build_model(config, groups, dtype=torch.bfloat16, head=head)
        load_weights(model, path)
        add_adapters(model, LoraConfig(rank=2), seed=1, trainable=True)
        base = roles[0] if shared and roles else None
        if base is not None and base.model is not None:
            share_base(model, base.model)
        wrap_in_ddp(model, True)
        outputs = ("old_log_probs", "entropy") if name == "actor" else ("values",)
        optimizer = Optimizer(model, OptimizerConfig(learning_rate=1e-2), steps=9)
        role = ModelRole(
            name, groups.layout, model, tokens_per_microbatch=20, outputs=outputs, optimizer=optimizer,
            offload=True, shares_base_with=base,
        )  # fmt: skip
        roles.append(role)
    for role in roles:
        role.residency.offload_all()
    return roles


def first_output(rows: TrainBatch, output: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    return (rows.loss_weights * output).sum(), Metrics()


def learned(role: ModelRole) -> dict[str, torch.Tensor]:
    """Return a role's log-probs of a batch before and after a step on it, and the trained weights."""
    tokens = torch.randint(0, 131, (35,), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    lengths = torch.tensor([7, 9, 2, 12, 5])
    batch = TrainBatch(tokens, lengths, mask, mask / len(tokens), torch.ones(len(lengths)))
    before = role.infer(batch).tokens
    role.update(batch, first_output)
    answers = {"before": before, "after": role.infer(batch).tokens}
    told = {f"{when} {name}": value for when, answer in answers.items() for name, value in answer.items()}
    assert role.model is not None
    with role.resident(ResidencyLevel.READ_WEIGHTS):
        return told | {name: value.clone() for name, value in trainable(role.model).items()}


def trainable(model: ParallelModel) -> dict[str, torch.Tensor]:
    (chunk,) = model.chunks
    return {name: value for name, value in chunk.named_parameters() if value.requires_grad}


@pytest.mark.slow
def test_roles_over_one_base_learn_as_over_two(tmp_path: Path) -> None:
    device.initialize()
    shared, apart = adapted_roles(tmp_path, True), adapted_roles(tmp_path, False)
    for _ in range(2):
        for role, other in zip(shared, apart, strict=True):
            found, expected = learned(role), learned(other)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
    actor, critic = shared
    assert actor.model is not None and critic.model is not None
    policy, values = live_parameters(actor.model), live_parameters(critic.model)
    base = policy.keys() - {"0.output_layer.weight"}
    assert on_device([*policy.values(), *values.values()]) == {False}
    with critic.resident(ResidencyLevel.READ_WEIGHTS):
        assert on_device(list(values.values())) == {True}
        assert all(policy[name].data_ptr() == values[name].data_ptr() for name in base)
    moved(critic.residency)
    with critic.resident(ResidencyLevel.READ_WEIGHTS):
        (chunk,) = critic.model.chunks
        own = sum(value.nbytes for value in (*trainable(critic.model).values(), *chunk.buffers()))
        assert moved(critic.residency) == pytest.approx(own, rel=0.05), "the base moves with the actor"
    # A checkpoint has what learns alone: adapters and the head.
    with critic.resident():
        (tmp_path / "saved").mkdir()
        saved = plan_tensor_write(
            tmp_path / "saved", critic.model, critic.optimizer, ANY, copy_host_tensors=False
        )
        saved.write_shards()
        with device.megatron_mode():
            saved.write_tensor_index()
    _, again = adapted_roles(tmp_path, False)
    with again.resident(), critic.resident():
        load_tensors(tmp_path / "saved", again.model, again.optimizer)
        assert again.model is not None
        for name, value in trainable(critic.model).items():
            assert torch.equal(trainable(again.model)[name], value), name


def test_adapters_reach_the_engine_from_host_memory(tmp_path: Path) -> None:
    learner = trained(tmp_path, LoraConfig(rank=2))
    assert learner.model is not None
    (chunk,) = learner.model.chunks
    base, adapters = live_parameters(learner.model), adapter_parameters(learner.model)
    size = sum(tensor.nbytes for tensor in (*chunk.parameters(), *chunk.buffers()))
    states = 6 * sum(tensor.nbytes for tensor in adapters.values())
    for value in adapters.values():
        value.normal_(std=0.1)
    engine = TorchEngine.from_hf(tmp_path, dtype=torch.bfloat16)
    learner.offload_all()
    assert moved(learner) == pytest.approx(size + states, rel=0.01)
    hybrid = HybridEngine(
        learner.model, engine, resident=partial(learner.resident, ResidencyLevel.READ_WEIGHTS)
    )
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    for _ in range(2):
        with hybrid.generation_mode() as synced:
            assert synced.values()
        assert on_device([*base.values(), *adapters.values()]) == {False}
        assert moved(learner) == pytest.approx(size, rel=0.01), "base and adapters were only read"
        with learner.resident(ResidencyLevel.WEIGHTS_AND_OPTIMIZER), torch.no_grad():
            written = engine.parameters()["model.layers.1.mlp.down_proj.weight"]
            assert torch.equal(written, policy_weights(learner.model)[f"0.{name}"])
            assert not torch.equal(written, base[f"0.{name}"])
            for value in adapters.values():
                value.mul_(2.0)
        learner.metrics()
        hybrid.mark_updated()
