"""Records in the forms of other projects: conversion, errors and remarks."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from config_workspace import CONFIG, write_workspace
from datasets import Dataset, Features, Json, Value
from transformers import AutoTokenizer

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.config.load import load_text
from megatron_rl.config.sections.data import DataConfig, fields_of
from megatron_rl.data.forms import Consumers, RecordReader
from megatron_rl.data.records import Record, load_records
from megatron_rl.data.sources import load_prompts, load_responses
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.errors import UserError
from megatron_rl.types import split_rows

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKS: dict[str, Any] = {"role": "user", "content": "1+1"}
ANSWERS: dict[str, Any] = {"role": "assistant", "content": "2"}
RESPONSE = {"response": "sft.response_field"}
PAIR = {"chosen": "preference.chosen_field", "rejected": "preference.rejected_field"}


def read(
    values: Mapping[str, Any],
    responses: Mapping[str, str] | None = None,
    *,
    from_table: bool = False,
    every_turn: bool = True,
    **data: Any,
) -> Mapping[str, Any]:
    reader = RecordReader(DataConfig(**data), "data.train", responses or {}, every_turn, template=TEMPLATE)
    return reader.read(Record(values, "test:1", from_table)).values


def refused(values: Mapping[str, Any], responses: Mapping[str, str] | None = None, **how: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read(values, responses, **how)
    assert caught.value.where and "test:1" in caught.value.where
    return caught.value


def remarks(values: Mapping[str, Any], responses: Mapping[str, str] | None = None, **data: Any) -> str:
    consumers = data.pop("consumers", Consumers("reward.function", "reward.function"))
    settings = DataConfig(**data)
    reader = RecordReader(settings, "data.train", responses or {}, consumers=consumers, template=TEMPLATE)
    for _ in range(2):
        reader.read(Record(values, "test:1"))
    return "\n".join(reader.warning_lines())


def tool(name: str, parameter: str, kind: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": kind}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def called(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_messages_of_sharegpt_become_messages_with_roles() -> None:
    conversation = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "5 degrees"},
    ]
    values = read({"conversations": conversation}, RESPONSE, prompt_field="conversations")
    assert values["conversations"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
    ]
    call, result, answer = values["response"]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert result == {"role": "tool", "content": "5"}
    assert answer == {"role": "assistant", "content": "5 degrees"}


def test_functions_of_openais_former_interface_become_calls_of_tools() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    messages = read({"prompt": [ASKS, call, {"role": "function", "content": "2"}], "ground_truth": 2})[
        "prompt"
    ]
    assert messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert messages[2]["role"] == "tool"


@pytest.mark.parametrize(
    "prompt",
    [
        [ASKS],
        json.dumps([ASKS]),
        ASKS,
        {"role": ["user"], "content": ["1+1"]},
        [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": "1+1", "image_url": None}]}],
        [{"role": "user", "content": ["1+1"]}],
        [{"role": "human", "content": "1+1", "tool_calls": []}],
    ],
)
def test_one_question_in_many_forms_is_one_message(prompt: Any) -> None:
    assert read({"prompt": prompt, "ground_truth": 2})["prompt"] == [ASKS]


def test_parts_of_text_are_joined_by_line() -> None:
    parts = [{"type": "text", "text": "Add:"}, {"type": "text", "text": "1+1"}]
    (message,) = read({"prompt": [{"role": "user", "content": parts}], "ground_truth": 2})["prompt"]
    assert message["content"] == "Add:\n1+1"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}, "type 'image'"),
        ({"role": "user", "content": {"question": "?"}}, "content other than text"),
        ({"role": "user", "content": 5}, "content other than text"),
        ({"role": "user", "content": None}, "has no content"),
        ({"role": "usr", "content": "?"}, "role 'usr'"),
        ({"role": None, "from": None, "content": "?"}, "has no role"),
        ({"role": "assistant", "content": "", "tool_calls": 5}, "without a name"),
        ({"from": "function_call", "value": "add(1, 2)"}, "does not call a function"),
        ("?", "is not an object"),
    ],
)
def test_a_message_that_cannot_be_read_is_named_with_its_record(message: Any, words: str) -> None:
    error = refused({"prompt": [ASKS, message], "ground_truth": 2})
    assert words in error.message
    assert "message 2 of `prompt`" in (error.where or "")


def test_a_role_that_the_template_compares_with_is_a_role() -> None:
    template = "{% for m in messages %}{% if m.role == 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    record = Record({"prompt": [{"role": "critic", "content": "?"}], "ground_truth": 1}, "test:1")
    reader = RecordReader(DataConfig(), "data.train", template=template)
    assert reader.read(record).values["prompt"][0]["role"] == "critic"


def test_a_prompt_that_ends_with_the_answer_is_refused() -> None:
    error = refused({"messages": [ASKS, ANSWERS], "ground_truth": 2}, prompt_field="messages")
    assert "ends with a message of the assistant" in error.message
    assert "remove the answer from `messages`" in (error.fix or "")


@pytest.mark.parametrize("messages", [[ASKS], [ASKS, ANSWERS, {"role": "user", "content": "2+2"}]])
def test_messages_that_end_with_a_question_hold_nothing_to_learn(messages: list[Any]) -> None:
    error = refused({"prompt": messages, "id": "a7"}, RESPONSE)
    assert "do not end with an answer" in error.message
    assert "field" not in error.fix

    elsewhere = refused({"prompt": messages, "completion": "4"}, RESPONSE)
    assert elsewhere.fix == "set sft.response_field=completion"


def test_nulls_of_a_table_are_left_out_of_calls_and_tools() -> None:
    rows = [
        {"prompt": [ASKS, called("weather", {"city": "Oslo"}), {"role": "tool", "content": "5"}],
         "tools": [tool("weather", "city", "string")]},
        {"prompt": [ASKS, called("add", {"n": 3}), {"role": "tool", "content": "6"}],
         "tools": [tool("add", "n", "integer")]},
    ]  # fmt: skip
    table = pyarrow.Table.from_pylist([row | {"ground_truth": "1"} for row in rows])
    for made, row in zip(table.to_pylist(), rows, strict=True):
        values = read(made, from_table=True, tools_field="tools")
        assert values["tools"] == row["tools"]
        assert values["prompt"][1]["tool_calls"] == row["prompt"][1]["tool_calls"]


def test_nulls_that_somebody_wrote_stay_where_json_has_them() -> None:
    schema = {"properties": {"unit": {"type": ["string", "null"], "default": None}}}
    described = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": schema}}])
    prompt = [ASKS, called("weather", json.dumps({"unit": None})), {"role": "tool", "content": "5"}]
    values = read(
        {"prompt": prompt, "tools": described, "ground_truth": 1}, from_table=True, tools_field="tools"
    )
    assert values["tools"][0]["function"]["parameters"] == schema
    assert values["prompt"][1]["tool_calls"][0]["function"]["arguments"] == {"unit": None}
    said = remarks({"prompt": [ASKS, called("f", {"n": None}), ASKS], "ground_truth": 1})
    assert "arguments of calls that are null" in said and "`n` first in test:1" in said


def test_tools_are_a_list_or_json_text_of_one() -> None:
    described = tool("add", "n", "integer")
    for tools in ([described], json.dumps([described]), [json.dumps(described)]):
        values = read({"prompt": [ASKS], "tools": tools, "ground_truth": 1}, tools_field="tools")
        assert values["tools"] == [described]
    for nothing in ([], "[]", "", " \n", "null"):
        assert (
            read({"prompt": [ASKS], "tools": nothing, "ground_truth": 1}, tools_field="tools")["tools"]
            is None
        )
    for wrong in (described, "add(n)", ["add"], 5):
        error = refused({"prompt": [ASKS], "tools": wrong, "ground_truth": 1}, tools_field="tools")
        assert "not a list of objects" in error.message


def test_a_table_may_have_tools_in_some_rows_and_an_empty_text_in_others() -> None:
    described = tool("add", "n", "integer")
    table = pyarrow.Table.from_pylist(
        [
            {"prompt": [ASKS], "tools": json.dumps([described]), "ground_truth": 1},
            {"prompt": [ASKS], "tools": "", "ground_truth": 1},
        ]
    )
    tools = [read(row, from_table=True, tools_field="tools")["tools"] for row in table.to_pylist()]
    assert tools == [[described], None]


def test_check_says_once_that_a_file_is_in_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_workspace(tmp_path)
    line = json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n"
    Path("train.jsonl").write_text(line * 20, encoding="utf-16")
    errors = check_config(load_text(CONFIG), training=False, patience=0).errors
    assert [error.message for error in errors] == ["train.jsonl is encoded in UTF-16"]
    assert "iconv -f UTF-16 -t UTF-8 train.jsonl > train.utf8.jsonl" in (errors[0].fix or "")


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0}, {"training": False}, {"train": False}, {"loss": False},
        {"step_loss_mask": 0}, {"masked": True},
    ],
)  # fmt: skip
def test_turns_of_no_weight_are_read_and_not_learned(mark: dict[str, Any]) -> None:
    wrong = {"role": "assistant", "content": "3", **mark}
    begun = read({"messages": [ASKS, wrong, ASKS, ANSWERS]}, RESPONSE, prompt_field="messages")
    assert (len(begun["messages"]), begun["response"]) == (3, [ANSWERS])
    ended = read({"messages": [ASKS, ANSWERS, ASKS, wrong]}, RESPONSE, prompt_field="messages")
    assert (len(ended["messages"]), ended["response"]) == (1, [ANSWERS])
    between = read(
        {"messages": [ASKS, ANSWERS, ASKS, wrong, ASKS, ANSWERS]}, RESPONSE, prompt_field="messages"
    )
    assert [message.get("weight") for message in between["response"]] == [None, None, 0, None, None]
    last = {"messages": [ASKS, ANSWERS, ASKS, wrong]}
    assert read(last, RESPONSE, prompt_field="messages", every_turn=False)["response"] == [ANSWERS]
    error = refused({"messages": [ASKS, wrong]}, RESPONSE, prompt_field="messages")
    assert "no turn to train on" in error.message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({**ANSWERS, "weight": 0.5}, "is trained on completely or not"),
        ({**ANSWERS, "train_detail": [{"begin_offset": 0, "end_offset": 1}]}, "completely or not at all"),
        ({**ASKS, "training": True}, "only the assistant's are trained on"),
    ],
)
def test_weights_that_cannot_be_honoured_are_refused(message: dict[str, Any], words: str) -> None:
    error = refused({"messages": [ASKS, message, ANSWERS]}, RESPONSE, prompt_field="messages")
    assert words in error.message


def test_preferences_come_as_texts_messages_or_conversations() -> None:
    other = {"role": "assistant", "content": "3"}
    texts = read({"prompt": [ASKS], "chosen": "2", "rejected": "3"}, PAIR)
    assert (texts["prompt"], texts["chosen"], texts["rejected"]) == ([ASKS], "2", "3")
    for record in (
        {"prompt": [ASKS], "chosen": [ANSWERS], "rejected": other},
        {"chosen": [ASKS, ANSWERS], "rejected": [ASKS, other]},
        {"chosen": json.dumps([ASKS, ANSWERS]), "rejected": json.dumps([ASKS, other])},
    ):
        values = read(record, PAIR)
        assert (values["prompt"], values["chosen"], values["rejected"]) == ([ASKS], [ANSWERS], [other])
    error = refused({"chosen": "Human: 1+1 Assistant: 2", "rejected": "Human: 1+1 Assistant: 3"}, PAIR)
    assert "give every record a field `prompt`" in (error.fix or "")


def test_what_nothing_reads_is_said_once_for_a_data_set() -> None:
    record = {"prompt": [{**ASKS, "name": "Ann"}], "ground_truth": 1, "level": 3, "images": ["a.png"]}
    said = remarks(record | {"system": "Be brief.", "tools": "[]"})
    assert said.count("\n") == 1
    assert "`images`, `system`, `tools`" in said and "set data.tools_field=tools" in said
    assert "keys of messages that nothing reads: `name`" in said
    assert "`level`" not in said  # a reward function is given it

    said = remarks(record, consumers=Consumers(None, None))
    assert "`level`" in said and "a reward function or an environment gets all fields" in said
    said = remarks({"prompt": "1+1", "response": "2", "score": 1, "empty": None}, RESPONSE)
    assert "`score`" in said and "`empty`" not in said
    assert not remarks({"prompt": [ASKS], "ground_truth": 1, "extra": {"index": 1}})


def test_escapes_in_json_text_make_no_halves_of_characters() -> None:
    text = '[{"role": "user", "content": "\\ud800"}]'
    assert "half of a character" in refused({"prompt": text, "ground_truth": 1}).message


def test_tables_of_every_kind_give_plain_values(tmp_path: Path) -> None:
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.large_string())])
    columns = {
        "prompt": pyarrow.array([[ASKS]], pyarrow.large_list(message)),
        "ground_truth": pyarrow.array(["2"]).dictionary_encode(),
        "notes": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "when": pyarrow.array([datetime.datetime(2026, 1, 2)]),
        "bytes": pyarrow.array([b"\x00"]),
        "price": pyarrow.array([decimal.Decimal("1.5")]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (record,) = load_records(tmp_path / "a.parquet")
    assert record.from_table
    assert (record.values["prompt"], record.values["ground_truth"]) == ([ASKS], "2")
    assert record.values["notes"] == {"a": 1}
    assert RecordReader(DataConfig(), "data.train").read(record).values["prompt"] == [ASKS]


def test_saved_formats_and_columns_of_json_give_plain_values(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "truth": {"a": 1}}, {"prompt": "1+2", "truth": {"b": "x"}}]
    saved = Dataset.from_list(rows, features=Features({"prompt": Value("string"), "truth": Json()}))
    saved.to_parquet(str(tmp_path / "a.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        assert [record.values for record in load_records(path)] == rows

    numbers = Dataset.from_list([{"prompt": "1+1", "level": [1, 2]}]).with_format("numpy")
    numbers.save_to_disk(str(tmp_path / "numpy"))
    (record,) = load_records(tmp_path / "numpy")
    assert record.values == {"prompt": "1+1", "level": [1, 2]}
    assert type(record.values["level"]) is list


def test_json_values_of_maps_are_parsed_at_any_depth(tmp_path: Path) -> None:
    texts = pyarrow.array(['{"a": 1}', "[2]", None, "3"], pyarrow.string())
    values = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts)
    maps = pyarrow.MapArray.from_arrays([0, 1, 4], ["x", "x", "y", "z"], values)
    nested = pyarrow.MapArray.from_arrays([0, 0, 1], ["outer"], pyarrow.ListArray.from_arrays([0, 2], maps))
    columns = {"prompt": ["1+1", "1+2"], "one": maps, "nested": nested}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")

    first, second = [record.values for record in load_records(tmp_path / "a.parquet")]
    one_key = {"x": {"a": 1}}
    several_keys = {"x": [2], "y": None, "z": 3}
    assert first == {"prompt": "1+1", "one": one_key, "nested": {}}
    assert second == {"prompt": "1+2", "one": several_keys, "nested": {"outer": [one_key, several_keys]}}


def test_names_that_stand_twice_are_refused(tmp_path: Path) -> None:
    columns = [pyarrow.array(["1+1"]), pyarrow.array(["2"]), pyarrow.array(["3"])]
    twice = pyarrow.Table.from_arrays(columns, names=["prompt", "ground_truth", "ground_truth"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="two columns named `ground_truth`"):
        load_records(tmp_path / "a.parquet")

    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "prompt": "b"}\n')
    with pytest.raises(UserError, match="has the key `prompt` twice"):
        load_records(tmp_path / "a.jsonl")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_workspace(tmp_path)
    Path("model/chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def check(*overrides: str, training: bool = False) -> CheckReport:
    loaded = load_text(CONFIG, ["data.max_prompt_tokens=200", *overrides])
    return check_config(loaded, patience=0, training=training)


def write(path: str, records: Sequence[Mapping[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def train_refuses() -> bool:
    """A job checks its configuration with the first records, and then reads all of them."""
    report = check(training=True)
    if report.errors:
        return True
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    assert report.config is not None
    try:
        load_prompts(report.config, "data.train", "train.jsonl", tokenizer, TokenFiles(None, print))
    except UserError:
        return True
    return False


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("prompts", "fits"),
    [
        (["1+1=", [ASKS]], False),
        ([[ASKS], "1+1="], True),
        (["1+1=", ""], False),
        ([[{"role": "user", "content": ""}]], False),  # the tokenizer has digits alone
        ([[ASKS, ANSWERS]], False),
        ([[ASKS, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, ASKS]], True),
        ([json.dumps([ASKS])], True),
        (["[1, 2]"], True),
        ([str([ASKS])], False),
        ([json.dumps([ASKS])[:-3]], False),
        ([[{"role": "user", "content": [{"type": "audio"}]}]], False),
        ([5], False),
        ([[]], False),
        ([{"a": 1}], False),
    ],
)
def test_check_refuses_the_prompts_that_training_refuses(prompts: list[Any], fits: bool) -> None:
    write("train.jsonl", [{"prompt": prompt, "ground_truth": "2"} for prompt in prompts])
    report = check()
    of_data = [error for error in report.errors if "train.jsonl" in (error.where or "")]
    assert (not of_data) is fits
    assert train_refuses() is not fits


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role + 5 }}{% endfor %}",
        "{% for m in messages %}{{ m.content.nothing.more }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}",
        "{{ raise_exception('no') }}",
        "{{ messages[7].content + 'x' }}",
    ],
)
def test_check_refuses_a_template_that_fails(template: str) -> None:
    Path("model/chat_template.jinja").write_text(template)
    write("train.jsonl", [{"prompt": [ASKS], "ground_truth": "2"}])
    report = check()
    assert any("refuses the messages" in error.message for error in report.errors)
    assert train_refuses()


@pytest.mark.usefixtures("workspace")
def test_a_ground_truth_is_required_where_something_may_read_it() -> None:
    write("train.jsonl", [{"prompt": "1+1="}] * 3)
    Path("length.py").write_text("def score(*, response, **_):\n    return len(response)\n")
    Path("compare.py").write_text("def score(*, response, ground_truth, **_):\n    return 1.0\n")
    base = ["evaluation.sets=null"]
    assert not check(*base, "reward={function: 'length.py:score'}").errors
    (error,) = check(*base, "reward={function: 'compare.py:score'}").errors
    assert error.message == "a record has no `ground_truth`"
    assert "make reward.function not read `ground_truth`" in (error.fix or "")
    (sent,) = check(*base, "reward={http: {url: 'http://localhost:1'}}").errors
    assert "make reward.http.sends not read" in (sent.fix or "")
    sends = "reward={http: {url: 'http://localhost:1', sends: [prompt, response]}}"
    assert not check(*base, sends).errors


@pytest.mark.usefixtures("workspace")
def test_a_turn_of_no_weight_between_others_is_masked() -> None:
    wrong = {"role": "assistant", "content": "9", "weight": 0}
    write("sft.jsonl", [{"messages": [ASKS, ANSWERS, ASKS, wrong, ASKS, ANSWERS], "id": 1}])
    overrides = "sft={data: sft.jsonl, steps: 1, prompt_field: messages, max_row_tokens: 200}"
    report = check(overrides)
    assert any("`id`" in warning.message for warning in report.warnings)
    config = report.valid()
    assert config.sft is not None
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    data = fields_of(config.data, config.sft, "sft")
    rows = load_responses(
        config, "sft.data", "sft.jsonl", tokenizer, TokenFiles(None, print), RESPONSE, 200, True, data
    )
    assert any("`id`" in remark for remark in rows.remarks())
    batch = rows.batch_in_file_order()
    (tokens,), (mask,) = (split_rows(part, batch.lengths) for part in (batch.tokens, batch.response_mask))
    assert "9" not in tokenizer.decode(tokens[mask])
    assert "9" in tokenizer.decode(tokens)
    assert tokenizer.decode(tokens[mask]).count("2") == 2
