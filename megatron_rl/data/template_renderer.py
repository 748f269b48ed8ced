"""A model's chat template, rendered the same way by `check` and by the run, in a process with limits.

The language is that of transformers' ``apply_chat_template``; rendering needs neither transformers nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.data.template_process import CPU_SECONDS, DEFAULT

TIME_ATTRIBUTE = "chat_template_time"
"""Attribute of a run's tokenizer: the time that its chat template takes for now."""
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from megatron_rl.data.template_process import main; main()"
)
_PACKAGES = str(Path(__file__).resolve().parents[2])
_BATCH = 64
"""Renderings of one message to the process."""
_CLOCK = "strftime_now"


class RenderRefused(Exception):
    """Reason why a chat template does not render messages."""


class Rendering(NamedTuple):
    """Messages to render, the tools beside them, and whether the assistant's turn is opened behind them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    opens: bool = True


class TemplateRenderer:
    """Chat templates by name, with the special tokens that they may write and the time they take for now.

    The process starts with the first rendering and ends with `close`, or with this object.
    """

    def __init__(
        self, templates: Mapping[str, str], special: Mapping[str, str], now: datetime | None = None
    ) -> None:
        self.templates = dict(templates)
        self.special = dict(special)
        self.now = now or datetime.now()
        self._process: subprocess.Popen[str] | None = None
        self._end: Any = None
        self._exhausted: str | None = None
        self._lock = threading.Lock()

    def is_for(self, templates: Mapping[str, str], special: Mapping[str, str], now: datetime | None) -> bool:
        """Return whether these are what it renders with."""
        return (self.templates, self.special) == (templates, special) and now in (None, self.now)

    @property
    def has_clock(self) -> bool:
        """Return whether a template may write the time."""
        return any(_CLOCK in text for text in self.templates.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, opens: bool = True
    ) -> str:
        """Return messages as text; raises RenderRefused. ``opens`` has the assistant's turn opened."""
        (text,) = self.render_all([Rendering(messages, tools, opens)])
        if isinstance(text, RenderRefused):
            raise text
        return text

    def render_all(self, renderings: Sequence[Rendering]) -> list[str | RenderRefused]:
        """Return each text, or why the template does not render it."""
        results: list[str | RenderRefused] = []
        for start in range(0, len(renderings), _BATCH):
            with self._lock:  # rewards may be computed in a thread of their own
                results += self._render_batch(renderings[start : start + _BATCH])
        return results

    def _render_batch(self, batch: Sequence[Rendering]) -> list[str | RenderRefused]:
        answers = self._ask(batch)
        if answers is not None:
            return answers
        if len(batch) == 1:
            return [RenderRefused(self._exhausted or "")]

        # A rendering that ends the process takes its whole batch along: find which one it is.
        return [answer for one in batch for answer in self._render_batch([one])]

    def _ask(self, batch: Sequence[Rendering]) -> list[str | RenderRefused] | None:
        """Return the answers of the process, None where it has ended over them."""
        if self._exhausted is not None and len(batch) == 1:
            return [RenderRefused(self._exhausted)]

        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(batch, default=str) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()

        if line.endswith("\n"):
            return [RenderRefused(reason) if text is None else text for text, reason in json.loads(line)]

        status = process.wait()
        self.close()
        if len(batch) == 1:
            self._exhausted = _ending(status)
        return None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-c", _START, _PACKAGES],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            )
            self._end = weakref.finalize(self, _end_process, self._process)
            setup = {"templates": self.templates, "special": self.special, "now": self.now.isoformat()}
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(setup) + "\n")
        return self._process

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        if self._process is not None:
            self._end()
            self._process = None


def _end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def _ending(status: int) -> str:
    """Return why the process of a template ended."""
    if -status == signal.SIGXCPU:
        return f"it takes more than {CPU_SECONDS} s of processor time"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


_RENDERERS: weakref.WeakKeyDictionary[Any, TemplateRenderer] = weakref.WeakKeyDictionary()
"""The renderer of each tokenizer, so that a process of a run has one process for its templates."""


def renderer_of(tokenizer: Any) -> TemplateRenderer | None:
    """Return the renderer of a tokenizer's chat templates, None where it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None

    templates = dict(template) if isinstance(template, Mapping) else {DEFAULT: template}
    names = tokenizer.special_tokens_map.items()
    special = {name: str(text) for name, text in names if isinstance(text, str)}
    now = getattr(tokenizer, TIME_ATTRIBUTE, None)

    renderer = _RENDERERS.get(tokenizer)
    if renderer is None or not renderer.is_for(templates, special, now):
        renderer = _RENDERERS[tokenizer] = TemplateRenderer(templates, special, now)
    return renderer


def can_render() -> bool:
    """Return whether this machine has the library that renders templates."""
    return find_spec("jinja2") is not None
