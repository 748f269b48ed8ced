"""Warnings about rendered texts, ends of turns and special tokens, from `check` and from the job."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from config_workspace import CONFIG, write_workspace

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.config.load import load_text
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.data.chat_format import ChatTemplate, VisibleText
from megatron_rl.data.records import Record
from megatron_rl.data.sources import PromptSource, encode_prompts
from megatron_rl.data.tokenizing import end_token_ids, load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.hf.files import copy_tokenizer
from tests.unit.chat_templates import FORMS, LLAMA_2, QWEN_2, ChatForm, tokenizer_of

ASKED = [{"role": "user", "content": "1+1="}]
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_workspace(tmp_path)
    return tmp_path


def check(*overrides: str) -> CheckReport:
    return check_config(load_text(CONFIG, overrides), training=False, patience=0)


def model(form: ChatForm, **files: Any) -> None:
    tokenizer_of(form).save_pretrained("model")
    for name, values in files.items():
        Path(f"model/{name}.json").write_text(json.dumps(values))


def write(path: str, *records: dict[str, Any]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def found(report: CheckReport, text: str) -> list[UserError]:
    return [warning for warning in report.warnings if text in warning.message]


@pytest.mark.usefixtures("workspace")
def test_an_end_of_turns_that_the_models_files_do_not_name_is_told_and_used() -> None:
    write("train.jsonl", {"prompt": ASKED, "ground_truth": "2"})
    form = replace(QWEN_2, ends=("<|endoftext|>",))
    model(form, generation_config={})
    (warning,) = found(check(), "do not name as an end")
    assert "<|im_end|>" in warning.message and "<|endoftext|>" in str(warning.expected)

    tokenizer = load_tokenizer("model")
    ends = {templated: end_token_ids(tokenizer, "model", templated=templated) for templated in (False, True)}
    assert ends[True] == (*ends[False], tokenizer.convert_tokens_to_ids("<|im_end|>"))

    model(form, generation_config={"eos_token_id": ends[True][-1]})
    assert not found(check(), "do not name as an end")
    write("train.jsonl", {"prompt": "1+1=", "ground_truth": "2"})
    model(form, generation_config={})
    assert not found(check(), "do not name as an end"), "no prompt goes through the template"


def test_ends_of_config_json_count_where_the_generation_config_names_none(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(replace(QWEN_2, ends=("<|endoftext|>",)))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [end, 2]}))
    assert end_token_ids(tokenizer, tmp_path) == (tokenizer.eos_token_id, end), "2 is a token of text"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    assert end_token_ids(tokenizer, tmp_path) == (tokenizer.eos_token_id,)


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "<|im_start|>user\na<|im_end|>\n"}, "nothing opens the turn"),
        ({"prompt": [{"role": "user", "content": "<|im_start|>user\na<|im_end|>"}]}, "rendered already"),
        ({"prompt": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"}, None),
        ({"prompt": ASKED}, None),
    ],
)
def test_prompts_that_are_rendered_half_or_twice_are_told_with_the_record(
    record: dict[str, Any], message: str | None
) -> None:
    model(QWEN_2)
    write("train.jsonl", {**record, "ground_truth": "2"})
    report = check()
    warnings = [warning for warning in report.warnings if "train.jsonl:1" in str(warning.got)]
    assert [message in warning.message for warning in warnings if message] == ([True] if message else [])
    assert message is not None or not warnings


@pytest.mark.usefixtures("workspace")
def test_responses_that_go_on_behind_their_end_are_told_with_the_record() -> None:
    model(QWEN_2)
    write("sft.jsonl", {"prompt": ASKED, "response": "2<|im_end|>\n<|im_start|>user\n3"})
    section = "sft={data: sft.jsonl, steps: 1, max_row_tokens: 64}"
    (warning,) = found(check(section), "continue after an end token")
    assert "sft.jsonl:1" in str(warning.got)
    thought = {"role": "assistant", "content": "2", "reasoning_content": "hm"}
    write("sft.jsonl", {"prompt": [*ASKED, thought, *ASKED, thought]})
    model(FORMS["qwen_3"])
    assert len(found(check(section), "renders earlier turns differently")) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ messages[0].nothing.more }}", "UndefinedError"), ("{% if %}", "SyntaxError"), (ENDLESS, "time")],
)
def test_check_refuses_a_template_that_fails_as_the_job_does(template: str, reason: str) -> None:
    Path("model/chat_template.jinja").write_text(template)
    write("train.jsonl", {"prompt": ASKED, "ground_truth": "2"})
    refused = [error for error in check().errors if "refuses the messages" in error.message]
    assert len(refused) == 1 and reason in str(refused[0].got)
    assert str(refused[0].where).startswith("train.jsonl:1")


@pytest.mark.usefixtures("workspace")
def test_a_template_that_writes_nothing_of_a_prompt_is_refused_before_the_job() -> None:
    Path("model/chat_template.jinja").write_text("{{ messages[0].content[0].text }}")
    write("train.jsonl", {"prompt": ASKED, "ground_truth": "2"})
    (error,) = [error for error in check().errors if "has no tokens" in error.message]
    assert str(error.where).startswith("train.jsonl:1")


@pytest.mark.usefixtures("workspace")
def test_nothing_is_said_of_the_ends_of_a_template_that_makes_no_conversation() -> None:
    model(replace(QWEN_2, template="{{ raise_exception('no') if messages[1:] }}{{ messages[0].content }}"))
    write("train.jsonl", {"prompt": ASKED, "ground_truth": "2"})
    assert not found(check(), "ends turns")


def test_rewards_see_the_marks_that_a_user_added_and_none_that_frame_a_turn() -> None:
    form = replace(QWEN_2, special=(*QWEN_2.special, "<answer>", "</answer>", "<think>"))
    tokenizer = tokenizer_of(form)
    ids = tokenizer.encode("<think>a<answer>4</answer><|im_end|>\n<|im_start|>user<|endoftext|>")
    assert VisibleText(tokenizer).decode(ids) == "<think>a<answer>4</answer>\nuser"
    assert VisibleText(tokenizer).decode_all([ids, []]) == ["<think>a<answer>4</answer>\nuser", ""]


def test_an_end_behind_a_space_is_not_repeated_where_a_conversation_goes_on() -> None:
    tokenizer = tokenizer_of(LLAMA_2)
    chat = ChatTemplate(tokenizer)
    new = [{"role": "user", "content": "b"}]
    assert tokenizer.decode(chat.encode_between_turns(tokenizer.eos_token_id, new)) == "<s>[INST] b [/INST]"
    assert tokenizer.decode(chat.encode_between_turns(None, new)) == " </s><s>[INST] b [/INST]"


def dated(tmp_path: Path, now: datetime) -> PromptSource:
    """Return prompts whose template writes the date."""
    tokenizer_of(FORMS["smollm_3"]).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, now)
    data = DataConfig("train")
    records = [Record({"prompt": ASKED, "ground_truth": "2"}, "train.jsonl:1")]
    encoded = encode_prompts(tokenizer, data, "data.train", records)
    return PromptSource(encoded, tokenizer, data, RolloutConfig(), seed=1)


def test_a_template_with_the_date_has_that_of_the_first_start(tmp_path: Path) -> None:
    first = datetime(2024, 2, 29, 23, 59)
    source = dated(tmp_path, first)
    assert "29 February 2024" in source.batch_in_file_order().prompts[0]
    dated(tmp_path, first).load_state_dict(source.state_dict())
    with pytest.raises(UserError, match="writes the date"):
        dated(tmp_path, first + timedelta(days=1)).load_state_dict(source.state_dict())


def test_the_first_start_of_a_run_is_the_first_that_any_process_keeps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_first_start() is None
    first = datetime(2024, 2, 29, 23, 59)
    assert folder.store_first_start(first) == first
    assert folder.store_first_start(first + timedelta(days=1)) == first
    folder.first_start.write_text("not a time")
    assert folder.store_first_start(first + timedelta(days=1)) == first + timedelta(days=1)
    assert [file.name for file in tmp_path.iterdir()] == ["first_start"]


def test_an_export_has_named_templates_and_the_code_of_the_tokenizer(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "exported"
    tokenizer = tokenizer_of(QWEN_2)
    tokenizer.chat_template = {"default": "a", "tool_use": "b", "rag": "c"}
    tokenizer.save_pretrained(source)
    (source / "tokenization_own.py").write_text("class Own: ...\n")
    target.mkdir()
    copy_tokenizer(source, target)
    assert load_tokenizer(target).chat_template == tokenizer.chat_template
    assert (target / "tokenization_own.py").read_text() == "class Own: ...\n"
