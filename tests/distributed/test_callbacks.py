"""A user's callbacks in a whole run: told of every step, its samples and metrics, and unable to end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from test_roles import grpo, metrics

CODE = """
import json, os

class Watch:
    def __init__(self):
        self.file = open(os.environ["WATCHED"], "a")

    def tell(self, *values):
        self.file.write(json.dumps(values) + "\\n")
        self.file.flush()

    def on_step_begin(self, step):
        self.tell("begin", step)

    def on_samples(self, step, samples):
        self.tell("samples", step, samples["reward"])

    def on_step_end(self, step, metrics):
        self.tell("end", step, metrics["reward/mean"])
        if step == 2:
            raise SystemError("enough")
"""


def test_a_callback_is_told_of_each_step_until_it_fails(fork: Any, material: Path, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(CODE)
    file = grpo(tmp_path, material)
    config = yaml.safe_load(file.read_text())
    config |= {"placement": "colocate", "steps": 3, "callbacks": [f"{tmp_path / 'watch.py'}:Watch"]}
    file.write_text(yaml.safe_dump(config))
    watched = tmp_path / "watched.jsonl"
    launch = fork("megatron_rl", 2, "train", file, module=True, env={"WATCHED": str(watched)})
    assert "is not called any more" in launch.output and "enough" in launch.output

    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3], "the run goes on"
    told = [json.loads(line) for line in watched.read_text().splitlines()]
    assert [(event, step) for event, step, *_ in told] == [
        (event, step) for step in (1, 2) for event in ("begin", "samples", "end")
    ]
    for event, step, *values in told:
        if event == "samples":
            assert len(values[0]) == 16
        if event == "end":
            assert values == [lines[step - 1]["reward/mean"]]
