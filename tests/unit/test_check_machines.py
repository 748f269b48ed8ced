"""What `check` says of the machines of a run: memory, hosts, settings handed on, short first tries."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from config_workspace import write_model, write_workspace

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.check.engine import arguments as engine_arguments
from megatron_rl.check.model import megatron_settings
from megatron_rl.check.model.megatron_settings import DROPPED, TRANSFORMER_CONFIG, check_model_settings
from megatron_rl.check.sizes import MEMORY_TOLERANCE, check_memory
from megatron_rl.check.warnings import TRIED
from megatron_rl.cli.check_text import report_text
from megatron_rl.config.budget import MemoryItem, RankMemory
from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.config.engines import ENGINES
from megatron_rl.config.load import load
from megatron_rl.errors import UserError
from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.blocks.block import Block
from megatron_rl.shapes.blocks.mlp import Mlp
from megatron_rl.shapes.model import ModelShape
from megatron_rl.user_code import find_module

pytestmark = pytest.mark.usefixtures("functions_load_once")

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    write_workspace(root)
    write_model(root / "small_heads", head_dim=16)
    write_model(root / "odd_heads", head_dim=48)
    return root


@pytest.fixture(autouse=True)
def inside(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)


def check(*overrides: str, **options: float) -> CheckReport:
    return check_config(load("config.yaml", overrides), None, **options)


def shipped(name: str, *overrides: str) -> CheckReport:
    return check_config(
        load(CONFIGS / name, overrides), without_files=True, shipped_models=CONFIGS / "models", patience=0
    )


def test_the_name_of_a_gpu_says_how_much_memory_it_has() -> None:
    large = ["actor.recompute=none", "batch.tokens_per_microbatch=32768", "gpu_memory_gib=null"]
    report = shipped(
        "qwen2.5-7b-8gpu.yaml", *large, "gpu=h100", "actor.layout.tensor=1", "actor.offload=false"
    )
    assert report.config.gpu_memory_gib == pytest.approx(79.2)
    assert report.origins["gpu_memory_gib"].kind == "derived"
    assert report.errors and {error.where.split(" ")[0] for error in report.errors if error.where} == {"gpu"}
    stated = shipped("qwen2.5-7b-8gpu.yaml", *large[:2], "gpu=h100", "gpu_memory_gib=500")
    assert stated.config.gpu_memory_gib == 500 and not stated.errors


@pytest.mark.parametrize(("gib", "errors", "warnings"), [(79, 0, 0), (90, 0, 1), (104, 1, 0)])
def test_an_estimate_is_an_error_beyond_what_it_may_be_wrong_by(gib: int, errors: int, warnings: int) -> None:
    config = load("config.yaml", ["gpu_memory_gib=79"]).config
    assert config is not None and 79 * (1 + MEMORY_TOLERANCE) < 104
    held = [RankMemory(0, (MemoryItem("weights", gib * 2**30, ("learn",), "many"),))]
    wrong, tight = check_memory(config, held, "gpu_memory_gib")
    assert (len(wrong), len(tight)) == (errors, warnings)
    for error in (*wrong, *tight):
        assert "94.8 may fit" in str(error.expected) and error.got
        assert "actor.recompute=full" in str(error.fix)
    spent = load("config.yaml", ["gpu_memory_gib=79", "actor.recompute=full", "actor.offload=true"]).config
    assert spent is not None
    for error in [found for each in check_memory(spent, held, "gpu_memory_gib") for found in each]:
        assert "recompute" not in str(error.fix) and "actor.offload" not in str(error.fix)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_head_sizes_without_a_kernel_are_refused_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = ENGINES["vllm"].capabilities.host_kernels["attention"]
    assert list(sizes) == CPUAttentionBackend.get_supported_head_sizes()
    monkeypatch.setattr(engine_arguments, "has_cpu_build", lambda: True)
    for model in ("small_heads", "odd_heads"):
        (error,) = check(f"model.path={model}", "rollout.engine=vllm").errors
        assert "no kernel for this model's layers of attention" in error.message and str(
            error.where
        ).startswith("rollout.engine")
        assert not check(f"model.path={model}", "rollout.engine=torch", "rollout.tensor=1").errors
        assert not check(f"model.path={model}", "rollout.engine=vllm", "gpu=h100").errors
        assert check_config(load("config.yaml", [f"model.path={model}", "gpu=h100"]), training=True).errors
    (error,) = check("rollout.vllm.enable_chunked_prefill=true").errors
    assert str(error.where).startswith("rollout.vllm.enable_chunked_prefill")
    monkeypatch.setattr(engine_arguments, "has_cpu_build", lambda: False)
    assert not check("model.path=small_heads", "rollout.engine=vllm").errors


def test_delta_nets_of_vllm_are_refused_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_spec("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    assert source is not None and source.origin is not None
    assert "mixed_qkv.dtype == torch.bfloat16" in Path(source.origin).read_text()
    monkeypatch.setattr(engine_arguments, "has_cpu_build", lambda: True)
    sizes = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp_width": 128}
    shape = ModelShape("hybrid", **sizes, vocab=100, linear_layers=(0, 1, 2))

    def errors(shape: ModelShape, *overrides: str, for_this_machine: bool = False) -> list[UserError]:
        config = load("config.yaml", ["rollout.engine=vllm", *overrides]).config
        assert config is not None
        return list(engine_arguments.host_engine_errors(config, shape, for_this_machine=for_this_machine))

    (error,) = errors(shape, "model.dtype=float32")
    assert (error.where, error.got) == ("rollout.engine", "vllm")
    assert error.fix is not None and "rollout.engine=torch" in error.fix
    assert errors(shape, "model.dtype=float32", "gpu=h100", for_this_machine=True)
    assert not errors(shape, "model.dtype=float32", "gpu=h100")
    assert not errors(shape, "model.dtype=float32", "rollout.engine=torch", "rollout.tensor=1")
    assert errors(shape, "model.dtype=bfloat16")
    assert not errors(replace(shape, linear_layers=()), "model.dtype=float32")
    # Kinds of attention with heads of one size have one error.
    blocks = (Block(Attention(24, 2), Mlp()), Block(Attention(24, 1, keys_are_values=True), Mlp())) * 2
    (error,) = errors(replace(shape, linear_layers=(), blocks=blocks))
    assert error.got == "a head size of 24"


def test_a_critic_that_no_piece_reads_is_a_warning() -> None:
    (warning,) = check("critic={}").warnings
    assert (
        warning.where is not None and warning.where.startswith("critic") and "not use it" in warning.message
    )
    assert not check("critic={}", "algorithm.advantage=gae").warnings


def test_a_first_try_is_shorter_than_the_warm_up() -> None:
    report = check("steps=2", "actor.optimizer.warmup_steps=10")
    assert not report.errors and "still warming up" in report.warnings[0].message
    for name in ("qwen2.5-7b-8gpu.yaml", "llama3.1-70b-64gpu.yaml", "bench/qwen3-32b-64gpu.yaml"):
        assert not shipped(name, "steps=2").errors


def test_a_rollout_is_not_told_to_have_a_pipeline() -> None:
    # Its weights need more than the GPUs of a node.
    warnings = shipped("bench/deepseek-v3-1024gpu.yaml").warnings
    assert not [warning for warning in warnings if "spans nodes" in warning.message]
    report = shipped("qwen2.5-7b-8gpu.yaml", "gpus_per_node=2", "rollout.tensor=4")
    (warning,) = [warning for warning in report.warnings if "spans nodes" in warning.message]
    assert "pipeline" not in str(warning.fix) and "rollout.tensor=2" in str(warning.fix)


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("cp_comm_type", "a2a", None),
        ("mtp_num_layers", 1, None),
        ("tp_comm_overlap", True, False),
        ("cuda_graph_impl", "local", "none"),
        ("flash_decode", True, False),
        ("cross_entropy_loss_fusion", True, False),
        ("perform_initialization", True, False),
    ],
)
def test_settings_of_megatron_without_effect_are_refused(name: str, value: object, off: object) -> None:
    (error,) = check_model_settings({name: value})
    assert "would have no effect" in error.message and error.where == f"actor.megatron.{name}"
    assert error.fix == f"remove `actor.megatron.{name}`"
    assert not check_model_settings({name: off})


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_settings_that_are_handed_on_untried_are_said() -> None:
    (warning,) = check("rollout.vllm={kv_cache_dtype: fp8, max_num_seqs: 4}").warnings
    assert "never tried here" in warning.message and warning.got == "kv_cache_dtype: fp8"
    assert not check("rollout.vllm={kv_cache_dtype: auto, max_num_seqs: 4}").warnings
    (warning,) = check("actor.ddp={check_for_large_grads: true, bucket_size: 1000}", patience=120).warnings
    assert warning.got == "check_for_large_grads: True"


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(
    ("override", "need"),
    [
        ("actor.megatron.moe_permute_fusion=true", "Transformer Engine"),
        ("actor.megatron.apply_rope_fusion=true", "Transformer Engine"),
        ("actor.megatron.attention_backend=flash", "Transformer Engine"),
        ("actor.megatron.batch_p2p_sync=true", "a GPU"),
        ("actor.megatron.moe_enable_deepep=true", "DeepEP or HybridEP"),
        ("actor.megatron.use_kitchen=true", "nvidia-kitchen"),
        ("actor.ddp.nccl_ub=true", "a GPU"),
        ("actor.optimizer.megatron.muon_momentum=0.9", "emerging_optimizers"),
    ],
)
def test_what_this_machine_cannot_try_is_said(
    monkeypatch: pytest.MonkeyPatch, override: str, need: str
) -> None:
    monkeypatch.setattr(megatron_settings, "has_cpu_build", lambda: True)
    monkeypatch.setattr(megatron_settings, "find_module", missing_packages)
    report = check(override, patience=120)
    (warning,) = report.warnings
    assert not report.errors and f"untried here, needs {need}" in warning.message
    assert warning.where and warning.where.startswith(override.partition("=")[0])


def missing_packages(name: str) -> tuple[Path | None, str | None]:
    """Find modules as on a host, where none of the packages for GPUs is installed."""
    if name in megatron_settings._PACKAGES.values():
        return None, name
    return find_module(name)


@pytest.mark.slow
def test_at_the_start_of_a_run_nothing_is_left_untried() -> None:
    """Megatron itself, imported anew, then refuses what needs a package that is not here."""
    if has_transformer_engine():
        return
    config = load("config.yaml", ["actor.megatron.moe_permute_fusion=true"])
    errors = check_config(config, training=True, patience=120.0).errors
    (error,) = errors
    assert "actor.megatron.moe_permute_fusion" in str(error.where) and "permut" in str(error.got)


def test_settings_that_are_refused_or_tried_exist() -> None:
    from megatron_rl.check.engine.arguments import ENGINE_ARGUMENTS
    from megatron_rl.check.installed_source import class_fields
    from megatron_rl.check.model.megatron_settings import DDP_CONFIG, OPTIMIZER_CONFIG

    assert not set(DROPPED) & TRIED["megatron"]
    for kind, classes in (
        ("megatron", TRANSFORMER_CONFIG),
        ("ddp", DDP_CONFIG),
        ("optimizer.megatron", OPTIMIZER_CONFIG),
        ("rollout.vllm", (ENGINE_ARGUMENTS,)),
    ):
        assert TRIED[kind] <= set(class_fields(*classes) or ())


@pytest.mark.slow
def test_what_megatron_did_not_answer_is_not_ready() -> None:
    override = "actor.megatron.hidden_dropout=0.1"
    verdict = report_text(check(override, patience=0.01), "config.yaml").partition("\n")[0]
    assert verdict.startswith("NOT TRIED: no errors, 1 warning")
    assert report_text(check(override, patience=120.0), "config.yaml").startswith("READY")
