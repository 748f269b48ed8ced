"""HTML pages that stand alone: tables, pictures, and a browser of samples. Text is always escaped."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 1180px;
margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top;
border-bottom: 1px solid #e5e7eb; overflow-wrap: anywhere; min-width: 5.5rem }
td:first-child { min-width: 7.5rem } td.n { white-space: nowrap }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; min-width: 0 }
.curves { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)) }
.curves img { width: 100% } pre { background: #f6f7f9; padding: 1rem; overflow-x: auto; font-size: 13px }
.filters { display: flex; flex-wrap: wrap; gap: .5rem 1rem; margin: .5rem 0 }
.filters input[type=number] { width: 5.5rem } input, select, button { font: inherit; max-width: 100% }
.sample { border-top: 1px solid #e5e7eb; padding: .5rem 0 }
.sample p { font-family: ui-monospace, monospace; white-space: pre-wrap; unicode-bidi: plaintext;
overflow-wrap: anywhere; margin: .2rem 0 }
.facts { color: #6b7280; font-size: 13px; overflow-wrap: anywhere } .prompt { color: #6b7280 }
.turn { border-left: 3px solid #d1d5db; padding: .1rem 0 .1rem .7rem; margin: .35rem 0 }
.turn.policy { border-color: #2563a8; background: #eef4fb } .call { color: #8a5bb5 }
.over { margin-top: .3rem }
"""
SCRIPT = """
'use strict';
const rows = JSON.parse(document.getElementById('rows').textContent);
const field = name => document.getElementById(name);
const shown = 50;
let limit = shown, only = null;
function options(name, values) {
  for (const value of values) field(name).add(new Option(value, value));
}
const turns = row => row.turns ?? [];
const different = key => [...new Set(rows.map(row => row[key]))];
options('set', different('set'));
options('step', different('step').sort((a, b) => a - b));
options('finish', different('finish').filter(word => word !== null));
function within(value, low, high) {
  return (low === '' || (value !== null && value >= Number(low)))
    && (high === '' || (value !== null && value <= Number(high)));
}
function chosen() {
  const value = name => field(name).value;
  return rows.filter(row => only === null
    ? (value('set') === '' || row.set === value('set'))
      && (value('step') === '' || row.step === Number(value('step')))
      && (value('finish') === '' || row.finish === value('finish'))
      && within(row.reward, value('low'), value('high'))
      && within(row.length, value('short'), value('long'))
      && [row.prompt, row.response, ...turns(row).map(turn => turn.content)]
        .some(text => text.includes(value('text')))
    : row.prompt === only.prompt && row.set === only.set);
}
function element(parent, tag, kind, text) {
  const made = parent.appendChild(document.createElement(tag));
  made.className = kind;
  made.textContent = text;
  return made;
}
function speak(sample, turn, row) {
  const box = element(sample, 'div', `turn ${turn.role}`, '');
  const facts = [turn.role, `${turn.tokens} tokens`];
  if (row.set === 'training')
    facts.push(turn.role === 'policy' && row.reward !== null ? 'learned from' : 'not learned from');
  element(box, 'div', 'facts', facts.join(' · '));
  element(box, 'p', '', turn.content);
  for (const call of turn.calls) element(box, 'p', 'call', `tool call: ${call}`);
}
function show() {
  const list = field('list'), found = chosen();
  list.replaceChildren();
  field('count').textContent = `${found.length} of ${rows.length} samples`
    + (only === null ? '' : ' (one prompt over steps)');
  field('all').hidden = only === null;
  field('more').hidden = found.length <= limit;
  for (const row of found.slice(0, limit)) {
    const sample = element(list, 'div', 'sample', '');
    const facts = [`step ${row.step}`, row.set, `reward ${row.reward === null ? 'failed' : row.reward}`];
    if (row.length !== null) facts.push(`${row.length} tokens`);
    if (row.finish !== null) facts.push(row.finish);
    element(sample, 'div', 'facts', facts.join(' · '));
    if (row.failure !== null) element(sample, 'div', 'facts', `failed: ${row.failure}`);
    if (row.turns === null) {
      element(sample, 'p', 'prompt', row.prompt);
      element(sample, 'p', 'response', row.response);
    } else for (const turn of row.turns) speak(sample, turn, row);
    if (row.truth !== null) element(sample, 'div', 'facts', `ground truth: ${row.truth}`);
    if (only === null) {
      const button = element(sample, 'button', 'over', 'this prompt over steps');
      button.addEventListener('click', () => { only = row; limit = shown; show(); });
    }
  }
}
for (const name of ['set', 'step', 'finish', 'low', 'high', 'short', 'long', 'text'])
  field(name).addEventListener('input', () => { limit = shown; show(); });
field('all').addEventListener('click', () => { only = null; limit = shown; show(); });
field('more').addEventListener('click', () => { limit += shown; show(); });
show();
"""
_FILTERS = """<div class="filters">
<label>set <select id="set"><option value="">all</option></select></label>
<label>step <select id="step"><option value="">all</option></select></label>
<label>finish <select id="finish"><option value="">all</option></select></label>
<label>reward from <input id="low" type="number" step="any"></label>
<label>to <input id="high" type="number" step="any"></label>
<label>tokens from <input id="short" type="number"></label>
<label>to <input id="long" type="number"></label>
<label>text <input id="text"></label>
<button id="all" hidden>all samples</button></div>
<p id="count"></p><div id="list"></div><button id="more" hidden>more</button>"""


def write(path: Path, title: str, parts: Sequence[str]) -> None:
    """Write a whole page; ``parts`` are HTML already. Halves of characters become question marks."""
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
    )
    page = "\n".join([f"{head}<body><h1>{html.escape(title)}</h1>", *parts, "</body></html>\n"])
    path.write_text(page, encoding="utf-8", errors="replace")


def heading(text: str) -> str:
    """Return a heading within a page."""
    return f"<h2>{html.escape(text)}</h2>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Return a table; the columns ``numeric`` are aligned to the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = [" class='n'" if place in numeric else "" for place in range(len(values))]
        texts = [html.escape(value) for value in values]
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{cells('th', headings)}</tr>{body}</table></div>"


def pictures(titled: Sequence[tuple[str, bytes]]) -> str:
    """Return SVG pictures, beside each other where there is room."""
    images = [
        f"<img alt='{html.escape(title, quote=True)}' "
        f"src='data:image/svg+xml;base64,{base64.b64encode(picture).decode()}'>"
        for title, picture in titled
    ]
    return f"<div class='curves'>{''.join(images)}</div>"


def paragraph(content: str) -> str:
    """Return a sentence of its own."""
    return f"<p>{html.escape(content)}</p>"


def text(content: str) -> str:
    """Return text as it is, its lines kept."""
    return f"<pre>{html.escape(content)}</pre>"


def sample_browser(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a list of samples with filters.

    Each has set, step, prompt, response, truth, reward, length, finish, turns and failure; from truth on they
    may be None. A turn has role, content, tokens, and calls as texts; a sample with turns is shown by them.
    Nothing that a model or a data set says is read as HTML or as a program: it is data of the script, in
    which no tag can end, and is shown as text.
    """
    data = json.dumps(rows, ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return f"{_FILTERS}<script type='application/json' id='rows'>{data}</script><script>{SCRIPT}</script>"
