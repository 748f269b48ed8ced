"""The process that renders a chat template: jinja2's sandbox, within limits of memory and processor time.

A sandbox keeps a template from files and attributes, not from `'a' * 10**10` or `9**9**9`. One operation of
that kind cannot be interrupted from inside the interpreter, so templates never run in the trainer: this
process has a limit of memory, and a limit of processor time that begins again with every rendering.

Both ends speak JSON, a value to a line. The first line has the templates by name, the special tokens and the
time that templates take for now; each later line is a list of renderings, answered by a list of as many.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

CPU_SECONDS = 2
"""Processor time of one rendering: the templates of published models take less than a millisecond."""
MEMORY_BYTES = 1 << 30
"""Address space of the whole process, of which Python and jinja2 take some 50 MiB."""
LONGEST_TEXT = 64 << 20
"""Characters of a rendered text."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""The names that transformers chooses among several templates by."""


class Refused(Exception):
    """The template called ``raise_exception``."""


def template_environment(now: datetime) -> Any:
    """Return the language of chat templates, as transformers' ``apply_chat_template`` has it."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise Refused(message)

    def to_json(value: Any, **how: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **how})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    return environment


def _generation_tag() -> type:
    """Return the extension that reads `{% generation %}`, which marks what is learned and writes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # In a scope of its own, as the call block that transformers puts it in.
            return nodes.Scope(body).set_lineno(line)

    return Generation


def choose_template(templates: Mapping[str, str], tools: Any) -> str:
    """Return the text of the template that transformers takes; raises Refused where there is none."""
    if tools is not None and WITH_TOOLS in templates:
        return templates[WITH_TOOLS]

    if DEFAULT not in templates:
        names = ", ".join(sorted(templates))
        raise Refused(f"the tokenizer has several chat templates and no default: {names}")
    return templates[DEFAULT]


def _render(compiled: Callable[[str], Any], setup: Mapping[str, Any], request: Sequence[Any]) -> list[Any]:
    """Return ``[text, null]`` of one rendering, or ``[null, reason]``."""
    messages, tools, opens = request
    values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": opens}

    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return [None, f"tools are a list of JSON schemas, not {json.dumps(tools)[:80]}"]

    try:
        template = compiled(choose_template(setup["templates"], tools))
        text = template.render(**{**setup["special"], **values})
    except Refused as error:
        return [None, str(error)]
    except MemoryError:
        return [None, f"it asks for more than {MEMORY_BYTES >> 30} GiB of memory"]
    except Exception as error:  # templates fail in ways of many kinds
        return [None, f"{type(error).__name__}: {error}"[:2000]]

    if len(text) > LONGEST_TEXT:
        return [None, f"it writes a text of more than {LONGEST_TEXT >> 20} Mi characters"]
    return [text, None]


def _limit(kind: int, most: int) -> None:
    """Lower a soft limit of this process to ``most``, or to the hard limit where that is lower."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, hard))


def main() -> None:
    """Render what standard input asks for, until it ends."""
    import jinja2  # noqa: F401 - before the limit of memory

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    setup = json.loads(sys.stdin.readline())
    environment = template_environment(datetime.fromisoformat(setup["now"]))
    templates: dict[str, Any] = {}

    def compiled(text: str) -> Any:
        if text not in templates:
            templates[text] = environment.from_string(text)
        return templates[text]

    for line in sys.stdin:
        answers = []

        for request in json.loads(line):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + CPU_SECONDS)
            answers.append(_render(compiled, setup, request))

        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()
