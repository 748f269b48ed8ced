"""Strategies that make inputs a user could get wrong, from the schema and from the quickstart's files.

Each makes a mapping of JSON values: ``set``, overrides of the command line; ``names``, the key that an answer
must be about; ``world``, the number of processes; ``text``, the configuration itself; ``file`` and how it is
damaged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megatron_rl.config.field_types import accepts_none, field_hints, is_mapping, section_class, union_members
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import Setting, setting_of

BASE = """\
model: {path: model, dtype: float32}
data: {train: train.jsonl, max_prompt_tokens: 8}
reward: {function: "megatron_rl.rewards.arithmetic:exact_match"}
rollout: {max_response_tokens: 4, engine: torch}
batch: {prompts_per_step: 4, samples_per_prompt: 2}
run_dir: run
steps: 1
checkpoint: {export: false, resume: never}
evaluation: {every: 100, at_start: false, sets: {held_out: {data: eval.jsonl, max_prompts: 4}}}
sft: {data: sft.jsonl, steps: 1, rows_per_step: 4}
"""
_FREE = ("prepare", "job", "run_dir", "base")
"""Keys whose value is the user's own, or of the command."""


@dataclasses.dataclass(frozen=True)
class Key:
    """Hold a plain key of the configuration with its type and what is said about it."""

    path: str
    hint: Any
    setting: Setting


def keys(cls: type = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Yield every key with a plain value."""
    for item in dataclasses.fields(cls):
        hint = field_hints(cls)[item.name]
        path = prefix + item.name
        section = section_class(hint)
        if section is not None and not is_mapping(hint):
            yield from keys(section, f"{path}.")
        elif section is None and path not in _FREE:
            yield Key(path, hint, setting_of(item))


KEYS = list(keys())
_MAPPINGS = {key.path for key in KEYS if is_mapping(key.hint)}


def wrong_values(key: Key) -> st.SearchStrategy[Any]:
    """Return values that a key cannot have: of another type, outside its bounds, or no choice of it."""
    taken = union_members(key.hint)
    said = key.setting
    number = int in taken or float in taken
    values: list[Any] = [3, "x", [1]] if is_mapping(key.hint) else [{"a": {"b": 1}}]

    if not any(isinstance(option, type) is False for option in taken):  # no list, no mapping
        values += [[[1], 2], [None, {}]]
    if not accepts_none(key.hint):
        values.append(None)
    if number or bool in taken:
        values += ["many", "", "0x", "1,000", "½", "x" * 10_000]
    if number:
        values += [True, float("nan"), float("inf"), -float("inf")]
        bounds = [(said.at_least, -1), (said.more_than, 0), (said.at_most, 1), (said.less_than, 0)]
        values += [limit + step for limit, step in bounds if limit is not None]
        values += [10**400] if said.at_most is not None or int in taken else []

    if bool in taken:
        values += [1, 0.0, 2]
    if str in taken:
        values += ["\ud800", " ", ""] if not said.choices else ["\ud800", ""]
        values += [choice[:-1] + "~" for choice in said.choices]
        values += [1, 1.5, True] if not is_mapping(key.hint) else [1]
    return st.sampled_from(values)


def small_values(key: Key) -> st.SearchStrategy[Any]:
    """Return values within the bounds of a key that a tiny run can have."""
    taken = union_members(key.hint)
    said = key.setting
    if said.choices:
        return st.sampled_from(said.choices)
    if bool in taken:
        return st.booleans()

    low = said.at_least if said.at_least is not None else said.more_than
    if int in taken:
        first = int(low or 0) + (said.more_than is not None)
        return st.integers(first, first + 4)

    if float in taken:
        first = float(low) if low is not None else 0.0
        last = next((bound for bound in (said.at_most, said.less_than) if bound is not None), first + 2)
        return st.floats(first, min(last, first + 2), exclude_min=said.more_than is not None).filter(
            said.contains
        )
    return st.none() if accepts_none(key.hint) else st.nothing()


def numbers() -> list[Key]:
    """Return the keys of one number, truth value or choice."""
    simple = [
        key for key in KEYS if not is_mapping(key.hint) and {int, float, bool} & set(union_members(key.hint))
    ]
    return simple + [key for key in KEYS if key.setting.choices]


def wrong_field() -> st.SearchStrategy[dict[str, Any]]:
    """Give one key a value that it cannot have."""
    pairs = st.sampled_from(KEYS).flatmap(lambda key: st.tuples(st.just(key), wrong_values(key)))
    return pairs.map(lambda pair: {"set": [_override(pair[0].path, pair[1])], "names": pair[0].path})


def _typos(path: str) -> st.SearchStrategy[str]:
    name = path.rpartition(".")[2]
    above = path.removesuffix(name)
    places = st.integers(0, len(name) - 1)
    changes = st.sampled_from(["drop", "double", "wrong", "case", "below", "top"])

    def changed(place: int, change: str) -> str:
        if change in ("below", "top"):
            # Below a mapping of free names every name is one.
            return f"{path}.{name}" if change == "below" and path not in _MAPPINGS else f"zz_{name}"

        kept = {
            "drop": "",
            "double": name[place] * 2,
            "wrong": "q",
            "case": name[place].upper(),
        }[change]
        return above + name[:place] + kept + name[place + 1 :]

    return st.builds(changed, places, changes).filter(lambda typo: typo not in {key.path for key in KEYS})


def unknown_name() -> st.SearchStrategy[dict[str, Any]]:
    """Write a name that the configuration does not have."""
    names = st.sampled_from([key.path for key in KEYS if len(key.path.rpartition(".")[2]) > 3]).flatmap(
        _typos
    )
    return names.map(lambda name: {"set": [f"{name}=1"], "names": name})


def valid_fields() -> st.SearchStrategy[dict[str, Any]]:
    """Give one to four keys small values that each may have: together they may contradict."""
    pairs = st.sampled_from(numbers()).flatmap(lambda key: st.tuples(st.just(key.path), small_values(key)))
    several = st.lists(
        pairs,
        min_size=1,
        max_size=4,
        unique_by=lambda pair: pair[0],
    )
    return several.map(lambda pairs: {"set": [_override(*pair) for pair in pairs]})


def long_names() -> st.SearchStrategy[dict[str, Any]]:
    """Give what becomes part of a file's name a name that no file system takes."""
    places = st.sampled_from(["evaluation.sets.{}.data=eval.jsonl", "reward.models.{}.path=model"])
    sizes = st.sampled_from([65, 255, 300, 5000])

    def stated(place: str, size: int) -> dict[str, Any]:
        return {"set": [place.format("n" * size)], "names": place.partition(".{}")[0]}

    return st.builds(stated, places, sizes)


def layouts() -> st.SearchStrategy[dict[str, Any]]:
    """Cut roles over ranks at random, against a random number of processes."""
    sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 8, 64, 2**20])
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    roles = st.sampled_from(["actor.layout", "reference.layout", "critic.layout"])
    cuts = st.dictionaries(st.tuples(roles, st.sampled_from(names)), sizes, max_size=4)
    ranks = st.lists(st.integers(-1, 9), max_size=5)
    rollout = st.fixed_dictionaries(
        {},
        optional={
            "rollout.tensor": sizes,
            "rollout.ranks": ranks,
            "actor.layout.ranks": ranks,
            "placement": st.sampled_from(["colocate", "standalone", "split"]),
            "rollout.engine": st.sampled_from(["vllm", "torch"]),
            "algorithm.name": st.sampled_from(["grpo", "ppo"]),
            "asynchrony.steps_ahead": st.integers(0, 2),
        },
    )

    worlds = st.sampled_from([None, 1, 2, 3, 4, 8, 0, -3, 2**40])

    def stated(cut: dict[tuple[str, str], int], more: dict[str, Any], world: int | None) -> dict[str, Any]:
        values = {".".join(name): value for name, value in cut.items()} | more
        return {"set": [_override(*pair) for pair in values.items()], "world": world}

    return st.builds(stated, cuts, rollout, worlds)


ODD = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1.5,
        10**30,
        1e308,
        "",
        " ",
        "x",
        "½\u0000",
        "\ud800",
        [],
        [1],
        {},
        {"a": 1},
        "9" * 9999,
    ]
)


def data_files() -> st.SearchStrategy[dict[str, Any]]:
    """Damage a line of a data set: a key, a value, the JSON or the bytes."""
    files = st.sampled_from(["train.jsonl", "eval.jsonl", "sft.jsonl"])
    fields = st.sampled_from(["prompt", "ground_truth", "response", "task"])
    record = st.builds(lambda field, value: {"field": field, "value": value}, fields, ODD)
    twice = '{"prompt": "1+1=", "prompt": "2+2=", "ground_truth": "4", "response": "4"}'
    broken = ["{", "[]", "null", "3", "\u2028", '{"prompt": NaN}', "{}", '"', '{"a":' * 9999, twice]
    text = st.sampled_from(broken)

    raw = st.sampled_from(["ff", "00", "efbbbf", "fffe", ""])
    change = st.one_of(record, text.map(lambda line: {"line": line}), raw.map(lambda data: {"bytes": data}))
    return st.builds(
        lambda file, change, row: {
            "file": file,
            "row": row,
            **change,
        },
        files,
        change,
        st.integers(0, 3),
    )


def model_folders() -> st.SearchStrategy[dict[str, Any]]:
    """Damage a file of the model: a value of its JSON, or its bytes."""
    config = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "max_position_embeddings", "hidden_act", "rope_parameters",
        "layer_types", "architectures", "model_type", "tie_word_embeddings", "rms_norm_eps",
        "sliding_window", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "auto_map",
        "rope_theta", "use_sliding_window", "max_window_layers", "initializer_range", "attention_dropout",
        "text_config", "id2label",
    )  # fmt: skip
    places = st.one_of(
        st.tuples(st.just("model/config.json"), st.sampled_from(config)),
        st.tuples(st.just("model/generation_config.json"), st.sampled_from(["eos_token_id", "pad_token_id"])),
        st.tuples(
            st.just("model/tokenizer_config.json"),
            st.sampled_from(["eos_token", "tokenizer_class", "chat_template"]),
        ),
        st.tuples(st.just("model/tokenizer.json"), st.sampled_from(["model", "added_tokens", "version"])),
    )

    near = st.one_of(
        ODD, st.integers(0, 130), st.sampled_from(["silu", "qwen3", "yarn", ["full_attention"], 2, 64])
    )
    values = st.builds(
        lambda place, value: {
            "file": place[0],
            "key": place[1],
            "value": value,
        },
        places,
        near,
    )

    names = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    )
    bytes_of = st.builds(
        lambda name, place, data: {
            "file": f"model/{name}",
            "at": place,
            "bytes": data,
        },
        st.sampled_from(names),
        st.integers(0, 3000),
        st.sampled_from(["", "00", "ff", "7b", "22", "cut", "gone"]),
    )
    return st.one_of(values, values, bytes_of)


def file_kinds() -> st.SearchStrategy[dict[str, Any]]:
    """Put a pipe, a folder, a device or a link into the place of a file, or a file into that of a folder."""
    files = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    )
    places = (
        *("train.jsonl", "eval.jsonl", "sft.jsonl", "model"),
        *(f"model/{name}" for name in files),
        *("run", "run/checkpoints", "run/rollouts", "run/stages", "run/config.yaml", "run/metrics.jsonl"),
    )
    kinds = st.sampled_from(["pipe", "folder", "file", "loop", "nowhere", "/dev/zero", "/dev/full", "/proc"])
    return st.builds(lambda file, kind: {"file": file, "as": kind}, st.sampled_from(places), kinds)


def command_lines() -> st.SearchStrategy[dict[str, Any]]:
    """Write overrides that are none, or that hold odd YAML."""
    name = st.one_of(
        st.sampled_from([key.path for key in KEYS]),
        st.text("ab._-=", max_size=6),
        st.sampled_from(["=", ".", "a..b"]),
    )

    value = st.one_of(
        st.text("abc:-{}[],&*!|>'\"%@#\n\t 019.~", max_size=12),
        st.sampled_from(["[" * 3000, "{a: " * 900, "&a [*a]", "!!python/object:os.system x", "!!binary x"]),
    )

    return st.lists(
        st.builds(lambda name, value: f"{name}={value}", name, value), min_size=1, max_size=2
    ).map(lambda words: {"set": [word for word in words if not word.startswith("-") and "=" in word]})


def texts() -> st.SearchStrategy[dict[str, Any]]:
    """Damage the text of the configuration: a character, a line, or its indentation."""
    change = st.sampled_from(["drop", "double", "tab", "cut", "insert"])
    places = st.integers(0, len(BASE) - 1)
    characters = st.text(":-{}[]&*!|>'\"%@#\n\t ~\u00e9", min_size=1, max_size=2)

    def changed(how: str, place: int, text: str) -> dict[str, Any]:
        lines = BASE.splitlines(keepends=True)
        row = place % len(lines)
        result = {
            "drop": "".join(lines[:row] + lines[row + 1 :]),
            "double": "".join([*lines[: row + 1], *lines[row:]]),
            "tab": "".join([*lines[:row], "\t" + lines[row], *lines[row + 1 :]]),
            "cut": BASE[:place],
            "insert": BASE[:place] + text + BASE[place:],
        }[how]
        return {"text": result}

    return st.builds(changed, change, places, characters)


GROUPS: dict[str, tuple[int, Callable[[], st.SearchStrategy[dict[str, Any]]]]] = {
    "wrong value": (5, wrong_field),
    "unknown name": (2, unknown_name),
    "long name": (1, long_names),
    "valid values together": (4, valid_fields),
    "layouts": (3, layouts),
    "data": (2, data_files),
    "model": (4, model_folders),
    "kinds of files": (2, file_kinds),
    "command line": (2, command_lines),
    "text": (2, texts),
}
"""Group -> its share of the cases, and what makes one."""


_DRAW = settings(
    max_examples=4,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def draw(strategy: st.SearchStrategy[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return what a strategy makes of a number."""
    drawn: list[dict[str, Any]] = []

    @seed(number)
    @_DRAW
    @given(strategy)
    def collect(value: dict[str, Any]) -> None:
        drawn.append(value)

    collect()
    return drawn[-1]  # the first is the simplest of all


def _override(path: str, value: Any) -> str:
    text = json.dumps(value).replace("-Infinity", "-.inf").replace("Infinity", ".inf").replace("NaN", ".nan")
    return f"{path}={text}"
