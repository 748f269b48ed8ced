"""Every page, rendered to HTML and measured in a browser: nothing is cut, and nothing scrolls sideways.

Formulas are drawn: GitHub and the browser read the same TeX.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from megatron_rl.cli.reference import FORMULAS
from tests import browser

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1280, 400)
"""A laptop's window and a phone's, in pixels."""
PAGES = ("README.md", "docs", "benchmarks/README.md", "launch/examples")
MEASURE = """
(() => {
  const width = document.documentElement.clientWidth;
  const problems = [];
  const text = element => element.innerText.slice(0, 70);
  if (document.documentElement.scrollWidth > width)
    problems.push(`page: ${document.documentElement.scrollWidth} pixels wide`);
  for (const table of document.querySelectorAll('article table'))
    if (table.scrollWidth > table.clientWidth + 2 || table.getBoundingClientRect().right > width)
      problems.push(`table: ${text(table)}`);
  for (const code of document.querySelectorAll('article pre > code'))
    if (code.scrollWidth > code.clientWidth + 2 || code.getBoundingClientRect().right > width)
      problems.push(`code: ${text(code)}`);
  for (const formula of document.querySelectorAll('article math')) {
    const box = formula.getBoundingClientRect();
    if (box.right > width || box.width < 5 || box.height < 5 || formula.querySelector('merror'))
      problems.push(`formula: ${formula.textContent.slice(0, 70)}`);
  }
  for (const picture of document.querySelectorAll('article img'))
    if (!picture.naturalWidth || picture.getBoundingClientRect().right > width)
      problems.push(`picture: ${picture.src}`);
  return problems;
})()
"""


def build_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Render the documentation and the pages outside of it, in the folders where readers find them."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    source = folder / "source"
    for name in PAGES:
        copied = [ROOT / name]
        if copied[0].is_dir():
            copied = [path for path in copied[0].rglob("*") if path.suffix in (".md", ".svg", ".png", ".css")]
        for path in copied:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)

    monkeypatch.chdir(ROOT)
    # Links to source files lead out of this copy, which mkdocs logs; test_docs.py checks links.
    logging.getLogger("mkdocs").setLevel(logging.ERROR)
    config = load_config(
        ".mkdocs.yml",
        docs_dir=str(source),
        site_dir=str(folder / "site"),
        nav=None,
        strict=False,
        extra_css=["docs/style.css"],
        plugins=[],  # the index of the search is a third of the build, and is on no page
    )
    build(config)
    return folder / "site"


@pytest.mark.slow
@pytest.mark.browser
def test_no_page_cuts_a_table_or_code_at_the_width_of_a_laptop_or_a_phone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = build_site(tmp_path, monkeypatch)
    path = browser.executable()
    assert path is not None
    problems = []
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 40

    formulas = 0
    with browser.Browser(path, WIDTHS[0]) as window:
        for page in pages:
            window.open(page)
            for width in WIDTHS:
                window.resize(width)
                found = window.value(MEASURE)
                name = page.parent.relative_to(site)
                problems += [f"{name} at {width} pixels: {problem}" for problem in found]
            formulas += window.value("document.querySelectorAll('article math').length")
            assert not window.value("document.querySelector('article').innerText.includes('\\\\frac')")
    assert not problems
    assert formulas >= len(FORMULAS), "the formulas of the algorithms"


@pytest.mark.browser
def test_a_table_that_is_too_wide_is_found(tmp_path: Path) -> None:
    path = browser.executable()
    assert path is not None
    page = tmp_path / "page.html"
    page.write_text(f"<article><table><tr><td>{'x' * 500}</td></tr></table></article>", encoding="utf-8")
    with browser.Browser(path, WIDTHS[1]) as window:
        window.open(page)
        window.resize(WIDTHS[1])
        assert any(problem.startswith("table:") for problem in window.value(MEASURE))
