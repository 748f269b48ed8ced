"""Write the quickstart's data in other forms: Parquet, chats, tools, nested fields, tests of programs.

``python -m tests.campaign.forms DIRECTORY`` writes one folder per form beside the data in ``DIRECTORY``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SETS = ("train", "eval", "sft", "sft_eval", "pairs")
TEMPLATE = (
    "{% if tools %}{{ tools|length }}*{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={{ m['content'] }}<eos>"
    "{% else %}<bos>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Chat template whose text consists of the quickstart's 21 tokens."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
        },
    },
}
Record = dict[str, Any]


def user(text: str) -> dict[str, str]:
    """Return a user message without the trailing ``=``, which the template adds."""
    return {"role": "user", "content": text.removesuffix("=")}


def assistant(text: str) -> dict[str, str]:
    """Return an assistant message."""
    return {"role": "assistant", "content": text}


def plain(record: Record, number: int) -> Record:
    """Return the record unchanged."""
    return record


def chats(record: Record, number: int) -> Record:
    """Return a record with a conversation as prompt; every third has three messages."""
    history = [user("1+1"), assistant("2")] if number % 3 == 0 else []
    prompt = [*history, user(record["prompt"])]
    if "response" in record:
        return {"prompt": [*prompt, assistant(record["response"])]}
    if "chosen" in record:
        pair = {name: [*prompt, assistant(record[name])] for name in ("chosen", "rejected")}
        return pair if number % 2 else {"prompt": prompt, **pair}
    return {**record, "prompt": prompt}


def tools(record: Record, number: int) -> Record:
    """Return a record with tools in its prompt and messages as responses."""
    responses = {
        name: [assistant(record[name])] for name in ("response", "chosen", "rejected") if name in record
    }
    return {
        **record,
        **responses,
        "prompt": [user(record["prompt"])],
        "tools": [TOOL] * (1 + number % 2),
    }


def nested(record: Record, number: int) -> Record:
    """Return a record with nested fields."""
    problem = {
        "text": record.pop("prompt"),
        "truth": record.pop("ground_truth", None),
    }
    return {
        **record,
        "problem": problem,
        "extra": {"kind": "addition", "list": [None, "a"]},
    }


def programs(record: Record, number: int) -> Record:
    """Return a record whose ground truth is a list of program tests; any program passes one of them."""
    # The prompt ends with "=", which is not part of the expression.
    sum_of = {"call": record["prompt"][:-1], "returns": "none"}
    tests = [{"call": "1+1", "returns": 2}, sum_of, "assert 1 + 1 == 2"]
    return {
        **record,
        "ground_truth": json.dumps(tests) if number % 2 else json.dumps(tests[::2]),
    }


FORMS: Mapping[str, tuple[Callable[[Record, int], Record], str]] = {
    "parquet": (plain, ".parquet"),
    "saved": (plain, ".saved"),
    "chats": (chats, ".jsonl"),
    "tools": (tools, ".parquet"),
    "nested": (nested, ".jsonl"),
    "programs": (programs, ".jsonl"),
}
"""Form -> the function that converts a record, and the suffix of the file."""


def in_form(value: Any, train: str) -> Any:
    """Return settings whose data files have the form of ``train``, the path of the prompts."""
    if isinstance(value, Mapping):
        return {key: in_form(nested_value, train) for key, nested_value in value.items()}
    if not str(value).endswith(".jsonl") or "/" in str(value):
        return value
    path = Path(train)
    return str(path.parent / f"{Path(value).stem}{path.suffix}")


def make(directory: Path) -> None:
    """Write the data of ``directory`` in every form."""
    for form, (change, suffix) in FORMS.items():
        (directory / form).mkdir(exist_ok=True)
        for name in SETS:
            lines = (directory / f"{name}.jsonl").read_text().splitlines()
            # The number decides which variant of the form a record gets.
            records = [change(json.loads(line), number) for number, line in enumerate(lines)]
            _write(records, directory / form / f"{name}{suffix}")


def _write(records: list[Record], path: Path) -> None:
    """Write records in the format of the path's suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return

    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    # Both formats store the same table.
    table = pyarrow.Table.from_pylist(records)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        Dataset(table).save_to_disk(str(path))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
