"""Defaults of an accelerator: the table's conditions, what builds with it, and what `check` prints of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.check.installed_source import class_fields
from megatron_rl.check.model.megatron_settings import DDP_CONFIG, TRANSFORMER_CONFIG
from megatron_rl.cli.check import report_json
from megatron_rl.cli.check_text import report_text
from megatron_rl.config.load import load
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.megatron.layers import find_earlier_attention_backend
from megatron_rl.megatron.transformer_settings import role_settings
from megatron_rl.shapes.accelerator import (
    DDP,
    DEFAULTS,
    ENVIRONMENT,
    LAYERS,
    MEGATRON,
    STAYS_OFF,
    AcceleratedJob,
    AcceleratedRole,
    accelerator_defaults,
    capability_of,
)
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pretrained import parse_pretrained
from tests.conftest import STANDIN
from tests.hf_models import config_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DENSE, MIXTURE, LATENT = (
    parse_pretrained(config_of(name).to_dict()).shape for name in ("qwen2", "qwen3-moe", "deepseek-v3")
)
ALONE = ParallelLayout((0,))
EXPERT = ParallelLayout((0, 1), expert=2)


def role(shape: Any = DENSE, layout: ParallelLayout = ALONE, **values: Any) -> AcceleratedRole:
    return AcceleratedRole(shape, layout, **{"fused": True, "half_precision": True, **values})


def shipped(name: str, *overrides: str) -> CheckReport:
    return check_config(
        load(CONFIGS / name, overrides), without_files=True, shipped_models=CONFIGS / "models", patience=0
    )


@pytest.mark.parametrize(
    ("subject", "key", "value"),
    [
        (role(), "attention_backend", "fused"),
        (role(half_precision=False), "attention_backend", None),
        (role(fused=False), "attention_backend", None),
        (role(capability=80, has_flash_attention=True), "attention_backend", "flash"),
        (role(capability=80), "attention_backend", "fused"),
        (role(), "gradient_accumulation_fusion", True),
        (role(fused=False), "gradient_accumulation_fusion", None),
        (role(), "apply_rope_fusion", True),
        (role(LATENT), "apply_rope_fusion", None),
        (role(), "moe_permute_fusion", None),
        (role(MIXTURE), "moe_permute_fusion", True),
        (role(MIXTURE), "moe_router_fusion", True),
        (role(MIXTURE, replays_routing=True), "moe_router_fusion", None),
        (role(LATENT, EXPERT), "moe_shared_expert_overlap", True),
        (role(LATENT, EXPERT, adapted=True), "moe_shared_expert_overlap", None),
        (role(LATENT), "moe_shared_expert_overlap", None),
        (role(MIXTURE, EXPERT), "moe_shared_expert_overlap", None),
        (role(layout=ParallelLayout((0, 1), pipeline=2)), "batch_p2p_sync", False),
        (role(layout=ParallelLayout((0, 1), pipeline=2, virtual_pipeline=2)), "batch_p2p_sync", None),
    ],
)
def test_conditions_of_megatrons_fields(subject: AcceleratedRole, key: str, value: object) -> None:
    assert accelerator_defaults(subject, MEGATRON).get(key) == value
    # The user's own value wins.
    assert accelerator_defaults(subject, MEGATRON, {key: "mine"})[key] == "mine"


@pytest.mark.parametrize(
    ("heads", "capability", "deterministic", "kernel"),
    [
        ((128, 128), 80, False, "torch"),
        ((128, 128), 90, False, "fused"),
        ((256, 256), 90, True, "fused"),
        ((256, 256), 100, False, "torch"),
        ((192, 128), 100, False, "fused"),
        ((192, 128), 120, False, "torch"),
        ((128, 128), 100, True, "torch"),
        ((12, 12), 90, False, "torch"),
    ],
)
def test_kernels_of_attention(
    heads: tuple[int, int], capability: int, deterministic: bool, kernel: str
) -> None:
    """As launch/fused_attention has them from the libraries."""
    shape = dataclasses.replace(DENSE, head_dim=heads[0])
    if heads[0] != heads[1]:
        shape = dataclasses.replace(LATENT, qk_nope=heads[0] - 64, qk_rope=64, v_head_dim=heads[1])
    subject = role(shape, capability=capability, deterministic=deterministic)
    assert subject.attention_kernel == kernel
    layer = accelerator_defaults(subject, LAYERS).get("core_attention")
    assert layer == ("torch" if kernel == "torch" else None)


def test_ddp_and_environment() -> None:
    assert accelerator_defaults(role(), DDP) == {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert accelerator_defaults(role(distributed=False), DDP) == {"overlap_grad_reduce": True}
    sharded = ParallelLayout((0, 1), tensor=2)
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert accelerator_defaults(AcceleratedJob({"actor": ALONE}, False), ENVIRONMENT) == segments
    assert accelerator_defaults(AcceleratedJob({"actor": sharded}, False), ENVIRONMENT) == segments | one
    assert accelerator_defaults(AcceleratedJob({"actor": sharded}, True), ENVIRONMENT) == one


def test_rows_name_fields_that_exist_and_say_why() -> None:
    fields = {MEGATRON: class_fields(*TRANSFORMER_CONFIG), DDP: class_fields(*DDP_CONFIG)}
    for row in DEFAULTS:
        assert row.condition and row.reason
        known = fields.get(row.section)
        assert known is None or row.key in known, row.key


def test_gpus_of_the_planner_have_a_capability() -> None:
    capabilities = {name: capability_of(name) for name in load_constants().gpus}
    assert capabilities.pop("A100-80GB") == 80
    assert capabilities.pop("B200") == capabilities.pop("GB200") == 100
    assert set(capabilities.values()) == {90}


def test_the_attention_backend_becomes_a_member_of_megatrons_enum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron would take a string for none of its backends."""
    from megatron.core.transformer.enums import AttnBackend

    settings = role_settings(ALONE, overrides={"attention_backend": "fused"})
    assert settings["attention_backend"] is AttnBackend.fused

    # A model of the process that is built already has Megatron's own default.
    kernels = ("FLASH", "FUSED", "UNFUSED")
    for kernel in kernels:
        monkeypatch.setenv(f"NVTE_{kernel}_ATTN", "0")
    assert not find_earlier_attention_backend()
    for kernel in kernels:
        monkeypatch.setenv(f"NVTE_{kernel}_ATTN", "1")
    assert find_earlier_attention_backend() == {"attention_backend": "auto"}


def test_hosts_have_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.on_host() != device.on_accelerator()
    if device.on_accelerator():
        return
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    device.set_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert "PYTORCH_ALLOC_CONF" not in device.os.environ
    monkeypatch.setattr(device, "_ON_HOST", False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    device.set_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert "PYTORCH_ALLOC_CONF" not in device.os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "mine")
    device.set_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert device.os.environ["PYTORCH_ALLOC_CONF"] == "mine"


def test_check_shows_them_with_their_reasons() -> None:
    report = shipped("bench/deepseek-v3-1024gpu.yaml")
    keys = {default.row.key: default.row.value for default in report.accelerator}
    assert keys["attention_backend"] == "fused" and keys["moe_shared_expert_overlap"] is True
    assert "apply_rope_fusion" not in keys
    text = report_text(report, "config.yaml", verbose=True)
    for default in report.accelerator:
        assert default.row.key in text and default.row.reason in text
    record = json.loads(json.dumps(report_json(report)))["accelerator"]
    assert {row["key"] for row in record} == set(keys)

    # A value of the user's is no default, and a run without GPUs has none.
    report = shipped("bench/deepseek-v3-1024gpu.yaml", "actor.megatron.moe_permute_fusion=false")
    assert "moe_permute_fusion" not in {default.row.key for default in report.accelerator}
    if not torch.cuda.is_available():
        assert not shipped("bench/qwen2.5-7b-8gpu.yaml", "gpu=null").accelerator


def test_expandable_segments_and_vllms_own_all_reduce_exclude_each_other() -> None:
    name = "bench/llama3.1-70b-128gpu.yaml"
    assert "PYTORCH_ALLOC_CONF" not in {default.row.key for default in shipped(name).accelerator}
    other = shipped(name, "rollout.vllm.disable_custom_all_reduce=true")
    assert "PYTORCH_ALLOC_CONF" in {default.row.key for default in other.accelerator}


def test_experts_in_plain_layers_on_a_gpu_are_an_error() -> None:
    report = shipped("bench/qwen3-30b-a3b-32gpu.yaml", "model.attention=torch")
    (error,) = [error for error in report.errors if str(error.where).startswith("model.attention")]
    assert "experts are computed one after the other" in error.message and error.expected and error.fix
    assert not shipped("bench/qwen2.5-7b-8gpu.yaml", "model.attention=torch").errors


def test_the_documentation_has_every_row() -> None:
    # The page marks versions as code, which the table of the package does not.
    text = (CONFIGS.parent / "docs/accelerators.md").read_text(encoding="utf-8").replace("`", "")
    for row in DEFAULTS:
        value = str(row.value).lower() if isinstance(row.value, bool) else row.value
        assert f"| {row.key} | {value} | {row.condition} | {row.reason} |".replace("`", "") in text
    for key, reason in STAYS_OFF.items():
        assert f"| {key} | {reason} |".replace("`", "") in text


@pytest.mark.slow
def test_megatron_takes_every_default(tmp_path: Path) -> None:
    """In its trial, with the stand-in of Transformer Engine, whose functions the fields need."""
    roles = []
    for family, layout in (("qwen2", ALONE), ("qwen3-moe", EXPERT), ("deepseek-v3", EXPERT)):
        model = tmp_path / f"{family}.json"
        model.write_text(config_of(family).to_json_string(use_diff=False), encoding="utf-8")
        subject = role(parse_pretrained(config_of(family).to_dict()).shape, layout)
        overrides = accelerator_defaults(subject, MEGATRON)
        # The stand-in has no fused permutation.
        overrides.pop("moe_permute_fusion", None)
        roles.append(
            {
                "role": family,
                "model": str(model),
                "layout": dataclasses.asdict(layout),
                "scalar_head": False,
                "dtype": "bfloat16",
                "recompute": "full",
                "fused": True,
                "overrides": overrides,
                "optimizer": dataclasses.asdict(OptimizerConfig()),
                "ddp": accelerator_defaults(subject, DDP),
            }
        )
    paths = [str(STANDIN), str(CONFIGS.parent)]
    answer = subprocess.run(
        [sys.executable, "-m", "megatron_rl.megatron.trial"],
        input=json.dumps(roles),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == {}
