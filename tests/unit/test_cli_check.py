"""The commands as a user runs them: output, exit codes and imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from config_workspace import write_workspace

from megatron_rl.cli.main import COMMANDS, main
from megatron_rl.config.load import flatten, load, load_config
from megatron_rl.launcher import REPORT_SECONDS

pytestmark = pytest.mark.usefixtures("functions_load_once")

ROOT = Path(__file__).resolve().parents[2]
GPU_LOCK = str(ROOT / "launch/constraints-gpu-py312-vllm0.32.txt")
ALONE = ("world_size=null", "actor.layout={}", "rollout.tensor=1")
LONG = "x" * 5000
HEAVY = ("torch", "transformers", "megatron", "vllm", "numpy", "pyarrow")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_check_begins_with_five_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command = ["check", "configs/qwen2.5-7b-8gpu.yaml", "--without-files"]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    shown = capsys.readouterr().out
    verdict, size, memory, sync, step, blank, *findings = shown.splitlines()

    assert verdict.startswith("READY once the missing files exist: no errors, 3 warnings (configs/")
    assert size.split("  ")[-1] == (
        "Qwen2.5-7B-Instruct, 7.62B parameters; grpo for 200 steps of 128 prompts x 16 samples"
    )
    peaks = {rank["rank"]: max(rank["total"].values()) for rank in record["memory"]}
    assert f"{max(peaks.values()) / 2**30:.1f} GiB" in memory and memory.endswith("of 79 GiB")
    assert "0 B to the busiest; 15.23 GB of weights" in sync
    seconds = record["prediction"]["seconds"]
    assert f"{seconds['total']:.3g} s predicted on H100-80GB (assumed)" in step
    assert all(f"{phase} {seconds[phase]:.3g}" in step for phase in ("generate", "score", "learn"))
    assert not blank and findings[0].startswith("warning 1: ")
    assert sum(line.startswith("warning ") for line in findings) == 3
    assert "MEMORY" not in shown and "--verbose" in findings[-1]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "model.dtype is float32"),
        (("model.dtype=bfloat16", "gpu=none-such"), "the planner has no constants of none-such"),
        (("model.dtype=bfloat16", "steps=0"), "the configuration has errors"),
        ((*ALONE, "rollout.engine=server", "rollout.server.urls=[http://127.0.0.1:9]"), "the servers"),
        (("model.dtype=bfloat16", "gpu=a100"), None),
    ],
)
def test_a_step_is_predicted_or_the_reason_is_given(
    overrides: tuple[str, ...], reason: str | None, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "config.yaml", *overrides])
    step = capsys.readouterr().out.splitlines()[4]
    if reason is None:
        assert "s predicted on A100-80GB: " in step
    else:
        assert "not predicted: " in step and reason in step


def test_check_shows_everything(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config.yaml", "steps=3", "--verbose"]) == 0
    shown = capsys.readouterr().out
    for title in (
        "CONFIGURATION",
        "BATCH",
        "ROLES",
        "MEMORY",
        "WEIGHT SYNC",
        "READY: no errors, no warnings",
    ):
        assert title in shown
    assert "16 prompts x 4 samples" in shown and "64 rows per step" in shown
    assert "override steps=3" in shown and "config.yaml:6" in shown
    for path in flatten(load_config("config.yaml")):
        assert path in shown, f"{path} is not shown"


def test_check_shows_the_health_rules(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "health.rules.kl.above=0.3",
        "health.rules.clipping.act=stop",
        "health.rules.equal_groups=off",
    ]
    overrides += ["health.rules.length.above=5"]
    own = ["health.rules.low.metric=reward/mean", "health.rules.low.below=0.1", "health.rules.low.steps=20"]
    assert main(["check", "config.yaml", "--verbose", *overrides, *own]) == 0
    section = capsys.readouterr().out.split("HEALTH  (")[1].split("\n\n")[0]
    warned = " ".join(section.split("end the run")[0].split())
    assert "warn kl, entropy, " in warned and warned.endswith(", low") and "equal_groups" not in warned
    assert re.search(r"end the run +clipping\n +off +equal_groups\n", section)
    assert "kl/ref: healthy 0.3 or less; fires after 3 measurements outside" in section
    assert "response/length (the value divided by the median" in " ".join(section.split())
    assert "reward/mean: healthy 0.1 or more; fires after 20 measurements outside" in section


def test_the_five_lines_tell_when_weights_are_synced_and_what_is_not_predicted(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus = ["config.yaml", "--on", "h100", "model.dtype=bfloat16"]
    assert main(["check", *on_gpus, "hybrid_engine.every=4"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"weight sync .* of weights; synced every 4 versions\n", shown)
    assert re.search(r"\nstep .*; with a weight sync\n", shown)
    assert main(["check", *on_gpus]) == 0
    shown = capsys.readouterr().out
    assert "synced every" not in shown and "with a weight sync" not in shown


def test_check_shows_the_pieces_that_the_algorithm_resolves_to(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["algorithm.name=dapo", "algorithm.kl.coef=0.25", "algorithm.kl.name=loss"]
    assert main(["check", "config.yaml", "--verbose", *overrides]) == 0
    shown = " ".join(capsys.readouterr().out.split("ALGORITHM  (")[1].split("\n\n")[0].split())
    assert "clip_low 0.2, clip_high 0.28, dual_clip 10.0" in shown
    assert "algorithm.dynamic_sampling refill: max_rounds 10" in shown
    assert "algorithm.value_loss not used without a critic" in shown
    assert re.search(r"algorithm.kl loss: .*coef 0.25.* \(override algorithm.kl", shown)

    assert main(["check", "config.yaml", "--json", *overrides]) == 0
    values = json.loads(capsys.readouterr().out)["config"]
    assert values["algorithm.policy_loss"]["value"]["clip_high"] == 0.28
    assert values["algorithm.policy_loss"]["detail"] == "algorithm.name=dapo"


ON_H100 = (
    "check", "config.yaml", "--on", "h100", "--json", "model.dtype=bfloat16", "gpu_memory_gib=1",
    "logging.trackers=[wandb]", "actor.megatron.fp8=hybrid", "algorithm.policy_loss=imports.py:loss",
)  # fmt: skip
"""Check of a run that needs a tracker, Transformer Engine's FP8, and a package that its loss imports."""


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.usefixtures("forked_trials")
def test_check_on_a_gpu_does_not_depend_on_this_machine(
    installed: bool, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("imports.py").write_text("import package_of_the_cluster\ndef loss(micro, log_probs): ...\n")
    for module in ("check.packages", "check.model.accelerator", "config.derive"):
        monkeypatch.setattr(f"megatron_rl.{module}.has_transformer_engine", lambda: installed)
    for module in ("check.engine.arguments", "check.model.accelerator"):
        monkeypatch.setattr(f"megatron_rl.{module}.has_cpu_build", lambda: not installed)
    if not installed:
        monkeypatch.setattr("megatron_rl.check.model.megatron_settings._is_installed", lambda _: False)

    assert main([*ON_H100]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["valid"] and not record["untried"] and not record["errors"]
    warnings = " ".join(warning["message"] for warning in record["warnings"])
    assert "wandb" not in warnings and "is not installed" not in warnings
    assert "cannot import imports.py" in warnings
    assert record["config"]["model.attention"]["value"] == "transformer_engine"
    assert record["config"]["gpu_memory_gib"]["value"] == 79.2, "that of the named GPU, not of the file"
    assert record["prediction"] == {"reason": "a piece of the algorithm cannot be imported here"}
    assert "gradient_accumulation_fusion" in {row["key"] for row in record["accelerator"]}

    assert main([*ON_H100, "algorithm.policy_loss=gspo"]) == 0
    prediction = json.loads(capsys.readouterr().out)["prediction"]
    assert prediction["gpu"] == "H100-80GB" and not prediction["assumed_gpu"]

    # What the user wrote wrongly is still refused.
    assert main([*ON_H100, "algorithm.policy_loss=misspelled:loss"]) == 2
    assert "cannot import misspelled" in capsys.readouterr().out
    assert main(["check", "config.yaml", "--on", "h100", "steps=0"]) == 2
    assert main(["check", "config.yaml", "--on", "h10"]) == 2
    refused = capsys.readouterr().err
    assert all(part in refused for part in ("where:    --on", "expected: one of", "fix: "))


def test_check_fails_with_every_error(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config.yaml", "rollout.n=3", "steps=0", "data.train=gone.jsonl"]) == 2
    shown = capsys.readouterr().out
    assert "`rollout.n` is called `batch.samples_per_prompt` here" in shown
    assert "NOT READY: 3 errors" in shown


def test_the_arithmetic_is_shown_beside_missing_files(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "config.yaml", "data.train=gone.jsonl", "-v"]) == 2
    assert "64 rows per step" in capsys.readouterr().out


def test_check_shows_what_conversations_have_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["check", "launch/examples/tools/run.yaml", "--world-size", "2", "--without-files", "-v"]
    assert main([*words, "rollout.max_in_flight=20"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "20 of 64 episodes in flight = at most, per replica; 12 groups of the step wait in the queue" in shown
    )
    assert "episode <= 3 turns = each answered within 30 s; 1 process of environments per replica" in shown
    assert "20 rows x 36 tokens x 1024 B: all at full length" in shown


def test_check_shows_the_command_of_the_first_server_and_which_are_not_there(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = "rollout.server.urls=[http://127.0.0.1:8, http://127.0.0.1:9]"
    main(["check", "config.yaml", *ALONE, "rollout.engine=server", urls])
    shown = capsys.readouterr().out
    assert "--port 8 " in shown and "2 of 2 servers of the rollout engine do not answer now" in shown


def test_check_for_machines(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config.yaml", "--json", "--world-size", "8", "world_size=null"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] and result["world_size"] == 8
    assert result["roles"]["actor"]["data"] == 2
    assert result["config"]["steps"] == {"value": 10, "origin": "file", "detail": "config.yaml:11"}
    assert main(["check", "config.yaml", "--json", "steps=x"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["where"] == "steps (override steps=x)"
    assert main(["check", "gone.yaml", "--json"]) == 2
    assert not json.loads(capsys.readouterr().out)["valid"]


def test_overrides_stand_before_or_after_options(workspace: Path) -> None:
    for words in (["steps=0", "--without-files"], ["--without-files", "steps=0"]):
        assert main(["check", "config.yaml", *words]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["check", "config.yaml", "--no-such-option"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="plain"),
        pytest.param(("actor.megatron.hidden_dropout=0.1",), id="tried", marks=pytest.mark.slow),
    ],
)
def test_check_imports_nothing_heavy(workspace: Path, words: tuple[str, ...]) -> None:
    program = (
        "import sys\n"
        "from megatron_rl.cli.main import main\n"
        f"code = main(['check', 'config.yaml', *{words!r}])\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("HEAVY []")


CHECKED_ELSEWHERE = ("translated", "bench", "parts")
"""Folders of configurations that other tests check: test_docs.py, and test_plan_throughput.py with more.

Those of `parts` are bases beside others, and no runs alone."""
SHIPPED = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in CHECKED_ELSEWHERE
)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_pass(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["check", str(path.relative_to(ROOT))]) == 0, capsys.readouterr().out


RECIPE_SIZES = (1, 8, 64)
"""Numbers of GPUs for which configs/ has recipes of published models, below configs/Ngpu/."""
RECIPE_KINDS = ("dapo", "distillation", "lora", "moe", "ppo", "tools")


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("gpus", RECIPE_SIZES)
@pytest.mark.parametrize("kind", RECIPE_KINDS)
def test_each_recipe_of_a_published_model_fits_its_gpus(
    kind: str, gpus: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = f"configs/{gpus}gpu/{kind}.yaml"
    code = main(["check", recipe, "--on", "h100", "--without-files"])
    text = "".join(capsys.readouterr())
    assert code == 0, text
    assert f"({recipe} on {gpus} process" in text
    percent = re.search(r"^memory .* (\d+)% of", text, re.MULTILINE)
    assert percent is not None and int(percent[1]) <= 95, text
    page = (ROOT / "docs/run.md").read_text(encoding="utf-8")
    assert f"| `{kind}.yaml` |" in page

    # Short, and nothing to download first: `train` takes model and data from the Hub.
    lines = (ROOT / recipe).read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 14
    loaded = load(ROOT / recipe)
    assert not loaded.valid().prepare
    assert len(loaded.hub) >= 3 and "hf://datasets/openai/gsm8k/main/train" in text


@pytest.mark.parametrize(
    ("name", "total", "per_rank"),
    [
        ("configs/qwen2.5-7b-8gpu.yaml", 7, 3),
        pytest.param("configs/bench/qwen3-235b-a22b-256gpu.yaml", 356, 12, marks=pytest.mark.slow),
        pytest.param("configs/bench/llama3.1-405b-512gpu.yaml", 310, 9, marks=pytest.mark.campaign),
        pytest.param("configs/bench/deepseek-v3-1024gpu.yaml", 178, 6, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.usefixtures("forked_trials")
def test_process_groups_are_counted(
    name: str,
    total: int,
    per_rank: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of several ranks in the job of a shipped configuration, and most of them on a rank."""
    monkeypatch.chdir(ROOT)
    assert main(["check", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["process_groups"] == {"total": total, "per_rank": per_rank}


def test_the_quickstart_passes_in_a_process_of_its_own() -> None:
    assert ROOT / "configs/quickstart.yaml" in SHIPPED
    done = run("check", "configs/quickstart.yaml", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("program", "first"), [("megatron-rl", "{cwd}"), ("__main__.py", "/somewhere")])
def test_the_installed_program_imports_modules_of_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, program: str, first: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/bin/{program}", "--help"])
    monkeypatch.setattr(sys, "path", ["/somewhere", *sys.path])
    with pytest.raises(SystemExit):
        main()
    assert sys.path[0] == first.format(cwd=Path.cwd())


def test_servers_are_planned_before_the_model_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    asked = ["rollout.engine=server", "rollout.tensor=1", "rollout.vllm={}"]
    words = ["check", "configs/qwen2.5-7b-8gpu.yaml", "--without-files", *asked]
    assert main([*words, "rollout.server.urls=[http://host:8000]"]) == 0, capsys.readouterr().out
    assert "once the model is in model.path" in capsys.readouterr().out


def test_a_whole_configuration_fits_in_twenty_lines() -> None:
    text = (ROOT / "configs/minimal.yaml").read_text().splitlines()
    assert len([line for line in text if line.strip() and not line.lstrip().startswith("#")]) <= 20


def test_train_stops_before_anything_heavy(workspace: Path) -> None:
    done = run("train", "config.yaml", "world_size=null", "data.train=gone.jsonl", cwd=workspace)
    assert done.returncode == 2
    assert "tensor 2 x pipeline 2 = 4 does not divide 1 rank" in done.stderr
    assert "the data set gone.jsonl does not exist" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_one_rank_speaks(workspace: Path) -> None:
    """Rank 0 prints, and writes where torchrun reads the root cause; other ranks print if it does not."""
    told = workspace / "error.json"
    world = {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    first = run(
        "train", "config.yaml", "steps=0", cwd=workspace, RANK="0", TORCHELASTIC_ERROR_FILE=str(told), **world
    )
    assert (first.returncode, first.stdout) == (2, "")
    assert first.stderr.startswith("error: `steps` is out of range")
    assert "`steps` is out of range" in json.loads(told.read_text())["message"]["message"]
    alone = run("train", "config.yaml", "steps=0", cwd=workspace, RANK="0", **world)
    assert alone.returncode == 2 and "`steps` is out of range" in alone.stderr
    other = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl", "train", "config.yaml", "steps=0"],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": str(ROOT), **world, "RANK": "1", "LOCAL_RANK": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(REPORT_SECONDS / 2)
    assert other.poll() is None, "it waits for rank 0"
    shown = other.communicate(timeout=60)[1]
    assert shown.startswith("rank 1 on ") and "`steps` is out of range" in shown and other.returncode == 2


ONE_RANK_FAILS = """
import sys, time
from megatron_rl.errors import UserError
from megatron_rl.launcher import process_rank, report_errors
if process_rank() == 1:
    report_errors(UserError("the disk of one rank is full", where="run_dir", fix="free some space"))
    sys.exit(2)
time.sleep(120)
"""


@pytest.mark.slow
def test_an_error_of_one_rank_alone_is_printed_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ONE_RANK_FAILS)
    launched = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "program.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    before, _, behind = launched.stderr.partition("Traceback (most recent call last)")
    assert re.search(r"rank 1 on .*:\nerror: the disk of one rank is full", before)
    assert "the disk of one rank is full" in behind.partition("Root Cause")[2]


@pytest.mark.slow
def test_errors_stand_before_and_behind_the_traceback_of_torchrun(workspace: Path) -> None:
    words = ["-m", "megatron_rl", "train", "config.yaml", "world_size=null", "steps=0", "seed=-1"]
    plain = subprocess.run(
        [sys.executable, *words],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", *words],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "error 1: `steps` is out of range" in plain.stderr
    before, _, behind = launched.stderr.partition("Traceback (most recent call last)")
    assert plain.stderr in before
    summary = behind.partition("Root Cause")[2]
    assert "bad input, no crash" in summary and "`steps` is out of range" in summary


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "config.yaml", *ALONE, "--checkpoint", "gone"), "no directory gone"),
        (("eval", "config.yaml", *ALONE, "--checkpoint", "runs"), "runs is not a checkpoint"),
        (("eval", "config.yaml", *ALONE, "--checkpoint", LONG), "choose a shorter name"),
        (("export", LONG, "--out", "x"), "… (5000 characters)"),
        (("export", "loop", "--out", "x"), "no directory loop"),
        (("export", "gone", "--out", "x"), "no directory gone"),
        (("export", "model", "--out", "x"), "is a Hugging Face model, not a training checkpoint"),
        (("export", "runs", "--out", "x"), "runs is not a checkpoint"),
        (("export", "folder", "--out", "model"), "would overwrite existing files"),
        (("report", "gone"), "no directory gone"),
        (("report", LONG), "choose a shorter name"),
        (("report", "runs"), "it is not a regular file"),
        (("plan-reshard", LONG, "--from", "tp2", "--to", "tp2"), "choose a shorter name"),
        (("plan", "qwen2-7b", "--gpus", "8", "--out", "gone/plan.yaml"), "create the folder first"),
        (("doctor", "--before-install", "runs", "--lock", GPU_LOCK), "name a file: this is a folder"),
    ],
)  # fmt: skip
def test_other_commands_refuse_bad_input(
    words: tuple[str, ...], message: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs").mkdir()
    os.mkfifo("runs/metrics.jsonl")
    Path("loop").symlink_to("loop")
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told and all(name in told for name in ("where:", "expected:", "got:", "fix:"))


def test_a_python_without_the_packages_is_named(workspace: Path) -> None:
    Path("folder").mkdir(exist_ok=True)
    Path("folder/meta.json").touch()
    code = (
        "import sys; sys.modules['torch'] = None; from megatron_rl.cli.main import main; sys.exit(main({}))"
    )
    command = [sys.executable, "-c", code.format(["export", "folder", "--out", "x"])]
    done = subprocess.run(
        command, cwd=workspace, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "expected: torch" in done.stderr, done.stderr
    assert sys.executable in done.stderr and "launch/setup.sh" in done.stderr


def test_help_names_every_command() -> None:
    done = run("--help", cwd=ROOT)
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    described = run("reward-model", "--help", cwd=ROOT).stdout
    assert "training of reward models" in described and "reward.models.NAME.training" in described


def test_doctor_without_heavy_imports(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 0
    assert "shared memory" in capsys.readouterr().out
    assert main(["doctor", "--quick", "--json"]) == 0
    assert {"packages", "machine"} <= json.loads(capsys.readouterr().out).keys()
