"""The plan command: search, written configuration, calibration, errors."""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_rl.check.configuration import check_config
from megatron_rl.cli.main import main as command
from megatron_rl.cli.plan import _model_path, add_arguments, make_problem, run
from megatron_rl.config import budget
from megatron_rl.config.adapters import is_initial_actor
from megatron_rl.config.load import load, load_text
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.planning.predict.calibrate import calibrate_constants
from megatron_rl.planning.predict.placement import search_placements
from megatron_rl.planning.predict.plan_file import (
    Paths,
    config_text,
    make_planned_run,
    plan_record,
    preset_of,
)
from megatron_rl.planning.predict.step import PHASES, RunStats, predict_run, role_shapes
from megatron_rl.shapes.hardware import Machine, load_constants
from megatron_rl.shapes.published import load_presets, load_shape


def plan(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def checked(path: Path):
    """Return the check of a written configuration; models are known by their planned shapes."""
    return check_config(load(path), without_files=True)


# Each option, and each kind of model and of group, is in a search that takes a second or two.
@pytest.mark.parametrize(
    "words",
    [
        ("llama-3.1-8b", "--gpus", "8"),
        ("llama-3-70b", "--gpus", "64", "--one-step-off"),
        pytest.param(
            ("qwen3-235b-a22b", "--gpus", "128", "--gpu", "h20", "--prompts", "64", "--samples", "16"),
            marks=pytest.mark.campaign,
        ),
        pytest.param(("qwen3-30b-a3b", "--gpus", "24", "--no-reference"), marks=pytest.mark.slow),
        pytest.param(
            ("deepseek-v3", "--gpus", "512", "--response-tokens", "4096"), marks=pytest.mark.campaign
        ),
        pytest.param(("qwen3-8b", "--gpus", "16", "--algorithm", "ppo"), marks=pytest.mark.campaign),
        pytest.param(
            ("qwen3-32b", "--gpus", "64", "--algorithm", "ppo", "--critic", "qwen3-8b"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("llama-3-70b", "--gpus", "128", "--algorithm", "ppo", "--no-reward-model"),
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            ("qwen3-30b-a3b", "--gpus", "64", "--algorithm", "ppo", "--gpu", "h200", "--open-order"),
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            ("deepseek-v3", "--gpus", "1024", "--algorithm", "ppo", "--response-tokens", "4096"),
            marks=pytest.mark.campaign,
        ),
        pytest.param(("llama-3.1-405b", "--gpus", "512", "--gpu", "gb200"), marks=pytest.mark.campaign),
        pytest.param(("llama-3.1-8b", "--gpus", "16", "--response-tokens", "65536"), marks=pytest.mark.slow),
        ("llama-3-70b", "--gpus", "16", "--lora-rank", "64"),
        pytest.param(
            ("qwen3-30b-a3b", "--gpus", "16", "--algorithm", "ppo", "--lora-rank", "16"),
            marks=pytest.mark.campaign,
        ),
    ],
)
@pytest.mark.usefixtures("forked_trials")
def test_every_written_plan_passes_check(tmp_path, words) -> None:
    out = tmp_path / "plan.yaml"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    problem = make_problem(parser.parse_args(words))
    for plan in search_placements(problem, parser.parse_args(words).split).plans:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(_hf_config(words[0])))
        critic = _critic(words, tmp_path)
        run = make_planned_run(problem, plan, Paths(str(model), reward_model=critic, critic=critic))
        out.write_text(config_text(problem, run))
        report = checked(out)
        assert not report.errors, (plan.name, [str(error) for error in report.errors])
        assert report.shape is not None and report.layouts is not None
        assert set(problem.models) <= {role.split(".")[0] for role in report.layouts}
        for name, layout in report.layouts.items():
            role = plan.plan_of(name.split(".")[0])
            size = plan.rollout.layout.tensor if role is None else role.choice.layout.tensor
            assert layout.tensor == size, name
            assert len(layout.ranks) == (
                role.choice.layout.size if role else plan.rollout.layout.replicas * size
            )
        ahead = report.config.asynchrony.steps_ahead
        assert ahead == (1 if plan.step.samples_ahead else 0)
        # What `plan` printed of this configuration is what `check` prints of it, to the last byte.
        assert run.memory == report.memory
        assert run.traffic == report.sync
        held = {phase: max(rank.phase_peak(phase) for rank in report.memory) for phase in budget.PHASES}
        assert plan_record(run)["gigabytes"] == {phase: most / 1e9 for phase, most in held.items()}
        # A plan that does not fit is none. The search does not know the connections of its weight sync.
        connections = max(
            item.bytes for rank in report.memory for item in rank.items if item.name == "sync connections"
        )
        known = max(held.values()) - connections
        assert known / 2**30 <= report.config.gpu_memory_gib, (plan.name, held)
        assert plan_record(run)["gigabytes_received_per_sync"] == report.sync.received_most / 1e9


def test_adapters_are_planned_without_states_of_the_weights_beneath() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["llama-3-70b", "--gpus", "8", "--response-tokens", "4096", "--lora-rank", "32"]
    problem = make_problem(parser.parse_args(words))
    whole, adapters = (search_placements(each).plans[0] for each in (replace(problem, lora=None), problem))
    actor, reference = (adapters.plan_of(role) for role in ("actor", "reference"))
    assert actor is not None and actor.memory.fullest.optimizer < 0.1 * actor.memory.fullest.weights
    assert reference is not None and reference.memory.states == 0 < reference.forward
    assert adapters.step.seconds["learn"] < whole.step.seconds["learn"]
    run = make_planned_run(problem, adapters, Paths("models/llama"))
    assert run.config.actor.lora is not None and run.config.actor.lora.rank == 32
    assert is_initial_actor(run.config, "reference")


@pytest.mark.slow
def test_plan_prints_and_writes(tmp_path, capsys) -> None:
    out, record = tmp_path / "plan.yaml", tmp_path / "plan.json"
    words = ("llama-3-70b", "--gpus", "64", "--one-step-off")
    assert plan(*words, "--out", str(out), "--json", str(record)) == 0
    printed = capsys.readouterr().out
    assert "tokens/s/GPU" in printed and "weight sync" in printed and "GiB per GPU" in printed
    plans = json.loads(record.read_text())
    assert plans[0]["seconds"]["total"] <= plans[-1]["seconds"]["total"]
    assert not checked(out).errors


def test_long_sequences_are_cut_over_ranks() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["llama-3.1-8b", "--gpus", "16"]
    for response, cut in (("65536", True), ("8192", False)):
        problem = make_problem(parser.parse_args([*words, "--response-tokens", response]))
        fastest = search_placements(problem).plans[0]
        actor = fastest.plan_of("actor").choice
        assert (actor.layout.context > 1) is cut
        config = make_planned_run(problem, fastest, Paths("models/llama")).config
        assert config.model.attention == "transformer_engine"
        assert config.actor.layout.context == actor.layout.context


def test_plan_and_check_print_the_same_words(tmp_path, capsys) -> None:
    model, out = tmp_path / "model", tmp_path / "plan.yaml"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_hf_config("qwen3-8b")))
    plan(str(model), "--gpus", "16", "--best", "1", "--out", str(out))
    printed = capsys.readouterr().out.splitlines()
    assert command(["check", str(out), "--without-files", "--verbose"]) == 0
    shown = capsys.readouterr().out.splitlines()
    # Without different ranks the fullest one's total is that of every rank.
    totals = [line for line in shown if line.strip().startswith(("most on any rank", "total "))]
    most = totals[-1].partition(" of ")[0]
    held = re.findall(r"([\d.]+) GiB", most)
    assert len(held) == 3
    line = next(line for line in printed if "GiB per GPU" in line)
    assert re.findall(r"(?:generate|score|learn) ([\d.]+)", line) == held
    received = next(line for line in shown if "received by the busiest rank" in line).split("  ")[-1].strip()
    assert f"{received} received by the busiest rank" in "\n".join(printed)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_plan_predicts_what_its_configuration_is_predicted_to_take(tmp_path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    problem = make_problem(parser.parse_args(["qwen3-8b", "--gpus", "16", "--algorithm", "ppo"]))
    for placed in search_placements(problem).plans:
        run = make_planned_run(problem, placed, Paths("models/qwen3-8b"))
        (tmp_path / "plan.yaml").write_text(config_text(problem, run))
        config = checked(tmp_path / "plan.yaml").valid()
        shapes = role_shapes(config, lambda path: load_shape("qwen3-8b"))
        mean = problem.batch.lengths.mean
        step = predict_run(config, load_constants(), "h100", shapes, RunStats(response_length=mean))
        assert step.seconds == pytest.approx(dict(run.prediction.seconds))
        # The search's own estimate differs where the configuration has one token budget for every role.
        assert placed.step.total == pytest.approx(step.total, rel=0.15)


def _hf_config(name: str) -> dict:
    architecture = {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    }
    config = load_presets()[name]["config"]
    return {**config, "architectures": [architecture[config["model_type"]]]}


def _critic(words: tuple[str, ...], folder: Path) -> str | None:
    if "--critic" not in words:
        return None
    path = folder / "critic"
    path.mkdir(exist_ok=True)
    config = _hf_config(words[words.index("--critic") + 1])
    judge = [name.replace("CausalLM", "SequenceClassification") for name in config["architectures"]]
    (path / "config.json").write_text(json.dumps({**config, "architectures": judge, "num_labels": 1}))
    return str(path)


@pytest.mark.slow
def test_a_colocated_ppo_plan_names_every_role(tmp_path) -> None:
    out = tmp_path / "plan.yaml"
    words = ("--algorithm", "ppo", "--reward", "rewards.py:score", "--reward-model-path", "models/judge")
    plan("qwen3-8b", "--gpus", "16", "--out", str(out), *words)
    config = yaml.safe_load(out.read_text())
    assert config["algorithm"] == {"name": "ppo", "kl": "reward"}
    # A run downloads what is named on the Hub; the reward model is the user's.
    assert config["model"]["path"] == "hf://Qwen/Qwen3-8B" and list(config["prepare"]) == ["models/judge"]
    assert config["data"]["train"].startswith("hf://datasets/openai/gsm8k/")
    assert "mathematics example: replace them" in out.read_text()
    assert config["reward"]["models"]["preference"]["path"] == "models/judge"
    assert config["reward"]["function"] == "rewards.py:score"
    assert {"critic", "reference"} <= set(config) and config["critic"]["recompute"] in ("none", "full")


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("qwen3-8b", "hf://Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B"),
        ("llama-3.1-8b", "hf://meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-3.1-8B", "hf://meta-llama/Llama-3.1-8B"),
        ("models/Qwen3-8B", "models/Qwen3-8B"),
        ("/data/models/Qwen3-8B", "/data/models/Qwen3-8B"),
    ],
)
def test_a_folder_of_another_machine_is_no_name_on_the_hub(model: str, path: str) -> None:
    assert _model_path(model) == path


def _planned_data(out: Path, *words: str) -> tuple[str, bool]:
    """Return the model of a plan, and whether its data goes through the chat template."""
    plan(*words, "--gpus", "8", "--no-reference", "--out", str(out))
    config = yaml.safe_load(out.read_text())
    return config["model"]["path"], config["data"]["chat_template"]


@pytest.mark.slow
def test_a_plan_has_a_chat_template_where_its_model_has_one(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    # Base models have none, so a preset stands for the instruction-tuned model of its shape.
    assert _planned_data(out, "llama-3.2-1b") == ("hf://meta-llama/Llama-3.2-1B-Instruct", True)
    base = "hf://meta-llama/Llama-3.2-1B"
    assert _planned_data(out, "meta-llama/Llama-3.2-1B") == (base, False)
    assert _planned_data(out, "llama-3.2-1b", "--model-path", f"{base}@main") == (f"{base}@main", False)

    # Of a model on this machine the tokenizer's files show it.
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_hf_config("llama-3.2-1b")))
    assert _planned_data(out, str(model)) == (str(model), True), "unknown without a tokenizer"
    (model / "tokenizer_config.json").write_text("{}")
    assert _planned_data(out, str(model)) == (str(model), False)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert _planned_data(out, str(model)) == (str(model), True)


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_a_plan_of_weights_that_no_run_has_is_not_written(precision, tmp_path) -> None:
    out = tmp_path / "plan.yaml"
    with pytest.raises(UserError, match=precision) as refused:
        plan("qwen3-8b", "--gpus", "8", "--precision", precision, "--out", str(out))
    assert refused.value.where == "--precision" and not out.exists()
    assert plan("qwen3-8b", "--gpus", "8", "--precision", precision) == 0


@pytest.mark.parametrize(
    ("places", "preset"),
    [
        ({"actor": (0, 8), "rollout": (0, 8)}, "colocate"),
        ({"actor": (0, 4), "rollout": (4, 4)}, "standalone"),
        ({"actor": (0, 4), "critic": (4, 4), "rollout": (0, 4)}, "split"),
        ({"actor": (0, 6), "rollout": (6, 2)}, None),
    ],
)
def test_placement_presets_are_recognised(places, preset) -> None:
    assert preset_of(places, 8) == preset


def test_written_configuration_takes_the_users_own_data(tmp_path) -> None:
    out = tmp_path / "plan.yaml"
    mine = ("--data", "mine.jsonl", "--reward", "rewards.py:score", "--model-path", "/models/mine")
    plan("qwen3-8b", "--gpus", "16", "--out", str(out), *mine)
    config = yaml.safe_load(out.read_text())
    assert config["data"]["train"] == "mine.jsonl"
    assert config["reward"]["function"] == "rewards.py:score"
    assert config["model"]["path"] == "/models/mine"
    assert config["world_size"] == 16 and "prepare" not in config


CONFIG = """
model: {path: llama-3.1-8b}
data: {train: train.jsonl}
reward: {function: megatron_rl.rewards.math_answer:marked_number}
run_dir: run
steps: 4
world_size: 8
gpu: a100
batch: {prompts_per_step: 64, samples_per_prompt: 8}
actor: {layout: {tensor: 2}}
reference: {}
rollout: {max_response_tokens: 1024}
"""


def _run_folder(path: Path, slower: dict[str, float]) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(CONFIG)
    config = load(path / "config.yaml").valid()
    expected = predict_run(
        config, load_constants(), "a100", role_shapes(config, load_shape), RunStats(200.0, 400.0)
    ).seconds
    lines = [{"step": 0, "time/generate": 999.0}]
    for step in (1, 2, 3):
        taken = {name: expected[name] * slower[name] for name in PHASES if expected[name]}
        # As the trainer writes it: the weight sync is part of the generate phase.
        entry = {f"time/{name}": seconds for name, seconds in taken.items()}
        entry["time/generate"] = taken["generate"] + taken["reshard"]
        entry["time/step"] = sum(taken.values()) + slower["rest"]
        rate = 64 * 8 * 600.0 / entry["time/step"]
        lines.append({"step": step, "response/length": 400.0, "throughput/tokens_per_second": rate, **entry})
    (path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"step": 4, "ti')


@pytest.mark.parametrize("updates", [1, 2])
def test_an_actor_that_is_not_asked_before_it_learns_takes_no_time_to_score(updates: int) -> None:
    batch = f"samples_per_prompt: 8, optimizer_steps: {updates}"
    text = CONFIG.replace("samples_per_prompt: 8", batch).replace("reference: {}", "")
    config = load_text(text).valid()
    step = predict_run(config, load_constants(), "a100", role_shapes(config, load_shape))
    assert (step.seconds["score"] > 0, step.flops["score"] > 0) == (updates > 1, updates > 1)


def test_fewer_episodes_in_flight_take_longer_to_sample() -> None:
    for bound in ("max_in_flight: 4", "vllm: {max_num_seqs: 4}"):
        config = load_text(CONFIG, [f"rollout={{max_response_tokens: 1024, {bound}}}"]).valid()
        free = load_text(CONFIG, ["rollout={max_response_tokens: 1024}"]).valid()
        seconds = [
            predict_run(each, load_constants(), "a100", role_shapes(each, load_shape)).seconds["generate"]
            for each in (free, config)
        ]
        assert seconds[1] > 2 * seconds[0], bound


@pytest.mark.parametrize("offload", [False, True])
def test_an_offloaded_reward_model_takes_the_time_of_its_transfers(offload: bool) -> None:
    function = "reward: {function: megatron_rl.rewards.math_answer:marked_number}"
    model = f"reward: {{models: {{preference: {{path: llama-3.1-8b, offload: {str(offload).lower()}}}}}}}"
    constants = load_constants()

    def reward_seconds(text: str) -> float:
        config = load_text(text).valid()
        return predict_run(config, constants, "a100", role_shapes(config, load_shape)).seconds["reward"]

    resident = reward_seconds(CONFIG.replace(function, model.replace("true", "false")))
    seconds = reward_seconds(CONFIG.replace(function, model))
    # Tensor parallelism 2 halves the two bytes of each parameter, which leave for the host and come back.
    weights = 2 * load_shape("llama-3.1-8b").parameters / 2
    transfers = 2 * weights / Machine(constants.cluster("a100", 8), constants).host_rate
    assert 0 < resident < seconds if offload else resident == seconds
    assert seconds - resident == pytest.approx(transfers * offload, rel=0.1)


def test_calibration_recovers_the_factors_of_a_run(tmp_path, capsys) -> None:
    slower = {"generate": 2.0, "score": 1.25, "learn": 1.6, "reshard": 0.5, "rest": 7.0}
    _run_folder(tmp_path / "run", slower)
    out, record = tmp_path / "mine.json", tmp_path / "phases.json"
    assert plan("--calibrate", str(tmp_path / "run"), "--out", str(out), "--json", str(record)) == 0
    assert "generate" in capsys.readouterr().out
    assert set(json.loads(record.read_text())) == {"generate", "reshard", "score", "learn", "rest"}
    # With its own constants the run is predicted as it was measured.
    _, phases = calibrate_constants(str(tmp_path / "run"), None, load_constants(str(out)))
    for name, (predicted, measured) in phases.items():
        assert predicted == pytest.approx(measured, rel=1e-6), name


def test_a_run_that_no_such_machine_ran_calibrates_nothing(tmp_path) -> None:
    _run_folder(tmp_path, {"generate": 0.01, "score": 1.0, "learn": 1e6, "reshard": 1.0, "rest": 1.0})
    with pytest.raises(UserErrors) as refused:
        plan("--calibrate", str(tmp_path))
    assert [error.where.rpartition("/")[2] for error in refused.value.errors] == ["generate", "learn"]


def test_calibration_says_that_the_model_of_the_run_is_not_there(tmp_path) -> None:
    _run_folder(tmp_path, dict.fromkeys((*PHASES, "rest"), 1.0))
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("llama-3.1-8b", "models/gone"))
    with pytest.raises(UserError, match="the run's model was not found") as refused:
        plan("--calibrate", str(tmp_path))
    assert refused.value.where == f"{config}: model.path" and "where the run was started" in refused.value.fix


def test_calibration_without_phase_times(tmp_path) -> None:
    _run_folder(tmp_path, dict.fromkeys((*PHASES, "rest"), 1.0))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with pytest.raises(UserError, match="no phase times"):
        plan("--calibrate", str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/learn": "x", "time/score": NaN}\n')
    with pytest.raises(UserError, match="no phase times"):
        plan("--calibrate", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "plan needs a model and a number of GPUs"),
        (("llama-3.1-8b",), "plan needs a model and a number of GPUs"),
        (("llama-9b", "--gpus", "8"), "unknown model"),
        (("llama-3.1-8b", "--gpus", "8", "--gpu", "h10"), "which is not a choice"),
        (("llama-3.1-8b", "--gpus", "0"), "plan needs a model and a number of GPUs"),
        (("llama-3.1-8b", "--gpus", "-8"), "`--gpus` is out of range"),
        (("llama-3.1-8b", "--gpus", "999999999"), "`--gpus` is out of range"),
        (("llama-3.1-8b", "--gpus", "8", "--optimizer-steps", "1000"), "more optimizer steps than prompts"),
        (("llama-3.1-8b", "--gpus", "8", "--response-tokens-mean", "9000"), "response-tokens-mean"),
        (("deepseek-v3", "--gpus", "8"), "does not fit on 8 H100-80GB"),
        (("--calibrate", "nowhere"), "metrics.jsonl does not exist"),
    ],
)
def test_errors_name_what_to_change(words, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*words)
    assert message in str(caught.value)


def test_constants_override_and_its_errors(tmp_path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"efficiency": {"rl_trian": 1.0}}))
    with pytest.raises(UserError, match="did you mean rl_train"):
        load_constants(str(path))
    for stated in ("{", "[]", '{"efficiency": 3}', '{"efficiency": {"hbm": 0}}', '{"gpus": {"X1": {}}}'):
        path = tmp_path / f"{len(stated)}.json"
        path.write_text(stated)
        with pytest.raises(UserError) as refused:
            load_constants(str(path))
        assert all(vars(refused.value).values()), stated
    new = {"gpus": {"X1": {**_gpu("H100-80GB"), "aliases": ["x1"]}}}
    other = tmp_path / "gpu.json"
    other.write_text(json.dumps(new))
    assert load_constants(str(other)).gpu("x1").name == "X1"


def _gpu(name: str) -> dict:
    from megatron_rl.shapes.hardware import read_packaged_constants

    return read_packaged_constants()["gpus"][name]


def test_planner_imports_without_torch() -> None:
    code = "import sys, megatron_rl.cli.plan; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
