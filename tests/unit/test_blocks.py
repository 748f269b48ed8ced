"""The blocks of layers: the registries agree, and a made-up mixer needs nothing but its own two halves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron import blocks as builders
from megatron_rl.megatron.blocks.builder import BlockBuilder, LayerOptions
from megatron_rl.megatron.features import FEATURES
from megatron_rl.megatron.model import build_model
from megatron_rl.megatron.packing import PackedRows
from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.placement import PlacementProblem, search_placements
from megatron_rl.shapes import families
from megatron_rl.shapes.blocks import FEED_FORWARDS, MIXERS
from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.blocks.block import Block, LocalLayer, Mixer
from megatron_rl.shapes.blocks.mlp import Mlp
from megatron_rl.shapes.family import ConfigReader, Family, Fields
from megatron_rl.shapes.hardware import Machine, load_constants
from megatron_rl.shapes.layer_weights import Source, Weight
from megatron_rl.shapes.layout import ParallelLayout, stage_layers, trainer_problems
from megatron_rl.shapes.memory import (
    LayerImplementation,
    OptimizerChoice,
    saved_activation_bytes,
    training_memory,
)
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape
from megatron_rl.shapes.traffic import shared_bytes

VOCABULARY = 131


def test_every_block_that_is_counted_can_be_built() -> None:
    assert set(builders.BUILDERS) == MIXERS.keys() | FEED_FORWARDS.keys()


def test_every_feature_is_some_families() -> None:
    used = {name for family in families.FAMILIES.values() for name in family.features}
    assert used == set(FEATURES)


# ---------------------------------------------------------------- a made-up mixer: its sizes


@dataclass(frozen=True)
class Decay(Mixer):
    """A sum of earlier tokens, in which older ones count less: one learned decay per channel."""

    width: int
    """Channels."""

    name: ClassVar[str] = "decay"
    noun: ClassVar[str] = "decaying sums"
    first_projection: ClassVar[str] = "in_proj"

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        inner = Source("self_attn.in_proj.weight", (self.width, shape.hidden), "rows")
        outer = Source("self_attn.out_proj.weight", (shape.hidden, self.width), "columns")
        yield Weight("self_attention.in_proj.weight", "rows", (inner,))
        yield Weight("self_attention.rate", "rows", (Source("self_attn.rate", (self.width,), "rows"),))
        yield Weight("self_attention.out_proj.weight", "columns", (outer,))

    def saved_elements(self, layer: LocalLayer) -> float:
        return 2 * self.width / layer.tensor

    def live_elements(self, layer: LocalLayer) -> float:
        return 2 * self.width / layer.tensor

    def flops_per_token(self, shape: ModelShape) -> float:
        return 2.0 * self.width

    def state_bytes(self, shape: ModelShape, dtype_bytes: float) -> float:
        return 4.0 * self.width

    def other_sharded_heads(self, shape: ModelShape) -> dict[str, int]:
        return {"channels of decaying sums": self.width}

    def problems(
        self, shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any]
    ) -> Iterator[UserError]:
        if layout.context > 1:
            yield UserError(f"{self.noun} need complete rows", where=f"{layout.path}.context")


# ---------------------------------------------------------------- its module in Megatron


def decayed(values: Tensor, rate: Tensor) -> Tensor:
    """Return the sums [rows, length, width] of ``values``, token by token."""
    total = torch.zeros_like(values[:, 0])
    sums = []
    for token in range(values.shape[1]):
        total = rate.sigmoid() * total + values[:, token]
        sums.append(total)
    return torch.stack(sums, dim=1)


class DecayLayer(MegatronModule):
    needs_bucketed_rows = True

    def __init__(self, config: Any, layer_number: int, *, mixer: Decay, **_: Any) -> None:
        super().__init__(config)
        self.in_proj = nn.Linear(config.hidden_size, mixer.width, bias=False)
        self.rate = nn.Parameter(torch.zeros(mixer.width))
        self.out_proj = nn.Linear(mixer.width, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, attention_mask: Any = None, *, packed_seq_params: PackedRows, **_: Any
    ) -> tuple[Tensor, None]:
        buckets = packed_seq_params.fill_buckets(self.in_proj(hidden).flatten(0, 1))
        outputs = [decayed(bucket, self.rate).flatten(0, 1) for bucket in buckets]
        sums = packed_seq_params.join_buckets(outputs)
        return self.out_proj(sums).unsqueeze(1), None


class DecayBuilder(BlockBuilder[Decay]):
    def layer_spec(self, layer: Any, sublayer: Decay, options: LayerOptions) -> Any:
        module = ModuleSpec(module=DecayLayer, params={"mixer": sublayer})
        return replace(layer, submodules=replace(layer.submodules, self_attention=module))


# ---------------------------------------------------------------- a family that has it in some layers


def structure(reader: ConfigReader) -> Fields:
    decay = Block(Decay(reader.size("decay_width")), Mlp())
    attention = Block(Attention(), Mlp())
    layers = range(reader.size("num_hidden_layers"))
    return {"blocks": tuple(decay if layer % 2 == 0 else attention for layer in layers)}


FAMILY = Family("Decay", "decay", "DecayForCausalLM", "DecayForSequenceClassification", structure)


class DecayConfig(LlamaConfig):
    model_type = "decay"


class ReferenceLayer(nn.Module):
    """The mixer as a module of transformers, on rows of equal length."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden, width, bias=False)
        self.rate = nn.Parameter(torch.randn(width))
        self.out_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.out_proj(decayed(self.in_proj(hidden_states), self.rate)), None


def config(**changes: Any) -> DecayConfig:
    sizes: dict[str, Any] = {
        "architectures": ["DecayForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "decay_width": 48,
    }
    return DecayConfig(**sizes | changes)


@pytest.fixture
def decay_shape(monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    """Register the mixer and the family, and return the shape of the tiny model."""
    monkeypatch.setitem(MIXERS, "decay", Decay)
    monkeypatch.setitem(builders.BUILDERS, "decay", DecayBuilder())
    table: Mapping[str, Any]
    for table in (families.FAMILIES, families.BY_MODEL_TYPE):
        monkeypatch.setitem(table, "decay", FAMILY)
    return load_shape(config().to_dict())


class DecayForCausalLM(LlamaForCausalLM):
    def __init__(self, config: DecayConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers[::2]:
            layer.self_attn = ReferenceLayer(64, 48)


def reference_model() -> DecayForCausalLM:
    torch.manual_seed(0)
    return DecayForCausalLM(config(initializer_range=0.2)).eval()


def test_a_new_mixer_computes_what_its_reference_does(decay_shape: ModelShape, tmp_path: Path) -> None:
    reference = reference_model()
    reference.save_pretrained(tmp_path)
    device.initialize()
    model = build_model(reference.config, ParallelGroups(ParallelLayout((0,))), dtype=torch.float32)
    load_weights(model, tmp_path)

    lengths = (5, 1, 17)
    rows = [torch.arange(length)[None] * 7 % VOCABULARY for length in lengths]
    with torch.no_grad():
        expected = torch.cat([reference(row).logits[0] for row in rows])
        with device.megatron_mode():
            (chunk,) = model.chunks
            tokens = torch.cat(rows, dim=1)
            hidden = chunk(tokens, None, None, packed_seq_params=model.pack(lengths))
            head: Any = chunk.output_layer
            logits = hidden.flatten(0, 1) @ head.weight.T
    assert expected.std() > 0.1
    torch.testing.assert_close(logits[:, :VOCABULARY], expected, atol=1e-4, rtol=0)


def test_a_new_mixer_is_counted_as_it_says(decay_shape: ModelShape) -> None:
    shape = decay_shape
    assert shape.parameters == sum(parameter.numel() for parameter in reference_model().parameters())

    # Two layers of attention and two of the mixer.
    attention = replace(shape, blocks=())
    assert shape.kv_elements == attention.kv_elements / 2
    assert shape.state_bytes_per_row(2) == 2 * 4 * 48 / 2
    assert shape.attention_flops(100.0) == attention.attention_flops(100.0) / 2 + 2 * 2 * 48
    (decay, other) = shape.block(0), shape.block(1)
    saved = [saved_activation_bytes(shape, block, 1, 1, 1, "none", fused=True) for block in (decay, other)]
    assert saved[0] - 2 * 2 * 48 == saved[1] - 2 * other.mixer.saved_elements(layer(shape))

    layout = ParallelLayout((0, 1), tensor=2)
    stages = stage_layers(shape.layers, layout)
    memory = training_memory(shape, layout, stages, 0, OptimizerChoice(), LayerImplementation(), 100, 1)
    assert memory.activations > 100 * 2 * (saved[0] / 2)
    traffic = shared_bytes(shape, layout, 1, 2)
    assert traffic.model_bytes == 2 * shape.parameters
    assert sum(traffic.resident[0]) < traffic.model_bytes


def layer(shape: ModelShape) -> LocalLayer:
    return LocalLayer(shape, 1, 1, 1, 2, True)


def test_a_new_mixer_is_refused_where_it_cannot_be_divided(decay_shape: ModelShape) -> None:
    def errors(**sizes: Any) -> str:
        layout = ParallelLayout(tuple(range(4)), **sizes)
        return "".join(map(str, trainer_problems(decay_shape, layout)))

    assert "decaying sums need complete rows" in errors(context=2)
    assert not errors(tensor=2)
    wide = replace(decay_shape, blocks=(Block(Decay(47), Mlp()),) * 4)
    assert "47 channels of decaying sums" in str(trainer_problems(wide, ParallelLayout((0, 1), tensor=2))[0])


def test_a_new_mixer_is_planned(decay_shape: ModelShape) -> None:
    large = config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_000,
        decay_width=8192,
    )
    shape = load_shape(large.to_dict())
    constants = load_constants()
    batch = StepBatch(128, 8, 2, 512.0, response_lengths(1024.0, 4096.0, "variable"), 4608.0)
    machine = Machine(constants.cluster("h100", 16), constants)
    problem = PlacementProblem(
        {"actor": shape}, "grpo", batch, machine, context_parallel=False, shared_stage_split=False
    )
    assert search_placements(problem).plans[0].step.total > 0


def test_a_mixer_without_a_builder_can_only_be_planned(
    decay_shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(builders.BUILDERS, "decay")
    with pytest.raises(UserError, match="'decay'"):
        builders.prepare_blocks(decay_shape, ParallelLayout((0,)))
