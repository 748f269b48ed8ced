"""Render a model's chat templates in a process with limits.

Templates never run in the trainer. jinja2's sandbox protects files and attributes from a template. It does
not prevent ``'a' * 10**10`` or ``9**9**9``, and Python cannot interrupt either operation once it has started.
So `TemplateRenderer` starts a process with a memory limit, and with a limit of processor time per rendering.
`check` and a run render in the same way.

The trainer and the process exchange one JSON value per line. The first line contains the templates by name,
the special tokens and the time that templates use as the current time. Each later line is a list of
renderings, and the reply is a list of the same length. The text equals the result of transformers'
``apply_chat_template``, but rendering needs neither transformers nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

TIME_ATTRIBUTE = "chat_template_time"
"""Name of the tokenizer's attribute with the time that its chat template uses as the current time."""
DEFAULT = "default"
"""Name of the template that transformers selects among several."""
WITH_TOOLS = "tool_use"
"""Name of the template that transformers selects for messages with tools."""

CPU_SECONDS = 2
"""Maximum seconds of processor time per rendering; the templates of published models need less than a
millisecond."""
MEMORY_BYTES = 1 << 30
"""Maximum bytes of the process's address space, of which Python and jinja2 need some 50 MiB."""
LONGEST_TEXT = 64 << 20
"""Largest rendered text in characters: far longer than any context, and small enough to send as one line."""
_BATCH = 64
"""Renderings per line: enough to hide the pipe's latency, few enough to repeat if the process ends."""
_TIME_FUNCTION = "strftime_now"
"""Name of the function that returns the current time to a template, as in transformers."""
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from megatron_rl.data.template_renderer import main; main()"
)
"""Source code of the process. Its argument is the folder `_PACKAGES`, which it adds to the import path."""
_PACKAGES = str(Path(__file__).resolve().parents[2])
"""Folder that contains the package ``megatron_rl``."""


# In the trainer


class RenderError(Exception):
    """Error for messages that a chat template cannot render; the text is the reason."""


class Rendering(NamedTuple):
    """One conversation to render.

    Example:
        >>> Rendering([{"role": "user", "content": "1+1"}]).add_generation_prompt
        True
    """

    messages: Sequence[Mapping[str, Any]]
    """Messages with a role and a content, as returned by `template_messages`."""
    tools: Sequence[Any] | None = None
    """JSON schemas of the available functions, or None for a conversation without tools."""
    add_generation_prompt: bool = True
    """Whether the template opens the assistant's turn after the messages."""
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of the template, by name."""


class TemplateRenderer:
    """Renderer of one tokenizer's chat templates, which runs them in a separate process.

    ``templates`` are the source texts of the templates, by name. ``special_tokens`` are the special tokens
    that they may write, by name, and ``now`` is the time that they use as the current time. The process
    starts with the first rendering, and ends with `close` or when this object is deleted.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: datetime | None = None,
    ) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens)
        self.now = now or datetime.now()
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: Any = None
        self._crash_reason: str | None = None
        """Reason why the process ended while it rendered a batch of one conversation, or None.

        If the reason is set, each later batch of one conversation is not rendered and fails with this reason.
        """
        self._lock = threading.Lock()

    def matches(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: datetime | None,
    ) -> bool:
        """Return whether the renderer has these templates, tokens and time; ``now`` None means any time."""
        is_same_time = now is None or now == self.now
        has_same_tokens = self.special_tokens == special_tokens
        return self.templates == templates and has_same_tokens and is_same_time

    @property
    def uses_current_time(self) -> bool:
        """Return whether a template contains the function that returns the current time."""
        return any(_TIME_FUNCTION in text for text in self.templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render one conversation to text; raises RenderError if the template cannot render it.

        See `Rendering` for ``add_generation_prompt``.
        """
        (text,) = self.render_all([Rendering(messages, tools, add_generation_prompt)])
        if isinstance(text, RenderError):
            raise text
        return text

    def render_all(self, renderings: Sequence[Rendering]) -> list[str | RenderError]:
        """Return the text of each rendering, or a RenderError if the template cannot render it."""
        results: list[str | RenderError] = []
        for start in range(0, len(renderings), _BATCH):
            with self._lock:  # rewards may be computed in a separate thread
                results += self._render_batch(renderings[start : start + _BATCH])
        return results

    def _render_batch(self, batch: Sequence[Rendering]) -> list[str | RenderError]:
        """Render a batch; if the process ends before its reply, render the conversations one by one."""
        texts = self._request_texts(batch)
        if texts is not None:
            return texts
        if len(batch) == 1:
            return [RenderError(self._crash_reason or "")]

        # All results of the batch are lost: render one by one to find the rendering that ended the process.
        results: list[str | RenderError] = []
        for rendering in batch:
            results += self._render_batch([rendering])
        return results

    def _request_texts(self, batch: Sequence[Rendering]) -> list[str | RenderError] | None:
        """Send a batch to the process; return a text or RenderError per rendering.

        Returns None if the process ended before it sent the reply.
        """
        # Do not start the process again for a batch of one after such a batch has ended the process.
        if self._crash_reason is not None and len(batch) == 1:
            return [RenderError(self._crash_reason)]

        # Writing fails, or reading ends early, if the process ends during the batch.
        process = self._ensure_process()
        assert process.stdin is not None and process.stdout is not None
        reply = ""
        with contextlib.suppress(BrokenPipeError):
            request = [_to_json_values(rendering) for rendering in batch]
            process.stdin.write(json.dumps(request, default=str) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()

        # A reply without a line break was truncated by the end of the process.
        if reply.endswith("\n"):
            results: list[str | RenderError] = []
            for text, reason in json.loads(reply):
                results.append(RenderError(reason) if text is None else text)
            return results

        status = process.wait()
        self.close()
        if len(batch) == 1:
            self._crash_reason = _exit_reason(status)
        return None

    def _ensure_process(self) -> subprocess.Popen[str]:
        """Return the rendering process; start one and send it the templates if none is running."""
        if self._process is not None:
            return self._process

        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", _START, _PACKAGES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end_process, process)

        # Send the first line of the protocol.
        setup = {
            "templates": self.templates,
            "special_tokens": self.special_tokens,
            "now": self.now.isoformat(),
        }
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(setup) + "\n")
        return process

    def close(self) -> None:
        """End the rendering process; a later rendering starts a new process."""
        if self._process is not None:
            self._finalizer()
            self._process = None


def _to_json_values(rendering: Rendering) -> tuple[Any, ...]:
    """Return the fields of a rendering in order, as values that JSON can encode."""
    # `kwargs` may be a read-only mapping, which JSON cannot encode.
    return (rendering.messages, rendering.tools, rendering.add_generation_prompt, dict(rendering.kwargs))


def _end_process(process: subprocess.Popen[str]) -> None:
    """Kill a rendering process and close its pipes."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def _exit_reason(status: int) -> str:
    """Describe why the rendering process ended; ``status`` is the return code of Popen."""
    if -status == signal.SIGXCPU:
        return f"it takes more than {CPU_SECONDS} s of processor time"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


_RENDERERS: weakref.WeakKeyDictionary[Any, TemplateRenderer] = weakref.WeakKeyDictionary()
"""Tokenizer -> renderer. Each process of a run then starts only one rendering process per tokenizer."""


def get_renderer(tokenizer: Any) -> TemplateRenderer | None:
    """Return the renderer of a tokenizer's chat templates, or None for a tokenizer without a template."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None

    templates = dict(template) if isinstance(template, Mapping) else {DEFAULT: template}
    special_tokens: dict[str, str] = {}
    for name, text in tokenizer.special_tokens_map.items():
        if isinstance(text, str):
            special_tokens[name] = str(text)
    now = getattr(tokenizer, TIME_ATTRIBUTE, None)

    # The tokenizer's template or time may have been changed after its first rendering.
    renderer = _RENDERERS.get(tokenizer)
    if renderer is None or not renderer.matches(templates, special_tokens, now):
        renderer = TemplateRenderer(templates, special_tokens, now)
        _RENDERERS[tokenizer] = renderer
    return renderer


def can_render() -> bool:
    """Return whether jinja2, which renders the templates, is installed."""
    return find_spec("jinja2") is not None


# In the process with limits


class _TemplateError(Exception):
    """Error of a template that called ``raise_exception``; the text is the template's message."""


def _make_environment(now: datetime) -> Any:
    """Return the jinja2 environment of chat templates, as in transformers' ``apply_chat_template``."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise _TemplateError(message)

    # jinja2's own tojson escapes HTML and non-ASCII characters.
    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _make_generation_tag()],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals[_TIME_FUNCTION] = now.strftime
    return environment


def _make_generation_tag() -> type:
    """Return the jinja2 extension for ``{% generation %}``, which marks trained text and writes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A variable that is set inside the tag must not be visible after it, as in transformers. So the
            # content of the tag gets a separate scope.
            return nodes.Scope(body).set_lineno(line)

    return Generation


def _choose_template(templates: Mapping[str, str], tools: Any) -> str:
    """Return the source of the template that transformers would select.

    Raises _TemplateError for several templates without a default.
    """
    if tools is not None and WITH_TOOLS in templates:
        return templates[WITH_TOOLS]

    if DEFAULT not in templates:
        names = ", ".join(sorted(templates))
        raise _TemplateError(f"the tokenizer has several chat templates and no default: {names}")
    return templates[DEFAULT]


def _render_request(
    compile_template: Callable[[str], Any],
    setup: Mapping[str, Any],
    request: Sequence[Any],
) -> list[Any]:
    """Render one request; return ``[text, None]``, or ``[None, reason]`` if the template cannot render it.

    ``compile_template`` compiles the source of a template to a jinja2 template. ``setup`` contains the
    templates and the special tokens by name, and ``request`` the fields of a `Rendering`.
    """
    messages, tools, add_generation_prompt, kwargs = request

    # Reject tools that are not a list of JSON schemas, as transformers does: a template would fail on them
    # with an obscure error.
    are_schemas = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not are_schemas:
        return [None, f"tools are a list of JSON schemas, not {json.dumps(tools)[:80]}"]

    # Arguments of the user may replace special tokens, but not the variables of the conversation.
    variables = {
        **setup["special_tokens"],
        **kwargs,
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        template = compile_template(_choose_template(setup["templates"], tools))
        text = template.render(**variables)
    except _TemplateError as error:
        return [None, str(error)]
    except MemoryError:
        return [None, f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"]
    except Exception as error:  # a template computes with values of the data, so it can raise any error
        return [None, f"{type(error).__name__}: {error}"[:2000]]

    if len(text) > LONGEST_TEXT:
        return [None, f"it writes a text of more than {LONGEST_TEXT >> 20} Mi characters"]
    return [text, None]


def _set_soft_limit(resource_kind: int, limit: int) -> None:
    """Set a soft limit of this process to ``limit``, or to the hard limit if that is lower."""
    hard_limit = resource.getrlimit(resource_kind)[1]
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource_kind, (limit, hard_limit))


def main() -> None:
    """Serve rendering requests from standard input until its end; write the replies to standard output."""
    import jinja2  # noqa: F401 - import it before the memory limit, which is meant for the templates

    _set_soft_limit(resource.RLIMIT_CORE, 0)
    _set_soft_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    setup = json.loads(sys.stdin.readline())
    environment = _make_environment(datetime.fromisoformat(setup["now"]))
    templates: dict[str, Any] = {}

    def compile_template(text: str) -> Any:
        if text not in templates:
            templates[text] = environment.from_string(text)
        return templates[text]

    for line in sys.stdin:
        results = []
        for request in json.loads(line):
            # The kernel limits the processor time of the whole process, in whole seconds. Add the time of one
            # rendering to the time that the process has used so far.
            usage = resource.getrusage(resource.RUSAGE_SELF)
            used_seconds = int(usage.ru_utime + usage.ru_stime)
            _set_soft_limit(resource.RLIMIT_CPU, used_seconds + 1 + CPU_SECONDS)
            results.append(_render_request(compile_template, setup, request))

        sys.stdout.write(json.dumps(results) + "\n")
        sys.stdout.flush()
