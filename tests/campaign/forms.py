"""The quickstart's data in other forms: files, chats, tools, fields within fields, tests of programs.

``python -m tests.campaign.forms DIRECTORY`` writes a folder per form beside the data in ``DIRECTORY``.
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
"""A chat template that says everything with the quickstart's 21 tokens."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
Record = dict[str, Any]


def user(text: str) -> dict[str, str]:
    """Return a message of the user, without the sign that the template puts before an answer."""
    return {"role": "user", "content": text.removesuffix("=")}


def assistant(text: str) -> dict[str, str]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": text}


def plain(record: Record, number: int) -> Record:
    """Return a record as it is."""
    return record


def chats(record: Record, number: int) -> Record:
    """Return a record whose prompt is a conversation, every third of three messages."""
    before = [user("1+1"), assistant("2")] if number % 3 == 0 else []
    prompt = [*before, user(record["prompt"])]
    if "response" in record:
        return {"prompt": [*prompt, assistant(record["response"])]}
    if "chosen" in record:
        answers = {name: [*prompt, assistant(record[name])] for name in ("chosen", "rejected")}
        return answers if number % 2 else {"prompt": prompt, **answers}
    return {**record, "prompt": prompt}


def tools(record: Record, number: int) -> Record:
    """Return a record whose prompt comes with tools, and whose responses are messages."""
    said = {name: [assistant(record[name])] for name in ("response", "chosen", "rejected") if name in record}
    return {
        **record,
        **said,
        "prompt": [user(record["prompt"])],
        "tools": [TOOL] * (1 + number % 2),
    }


def nested(record: Record, number: int) -> Record:
    """Return a record whose fields lie within others."""
    problem = {"text": record.pop("prompt"), "truth": record.pop("ground_truth", None)}
    return {
        **record,
        "problem": problem,
        "extra": {"kind": "addition", "list": [None, "a"]},
    }


def programs(record: Record, number: int) -> Record:
    """Return a record whose ground truth are tests of programs, of which any program passes one."""
    sum_of = {"call": record["prompt"][:-1], "returns": "none"}
    tests = [{"call": "1+1", "returns": 2}, sum_of, "assert 1 + 1 == 2"]
    return {**record, "ground_truth": json.dumps(tests) if number % 2 else json.dumps(tests[::2])}


FORMS: Mapping[str, tuple[Callable[[Record, int], Record], str]] = {
    "parquet": (plain, ".parquet"),
    "saved": (plain, ".saved"),
    "chats": (chats, ".jsonl"),
    "tools": (tools, ".parquet"),
    "nested": (nested, ".jsonl"),
    "programs": (programs, ".jsonl"),
}
"""What becomes of a record, and how the file's name ends."""


def laid(value: Any, train: str) -> Any:
    """Return settings whose data are in the form that ``train``, the path of the prompts, is in."""
    if isinstance(value, Mapping):
        return {key: laid(inner, train) for key, inner in value.items()}
    if not str(value).endswith(".jsonl") or "/" in str(value):
        return value
    path = Path(train)
    return str(path.parent / f"{Path(value).stem}{path.suffix}")


def make(directory: Path) -> None:
    """Write every form of the data in ``directory``."""
    for form, (change, suffix) in FORMS.items():
        (directory / form).mkdir(exist_ok=True)
        for name in SETS:
            lines = (directory / f"{name}.jsonl").read_text().splitlines()
            records = [change(json.loads(line), number) for number, line in enumerate(lines)]
            _write(records, directory / form / f"{name}{suffix}")


def _write(records: list[Record], path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return

    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(records)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        Dataset(table).save_to_disk(str(path))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
