"""Prompt and supervised sources: tokens, templates, limits, sampling, order and exact resumption."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.data import quickstart
from megatron_rl.data.records import Record, load_records
from megatron_rl.data.sources import PromptSource, encode_prompts, encode_responses
from megatron_rl.data.token_files import EncodedData, TokenFiles
from megatron_rl.data.tokenizing import encode_texts, end_token_ids, load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.types import BANNED, PromptBatch, SamplingParameters, split_rows

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart.write_inputs(tmp_path_factory.mktemp("quickstart"), "tiny")


@pytest.fixture(scope="module")
def tokenizer(material: Path) -> Any:
    return load_tokenizer(material / "model")


def records(values: Sequence[dict[str, Any]]) -> tuple[Record, ...]:
    return tuple(Record(value, f"test.jsonl:{line}") for line, value in enumerate(values, start=1))


def problems(count: int) -> tuple[Record, ...]:
    return records([{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n), "level": n} for n in range(count)])


def source(
    items: Sequence[Record], tokenizer: Any, rollout: RolloutConfig | None = None, **data: Any
) -> PromptSource:
    seed = data.pop("seed", 3)
    settings = DataConfig("train", **data)
    encoded = encode_prompts(tokenizer, settings, "data.train", items)
    return PromptSource(encoded, tokenizer, settings, rollout or RolloutConfig(), seed=seed)


def same(left: PromptBatch, right: PromptBatch) -> bool:
    return (
        torch.equal(left.tokens, right.tokens)
        and torch.equal(left.prompt_ids, right.prompt_ids)
        and left.prompts == right.prompts
        and left.ground_truths == right.ground_truths
    )


def test_a_batch_holds_what_the_records_say(tokenizer: Any) -> None:
    batch = source(problems(3), tokenizer, shuffle=False).next_batch(3)
    assert batch.prompts == ("0+0=", "1+1=", "2+2=") and batch.ground_truths == ("0", "2", "4")
    assert batch.tasks == ("default",) * 3 and [m["level"] for m in batch.metadata] == [0, 1, 2]
    assert "prompt" not in batch.metadata[0] and "ground_truth" not in batch.metadata[0]
    named = [Record({**problem.values, "task": "sums"}, problem.where) for problem in problems(1)]
    of_task = source(named, tokenizer).next_batch(1)
    assert of_task.tasks == ("sums",) and of_task.metadata[0]["task"] == "sums", "rewards may go by the task"
    assert batch.tokens.dtype == torch.int64 and batch.lengths.tolist() == [5, 5, 5]
    rows = [row.tolist() for row in split_rows(batch.tokens, batch.lengths)]
    assert rows == [tokenizer(text)["input_ids"] for text in batch.prompts]
    assert batch.sampling[0] == SamplingParameters(1.0, 1.0, 0, 256, (tokenizer.eos_token_id,))


def test_a_dot_leads_into_a_field(tokenizer: Any) -> None:
    inner = {"style": "rule", "ground_truth": "2", "said": "3"}
    items = records([{"ask": {"now": "1+1="}, "reward_model": inner, "extra": {"index": 7, "kind": "sum"}}])
    names = {"prompt_field": "ask.now", "task_field": "extra.kind"}
    truth = "reward_model.ground_truth"
    batch = source(items, tokenizer, ground_truth_field=truth, **names).next_batch(1)
    assert (batch.prompts, batch.ground_truths, batch.tasks) == (("1+1=",), ("2",), ("sum",))
    assert batch.metadata[0]["reward_model"] == inner and batch.metadata[0]["extra"]["index"] == 7
    literal = records([{"prompt": "1+1=", "reward_model.ground_truth": "4", "reward_model": inner}])
    assert source(literal, tokenizer, ground_truth_field="reward_model.ground_truth").next_batch(
        1
    ).ground_truths == ("4",)
    fields = {"reward_model.said": "sft.response_field"}
    encoded = encode_responses(
        tokenizer, DataConfig(prompt_field="ask.now"), fields, 64, "sft.data", [tokenizer.eos_token_id], items
    )
    assert tokenizer.decode(encoded.tokens[1][0]) == "3<eos>"


def test_every_epoch_has_every_prompt_once_in_its_own_order(tokenizer: Any) -> None:
    prompts = source(problems(20), tokenizer)
    epochs = [[int(i) for i in prompts.next_batch(20).prompt_ids] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(20))
    again = source(problems(20), tokenizer)
    assert [int(i) for i in again.next_batch(60).prompt_ids] == [i for epoch in epochs for i in epoch]
    other = source(problems(20), tokenizer, seed=4)
    assert [int(i) for i in other.next_batch(20).prompt_ids] != epochs[0]
    assert prompts.epoch == 2


@pytest.mark.parametrize("taken", [0, 1, 19, 20, 33, 47])
def test_a_resumed_source_goes_on_exactly(tokenizer: Any, taken: int) -> None:
    whole, first, second = (source(problems(20), tokenizer) for _ in range(3))
    if taken:
        whole.next_batch(taken)
        first.next_batch(taken)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for count in (7, 30, 1):
        assert same(whole.next_batch(count), second.next_batch(count))


def test_a_resumed_source_warns_of_changed_fields(tokenizer: Any) -> None:
    state = source(problems(3), tokenizer).state_dict()
    assert source(problems(3), tokenizer).load_state_dict(state) is None
    items = problems(2) + records([{**problems(3)[2].values, "ground_truth": "5"}])
    assert "fields other than the prompt" in (source(items, tokenizer).load_state_dict(state) or "")
    del state["records"]
    assert source(items, tokenizer).load_state_dict(state) is None, "a checkpoint that has no digest"


def test_state_of_other_data_is_refused(tokenizer: Any) -> None:
    state = source(problems(20), tokenizer).state_dict()
    for other, message in (
        (source(problems(21), tokenizer), "another data set"),
        (source(problems(20), tokenizer, seed=4), "another seed"),
        (source(problems(20), tokenizer, shuffle=False), "another shuffle"),
    ):
        with pytest.raises(UserError, match=message):
            other.load_state_dict(state)


def test_over_long_prompts_are_dropped_counted_and_reported(tokenizer: Any) -> None:
    items = records([{"prompt": "1" * n, "ground_truth": "x"} for n in (3, 30, 4, 40, 5)])
    prompts = source(items, tokenizer, max_prompt_tokens=10, shuffle=False)
    report = prompts.length_report
    assert (report.total, report.over_long, report.longest) == (5, 2, 41)
    assert "dropped 2 of 5" in report.describe() and "test.jsonl:2 (31 tokens)" in report.describe()
    assert prompts.next_batch(3).prompt_ids.tolist() == [0, 2, 4]
    with pytest.raises(UserError, match="2 of 5") as caught:
        source(items, tokenizer, max_prompt_tokens=10, over_long="error")
    assert "test.jsonl:2" in str(caught.value) and "data.over_long=drop" in str(caught.value)
    with pytest.raises(UserError, match="5 of 5"):
        source(items, tokenizer, max_prompt_tokens=2)
    assert "none over" in source(items, tokenizer).length_report.describe()


def test_messages_go_through_the_chat_template_once(material: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "+2"}]
    items = records([{"prompt": messages, "ground_truth": "3"}, {"prompt": "4+5", "ground_truth": "9"}])
    with pytest.raises(UserError, match="chat template"):
        source(items, tokenizer)
    tokenizer.chat_template = TEMPLATE
    batch = source(items, tokenizer, shuffle=False).next_batch(2)
    assert batch.prompts == ("1+2=", "4+5")
    rows = [row.tolist() for row in split_rows(batch.tokens, batch.lengths)]
    assert rows[0] == tokenizer.encode("1+2=", add_special_tokens=False), "a template brings its own <bos>"
    assert rows[1] == tokenizer.encode("4+5"), "a plain string is not a message"
    batch = source(items, tokenizer, shuffle=False, chat_template=True).next_batch(2)
    assert batch.prompts == ("1+2=", "4+5=")
    with pytest.raises(UserError, match="switched off"):
        source(items, tokenizer, chat_template=False)
    with pytest.raises(UserError, match=r"not a prompt[\s\S]*test.jsonl:1"):
        source(records([{"prompt": 5, "ground_truth": "3"}]), tokenizer)


def test_sampling_profiles_by_task(tokenizer: Any) -> None:
    rollout = RolloutConfig(
        temperature=0.9,
        stop=("=",),
        sampling_profiles={
            "hard": {"temperature": 0.5, "top_k": 4, "max_response_tokens": 9, "stop": [",", "."]}
        },
    )
    items = records([{"prompt": "1", "ground_truth": 1}, {"prompt": "1", "ground_truth": 1, "task": "hard"}])
    easy, hard = source(items, tokenizer, rollout, shuffle=False).next_batch(2).sampling
    eos, equals, comma, dot = (tokenizer.convert_tokens_to_ids(t) for t in ("<eos>", "=", ",", "."))
    assert easy == SamplingParameters(0.9, 1.0, 0, 256, (eos, equals))
    assert hard == SamplingParameters(0.5, 1.0, 4, 9, (eos, comma, dot))


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"temprature": 1.0}, "did you mean `temperature`"),
        ({"temperature": -1.0}, "temperature` is out of range"),
        ({"top_p": 0.0}, "top_p` is out of range"),
        ({"top_k": 1.5}, "top_k` is out of range"),
        ({"max_response_tokens": 0}, "max_response_tokens` is out of range"),
        ({"temperature": "hot"}, "temperature` is out of range"),
        ({"stop": ["=ß"]}, "never part of a response"),
        ({"stop": "="}, "a list of texts"),
    ],
)
def test_bad_sampling_profiles(tokenizer: Any, profile: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        source(problems(1), tokenizer, RolloutConfig(sampling_profiles={"hard": profile}))
    assert message in str(caught.value) and "rollout.sampling_profiles.hard" in str(caught.value)


def test_temperatures_follow_the_step(tokenizer: Any) -> None:
    rollout = RolloutConfig(
        temperature={"start": 1.0, "end": 0.6, "steps": 4},
        sampling_profiles={
            "hard": {"temperature": {"start": 0.5, "end": 1.5, "steps": 2}},
            "fixed": {"temperature": 0.7},
        },
    )
    values = [{"prompt": "1+1=", "ground_truth": "2", "task": task} for task in ("easy", "hard", "fixed")]
    prompts = source(records(values), tokenizer, rollout)

    found = {}
    for step in (1, 2, 3, 9):
        prompts.begin_step(step)
        batch = prompts.next_batch(3)
        temperatures = [sampling.temperature for sampling in batch.sampling]
        by_task = dict(zip(batch.tasks, temperatures, strict=True))
        found[step] = [round(by_task[task], 9) for task in ("easy", "hard", "fixed")]
    assert found == {1: [1.0, 0.5, 0.7], 2: [0.9, 1.0, 0.7], 3: [0.8, 1.5, 0.7], 9: [0.6, 1.5, 0.7]}


def test_schedules_over_tokens_follow_the_step_too(tokenizer: Any) -> None:
    rollout = RolloutConfig(
        temperature={"start": {"start": 1.0, "end": 0.6, "steps": 4}, "end": 0.5, "over": 9},
        top_p={"start": 0.8, "end": 1.0, "steps": 2},
        sampling_profiles={"hard": {"top_p": {"start": 0.7, "end": 0.9, "over": 5}, "temperature": 1.0}},
    )
    values = [{"prompt": "1+1=", "ground_truth": "2", "task": task} for task in ("easy", "hard")]
    prompts = source(records(values), tokenizer, rollout)

    expected = {
        1: [(1.0, 0.5, 9, 0.8, 0), (1.0, 1.0, 0, 0.7, 5)],
        2: [(0.9, 0.5, 9, 0.9, 0), (1.0, 1.0, 0, 0.7, 5)],
        9: [(0.6, 0.5, 9, 1.0, 0), (1.0, 1.0, 0, 0.7, 5)],
    }
    for step, wanted in expected.items():
        prompts.begin_step(step)
        batch = prompts.next_batch(2)
        found = {}
        for task, s in zip(batch.tasks, batch.sampling, strict=True):
            last = s.last_temperature
            found[task] = (s.temperature, last, s.temperature_tokens, s.top_p, s.top_p_tokens)
        assert [found[task] for task in ("easy", "hard")] == [pytest.approx(row) for row in wanted]

    # An evaluation has its own temperature, and its own top-p where it has one.
    easy, hard = sorted(prompts.batch_in_file_order(temperature=0.7).sampling, key=lambda s: s.top_p_tokens)
    assert (easy.temperature, easy.temperature_tokens, hard.top_p_tokens) == (0.7, 0, 5)
    fixed = prompts.batch_in_file_order(temperature=0.7, top_p=0.9).sampling
    assert {(s.top_p, s.top_p_tokens) for s in fixed} == {(0.9, 0)}


def test_rules_name_tokens_by_text_or_id(tokenizer: Any) -> None:
    rollout = RolloutConfig(
        banned_tokens=("7", "token_id:3"), logit_bias={"8": 1.5, "token_id:5": 0.0}, min_response_tokens=2
    )
    (sampling,) = source(problems(1), tokenizer, rollout).next_batch(1).sampling
    seven, eight = (tokenizer.convert_tokens_to_ids(text) for text in "78")
    assert dict(sampling.logit_bias) == {eight: 1.5, seven: BANNED, 3: BANNED}
    assert sampling.min_response_tokens == 2

    for text in ("token_id:99999", "no token"):
        with pytest.raises(UserError, match="not"):
            source(problems(1), tokenizer, RolloutConfig(banned_tokens=(text,)))


def test_everything_is_in_file_order_and_greedy_switches_filters_off(tokenizer: Any) -> None:
    prompts = source(problems(9), tokenizer, RolloutConfig(top_p=0.5, top_k=3))
    before = prompts.state_dict()
    batch = prompts.batch_in_file_order(temperature=0.0)
    assert batch.prompt_ids.tolist() == list(range(9))
    assert {s[:3] for s in batch.sampling} == {(0.0, 1.0, 0)}
    assert (
        len(prompts.batch_in_file_order(limit=4)) == 4
        and prompts.batch_in_file_order(limit=4).sampling[0].top_k == 3
    )
    assert prompts.state_dict() == before


def test_end_tokens_include_those_of_the_generation_config(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert end_token_ids(tokenizer, tmp_path) == (1, 7)
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none")


@pytest.mark.timeout(60)
def test_end_tokens_are_not_read_from_a_pipe_that_nobody_writes(tokenizer: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")
    assert end_token_ids(tokenizer, tmp_path) == (1,)


def test_a_prompt_without_tokens_is_an_error(tokenizer: Any) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    plain.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match="no tokens"):
        source(records([{"prompt": "", "ground_truth": "x"}]), plain)


def test_the_chat_template_is_given_the_tools_of_a_record(material: Path) -> None:
    tokenizer = load_tokenizer(material / "model")
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}" + TEMPLATE
    messages = [{"role": "user", "content": "1+2"}]
    items = [{"prompt": messages, "ground_truth": "3"}, {"prompt": messages, "ground_truth": "3"}]
    items[0]["tools"] = [{"name": "7"}, {"name": "8"}]
    batch = source(records(items), tokenizer, shuffle=False, tools_field="tools").next_batch(2)
    assert batch.prompts == ("781+2=", "1+2=")
    assert source(records(items), tokenizer, shuffle=False).next_batch(1).prompts == ("1+2=",)
    mistakes = [
        ({"tools": "add"}, "are not a list"),
        ({"prompt": "1+2"}, "does not go through the chat template"),
    ]
    for change, words in mistakes:
        with pytest.raises(UserError, match=words):
            source(records([items[0] | change]), tokenizer, tools_field="tools")


def test_the_quickstart_holds_its_evaluation_out(material: Path) -> None:
    train, held_out, sft = (
        [record.values for record in load_records(material / f"{name}.jsonl")]
        for name in ("train", "eval", "sft")
    )
    assert len(held_out) == 500 and len(train) == 2020
    asked = {value["prompt"] for value in held_out}
    assert len(asked) == 500
    assert not asked & {value["prompt"] for value in train} and not asked & {value["prompt"] for value in sft}
    for value in (*train, *held_out):
        left, right = value["prompt"].rstrip("=").split("+")
        assert int(value["ground_truth"]) == int(left) + int(right)


def test_the_quickstart_is_the_same_each_time_and_loads(material: Path, tmp_path: Path) -> None:
    again = quickstart.write_inputs(tmp_path / "again", "tiny")
    for file in sorted(path for path in material.rglob("*") if path.is_file()):
        assert file.read_bytes() == (again / file.relative_to(material)).read_bytes(), file.name
    model = AutoModelForCausalLM.from_pretrained(material / "model")
    for load in (AutoTokenizer, PreTrainedTokenizerFast):
        tokenizer = load.from_pretrained(material / "model")
        assert tokenizer.decode(tokenizer("37+58=")["input_ids"], skip_special_tokens=True) == "37+58="
        assert tokenizer("37+58=")["input_ids"][0] == tokenizer.bos_token_id
        assert len(tokenizer) == model.config.vocab_size == 21
    assert model.dtype == torch.float32 and model.config.hidden_size // model.config.num_attention_heads >= 32
    assert model.config.num_key_value_heads == 2


def test_a_text_of_megabytes_is_not_tokenised_to_its_end(tokenizer) -> None:
    items = [*problems(2), *records([{"prompt": "1" * 5_000_000, "ground_truth": "1"}])]
    report = source(items, tokenizer, max_prompt_tokens=8).length_report
    assert (report.over_long, report.examples) == (1, ("test.jsonl:1 (1040 or more tokens)",))
    (tokens,) = encode_texts(tokenizer, ["1" * 5_000_000], 8)
    assert 8 < len(tokens) < 100_000
    (tokens,) = encode_texts(tokenizer, ["1" * 100_000], 100_000)
    assert len(tokens) == 100_000


@pytest.mark.slow
def test_processes_tokenise_a_data_set_once(tokenizer: Any, tmp_path: Path) -> None:
    path, told = tmp_path / "set.jsonl", []
    lines = [
        {"prompt": f"{n}+{n}=", "ground_truth": str(2 * n), "names": ["ä", None, 1.5]} for n in range(50)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data, made = DataConfig("train", max_prompt_tokens=5), tmp_path / "made"
    files = TokenFiles(tmp_path / "tokens", told.append)

    def encode(items: Sequence[Record]) -> EncodedData:
        with made.open("a") as log:
            log.write("once\n")
        time.sleep(0.3)  # the others come meanwhile
        return encode_prompts(tokenizer, data, "data.train", items)

    def prompts(kept: TokenFiles) -> PromptSource:
        encoded = kept.load_or_encode(path, "data.train", tokenizer, ("prompts",), encode)
        return PromptSource(encoded, tokenizer, data, RolloutConfig(), seed=3)

    def child() -> None:
        os._exit(0 if len(prompts(files)) == 10 else 1)

    others = [multiprocessing.get_context("fork").Process(target=child) for _ in range(2)]
    for other in others:
        other.start()
    mapped = prompts(files)
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0] and made.read_text() == "once\n"
    alone = prompts(TokenFiles(None, told.append))
    assert mapped.length_report == alone.length_report and mapped.state_dict() == alone.state_dict()
    assert same(mapped.batch_in_file_order(), alone.batch_in_file_order()) and same(
        mapped.next_batch(25), alone.next_batch(25)
    )
    assert mapped.next_batch(3).metadata == alone.next_batch(3).metadata and not told
    (file,) = (tmp_path / "tokens").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-100])
    cut, written = (
        file.with_name(f"{file.name}.{socket.gethostname()}.{process}.part")
        for process in (2**22 + 1, os.getppid())
    )
    cut.write_bytes(b"of a job that was killed while it wrote")
    written.write_bytes(b"of a process that lives, where the file system has no locks")
    assert same(prompts(files).batch_in_file_order(), alone.batch_in_file_order()), (
        "a damaged file is made again"
    )
    assert len(told) == 1 and file.name in told.pop()
    assert not cut.exists() and written.exists()
    path.write_text(path.read_text() + path.read_text())
    assert len(prompts(files)) == 20, "another content is another data set"
    blocked = TokenFiles(made / "tokens", told.append)
    assert len(prompts(blocked)) == 20 and len(told) == 1 and "tokenises the data for itself" in told[0]


def _flip_a_token(file: Path, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.rindex(numpy.int32(7).tobytes() + numpy.int32(4).tobytes())] ^= 2
    file.write_bytes(content)


def _copy_other(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


def _copy_other_with_digest(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)
    shutil.copyfile(other.with_suffix(".digest"), file.with_suffix(".digest"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_flip_a_token, "has different content than when it was written"),
        (_copy_other, "has "),
        (_copy_other_with_digest, "has the digest of "),
        (lambda file, other: file.with_suffix(".digest").unlink(), "has no digest"),
        (lambda file, other: file.with_suffix(".digest").write_bytes(b"\xff"), "has no digest"),
        (lambda file, other: file.write_bytes(b""), "has 0 bytes instead of"),
    ],
)
def test_a_damaged_file_of_tokens_is_named_and_made_anew(
    damage: Callable[[Path, Path], None], named: str, tokenizer: Any, tmp_path: Path
) -> None:
    told: list[str] = []
    files = TokenFiles(tmp_path / "tokens", told.append)
    data = DataConfig("train", shuffle=False)

    def tokens(name: str, numbers: Sequence[int]) -> list[list[int]]:
        path = tmp_path / name
        lines = [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n)} for n in numbers]
        if not path.exists():
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        encode = partial(encode_prompts, tokenizer, data, "data.train")
        encoded = files.load_or_encode(path, "data.train", tokenizer, ("prompts",), encode)
        return [row.tolist() for row in encoded.tokens[0]]

    expected = tokens("set.jsonl", [30, 31, 32])
    (file,) = (tmp_path / "tokens").glob("*.arrow")
    assert tokens("other.jsonl", [73, 74, 75]) != expected
    (other,) = set((tmp_path / "tokens").glob("*.arrow")) - {file}
    damage(file, other)
    assert not told and tokens("set.jsonl", [30, 31, 32]) == expected
    assert len(told) == 1 and f"{file} {named}" in told[0] and "tokenised again" in told.pop()
    assert tokens("set.jsonl", [30, 31, 32]) == expected and not told


def test_records_that_no_file_gives_back_stay_as_they_are(tokenizer: Any, tmp_path: Path) -> None:
    told, path = [], tmp_path / "set.parquet"
    values = {"prompt": ["1+1=", "2+2="], "ground_truth": ["2", "4"], "raw": [b"\xff", b"\x00"]}
    pyarrow.parquet.write_table(pyarrow.table(values), path)
    data = DataConfig("train", shuffle=False)
    encode = partial(encode_prompts, tokenizer, data, "data.train")
    files = TokenFiles(tmp_path / "tokens", told.append)
    prompts = PromptSource(
        files.load_or_encode(path, "data.train", tokenizer, (), encode),
        tokenizer,
        data,
        RolloutConfig(),
        seed=1,
    )
    assert [fields["raw"] for fields in prompts.batch_in_file_order().metadata] == values["raw"]
    assert len(told) == 1 and "JSON" in told[0] and not list((tmp_path / "tokens").glob("*.arrow*"))


def test_tokens_of_shards_are_made_anew_when_one_is_added(tokenizer: Any, tmp_path: Path) -> None:
    folder, settings = tmp_path / "shards", DataConfig("train", shuffle=False)
    folder.mkdir()
    files = TokenFiles(tmp_path / "tokens", print)
    encode = partial(encode_prompts, tokenizer, settings, "data.train")

    def prompts() -> PromptSource:
        encoded = files.load_or_encode(str(folder), "data.train", tokenizer, ("prompts",), encode)
        return PromptSource(encoded, tokenizer, settings, RolloutConfig(), seed=3)

    for name, prompt in (("b.jsonl", "2+2="), ("a.jsonl", "1+1=")):
        (folder / name).write_text(
            json.dumps({"prompt": prompt, "ground_truth": "x", "images": ["a"]}) + "\n"
        )
    begun = prompts()
    assert begun.next_batch(2).prompts == ("1+1=", "2+2=")
    assert prompts().remarks == begun.remarks and "`images`" in begun.remarks[0]  # read from the file

    state = begun.state_dict()
    (folder / "c.jsonl").write_text(json.dumps({"prompt": "3+3=", "ground_truth": "x"}) + "\n")
    longer = prompts()
    assert longer.next_batch(3).prompts == ("1+1=", "2+2=", "3+3=")
    with pytest.raises(UserError, match="another data set"):
        longer.load_state_dict(state)


def test_an_epoch_skips_a_share_of_the_prompts_with_equal_rewards(tokenizer: Any) -> None:
    def new() -> PromptSource:
        data = DataConfig(uniform_share=0.25)
        items = [{"prompt": f"{number}+1=", "ground_truth": 0} for number in range(400)]
        return PromptSource(
            encode_prompts(tokenizer, data, "data.train", records(items)),
            tokenizer,
            data,
            RolloutConfig(),
            seed=1,
        )

    prompts = new()
    assert sorted(prompts.next_batch(400).prompt_ids.tolist()) == list(range(400)), (
        "nothing is known in the first"
    )
    for number in range(300):
        prompts.record_uniform_rewards(number, is_uniform=True)

    # The second epoch: every other prompt, and about a quarter of these.
    skipped: list[set[int]] = []
    for _ in range(2):
        first = prompts.next_batch(1).prompt_ids.tolist()
        size = 400 - len(prompts._order.skipped)
        drawn = first + prompts.next_batch(size - 1).prompt_ids.tolist()
        assert len(set(drawn)) == size and set(range(300, 400)) <= set(drawn)
        assert 45 < size - 100 < 105
        skipped.append(set(range(400)) - set(drawn))
    assert prompts.epoch == 2 and skipped[0] != skipped[1], "each waits for a later epoch"
    ((uniform, now_skipped),) = prompts.uniform_fractions().values()
    assert uniform == 0.75 and now_skipped == len(skipped[1]) / 400

    # Inside an epoch, with records that count for the next one only.
    prompts.next_batch(20)
    prompts.record_uniform_rewards(350, is_uniform=True)
    prompts.record_uniform_rewards(0, is_uniform=False)
    resumed = new()
    resumed.load_state_dict(prompts.state_dict())
    assert resumed.next_batch(900).prompt_ids.tolist() == prompts.next_batch(900).prompt_ids.tolist()
    assert resumed.state_dict() == prompts.state_dict()

    # Never all of them.
    for number in range(400):
        prompts.record_uniform_rewards(number, is_uniform=True)
    prompts._order.uniform_share = 0.0
    assert len(set(prompts.next_batch(1200).prompt_ids.tolist())) == 400
