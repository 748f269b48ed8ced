"""Packed rows in Transformer Engine's form (THD) give the same logits through Megatron's own code."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch.nn.attention import varlen

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron import layers
from megatron_rl.megatron.layers import PackedAttention
from megatron_rl.megatron.model import ParallelModel, build_model
from megatron_rl.megatron.packing import make_row_boundaries
from megatron_rl.megatron.schedule import build_microbatches, forward_only
from megatron_rl.metrics import merge_metrics
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch, token_index
from tests.hf_models import save_model


class DocumentedAttention(torch.nn.Module):
    """Compute padding-causal attention of ``qkv_format="thd"`` in float64, as documented."""

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, *,
        attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        packed = packed_seq_params
        assert attention_mask is None and attention_bias is None
        assert packed.qkv_format == "thd" and attn_mask_type.name in ("causal", "padding_causal")
        assert all(tensor.dim() == 3 for tensor in (query, key, value)), "3 dimensions when thd"
        assert packed.cu_seqlens_q.dtype == packed.cu_seqlens_kv.dtype == torch.int32
        assert packed.cu_seqlens_q.dim() == packed.cu_seqlens_kv.dim() == 1
        assert packed.cu_seqlens_q_padded is None and packed.cu_seqlens_kv_padded is None
        assert packed.cp_group is None and packed.local_cp_size is None
        bounds = packed.cu_seqlens_q.tolist()
        sizes = [end - begin for begin, end in pairwise(bounds)]
        assert bounds[0] == 0 and bounds[-1] == len(query) == len(key) and min(sizes) > 0
        assert packed.max_seqlen_q == packed.max_seqlen_kv == -(-max(sizes) // 8) * 8
        repeats = query.shape[1] // key.shape[1]
        q = query.double()
        k, v = (tensor.double().repeat_interleave(repeats, dim=1) for tensor in (key, value))
        out = torch.empty_like(v)
        for begin, end in pairwise(bounds):
            scores = torch.einsum("ihd,jhd->hij", q[begin:end], k[begin:end]) / q.shape[-1] ** 0.5
            hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[begin:end] = torch.einsum("hij,jhd->ihd", weights, v[begin:end])
        return out.to(query.dtype).flatten(1)  # [tokens, heads * size]


def build(family: str, tmp_path: Any, **more: Any) -> Any:
    reference = save_model(family, tmp_path)
    device.initialize()
    model = build_model(reference.config, ParallelGroups(ParallelLayout((0,))), dtype=torch.float32, **more)
    load_weights(model, tmp_path)
    return model


def with_attention_of_ones_own(model: Any) -> None:
    """Replace a model's attention by the one that a provider may build with Transformer Engine."""
    config, arguments = model.transformer_config, model.spec.gpt_kwargs
    model.uses_transformer_engine, model.accepts_packed_rows = True, False
    for chunk in model.chunks:
        chunk.rotary_pos_emb = RotaryEmbedding(
            config.kv_channels,
            rotary_percent=arguments["rotary_percent"],
            rotary_base=arguments["rotary_base"],
            use_cpu_initialization=True,
            cp_group=model.groups.context,
        )
        model.spec.finish(chunk)
        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention = DocumentedAttention()


def hidden_states(model: Any, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    (chunk,) = model.chunks
    with device.megatron_mode():
        return chunk(tokens[None], None, None, packed_seq_params=model.pack(lengths))


@pytest.mark.parametrize("family", ["qwen2", "llama3", "qwen3"])
@pytest.mark.parametrize("lengths", [[5, 1, 17, 3], [9]], ids=str)
def test_thd_gives_the_states_of_packed_rows(family, lengths, tmp_path):
    model = build(family, tmp_path)
    tokens = torch.randint(0, 131, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    weight = next(model.chunks[0].parameters())
    expected = hidden_states(model, tokens, lengths)
    (wanted,) = torch.autograd.grad(expected.square().sum(), weight)
    with_attention_of_ones_own(model)
    found = hidden_states(model, tokens, lengths)
    (gradient,) = torch.autograd.grad(found.square().sum(), weight)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5


def test_boundaries():
    packed = make_row_boundaries([3, 1, 4])
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 3, 4, 8]
    assert packed.cu_seqlens_q.dtype == torch.int32 and packed.max_seqlen_q == packed.max_seqlen_kv == 8


def documented_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Compute what the documentation of `torch.nn.attention.varlen.varlen_attn` says, row by row."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "its kernel has one head size"
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q is cu_seq_k and max_q == max_k
    repeats = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    rows = []
    for begin, end in pairwise(cu_seq_q.tolist()):
        assert end - begin <= max_q
        q, k, v = (heads[begin:end].transpose(0, 1) for heads in (query, key, value))
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        left, right = window_size
        assert right == 0, "causal"
        hidden = (distance < 0) if left == -1 else (distance < 0) | (distance > left)
        rows.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["qwen2", "mistral", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_attention_between_boundaries_is_that_of_rows_by_length(family, tmp_path, monkeypatch):
    """Grouped keys, a window, and values narrower than keys, as torch's kernel takes them."""
    real = inspect.signature(varlen.varlen_attn).parameters
    assert set(inspect.signature(documented_varlen_attn).parameters) <= set(real)
    model = build(family, tmp_path)
    assert not model.uses_varlen_kernel, "hosts gather rows by length"
    lengths = [5, 1, 17, 3]
    tokens = torch.randint(0, 131, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    weight = next(model.chunks[0].parameters())
    expected = hidden_states(model, tokens, lengths)
    (wanted,) = torch.autograd.grad(expected.square().sum(), weight)

    monkeypatch.setattr(varlen, "varlen_attn", documented_varlen_attn)
    monkeypatch.setattr(PackedAttention, "uses_varlen_kernel", True)
    model.uses_varlen_kernel = True
    found = hidden_states(model, tokens, lengths)
    (gradient,) = torch.autograd.grad(found.square().sum(), weight)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5


def batch_of(lengths: list[int]) -> TrainBatch:
    tokens = torch.randint(0, 131, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    return TrainBatch(
        tokens=tokens,
        lengths=torch.tensor(lengths),
        response_mask=mask,
        loss_weights=mask / len(tokens),
        temperature=torch.ones(len(lengths)),
    )


def test_scores_in_thd_and_what_padding_they_count(tmp_path, monkeypatch):
    """Padding to a multiple is a row of its own, counted, and changes nothing."""
    model = build("qwen2", tmp_path)
    batch = batch_of([7, 9, 2, 12, 5])

    def scores() -> list[torch.Tensor]:
        parts = forward_only(model, batch, 20, batch.response_mask)
        places = torch.cat([token_index(batch.lengths, torch.tensor(part.rows)) for part in parts])
        found = [torch.cat(outputs) for outputs in zip(*(part.outputs for part in parts), strict=True)]
        return [output[places.argsort()] for output in found]

    expected = scores()
    with_attention_of_ones_own(model)
    monkeypatch.setattr(ParallelModel, "token_multiple", 16)
    for one, other in zip(scores(), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    micros, padding = build_microbatches(model, batch, 20, batch.response_mask)
    padded = [micro.inputs.shape[1] for micro in micros]
    assert [tokens % 16 for tokens in padded] == [0] * len(micros)
    assert padding.values() == {"padding/fraction": pytest.approx(1 - 35 / sum(padded))}


@pytest.mark.parametrize(
    ("settings", "tensor", "multiple"),
    [
        ({}, 4, 1), ({"sequence_parallel": True}, 4, 4), ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 1, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "sequence_parallel": True}, 2, 64),
    ],
)  # fmt: skip
def test_what_a_micro_batch_must_be_a_multiple_of(settings, tensor, multiple):
    absent = dict.fromkeys(("sequence_parallel", "fp8", "fp4", "use_transformer_engine_op_fuser"))
    config = SimpleNamespace(**{**absent, **settings})
    groups: Any = SimpleNamespace(layout=ParallelLayout(tuple(range(tensor)), tensor=tensor))
    spec: Any = SimpleNamespace(transformer_config=config)
    assert ParallelModel([], [], groups, spec, True).token_multiple == multiple


def test_padding_of_ranks_is_a_share_of_all_their_tokens():
    """A rank with few tokens must not weigh as much as one with many."""
    model: Any = SimpleNamespace(
        groups=SimpleNamespace(
            layout=ParallelLayout((0,)),
            coordinates=SimpleNamespace(data=0, context=0),
            data=SimpleNamespace(size=lambda: 1),
        ),
        transformer_config=SimpleNamespace(hidden_size=8),
        token_multiple=4,
        routing=None,
        pack=make_row_boundaries,
    )
    few, many = batch_of([1]), batch_of([31, 31])
    found = merge_metrics(
        build_microbatches(model, batch, 64, batch.response_mask)[1] for batch in (few, many)
    )
    assert found.values()["padding/fraction"] == pytest.approx(5 / 68)


def test_context_parallelism_of_whole_rows_is_refused():
    layer = torch.nn.Module()
    layer.core_attention = DocumentedAttention()
    chunk: Any = torch.nn.Sequential(layer)
    groups: Any = SimpleNamespace(layout=ParallelLayout((0, 1), context=2))
    with pytest.raises(UserError, match="complete rows") as refused:
        ParallelModel([chunk], [chunk], groups, cast(Any, None), True)
    assert "DocumentedAttention" in str(refused.value)


def test_attention_without_a_fused_kernel_is_told_once_and_why(monkeypatch):
    name = "transformer_engine.pytorch.attention.dot_product_attention"
    settings = SimpleNamespace(_log_level=logging.WARNING)

    def choose(parameters):
        log = logging.getLogger("DotProductAttention")
        log.setLevel(settings._log_level)
        log.debug("Running with config=%s", parameters)
        log.debug("Disabling FusedAttention: %s", parameters)
        log.debug("Selected backend = %s.", "UnfusedDotProductAttention")

    chosen = {"use_fused_attention": True, "use_unfused_attention": False, "attention_params": "too wide"}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_attention_backends=chosen))
    choice = SimpleNamespace(AttentionLogging=settings, get_attention_backend=choose)
    monkeypatch.setitem(sys.modules, f"{name}.utils", choice)
    told: list[str] = []
    for _ in range(2):
        monkeypatch.setattr(layers, "_warned_of_unfused", False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layers.warn_of_unfused_attention()
            assert not caught
            chosen |= {"use_fused_attention": False, "use_unfused_attention": True}
            layers.warn_of_unfused_attention()
            layers.warn_of_unfused_attention()
        told += [str(warning.message) for warning in caught]
        chosen |= {"use_fused_attention": True, "use_unfused_attention": False}
        vars(choice).pop("get_attention_backend", None)  # as in a version that has it elsewhere
    assert "reasons against fused kernels: Disabling FusedAttention: too wide. Fix" in told[0]
    assert "unavailable (AttributeError" in told[1]
    assert len(told) == 2
    log = logging.getLogger("DotProductAttention")
    assert (settings._log_level, log.handlers, log.propagate) == (logging.WARNING, [], True)
