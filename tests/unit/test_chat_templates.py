"""Rows train on the text that chat templates generate, for the forms of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.sections.data import DataConfig, SourceConfig, fields_of
from megatron_rl.data.records import Record
from megatron_rl.data.rendered_text import render_prompts
from megatron_rl.data.sources import encode_responses
from megatron_rl.data.template_renderer import Rendering, get_renderer
from megatron_rl.data.tokenizing import PromptEncoder, end_token_ids
from tests.unit.chat_templates import FORMS, QWEN_2, TOOL, ChatForm, tokenizer_of

USER = [{"role": "user", "content": text} for text in ("What is 2+2?", " And 3+3? ")]
SAID = [{"role": "assistant", "content": text} for text in ("4", "It is 6.")]
CHAT = [USER[0], SAID[0], USER[1], SAID[1]]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLED = [
    USER[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add"},
    SAID[1],
]


def model_of(form: ChatForm, folder: Path, tokenizer: Any) -> Path:
    ends = [tokenizer.convert_tokens_to_ids(text) for text in form.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def row_of(form: ChatForm, folder: Path, values: dict[str, Any], **data: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a record's row, and the tokens with a loss."""
    tokenizer = tokenizer_of(form, spaces=data.pop("spaces", False))
    ends = end_token_ids(tokenizer, model_of(form, folder, tokenizer))
    settings = DataConfig("train", prompt_field=data.pop("prompt_field", "messages"), **data)
    encoded = encode_responses(
        tokenizer, settings, {"response": "sft.response_field"}, 4096, "sft.data", ends,
        [Record(values, "chats.jsonl:1")], every_turn=True,
    )  # fmt: skip
    prompts, responses = encoded.tokens
    whole = [int(token) for token in [*prompts[0], *responses[0]]]
    said = [token for token in whole[len(prompts[0]) :] if token >= 0]
    return [token if token >= 0 else ~token for token in whole], said


def learned(form: ChatForm, folder: Path, values: dict[str, Any], **data: Any) -> tuple[str, str]:
    """Return the text of a record's row, and the part of it with a loss."""
    tokenizer = tokenizer_of(form, spaces=data.get("spaces", False))
    row, said = row_of(form, folder, values, **data)
    return tokenizer.decode(row), tokenizer.decode(said)


@pytest.mark.parametrize("name", FORMS)
def test_a_template_is_rendered_as_transformers_does(name: str) -> None:
    tokenizer = tokenizer_of(FORMS[name])
    renderer = get_renderer(tokenizer)
    assert renderer is not None
    chats: list[tuple[Any, Any]] = [(USER[:1], None), (CHAT[:3], None), (CHAT, None)]
    chats += [(USER[:1], [TOOL]), (CALLED, [TOOL])] if FORMS[name].tools else []
    for messages, tools in chats:
        for opens in (True, False):
            expected = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=opens
            )
            assert renderer.render(messages, tools, add_generation_prompt=opens) == expected


def test_arguments_of_a_template_are_rendered_as_transformers_does() -> None:
    tokenizer = tokenizer_of(next(iter(FORMS.values())))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    records = [Record({"prompt": "1+1="}, "test.jsonl:1")]
    texts = []
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        source = SourceConfig("test.jsonl", system_prompt="Add.", chat_template_kwargs=kwargs)
        data = fields_of(DataConfig(), source, "data.sources.easy")
        renderer = get_renderer(tokenizer)
        (text,) = render_prompts(records, data, "data.sources.easy.path", renderer)
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **kwargs
        )
        assert text == expected
        texts.append(text)
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("name", [name for name in FORMS if name != "deepseek_r1"])
def test_a_row_of_a_conversation_is_what_the_template_writes(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FORMS[name])
    text, said = learned(FORMS[name], tmp_path, {"messages": CHAT})
    written = tokenizer.apply_chat_template(CHAT, tokenize=False)
    if name == "glm_4":  # whose turns end with the opening of the next message
        written += "<|user|>"
    assert text == written.rstrip("\n")
    for message in SAID:
        assert said.count(message["content"]) == 1
    assert any(text.endswith(end) for end in FORMS[name].ends)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.tools])
def test_a_row_with_calls_of_tools_is_what_the_template_writes(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FORMS[name])
    record = {"messages": CALLED, "tools": [TOOL]}
    text, said = learned(FORMS[name], tmp_path, record, tools_field="tools")
    written = tokenizer.apply_chat_template(CALLED, tools=[TOOL], tokenize=False)
    ends = {"glm_4": "<|user|>"}
    assert text == written.rstrip("\n") + ends.get(name, "")
    assert '"a": 2' in said and TOOL["function"]["description"] not in said
    assert ("<|observation|>" in said) is (name == "glm_4")


def test_thoughts_are_learned_in_every_turn_though_the_template_drops_them_later(tmp_path: Path) -> None:
    thinking = [{"role": "assistant", "content": text, "reasoning_content": "hm"} for text in ("4", "6")]
    chat = [USER[0], thinking[0], USER[1], thinking[1]]
    text, said = learned(FORMS["qwen_3"], tmp_path, {"messages": chat})
    assert said == "<think>\nhm\n</think>\n\n4<|im_end|><think>\nhm\n</think>\n\n6<|im_end|>"
    assert text.count("hm") == 2


def test_what_follows_opened_thoughts_is_learned_as_it_is_given(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "hm</think>4"}
    text, _ = learned(FORMS["deepseek_r1"], tmp_path, {"messages": [USER[0], said]})
    assert text.endswith("<｜Assistant｜><think>\nhm</think>4<｜end▁of▁sentence｜>")


@pytest.mark.parametrize("name", [name for name in FORMS if name != "deepseek_r1"])
def test_a_row_has_the_tokens_of_the_whole_text_where_a_tokenizer_writes_spaces_into_words(
    name: str, tmp_path: Path
) -> None:
    form = FORMS[name]
    tokenizer = tokenizer_of(form, spaces=True)
    text, _ = learned(form, tmp_path, {"messages": CHAT}, spaces=True)
    ids = row_of(form, tmp_path, {"messages": CHAT}, spaces=True)[0]
    written = tokenizer.apply_chat_template(CHAT)["input_ids"]
    while not tokenizer.decode(written[-1:]).strip():  # a newline behind the last turn
        written = written[:-1]
    assert ids[: len(written)] == written
    assert len(ids) == len(written) + (name == "glm_4"), text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama_2", " 4 </s>"),
        ("mistral_1", " 4</s>"),
        ("qwen_2", "4<|im_end|>"),
        ("glm_4", "\n4<|user|>"),
        ("gemma", "4<end_of_turn>"),
        ("deepseek_3", "4<｜end▁of▁sentence｜>"),
    ],
)
def test_a_message_alone_is_learned_with_the_space_and_the_end_of_the_template(
    name: str, expected: str, tmp_path: Path
) -> None:
    values = {"prompt": USER[:1], "response": SAID[:1]}
    assert learned(FORMS[name], tmp_path, values, prompt_field="prompt")[1] == expected


@pytest.mark.parametrize(
    "response",
    [
        "4",
        "4<|im_end|>",
        "4<|im_end|>\n",
        "4<|im_end|>\n<|endoftext|>",
        "4<|im_end|><|im_end|>",
        "<|im_start|>assistant\n4<|im_end|>\n",
    ],
)
def test_a_response_cut_from_a_rendered_conversation_has_one_end(response: str, tmp_path: Path) -> None:
    values = {"prompt": USER[:1], "response": response}
    assert learned(QWEN_2, tmp_path, values, prompt_field="prompt")[1] == "4<|im_end|>"


def test_a_response_does_not_begin_with_the_bos_that_its_prompt_has(tmp_path: Path) -> None:
    values = {"prompt": USER[:1], "response": "<s> 4 </s>"}
    assert learned(FORMS["llama_2"], tmp_path, values, prompt_field="prompt")[1] == " 4 </s>"


@pytest.mark.parametrize(
    ("prefix", "suffix", "text", "expected"),
    [
        (("<s>",), (), "<s>[INST] a [/INST]", "<s>[INST] a [/INST]"),
        (("<s>",), (), "a", "<s>a"),
        (("<s>",), ("</s>",), "a", "<s>a"),
        ((), ("</s>",), "a", "a"),
        (("<s>", "</s>"), (), "</s>a", "<s></s>a"),
    ],
)
def test_a_prompt_has_what_the_tokenizer_puts_before_it_once_and_nothing_behind(
    prefix: tuple[str, ...], suffix: tuple[str, ...], text: str, expected: str
) -> None:
    tokenizer = tokenizer_of(FORMS["mistral_1"], prefix=prefix, suffix=suffix)
    encoder = PromptEncoder(tokenizer, DataConfig("train"), "data.train")
    _, (tokens,) = encoder.encode([Record({"prompt": text}, "p.jsonl:1")], 64)
    assert tokenizer.decode(tokens) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "processor time"),
        ("{{ 'a' * 10 ** 8 }}", "characters"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no such role') }}", "no such role"),
    ],
)
def test_a_template_that_fails_or_has_no_end_is_refused_with_the_reason(template: str, reason: str) -> None:
    tokenizer = tokenizer_of(FORMS["qwen_2"])
    tokenizer.chat_template = template
    renderer = get_renderer(tokenizer)
    assert renderer is not None
    (found,) = renderer.render_all([Rendering(USER[:1])])
    assert reason in str(found)


@pytest.mark.slow
def test_one_record_that_has_no_end_is_told_from_its_neighbours() -> None:
    tokenizer = tokenizer_of(FORMS["qwen_2"])
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = "{% if messages[0].content == 'b' %}" + endless + "{% endif %}x"
    renderer = get_renderer(tokenizer)
    assert renderer is not None
    found = renderer.render_all([Rendering([{"role": "user", "content": text}]) for text in "ab"])
    assert found[0] == "x" and "processor time" in str(found[1])
