"""A role that offloads moves what it is used for, and nothing else."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_rl.config.sections.models import LoraConfig, OptimizerConfig
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.parallel import device
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.hf.weights import load_weights
from megatron_rl.parallel.lora import adapter_parameters, add_adapters, policy_weights
from megatron_rl.parallel.model import ParallelModel, build_model, live_parameters
from megatron_rl.parallel.optimizer import Optimizer, wrap
from megatron_rl.parallel.residency import Residency, Use
from megatron_rl.rollout.torch import TorchEngine
from megatron_rl.shapes.layout import ParallelLayout
from tests.hf_models import save_model


def trained(path: Path, lora: LoraConfig | None = None) -> Residency:
    """Return a model's residency after its first step."""
    device.initialize()
    config = save_model("llama", path).config
    model = build_model(config, ParallelGroups(ParallelLayout((0,))), dtype=torch.bfloat16)
    load_weights(model, path)
    if lora is not None:
        add_adapters(model, lora, seed=1, trainable=True)
    wrap(model, True)
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
    learner.leave()
    assert moved(learner) == pytest.approx(size + states, rel=0.01)
    assert on_device([*weights, *mains, *gradients(learner.model)]) == {False}
    for _ in range(2):
        with learner.resident(Use.READ), learner.resident(Use.READ):
            assert moved(learner) == pytest.approx(size, rel=0.01)
            assert on_device(weights) == {True}
            assert on_device([*mains, *gradients(learner.model)]) == {False}
        assert on_device(weights) == {False} and moved(learner) == 0, "nobody had written them"
    with learner.resident(Use.STATE):
        assert moved(learner) == pytest.approx(size + states, rel=0.01)
        assert on_device(gradients(learner.model)) == {False}
    assert moved(learner) == pytest.approx(size + states, rel=0.01)
    with learner.resident(Use.READ):
        with learner.resident(Use.LEARN):
            assert not any(buffer.any() for buffer in gradients(learner.model))
            gradients(learner.model)[0].fill_(1.0)
            weights[0].fill_(3.0)
        assert on_device(weights) == {True} and on_device([*mains, *gradients(learner.model)]) == {False}
    assert moved(learner) == pytest.approx(2 * (size + states), rel=0.01), "gradients never travel"
    with learner.resident(Use.LEARN):
        assert not any(buffer.any() for buffer in gradients(learner.model))
        assert bool((weights[0] == 3.0).all())
        for tensor, value in zip((*weights[1:], *mains), before[1:], strict=True):
            assert torch.equal(tensor, value)


def test_a_plan_stays_compiled_while_weights_come_and_go(learner: Residency, tmp_path: Path) -> None:
    assert learner.model is not None
    engine = TorchEngine.from_hf(tmp_path, dtype=torch.bfloat16)
    learner.leave()
    hybrid = HybridEngine(learner.model, engine, resident=partial(learner.resident, Use.READ))
    with hybrid.generation_mode():
        first = hybrid._movements[0]._execution
    with learner.resident(Use.STATE), torch.no_grad():
        for value in live_parameters(learner.model).values():
            value.mul_(2.0)
    hybrid.mark_updated()
    held = torch.empty(1 << 20)  # what was freed is another's
    with hybrid.generation_mode() as synced:
        assert synced.values() and hybrid._movements[0]._execution is first is not None
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
    learner.leave()
    assert moved(learner) == pytest.approx(size + states, rel=0.01)
    hybrid = HybridEngine(learner.model, engine, resident=partial(learner.resident, Use.READ))
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    for _ in range(2):
        with hybrid.generation_mode() as synced:
            assert synced.values()
        assert on_device([*base.values(), *adapters.values()]) == {False}
        assert moved(learner) == pytest.approx(size, rel=0.01), "base and adapters were only read"
        with learner.resident(Use.STATE), torch.no_grad():
            written = engine.parameters()["model.layers.1.mlp.down_proj.weight"]
            assert torch.equal(written, policy_weights(learner.model)[f"0.{name}"])
            assert not torch.equal(written, base[f"0.{name}"])
            for value in adapters.values():
                value.mul_(2.0)
        learner.metrics()
        hybrid.mark_updated()
