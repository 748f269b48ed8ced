"""Hypothesis strategies for invalid inputs, from the configuration's schema and the quickstart's files.

Each generates a mapping of JSON values: ``set``, overrides of the command line; ``names``, the key that an
error must be about; ``world``, the number of processes; ``text``, the configuration's text; ``file`` and how
it is damaged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megatron_rl.config.field_types import (
    accepts_mapping,
    accepts_none,
    field_hints,
    section_class,
    union_members,
)
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
"""Keys that are not varied: their value is free text, or belongs to the command."""


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of the configuration with a plain value, its type hint and its setting."""

    path: str
    hint: Any
    setting: Setting


def keys(cls: type = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Yield every key with a plain value, below the section ``cls``."""
    for item in dataclasses.fields(cls):
        hint = field_hints(cls)[item.name]
        path = prefix + item.name
        section = section_class(hint)
        if section is not None and not accepts_mapping(hint):
            yield from keys(section, f"{path}.")
        elif section is None and path not in _FREE:
            yield Key(path, hint, setting_of(item))


KEYS = list(keys())
_MAPPINGS = {key.path for key in KEYS if accepts_mapping(key.hint)}


def _is_set_in_base(path: str) -> bool:
    """Return whether `BASE` has a value for the key."""
    node = yaml.safe_load(BASE)
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


def wrong_values(key: Key) -> st.SearchStrategy[Any]:
    """Return invalid values of a key: of another type, outside its bounds, or not among its choices."""
    types = union_members(key.hint)
    setting = key.setting
    is_number = int in types or float in types
    values: list[Any] = [3, "x", [1]] if accepts_mapping(key.hint) else [{"a": {"b": 1}}]

    if not any(isinstance(option, type) is False for option in types):  # neither a list nor a mapping
        values += [[[1], 2], [None, {}]]
    # In place of a value of the file, null restores the default.
    if not accepts_none(key.hint) and not _is_set_in_base(key.path):
        values.append(None)
    if is_number or bool in types:
        values += ["many", "", "0x", "1,000", "½", "x" * 10_000]
    if is_number:
        values += [True, float("nan"), float("inf"), -float("inf")]
        # Just outside each bound.
        bounds = [
            (setting.at_least, -1),
            (setting.more_than, 0),
            (setting.at_most, 1),
            (setting.less_than, 0),
        ]
        values += [limit + step for limit, step in bounds if limit is not None]
        # Beyond a double, and beyond any bound.
        if setting.at_most is not None or int in types:
            values.append(10**400)

    if bool in types:
        values += [1, 0.0, 2]
    if str in types:
        values.append("\ud800")
        if not setting.choices:
            values.append(" ")
        values.append("")
        values += [choice[:-1] + "~" for choice in setting.choices]
        values.append(1)
        if not accepts_mapping(key.hint):
            values += [1.5, True]
    return st.sampled_from(values)


def small_values(key: Key) -> st.SearchStrategy[Any]:
    """Return valid values of a key that a tiny run can have."""
    types = union_members(key.hint)
    setting = key.setting
    if setting.choices:
        return st.sampled_from(setting.choices)
    if bool in types:
        return st.booleans()

    bound = setting.at_least if setting.at_least is not None else setting.more_than
    if int in types:
        # Small values, so that a run with them stays tiny.
        lowest = int(bound or 0) + (setting.more_than is not None)
        return st.integers(lowest, lowest + 4)

    if float in types:
        lowest = float(bound) if bound is not None else 0.0
        highest = next(
            (bound for bound in (setting.at_most, setting.less_than) if bound is not None),
            lowest + 2,
        )
        return st.floats(
            lowest,
            min(highest, lowest + 2),
            exclude_min=setting.more_than is not None,
        ).filter(setting.is_within_bounds)
    if accepts_none(key.hint):
        return st.none()
    return st.nothing()


def numbers() -> list[Key]:
    """Return the keys whose value is a number, a truth value or a choice."""
    plain_keys = [
        key
        for key in KEYS
        if not accepts_mapping(key.hint) and {int, float, bool} & set(union_members(key.hint))
    ]
    return plain_keys + [key for key in KEYS if key.setting.choices]


def wrong_field() -> st.SearchStrategy[dict[str, Any]]:
    """Set one key to an invalid value."""
    pairs = st.sampled_from(KEYS).flatmap(lambda key: st.tuples(st.just(key), wrong_values(key)))
    return pairs.map(
        lambda pair: {
            "set": [_override(pair[0].path, pair[1])],
            "names": pair[0].path,
        }
    )


def _typos(path: str) -> st.SearchStrategy[str]:
    """Return misspellings of a key, and its name at wrong levels of the configuration."""
    name = path.rpartition(".")[2]
    section = path.removesuffix(name)
    indices = st.integers(0, len(name) - 1)
    edits = st.sampled_from(["drop", "double", "wrong", "case", "below", "top"])

    def apply_edit(index: int, edit: str) -> str:
        if edit in ("below", "top"):
            # Every name is valid below a mapping with free names.
            if edit == "below" and path not in _MAPPINGS:
                return f"{path}.{name}"
            return f"zz_{name}"

        replacement = {
            "drop": "",
            "double": name[index] * 2,
            "wrong": "q",
            "case": name[index].upper(),
        }[edit]
        return section + name[:index] + replacement + name[index + 1 :]

    return st.builds(apply_edit, indices, edits).filter(lambda typo: typo not in {key.path for key in KEYS})


def unknown_name() -> st.SearchStrategy[dict[str, Any]]:
    """Set a key that the configuration does not have."""
    # Short names have too many valid neighbours.
    names = st.sampled_from([key.path for key in KEYS if len(key.path.rpartition(".")[2]) > 3]).flatmap(
        _typos
    )
    return names.map(lambda name: {"set": [f"{name}=1"], "names": name})


def valid_fields() -> st.SearchStrategy[dict[str, Any]]:
    """Set one to four keys to small valid values, which may contradict each other."""
    pairs = st.sampled_from(numbers()).flatmap(lambda key: st.tuples(st.just(key.path), small_values(key)))
    entries = st.lists(
        pairs,
        min_size=1,
        max_size=4,
        unique_by=lambda pair: pair[0],
    )
    return entries.map(lambda pairs: {"set": [_override(*pair) for pair in pairs]})


def long_names() -> st.SearchStrategy[dict[str, Any]]:
    """Use a name that becomes part of a file name and is longer than file systems allow."""
    patterns = st.sampled_from(["evaluation.sets.{}.data=eval.jsonl", "reward.models.{}.path=model"])
    # 255 bytes is the limit of Linux file systems; suffixes are added to the name.
    sizes = st.sampled_from([65, 255, 300, 5000])

    def overrides(pattern: str, size: int) -> dict[str, Any]:
        return {
            "set": [pattern.format("n" * size)],
            "names": pattern.partition(".{}")[0],
        }

    return st.builds(overrides, patterns, sizes)


def layouts() -> st.SearchStrategy[dict[str, Any]]:
    """Set random layouts of roles, with a random number of processes."""
    # Mostly degrees that fit, since one that does not hides the errors behind it.
    sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 8, 64, 2**20])
    names = (
        "tensor",
        "pipeline",
        "virtual_pipeline",
        "context",
        "expert",
        "expert_tensor",
    )
    roles = st.sampled_from(["actor.layout", "reference.layout", "critic.layout"])
    layout_degrees = st.dictionaries(st.tuples(roles, st.sampled_from(names)), sizes, max_size=4)
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

    def overrides(
        degrees: dict[tuple[str, str], int],
        rollout_values: dict[str, Any],
        world: int | None,
    ) -> dict[str, Any]:
        values = {".".join(name): value for name, value in degrees.items()} | rollout_values
        return {
            "set": [_override(*pair) for pair in values.items()],
            "world": world,
        }

    return st.builds(overrides, layout_degrees, rollout, worlds)


# Values that break code without complete checks: numbers beyond 64 bits, a lone surrogate, nested values.
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
    """Damage a line of a data set: a key, a value, its JSON or its bytes."""
    files = st.sampled_from(["train.jsonl", "eval.jsonl", "sft.jsonl"])
    fields = st.sampled_from(["prompt", "ground_truth", "response", "task"])
    record = st.builds(lambda field, value: {"field": field, "value": value}, fields, ODD)
    # JSON allows duplicate keys, and Python's parser keeps the last one silently.
    duplicate_key = '{"prompt": "1+1=", "prompt": "2+2=", "ground_truth": "4", "response": "4"}'
    lines = [
        "{",
        "[]",
        "null",
        "3",
        "\u2028",
        '{"prompt": NaN}',
        "{}",
        '"',
        '{"a":' * 9999,
        duplicate_key,
    ]
    line_texts = st.sampled_from(lines)

    byte_texts = st.sampled_from(["ff", "00", "efbbbf", "fffe", ""])
    change = st.one_of(
        record,
        line_texts.map(lambda line: {"line": line}),
        byte_texts.map(lambda data: {"bytes": data}),
    )
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
    keys = st.one_of(
        st.tuples(st.just("model/config.json"), st.sampled_from(config)),
        st.tuples(
            st.just("model/generation_config.json"),
            st.sampled_from(["eos_token_id", "pad_token_id"]),
        ),
        st.tuples(
            st.just("model/tokenizer_config.json"),
            st.sampled_from(["eos_token", "tokenizer_class", "chat_template"]),
        ),
        st.tuples(
            st.just("model/tokenizer.json"),
            st.sampled_from(["model", "added_tokens", "version"]),
        ),
    )

    # Values that other models have, or that almost fit.
    plausible_values = st.one_of(
        ODD,
        st.integers(0, 130),
        st.sampled_from(["silu", "qwen3", "yarn", ["full_attention"], 2, 64]),
    )
    values = st.builds(
        lambda key, value: {
            "file": key[0],
            "key": key[1],
            "value": value,
        },
        keys,
        plausible_values,
    )

    file_names = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    )
    bytes_of = st.builds(
        lambda name, offset, data: {
            "file": f"model/{name}",
            "at": offset,
            "bytes": data,
        },
        st.sampled_from(file_names),
        st.integers(0, 3000),
        st.sampled_from(["", "00", "ff", "7b", "22", "cut", "gone"]),
    )
    # Values twice as often as bytes: most damaged bytes only make a file unreadable.
    return st.one_of(values, values, bytes_of)


def file_kinds() -> st.SearchStrategy[dict[str, Any]]:
    """Replace a file by a pipe, a folder, a device or a link, or a folder by a file."""
    files = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    )
    paths = (
        *("train.jsonl", "eval.jsonl", "sft.jsonl", "model"),
        *(f"model/{name}" for name in files),
        *(
            "run",
            "run/checkpoints",
            "run/rollouts",
            "run/stages",
            "run/config.yaml",
            "run/metrics.jsonl",
        ),
    )
    replacements = st.sampled_from(
        [
            "pipe",
            "folder",
            "file",
            "loop",
            "nowhere",
            "/dev/zero",
            "/dev/full",
            "/proc",
        ]
    )
    return st.builds(
        lambda file, replacement: {"file": file, "as": replacement},
        st.sampled_from(paths),
        replacements,
    )


def command_lines() -> st.SearchStrategy[dict[str, Any]]:
    """Write malformed overrides, or overrides with unusual YAML."""
    name = st.one_of(
        st.sampled_from([key.path for key in KEYS]),
        st.text("ab._-=", max_size=6),
        st.sampled_from(["=", ".", "a..b"]),
    )

    value = st.one_of(
        st.text("abc:-{}[],&*!|>'\"%@#\n\t 019.~", max_size=12),
        st.sampled_from(
            [
                "[" * 3000,
                "{a: " * 900,
                "&a [*a]",
                "!!python/object:os.system x",
                "!!binary x",
            ]
        ),
    )

    return st.lists(
        st.builds(lambda name, value: f"{name}={value}", name, value),
        min_size=1,
        max_size=2,
    ).map(
        lambda overrides: {
            "set": [override for override in overrides if not override.startswith("-") and "=" in override]
        }
    )


def texts() -> st.SearchStrategy[dict[str, Any]]:
    """Damage the text of the configuration: a character, a line, or its indentation."""
    edits = st.sampled_from(["drop", "double", "tab", "cut", "insert"])
    positions = st.integers(0, len(BASE) - 1)
    characters = st.text(":-{}[]&*!|>'\"%@#\n\t ~\u00e9", min_size=1, max_size=2)

    def apply_edit(edit: str, position: int, inserted: str) -> dict[str, Any]:
        lines = BASE.splitlines(keepends=True)
        line_number = position % len(lines)
        result = {
            "drop": "".join(lines[:line_number] + lines[line_number + 1 :]),
            "double": "".join([*lines[: line_number + 1], *lines[line_number:]]),
            "tab": "".join(
                [
                    *lines[:line_number],
                    "\t" + lines[line_number],
                    *lines[line_number + 1 :],
                ]
            ),
            "cut": BASE[:position],
            "insert": BASE[:position] + inserted + BASE[position:],
        }[edit]
        return {"text": result}

    return st.builds(apply_edit, edits, positions, characters)


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
"""Group -> its share of the cases, and its strategy."""


_DRAW = settings(
    max_examples=4,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def draw(strategy: st.SearchStrategy[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return the value that a strategy generates for a seed."""
    examples: list[dict[str, Any]] = []

    @seed(number)
    @_DRAW
    @given(strategy)
    def collect(value: dict[str, Any]) -> None:
        examples.append(value)

    collect()
    return examples[-1]  # the first example is the simplest value, whatever the seed


def _override(path: str, value: Any) -> str:
    text = json.dumps(value).replace("-Infinity", "-.inf").replace("Infinity", ".inf").replace("NaN", ".nan")
    return f"{path}={text}"
