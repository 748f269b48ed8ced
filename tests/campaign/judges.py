"""A server that judges the responses of a run: as `reward.http` asks, and as `reward.judge` does.

What it says depends on nothing but the response, so that a run that asks again learns the same.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from tests.campaign import runs

ANYWHERE = "http://judge"
"""What the address of a configuration begins with that is of the server which a case starts."""


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: ClassVar[Counter[bytes]] = Counter()

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked[text] += 1
        if "flaky" in self.path and self.asked[text] % 3 == 1:
            self._say(503, {"error": "busy"})
            return

        body = json.loads(text)
        if "messages" in body:
            said = judgement(body["messages"][-1]["content"])
            self._say(200, {"choices": [{"message": {"role": "assistant", "content": said}}]})
        else:
            self._say(200, {"rewards": [reward(sample, self.path) for sample in body["samples"]]})

    def do_HEAD(self) -> None:
        self._say(404, {})

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def _say(self, code: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a run that has gone without a word."""


def reward(sample: dict[str, Any], path: str) -> Any:
    """Return what the server gives a sample: a number, numbers by name, or why there is none."""
    response = str(sample["response"])
    if "failing" in path and len(response) % 4 == 1:
        return {"error": "cannot judge this"}
    if "named" in path:
        return {"reward": len(set(response)) / 10, "length": len(response)}
    return len(response) / 10


def judgement(asked: str) -> str:
    """Return what the judge writes about a question, now and then without a verdict."""
    return "I cannot say." if len(asked) % 7 == 0 else f"So it is.\nScore: {len(set(asked)) % 11 / 10}"


@contextmanager
def served() -> Iterator[str]:
    """Have a process of this one serve inside the block; gives its address."""
    server = _Server(("127.0.0.1", 0), _Answers)
    process = os.fork()
    if not process:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            runs.die_with_parent()
            server.serve_forever()
        finally:
            os._exit(1)

    runs.BESIDE.add(process)
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.server_close()
        runs.BESIDE.discard(process)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
