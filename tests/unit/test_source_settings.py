"""Sources of prompts with their own reward, sampling profile and arguments of the chat template."""

from __future__ import annotations

import json
from array import array
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any, cast

import pyarrow
import pyarrow.parquet
import pytest
import torch
from config_workspace import CONFIG, write_workspace

import megatron_rl
from megatron_rl.check.configuration import check_config
from megatron_rl.config import sampling_profiles
from megatron_rl.config.load import describe_changes, dump, load_text
from megatron_rl.config.sections.data import DataConfig, SourceConfig, fields_of
from megatron_rl.config.sections.filters import FiltersConfig
from megatron_rl.config.sections.rewards import RewardConfig, RewardLimitsConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.contained import process as contained_process
from megatron_rl.data import chat_format, quickstart
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.data.forms import RecordReader
from megatron_rl.data.records import Record, load_records
from megatron_rl.data.sources import PromptSource, encode_prompts, encode_responses, load_prompts
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.data.tokenizing import load_tokenizer, make_conversation_renderer
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.errors import UserError
from megatron_rl.rewards.by_source import NO_FUNCTION, SOURCE, SourceRewards
from megatron_rl.rewards.function import FunctionReward, Sample
from megatron_rl.rewards.worker import GROUP, TURNS, Answer
from megatron_rl.roles.reward import RewardRole
from megatron_rl.rollout.collate import make_waiting_groups, to_prompts
from megatron_rl.rollout.limits import AutoLimits
from megatron_rl.rollout.types import Completion, Sequence, SequenceGroup
from megatron_rl.types import FINISH_STOP, PromptBatch, SamplingParameters

# The markup has only characters that the quickstart's tokenizer has.
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %},{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% if thinks is defined and not thinks %}*{% endif %}{% endif %}"
)
FUNCTIONS = """
import pathlib, time

def waits(metadata):
    while not pathlib.Path(metadata["done"]).exists():
        time.sleep(0.01)
    return 1.0

def also_waits(metadata):
    return waits(metadata)

def marks(metadata):
    pathlib.Path(metadata["done"]).touch()
    return 2.0

def words(*, response, **rest):
    return {"reward": len(response), "seen": len(rest)}

def turns_of(turns, response):
    if response == "fail":
        raise ValueError("not this one")
    return len(turns)

def ranked(group, **rest):
    return [sum(len(other) < len(one) for other in group) for one in group]

def with_bonus(response, bonus):
    return bonus
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart.write_inputs(tmp_path_factory.mktemp("quickstart"), "tiny")


@pytest.fixture
def tokenizer(material: Path) -> Any:
    tokenizer = load_tokenizer(material / "model")
    tokenizer.chat_template = TEMPLATE  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampling_profiles, "_registered_profiles", {})
    write_workspace(tmp_path)
    return tmp_path


@pytest.fixture
def functions(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return lambda name: f"{file}:{name}"


def errors_of(data: Mapping[str, Any], *overrides: str) -> list[UserError]:
    removed = "data.train=null"
    value = json.dumps(data)
    return list(check_config(load_text(CONFIG, [removed, f"data.sources={value}", *overrides])).errors)


def key_of(error: UserError) -> str:
    """Return the key of an error without the place where it is written."""
    return (error.where or "").partition(" ")[0]


# Rewards


def sample(source: str | None, response: str, group: int = 0) -> dict[str, Any]:
    values = {"prompt": "1+1=", "response": response, "ground_truth": "2", "metadata": {}}
    return values | {SOURCE: source, GROUP: group, TURNS: [{"role": "policy", "content": response}]}


def test_each_sample_is_rewarded_by_the_function_of_its_source(functions: Callable[[str], str]) -> None:
    config = RewardConfig(functions("words"), workers=1)
    sources = {"chat": functions("turns_of"), "order": functions("ranked"), "same": functions("words")}
    samples = [
        sample("order", "12", group=1),
        sample(None, "123"),
        sample("chat", "4"),
        sample("order", "1", group=1),
        sample("same", "12345"),
        sample("chat", "fail"),
        sample("other", "1"),
    ]
    scorer = SourceRewards(config, sources)
    try:
        assert scorer.optional_fields == {SOURCE, TURNS, GROUP}
        assert len(scorer._functions) == 3, "two sources share the processes of one function"
        result = scorer.score(samples)
        assert result.rewards.nan_to_num(-1).tolist() == [1, 3, 1, 0, 5, -1, 1]
        (failure,) = result.failures
        assert (failure.row, failure.reason) == (5, "exception")
        assert failure.message.endswith(" (data.sources.chat.reward)") and "not this one" in failure.message
        # `words` takes all arguments: it gets neither the source nor what other functions read.
        assert result.components["seen"].nan_to_num(-1).tolist() == [-1, 3, -1, -1, 3, -1, 3]
        assert scorer.score([]).rewards.tolist() == []
    finally:
        scorer.close()
    with pytest.raises(RuntimeError, match="closed"):
        scorer.score(samples[:1])


def test_a_row_without_any_function_is_invalid(functions: Callable[[str], str]) -> None:
    scorer = SourceRewards(RewardConfig(), {"chat": functions("turns_of")})
    answers = scorer.compute_answers([sample("chat", "1"), sample("gone", "1")])
    scorer.close()
    assert [answer.reason for answer in answers] == [None, NO_FUNCTION]


def test_the_error_of_a_function_names_its_source(functions: Callable[[str], str]) -> None:
    with pytest.raises(UserError) as caught:
        SourceRewards(RewardConfig(functions("words")), {"chat": functions("absent")})
    assert caught.value.where == "data.sources.chat.reward"


def finished_groups(sources: abc.Sequence[str | None], **metadata: Any) -> list[SequenceGroup]:
    """Return a finished group of one response for a prompt of each source."""
    groups = []
    for source in sources:
        one = torch.ones(1, dtype=torch.int64)
        texts = (("task",), ("1+1=",), ("2",), (metadata,))
        names = (source,) if source else None
        prompt = PromptBatch(one, one, one, *texts, (SamplingParameters(),), sources=names)
        sequence = Sequence(array("q", [1]), SamplingParameters(), seed=1, policy_version=0)
        sequence.append_sampled(Completion(0, [5], [0.0], FINISH_STOP), version=0)
        sequence.finish_reason = FINISH_STOP
        groups.append(SequenceGroup(prompt, [sequence]))
    return groups


def early_rewards_of(reward: RewardRole) -> Mapping[int, Answer]:
    """Return the early rewards of a role's only rank by row."""
    group = SimpleNamespace(gather_objects=lambda value: [value])
    return reward.gather_early_rewards(cast(ReplicaGroup, group))["function"]


def test_early_rewards_of_a_source_do_not_wait_for_the_slow_function_of_another(
    functions: Callable[[str], str], tokenizer: Any, tmp_path: Path
) -> None:
    # `waits` returns only after `marks` has run, which two sources share.
    config = RewardConfig(functions("marks"), timeout=30, workers=1, limits=RewardLimitsConfig(write=True))
    reward = RewardRole(
        config, tokenizer, source_functions={"slow": functions("waits"), "fast": functions("marks")}
    )
    for index, group in enumerate(finished_groups(["slow", "fast", None], done=str(tmp_path / "done"))):
        reward.start_early_rewards(index, group)
    early = early_rewards_of(reward)
    reward.close()
    assert {row: (answer.reason, answer.reward) for row, answer in early.items()} == {
        0: (None, 1.0),
        1: (None, 2.0),
        2: (None, 2.0),
    }


def test_early_rewards_come_in_the_order_of_groups_and_the_first_groups_error_is_raised(
    functions: Callable[[str], str], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RewardConfig(functions("marks"), timeout=30, workers=1, limits=RewardLimitsConfig(write=True))
    reward = RewardRole(config, tokenizer, source_functions={"slow": functions("waits")})
    groups = finished_groups(["slow", None, "slow"], done=str(tmp_path / "done"))
    for index, group in enumerate(groups):
        reward.start_early_rewards(index, group)
    assert list(early_rewards_of(reward)) == [0, 1, 2], "although the second group is rewarded first"

    compute_answers = FunctionReward.compute_answers
    second_failed = Event()

    def fail(function: FunctionReward, samples: abc.Sequence[Sample]) -> list[Answer]:
        """Fail for both functions, for that of the first group last."""
        name = str(function.config.function).rpartition(":")[2]
        if name == "waits":
            second_failed.wait(30)
        else:
            second_failed.set()
        raise MemoryError(name)

    monkeypatch.setattr(FunctionReward, "compute_answers", fail)
    for index, group in enumerate(groups):
        reward.start_early_rewards(index, group)
    with pytest.raises(MemoryError, match="waits"):
        early_rewards_of(reward)

    # The next round has only its own rewards.
    monkeypatch.setattr(FunctionReward, "compute_answers", compute_answers)
    reward.start_early_rewards(0, groups[1])
    assert {row: answer.reward for row, answer in early_rewards_of(reward).items()} == {0: 2.0}
    reward.close()


@pytest.mark.parametrize("filter_name", [None, "waits"])
def test_closing_ends_the_threads_and_processes_of_early_rewards(
    functions: Callable[[str], str],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    filter_name: str | None,
) -> None:
    start_process = contained_process.start_process
    processes: list[Any] = []

    def start_and_record(*arguments: Any) -> Any:
        """Start a contained process, and record it."""
        processes.append(start_process(*arguments))
        return processes[-1]

    monkeypatch.setattr(contained_process, "start_process", start_and_record)
    earlier_threads = set(enumerate_threads())
    filters = FiltersConfig(function=functions(filter_name)) if filter_name else None
    config = RewardConfig(functions("waits"), timeout=60, workers=2, limits=RewardLimitsConfig(write=True))
    sources = {"other": functions("also_waits")}
    reward = RewardRole(config, tokenizer, source_functions=sources, filters=filters)
    for index, group in enumerate(finished_groups(["other", None] * 3, done=str(tmp_path / "never"))):
        reward.start_early_rewards(index, group)
    new_threads = set(enumerate_threads()) - earlier_threads
    threads = [thread for thread in new_threads if thread.name.startswith("rewards ")]
    assert len(threads) == 2 + bool(filter_name)

    # A process that ends is replaced, unless `close` ended it.
    reward.close()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert processes and all(process.poll() is not None for process in processes)


@pytest.mark.usefixtures("workspace")
def test_check_reads_and_loads_the_functions_of_sources() -> None:
    easy = {"path": "train.jsonl", "reward": "reward.py:scores"}
    hard = {"path": "train.jsonl"}
    (error,) = errors_of({"easy": easy, "hard": hard})
    assert key_of(error) == "data.sources.easy.reward" and error.fix == "did you mean score?"

    # Settings of `reward` are those of each function, its arguments too.
    easy["reward"] = "reward.py:with_bonus"
    (error,) = errors_of({"easy": easy, "hard": hard})
    assert "requires bonus" in str(error.got) and "set them in reward.arguments" in (error.fix or "")
    (error,) = errors_of({"easy": easy, "hard": hard}, "reward.arguments.bonus=1")
    assert error.where and "reward.py" in error.where and "does not take bonus" in str(error.got)

    Path("broken.py").write_text("1 / 0\ndef score(response): return 1.0\n")
    easy["reward"] = "broken.py:score"
    (error,) = errors_of({"easy": easy, "hard": hard})
    assert "ZeroDivisionError" in str(error) and key_of(error) == "data.sources.easy.reward"


@pytest.mark.usefixtures("workspace")
def test_every_source_and_set_needs_a_function_once_one_source_has_its_own() -> None:
    easy = {"path": "train.jsonl", "reward": "reward.py:score"}
    none = ("reward.function=null",)
    errors = errors_of({"easy": easy, "hard": {"path": "train.jsonl"}}, *none)
    assert [key_of(error) for error in errors] == [
        "data.sources.hard.reward",
        "evaluation.sets.held_out.reward",
    ]
    assert all("reward.function" in (error.fix or "") for error in errors)
    own_set = "evaluation.sets.held_out.reward=reward.py:score"
    assert errors_of({"easy": easy}, *none, own_set) == []
    assert errors_of({"easy": easy, "hard": {"path": "train.jsonl"}}) == []


@pytest.mark.usefixtures("workspace")
def test_a_ground_truth_is_required_by_the_function_of_the_source_alone() -> None:
    Path("bare.jsonl").write_text('{"prompt": "1+1="}\n')
    bare = {"path": "bare.jsonl", "reward": "short.py:score"}
    Path("short.py").write_text("def score(response): return -len(response)\n")
    assert errors_of({"easy": {"path": "train.jsonl"}, "bare": bare}) == []
    (error,) = errors_of({"easy": {"path": "train.jsonl"}, "bare": {"path": "bare.jsonl"}})
    assert error.where == "bare.jsonl:1 (data.sources.bare.path)"


@pytest.mark.usefixtures("workspace")
def test_another_reward_of_a_source_leaves_the_order_of_its_prompts() -> None:
    text = CONFIG.replace("train: train.jsonl", "sources: {easy: {path: train.jsonl, reward: 'r.py:a'}}")
    overrides = ["data.sources.easy.reward=r.py:b", "data.sources.easy.weight=2"]
    changes = describe_changes(dump(load_text(text).valid()), load_text(text, overrides).valid())
    assert changes == [
        "data.sources.easy.reward was r.py:a and is r.py:b",
        "data.sources.easy.weight was 1.0 and is 2.0: the order of the prompts changes",
    ]


# Sampling profiles


def prompts_of(
    values: abc.Sequence[Mapping[str, Any]],
    tokenizer: Any,
    source: SourceConfig | None = None,
    rollout: RolloutConfig | None = None,
) -> PromptSource:
    source = source or SourceConfig("test.jsonl")
    data = fields_of(DataConfig(shuffle=False), source, "data.sources.easy")
    records = [Record(dict(value), f"test.jsonl:{line}") for line, value in enumerate(values, start=1)]
    encoded = encode_prompts(tokenizer, data, "data.sources.easy.path", records)
    settings = rollout or RolloutConfig()
    return PromptSource(encoded, tokenizer, data, settings, seed=1, source="easy", profile=source.profile)


def test_rows_of_a_source_are_sampled_with_its_profile(tokenizer: Any) -> None:
    rollout = RolloutConfig(
        sampling_profiles={
            "careful": {"temperature": {"start": 0.7, "end": 0.5, "steps": 1}, "max_response_tokens": "auto"},
            "proof": {"temperature": 0.25, "max_response_tokens": 5},
            "easy": {"temperature": 0.125},
        }
    )
    values = [{"prompt": "1+1=", "ground_truth": "2", "task": task} for task in (None, "proof", "sum")]
    source = SourceConfig("test.jsonl", profile="careful")
    prompts = prompts_of(values, tokenizer, source, rollout)
    batch = prompts.next_batch(3)

    # A task of the record's own with a profile precedes the source, the source precedes its name.
    assert batch.tasks == ("easy", "proof", "sum") and batch.sources == ("easy",) * 3
    assert batch.profiles == ("careful", "proof", "careful")
    assert [sampling.temperature for sampling in batch.sampling] == [0.7, 0.25, 0.7]
    prompts.begin_step(2)
    assert [sampling.temperature for sampling in prompts.next_batch(3).sampling] == [0.5, 0.25, 0.5]

    # Automatic limits are those of the profile too.
    groups = AutoLimits(rollout).with_limits(make_waiting_groups(batch))
    limits = [group.prompt.sampling[0].max_response_tokens for group in groups]
    assert limits == [rollout.auto_limit.at_most, 5, rollout.auto_limit.at_most]
    assert to_prompts(groups).profiles == batch.profiles

    # Prompts of an older checkpoint have no profiles: those of their tasks apply, also beside new prompts.
    older = replace(batch.rows([0]), profiles=None)
    groups = make_waiting_groups(PromptBatch.concatenate([older, batch.rows([2])]))
    assert to_prompts(groups).profile_names == ("easy", "careful")
    assert [group.prompt.profile_names for group in groups] == [("easy",), ("careful",)]

    # Without a profile of the source only tasks have profiles.
    plain = prompts_of(values, tokenizer, rollout=rollout).next_batch(3)
    assert [sampling.temperature for sampling in plain.sampling] == [0.125, 0.25, 1.0]


@pytest.mark.usefixtures("workspace")
def test_a_profile_of_a_source_is_a_name_of_the_configuration_or_of_a_file() -> None:
    text = CONFIG.replace("train: train.jsonl", "sources: {easy: {path: train.jsonl, profile: NAME}}")
    named = "\n  sampling_profiles: {careful: {top_k: 3}, proof: careful}\n"
    for name in ("careful", "proof"):
        config = load_text(text.replace("NAME", name) + named.strip("\n")).valid()
        assert config.data.sources["easy"].profile == name
        assert config.rollout.sampling_profiles[name] == {"top_k": 3}

    # The stored configuration needs no file.
    Path("own.py").write_text("import megatron_rl\nmegatron_rl.sampling_profile('bold', top_k=7)\n")
    config = load_text(text.replace("NAME", "own.py:bold")).valid()
    assert config.data.sources["easy"].profile == "bold"
    assert config.rollout.sampling_profiles["bold"] == {"top_k": 7}
    sampling_profiles._registered_profiles.clear()
    assert load_text(dump(config)).valid() == config

    megatron_rl.sampling_profile("warm", top_k=9)
    config = load_text(text.replace("NAME", "warm")).valid()
    assert config.rollout.sampling_profiles["warm"] == {"top_k": 9}


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("carefull", ("no sampling profile 'carefull'", "did you mean 'careful'?")),
        ("absent.py:bold", ("absent.py does not exist",)),
        ("[1]", ("wrong type",)),
    ],
)
def test_an_unknown_profile_of_a_source_is_an_error(name: str, expected: tuple[str, ...]) -> None:
    text = CONFIG.replace("train: train.jsonl", f"sources: {{easy: {{path: train.jsonl, profile: {name}}}}}")
    (error,) = load_text(text + "  sampling_profiles: {careful: {top_k: 3}}\n").errors
    assert error.where and error.where.startswith("data.sources.easy.profile"), error
    assert all(part in str(error) for part in expected), error


def test_an_unknown_profile_is_an_error_without_a_rollout_section_too() -> None:
    text = CONFIG.replace("train: train.jsonl", "sources: {easy: {path: train.jsonl, profile: careful}}")
    (error,) = load_text(text, ["rollout=null"]).errors
    assert "no sampling profile 'careful'" in str(error)


# Arguments of the chat template in records


def reader_of(**data: Any) -> RecordReader:
    return RecordReader(DataConfig(**data), "data.train", template=TEMPLATE)


def arguments(value: Any, *, from_table: bool = False) -> Any:
    values = {"prompt": [{"role": "user", "content": "1+1"}], "ground_truth": "2"}
    record = Record({**values, "chat_template_kwargs": value}, "test:1", from_table)
    return reader_of().read(record).values["chat_template_kwargs"]


def test_arguments_of_a_record_are_a_mapping_or_json_of_one() -> None:
    assert arguments({"thinks": False}) == {"thinks": False}
    assert arguments('{"thinks": false}') == {"thinks": False}
    assert arguments({"thinks": None}) == {"thinks": None}, "written by the author"
    assert arguments({"thinks": None, "effort": "low"}, from_table=True) == {"effort": "low"}
    assert [arguments(empty) for empty in ({}, "", "null", None)] == [None] * 4
    for wrong in (["thinks"], "thinks", 3, "[1]", True):
        with pytest.raises(UserError, match="not a mapping") as caught:
            arguments(wrong)
        assert caught.value.where == "test:1 (data.train)"
    with pytest.raises(UserError, match="the prompt itself sets") as caught:
        arguments({"add_generation_prompt": False})
    assert "remove add_generation_prompt" in (caught.value.fix or "")


def test_arguments_that_nothing_uses_are_reported() -> None:
    record = {"prompt": "1+1=", "ground_truth": "2", "chat_template_kwargs": {"thinsk": False}}
    reader = reader_of(chat_template=True)
    reader.read(Record(record, "test:1"))
    (line,) = reader.warning_lines()
    assert "`thinsk` first in test:1" in line and "did you mean thinks?" in line

    # Those of a source too.
    source = SourceConfig("test.jsonl", chat_template_kwargs={"thinsk": False, "thinks": True})
    data = fields_of(DataConfig(), source, "data.sources.easy")
    (line,) = RecordReader(data, "data.sources.easy.path", template=TEMPLATE).warning_lines()
    assert "`thinsk` first in data.sources.easy.chat_template_kwargs" in line

    # A prompt of text has no template, unless the field is not read.
    with pytest.raises(UserError, match="does not go through it") as caught:
        reader_of().read(Record(record, "test:1"))
    assert "data.chat_template_kwargs_field=null" in (caught.value.fix or "")
    reader = reader_of(chat_template_kwargs_field=None)
    reader.read(Record(record, "test:1"))
    assert "`chat_template_kwargs` first in test:1" in "".join(reader.warning_lines())


def test_arguments_of_a_record_replace_those_of_its_source(tokenizer: Any, tmp_path: Path) -> None:
    table = pyarrow.table({
        "prompt": ["1+1", "2+2", "3+3"],
        "ground_truth": ["2", "4", "6"],
        "template": [{"thinks": False}, {"thinks": None}, None],
    })  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")
    values = [record.values for record in load_records(tmp_path / "test.parquet", "data.train")]
    records = [{**value, "template": value["template"] and json.dumps(value["template"])} for value in values]

    def texts(kwargs: dict[str, Any]) -> tuple[str, ...]:
        source = SourceConfig(
            "test.jsonl",
            chat_template=True,
            chat_template_kwargs=kwargs,
            chat_template_kwargs_field="template",
        )
        return prompts_of(records, tokenizer, source).next_batch(3).prompts

    # Null in JSON text is written by the author: it is false to the template.
    assert texts({}) == ("1+1=*", "2+2=*", "3+3=")
    assert texts({"thinks": True}) == ("1+1=*", "2+2=*", "3+3=")
    assert texts({"thinks": False}) == ("1+1=*", "2+2=*", "3+3=*")


def test_later_turns_are_rendered_with_the_arguments_of_the_record(tokenizer: Any) -> None:
    formats = ChatFormats(tokenizer, templated=True)
    message = [{"role": "user", "content": "7"}]
    for kwargs, opening in (({}, "="), ({"thinks": False}, "=*")):
        for chat in (formats.prompt_format(kwargs), formats.environment_format(kwargs)):
            assert tokenizer.decode(chat.encode_prompt(message, None)) == f"7{opening}"
            assert tokenizer.decode(chat.encode_between_turns(None, message)) == f",7{opening}"
    assert formats.prompt_format({"thinks": False}) is formats.prompt_format({"thinks": False})


def test_a_bounded_number_of_arguments_is_cached(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_format, "CACHED_KWARGS", 2)
    formats = ChatFormats(tokenizer, templated=True)
    text = make_conversation_renderer(tokenizer)
    assert text is not None
    for make in (formats.prompt_format, formats.environment_format, text.with_kwargs):
        first, second, third = (make({"thinks": False, "number": number}) for number in range(3))
        assert make({"thinks": False, "number": 2}) is third
        assert make({"thinks": False, "number": 1}) is second
        assert make({"thinks": False, "number": 0}) is not first
    assert text.with_kwargs({}) is text
    question = [{"role": "user", "content": "7"}]
    assert text.with_kwargs({"thinks": False, "number": 0}).render_prompt(question) == "7=*"


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_arguments_of_a_source_with_which_no_turn_can_follow_are_an_error_at_the_start() -> None:
    counts = "{% if add_generation_prompt and counts %}{{ messages | length }}{% endif %}"
    Path("model/chat_template.jinja").write_text(TEMPLATE + counts)
    easy, hard = ({"path": "train.jsonl", "chat_template_kwargs": {"counts": value}} for value in (1, 0))
    overrides = ["evaluation.sets.held_out.chat_template=true"]
    assert errors_of({"easy": easy, "hard": hard}, *overrides) == []

    Path("env.py").write_text(
        "from megatron_rl import Environment\n"
        "class Silent(Environment):\n"
        "    async def run(self, episode): pass\n"
    )
    overrides.append("rollout.environment={name: 'env.py:Silent'}")
    (error,) = errors_of({"easy": easy, "hard": hard}, *overrides)
    assert key_of(error) == "data.sources.easy.chat_template_kwargs"
    assert "the text after a turn depends on the earlier messages" in error.message
    assert "with {'counts': 1}: " in (error.got or "") and "data.sources.easy" in (error.fix or "")

    # A run refuses them in the same words, when it loads the prompts.
    sources = json.dumps({"easy": easy, "hard": hard})
    config = load_text(CONFIG, ["data.train=null", f"data.sources={sources}", *overrides]).valid()
    tokenizer, files = load_tokenizer("model"), TokenFiles(None, print)
    with pytest.raises(UserError) as caught:
        load_prompts(config, "data.sources.easy.path", "train.jsonl", tokenizer, files)
    assert caught.value.to_json() == {**error.to_json(), "where": "data.sources.easy.chat_template_kwargs"}
    assert load_prompts(config, "data.sources.hard.path", "train.jsonl", tokenizer, files).templated

    # A template that cannot at all is one error of all data sets.
    Path("model/chat_template.jinja").write_text(TEMPLATE + counts.replace(" and counts", ""))
    plain = {"path": "train.jsonl", "chat_template": True}
    (error,) = errors_of({"easy": plain, "hard": plain}, *overrides)
    assert error.where == "the chat template of model.path"


def test_responses_follow_prompts_with_the_arguments_of_the_record(tokenizer: Any) -> None:
    conversation = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
    ]
    records = [
        Record({"messages": conversation, "chat_template_kwargs": kwargs}, "test:1")
        for kwargs in ({}, {"thinks": False})
    ]
    data = DataConfig(prompt_field="messages")
    fields = {"response": "sft.response_field"}
    ends = [tokenizer.eos_token_id]
    encoded = encode_responses(tokenizer, data, fields, 99, "sft.data", ends, records, every_turn=True)
    assert encoded.texts == ["1=", "1=*"]
    texts = []
    for response in encoded.tokens[1]:
        ids = [~token if token < 0 else token for token in response.tolist()]
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert texts == ["2,3=4", "2,3=*4"]
