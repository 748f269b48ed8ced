"""What `check` says of data sets: fields of their own, records anywhere in them, and their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from config_workspace import CONFIG, write_workspace
from transformers import AutoTokenizer

from megatron_rl.check import data as data_rules
from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.check.model.tokenizer import build_template_renderer
from megatron_rl.cli.check_text import report_text
from megatron_rl.config.load import load_text
from megatron_rl.config.sections.data import fields_of
from megatron_rl.data.sources import load_prompts, load_responses
from megatron_rl.data.token_files import TokenFiles

THINKS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
)
FILES = TokenFiles(None, print)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_workspace(tmp_path)
    return tmp_path


def check(*overrides: str, training: bool = False) -> CheckReport:
    return check_config(load_text(CONFIG, overrides), training=training, patience=0)


def write(path: str, records: Sequence[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def template(text: str) -> None:
    Path("model/chat_template.jinja").write_text(text)


@pytest.mark.usefixtures("workspace")
def test_each_data_set_may_have_fields_of_its_own() -> None:
    write("eval.jsonl", [{"question": "1+1=", "answer": "2", "kind": "sum"}] * 3)
    own = "evaluation.sets.held_out"
    (asked, *_) = (error for error in check().errors if "eval.jsonl" in (error.where or ""))
    assert "`prompt`" in asked.message and asked.fix == f"set {own}.prompt_field=question"
    (judged,) = check(f"{own}.prompt_field=question").errors
    assert judged.where == f"eval.jsonl:1 ({own}.data)" and judged.message == "a record has no `ground_truth`"
    assert f"{own}.ground_truth_field" in (judged.fix or "")
    stated = [f"{own}.prompt_field=question", f"{own}.ground_truth_field=answer", f"{own}.task_field=kind"]
    config = check(*stated).valid()
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    held_out = load_prompts(config, f"{own}.data", "eval.jsonl", tokenizer, FILES).batch_in_file_order()
    assert (held_out.prompts[0], held_out.ground_truths[0], held_out.tasks[0]) == ("1+1=", "2", "sum")
    assert held_out.metadata[0] == {"kind": "sum"}
    assert load_prompts(config, "data.train", "train.jsonl", tokenizer, FILES).next_batch(1).prompts == (
        "1+1=",
    )
    (same,) = check(*stated, f"{own}.ground_truth_field=question").errors
    assert (same.message, (same.where or "").split(" ")[0]) == (
        "prompt and ground truth are read from the same field",
        f"{own}.ground_truth_field",
    )


@pytest.mark.usefixtures("workspace")
def test_data_of_messages_may_stand_beside_data_of_text() -> None:
    template("{% for m in messages %}{{ m.content }}{% endfor %}")
    asked = [{"role": "user", "content": "1+1="}]
    write("eval.jsonl", [{"prompt": asked, "ground_truth": "2"}])
    write("sft.jsonl", [{"ask": asked, "response": "2"}])
    report = check("sft={data: sft.jsonl, steps: 1, prompt_field: ask}")
    config = report.valid()
    assert (config.data.chat_template, config.evaluation.sets["held_out"].chat_template) == (False, True)
    assert str(report.origins["evaluation.sets.held_out.chat_template"]).startswith("derived")
    assert config.sft is not None and config.sft.chat_template is True
    environment = "rollout.environment={name: 'megatron_rl:AgentEnvironment', program: 'true'}"
    assert any(
        "continues all conversations in one way" in error.message for error in check(environment).errors
    )


@pytest.mark.usefixtures("workspace")
def test_every_record_is_read_where_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"prompt": "1+1=", "ground_truth": "2"}
    write("train.jsonl", [good] * 500 + [{"prompt": "1+1="}] + [good] * 99)
    (error,) = check().errors
    assert (error.message, error.where) == ("a record has no `ground_truth`", "train.jsonl:501 (data.train)")
    monkeypatch.setattr(data_rules, "FULLY_READ_BYTES", 300 * len(json.dumps(good)))
    report = check()
    assert not report.errors
    text = report_text(report, "run.yaml", verbose=True)
    assert re.search(r"read the first 29\d of 600 records, counted", text)
    assert not check(training=True).data_stats  # the job reads all of it anyway


@pytest.mark.usefixtures("workspace")
def test_records_that_are_too_long_are_found_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    good, long = ({"prompt": text, "ground_truth": "2"} for text in ("1+1=", "1+1+1+1+1="))
    write("train.jsonl", [long] * 20)
    (error,) = check().errors
    assert error.message == "20 of 20 tokenised records are longer than the limit"
    assert (error.expected, error.fix) == ("at most 8 tokens", "raise data.max_prompt_tokens")
    write("train.jsonl", [long] * 2 + [good] * 600)
    report = check()
    assert not report.errors and not any("longer" in warning.message for warning in report.warnings)
    text = report_text(report, "run.yaml", verbose=True)
    assert re.search(
        r"read all 602 records, counted the tokens of 2\d\d: longest 10 of 8; 2 are longer", text
    )
    (error,) = check("data.over_long=error").errors
    assert error.where == "train.jsonl:1 (data.train)" and "data.over_long=drop" in (error.fix or "")
    write("train.jsonl", [long] * 600 + [good])
    report = check()
    assert not report.errors and any(
        "longer than the limit" in warning.message for warning in report.warnings
    )
    write("train.jsonl", [good])
    write("sft.jsonl", [{"prompt": "1+1=", "response": "2" * 20}])
    (error,) = check("sft={data: sft.jsonl, steps: 1}").errors
    assert (error.expected, error.fix) == ("at most 16 tokens", "raise sft.max_row_tokens")
    monkeypatch.setattr(data_rules, "CHARACTERS", 0)
    report = check()
    assert report.data_stats[0].tokenised == 1


@pytest.mark.usefixtures("workspace")
def test_responses_that_cannot_follow_their_prompts_are_found_before_the_job() -> None:
    write("sft.jsonl", [{"prompt": "1+1=", "response": [{"role": "assistant", "content": "2", "name": "a"}]}])
    (error,) = check("sft={data: sft.jsonl, steps: 1}").errors
    assert "does not go through the chat template" in error.message
    assert "sft.chat_template=true" in (error.fix or "")
    template("{{ raise_exception('only users ask') }}")
    write("train.jsonl", [{"prompt": [{"role": "system", "content": "1"}], "ground_truth": "2"}])
    (error,) = check().errors
    assert (error.message, error.got) == ("the chat template refuses the messages", "only users ask")


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_responses_that_would_be_learned_as_thoughts_are_said_once() -> None:
    template(THINKS)
    asked = [{"role": "user", "content": "1+1="}]
    said = [{"prompt": asked, "response": "hm</think>2"}] * 2
    section = "sft={data: sft.jsonl, held_out: sft.jsonl, steps: 1, max_row_tokens: 64}"
    tokenizer: Any = AutoTokenizer.from_pretrained("model")

    def warned() -> tuple[list[str], list[str]]:
        report = check(section)
        config = report.valid()
        data, fields = fields_of(config.data, config.sft, "sft"), {"response": "sft.response_field"}
        loaded = load_responses(config, "sft.data", "sft.jsonl", tokenizer, FILES, fields, 64, data=data)
        return (
            [str(warning.got) for warning in report.warnings if "opens thoughts" in warning.message],
            [remark for remark in loaded.remarks() if "opens thoughts" in remark],
        )

    write("sft.jsonl", said)
    assert warned() == ([], [])
    write("sft.jsonl", [*said, {"prompt": asked, "response": "2"}])
    checked, job = warned()
    assert checked == ["none in 1 of 3 records; first: sft.jsonl:3"]
    assert len(job) == 1 and "</think>" in job[0]
    template(THINKS.replace("<think>\n", ""))
    assert warned()[0] == []


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    "text",
    [
        THINKS,
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}{{ m | tojson }}{% else %}{% break %}"
        "{% endif %}{% endfor %}{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{{ eos_token }}",
    ],
)
def test_templates_are_rendered_as_transformers_does(workspace: Path, text: str) -> None:
    template(text)
    settings = {"eos_token": "<eos>", "bos_token": "<bos>"}
    (workspace / "model/tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    messages = [{"role": "user", "content": "<ä>"}, {"role": "assistant", "content": "b"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    renderer = build_template_renderer(Path("model"))
    assert renderer is not None
    for given in (None, tools):
        expected = tokenizer.apply_chat_template(
            messages, tools=given, tokenize=False, add_generation_prompt=True
        )
        assert renderer.render(messages, given) == expected
