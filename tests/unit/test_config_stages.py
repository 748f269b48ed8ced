"""Stages and jobs of one stage: requirements, derived values and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_workspace import write_workspace

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.cli.main import main as command
from megatron_rl.config.load import dump, load, load_text
from megatron_rl.config.stage_plan import current_model, pending_stages, stage_plans, starting_model

ALONE = "model: {path: model, dtype: float32}\ndata: {max_prompt_tokens: 8}\nrun_dir: alone\n"
SECTIONS = {
    "sft": "sft: {data: sft.jsonl, epochs: 2, rows_per_step: 4}\n",
    "prefer": "preference: {data: pairs.jsonl, steps: 5, max_row_tokens: 16}\n",
    "reward-model": "reward: {models: {judge: {training: {data: pairs.jsonl, steps: 5}}}}\n",
}
STAGES = "".join(SECTIONS.values())


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    values = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}
    for name in ("sft", "pairs"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(values) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(text: str, *overrides: str) -> CheckReport:
    return check_config(load_text(text, overrides), 1)


@pytest.mark.parametrize("job", SECTIONS)
def test_a_stage_alone_needs_its_section_only(job: str) -> None:
    report = check(ALONE + SECTIONS[job], f"job={job}", "rollout.max_response_tokens=8")
    assert report.errors == ()
    (plan,) = stage_plans(report.config)
    assert plan.settings.max_row_tokens == 16 and plan.settings.checkpoint_every == 50
    learner = "reward.judge" if job == "reward-model" else "actor"
    assert list(report.layouts or {}) == [learner] and report.batch is None
    assert load_text(dump(report.config)).valid() == report.config, "the run folder's copy loads"


@pytest.mark.parametrize("job", SECTIONS)
def test_a_stage_alone_takes_the_configuration_of_a_run_with_a_best_checkpoint(job: str) -> None:
    run = f"{ALONE}{STAGES}checkpoint: {{best: eval/held_out/reward, best_is: lowest}}\n"
    report = check(run, f"job={job}", "rollout.max_response_tokens=8")
    assert report.errors == () and report.config.checkpoint.best is None


@pytest.mark.parametrize("job", SECTIONS)
def test_a_stage_alone_shows_its_memory_and_what_it_reads(job: str, capsys) -> None:
    unused = "algorithm: {name: ppo}\nbatch: {prompts_per_step: 4, optimizer_steps: 8}\n"
    Path("alone.yaml").write_text(ALONE + STAGES + unused + "rollout: {max_response_tokens: 8}\n")
    assert command(["check", "alone.yaml", "--verbose", "--for", job, "--world-size", "2"]) == 0
    shown = capsys.readouterr().out
    settings, memory = shown.split("BATCH")[0], shown.split("MEMORY")[1]
    for unread in (" steps=", "algorithm.", "prompts_per_step", "evaluation.", "rollout.tensor"):
        assert unread not in settings, unread
    learner = "reward.judge weights" if job == "reward-model" else "actor weights"
    assert all(name in memory for name in (learner, "gradients", "optimizer", "activations", "total"))
    assert "generate" not in memory and "score" not in memory

    report = check_config(load("alone.yaml", [f"job={job}"]), 2)
    (rank,) = report.memory
    sizes = {item.name.split()[-1]: item.bytes for item in rank.items}
    # Weights, float32 gradients, and two moments that both copies share: 4 bytes each.
    assert sizes["weights"] == sizes["gradients"] == sizes["optimizer"] > 0
    assert rank.phase_peak("learn") == sum(sizes.values()) and rank.peak == rank.phase_peak("learn")
    halved = check_config(load("alone.yaml", [f"job={job}", "batch.tokens_per_microbatch=16"]), 2)
    assert halved.memory[0].peak < rank.peak


def test_responses_are_looked_at_before_anything_is_built() -> None:
    def found(job: str, name: str, *records: dict[str, object]) -> CheckReport:
        lines = [json.dumps({"prompt": "1+1=", **record}) for record in records]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
        return check(ALONE + SECTIONS[job], f"job={job}", "rollout.max_response_tokens=8")

    pair, equal = {"chosen": "2", "rejected": "3"}, {"chosen": "2", "rejected": "2"}
    report = found("prefer", "pairs", pair, equal, equal, {"chosen": "", "rejected": "2"})
    assert report.errors == ()
    (warning,) = (warning for warning in report.warnings if "preference.data" in str(warning.where))
    assert warning.message.startswith("2 of 4 pairs prefer a response to itself")
    assert warning.message.endswith("first: pairs.jsonl:2, pairs.jsonl:3")
    report = found("sft", "sft", {"response": ""}, {"response": "2"})
    assert any("1 of 2 responses are empty" in warning.message for warning in report.warnings)
    assert not any("response" in warning.message for warning in found("prefer", "pairs", pair).warnings)

    said = {"role": "assistant", "content": "2"}
    messages = [{"role": "user", "content": "1+1="}, said]
    (error,) = found("sft", "sft", {"prompt": messages}).errors
    assert "no chat template" in error.message and "sft.data" in str(error.got)
    template = "{% for message in messages %}{{ message['content'] }};{% endfor %}"
    Path("model", "chat_template.jinja").write_text(template)
    assert found("sft", "sft", {"prompt": messages}).errors == ()
    (error,) = found(
        "sft", "sft", {"prompt": [*messages[:1], {"role": "assistant", "content": 2}, *messages]}
    ).errors
    assert "content other than text" in error.message and "message 2" in str(error.where)
    assert found("prefer", "pairs", {"chosen": [said], "rejected": "3"}).errors == ()
    whole = {"chosen": messages, "rejected": [messages[0], {"role": "assistant", "content": "3"}]}
    assert found("prefer", "pairs", whole).errors == ()
    Path("model", "chat_template.jinja").unlink()
    assert "no chat template" in found("prefer", "pairs", whole).errors[0].message
    (error,) = found("sft", "sft", {"response": ["2"]}, {"response": "2"}).errors
    assert "not a response" in error.message and "sft.jsonl:1" in str(error.where)
    (error,) = found("prefer", "pairs", *[{"rejected": "3"}] * 9).errors
    assert "has no `chosen`" in error.message, "once for all that are alike"


@pytest.mark.parametrize("job", SECTIONS)
def test_a_stage_alone_without_its_section_is_an_error(job: str) -> None:
    others = "".join(text for name, text in SECTIONS.items() if name != job)
    (error,) = check(ALONE + others, f"job={job}", "rollout.max_response_tokens=8").errors
    assert f"nothing to do for {job}" in error.message and error.fix


def test_reinforcement_learning_needs_more() -> None:
    missing = {error.message for error in check(ALONE + SECTIONS["sft"]).errors}
    assert {"`data.train` is missing", "`steps` is missing", "no reward is configured"} <= missing


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.steps=3", "a number of steps or a number of epochs"),
        ("checkpoint.resume=runs/other/checkpoints/step_3", "resumes from its own checkpoints"),
        ("sft.max_row_tokens=100000", "rows may be longer than the model's positions"),
        ("sft.held_out=gone.jsonl", "does not exist"),
        ("sft.until_loss=0.2", "requires held-out data"),
        ("batch.tokens_per_microbatch=8", "rows may be longer than batch.tokens_per_microbatch"),
    ],
)
def test_mistakes_of_a_stage(override: str, message: str) -> None:
    errors = check(ALONE + SECTIONS["sft"], "job=sft", "rollout.max_response_tokens=8", override).errors
    assert any(message in error.message and error.fix for error in errors), [str(error) for error in errors]


def test_a_run_of_stages_alone_is_told_their_commands() -> None:
    (told,) = (
        error for error in check(ALONE + SECTIONS["prefer"]).errors if "no reinforcement" in error.message
    )
    assert "megatron-rl prefer CONFIG" in (told.fix or "")


@pytest.mark.parametrize(
    ("overrides", "unused"),
    [
        ("preference.evaluate_every=2", "evaluate_every"),
        ("preference.loss=ipo preference.label_smoothing=0.1", "label_smoothing"),
        ("preference.loss=robust preference.label_smoothing=0.1", None),
        ("preference.margin=1", "margin"),
        ("preference.loss=simpo preference.margin=1", None),
        ("preference.pairs_per_step=2", "pairs_per_step"),
        ("preference.steps=null preference.epochs=3 preference.pairs_per_step=2", "pairs_per_step"),
        ("preference.steps=null preference.epochs=1 preference.pairs_per_step=2", None),
    ],
)
def test_what_a_stage_is_allowed_but_rarely_meant(overrides: str, unused: str | None) -> None:
    text = ALONE + "preference: {data: pairs.jsonl, steps: 5, pairs_per_step: 1}\n"
    report = check(text, "job=prefer", "rollout.max_response_tokens=8", "world_size=1", *overrides.split())
    assert report.errors == ()
    # Preferences do not read the responses that the workspace's records also have.
    warnings = [one for one in report.warnings if "fields of records that nothing reads" not in one.message]
    found = [(warning.where or "").partition(" (")[0] for warning in warnings]
    assert found == ([] if unused is None else [f"preference.{unused}"])


def test_a_stage_has_ended_when_its_model_is_there(workspace: Path) -> None:
    (workspace / "stages.yaml").write_text("base: config.yaml\n" + STAGES)
    config = load("stages.yaml", ["reward.function=null"]).valid()
    sft, dpo, judge = stage_plans(config)
    assert [plan.name for plan in (sft, dpo, judge)] == ["sft", "dpo", "reward_judge"]
    assert starting_model(config) == str(dpo.model)
    assert pending_stages(config) == (sft, dpo, judge) and current_model(config) == config.model.path
    sft.model.mkdir(parents=True)
    assert pending_stages(config) == (dpo, judge) and current_model(config) == str(sft.model)
    judge.model.mkdir(parents=True)
    assert pending_stages(config) == (dpo,)
    dpo.model.mkdir(parents=True)
    sft.model.rmdir()
    assert pending_stages(config) == (), "a stage before one that has ended is not run after it"
