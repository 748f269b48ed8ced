"""The consoles of tutorials are recordings of their commands, in the form that the package prints today.

Numbers are not compared. ``python benchmarks/tutorials.py NAME`` records one.
"""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.tutorials import LEFT_OUT, RECORDINGS
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.trainer import report
from megatron_rl.trainer.logging import COLUMNS, MetricsLog, accuracy_names

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"train +(?P<step>\d+)/(?P<total>\d+)(?P<items>(?:  .*)?(?:\n    eval/.*)*)")
# A text that begins or ends with a letter is looked for as whole words.
WORD_START = r"(?:(?<![A-Za-z])|(?=[^A-Za-z]))"
WORD_END = r"(?:(?![A-Za-z])|(?<=[^A-Za-z]))"
RECORDED = [name for name in RECORDINGS if (ROOT / f"docs/recorded/{name}.txt").exists()]
ETA = re.compile(r"eta [\d:]+")


def recording(name: str) -> str:
    return (ROOT / f"docs/recorded/{name}.txt").read_text(encoding="utf-8")


def test_a_page_includes_its_recording_as_soon_as_there_is_one() -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs/tutorials").glob("*.md")}
    assert set(RECORDINGS) <= set(pages)
    assert [name for name in RECORDINGS if f'--8<-- "docs/recorded/{name}.txt"\n' in pages[name]] == RECORDED


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_is_of_the_commands_on_the_page(name: str) -> None:
    page = (ROOT / f"docs/tutorials/{name}.md").read_text(encoding="utf-8")
    commands = RECORDINGS[name].commands
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert not {*commands} - {line.partition(" #")[0].rstrip() for line in shell.splitlines()}
    assert tuple(re.findall(r"^\$ (.+)$", recording(name), re.MULTILINE)) == commands
    assert RECORDINGS[name].curve == (f"../images/{name}_curve.svg" in page)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_names_no_machine(name: str) -> None:
    text = recording(name)
    folders = set(re.findall(r"(?<![\w.~/-])/(\w+)/", text)) - {"dev"}
    assert not folders
    assert socket.gethostname() not in text


def lines_of(name: str) -> Iterator[str]:
    """Yield the printed lines of a recording, a step with the indented results that follow it."""
    for line in re.split(r"\n(?!    eval/)", recording(name)):
        if line and line != LEFT_OUT and not line.startswith("$ "):
            yield line


def values_of(items: list[str]) -> dict[str, float]:
    """Return the metrics that a step's line shows, by name."""
    metric_of = {label: metric for label, metric, _ in COLUMNS}
    values: dict[str, float] = {}
    for item in items:
        name, _, text = item.partition(" ")
        if name in metric_of:
            values[metric_of[name]] = float(text)
        elif accuracy_names([name]):
            values[name] = float(text)
        elif name == "invalid":
            values["reward/invalid"] = float(text)
        elif name == "unhealthy":
            rule, *others = text.split(" and ")
            names = [rule]
            if others:
                names += map(str, range(int(others[0].removesuffix(" more"))))
            values |= {f"health/{name}": 1.0 for name in names}
        elif item.startswith("("):
            phases = (phase.split(" ") for phase in item.strip("()").split(", "))
            values |= {f"time/{phase}": float(seconds) for phase, seconds in phases}
        elif text == "s":
            values["time/step"] = float(name)
        else:
            assert name == "eta", item
    return values


@pytest.mark.parametrize("name", RECORDED)
def test_the_lines_of_steps_are_those_that_the_log_writes(name: str, tmp_path: Path) -> None:
    for line in lines_of(name):
        match = STEP.fullmatch(line)
        if match:
            values = values_of(re.split(r"\s{2,}", match["items"])[1:])
            with MetricsLog(RunFolder(tmp_path), int(match["total"])) as log:
                written = log.format_line(int(match["step"]), values)
            assert ETA.sub("eta", line) in (ETA.sub("eta", written), written)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


@pytest.mark.parametrize("name", RECORDED)
def test_the_table_of_phases_is_that_of_the_report(name: str) -> None:
    """The last column follows from the name of a phase."""
    for table in re.findall(r"^┏.*?^└", recording(name), re.MULTILINE | re.DOTALL):
        headings, *rows = [cells(line) for line in table.splitlines() if line.startswith(("┃", "│"))]
        if headings[0] == report.PHASE_HEADINGS[0]:
            assert tuple(headings) == report.PHASE_HEADINGS
            for phase, *_, part_of in rows:
                outside = report.BETWEEN_STEPS if phase in report.OUTSIDE_STEPS else ""
                assert part_of == report.PART_OF.get(phase, outside)


@cache
def texts() -> tuple[frozenset[str], frozenset[str]]:
    """Return the parts of the package's texts between values, and the single words among its constants."""
    parts: set[str] = set()
    words: set[str] = set()
    for path in [*(ROOT / "megatron_rl").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for text in node.value.splitlines():
                    if re.fullmatch(r"[\w-]+", text):
                        words |= {text, f"{text}s"}
                    elif re.search(r"[A-Za-z]{2}", text):
                        parts.add(text)
    for path in (ROOT / "launch").rglob("*.sh"):
        for printed in re.findall(r'echo "([^"]+)"', path.read_text(encoding="utf-8")):
            parts |= set(re.split(r"\$\S+", printed)) - {""}
    return frozenset(parts), frozenset(words)


def words_without_a_text(line: str) -> list[str]:
    """Return the words of a line that neither stand in a text of the package nor are a constant of it."""
    parts, words = texts()
    # The headings of `doctor` are written in capitals.
    rest = line
    if line.isupper():
        rest = line.lower()
    # A text that ends in a folder would take it off the path that follows.
    rest = re.sub(r"\S*\w/\w+[/-]\S*", " ", rest)
    for part in sorted((part for part in parts if part in rest), key=len, reverse=True):
        rest = re.sub(rf"{WORD_START}{re.escape(part)}{WORD_END}", " ", rest)
    # Numbers, keys, paths and names of files are values.
    rest = re.sub(r"\S*[/_=\d]\S*|\S*\w\.\w\S*", " ", rest)
    return sorted({*re.findall(r"[A-Za-z][\w-]*", rest)} - words)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_every_word_of_a_recording_is_one_that_the_package_prints(name: str) -> None:
    # Tables are titled by the name of a run's folder.
    run_folders = re.findall(r"runs/\S+", recording(name))
    shown = set(re.split(r"\W+", " ".join([*RECORDINGS[name].commands, *run_folders])))
    wrong: dict[str, list[str]] = {}
    for line in lines_of(name):
        missing = [word for word in words_without_a_text(line) if word not in shown]
        if missing and not STEP.fullmatch(line):
            wrong[line] = missing
    assert not wrong
