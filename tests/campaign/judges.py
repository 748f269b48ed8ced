"""Server that computes rewards, in the protocols of `reward.http` and of `reward.judge`.

Its answer depends on the response alone, so that a resumed run gets the same rewards.
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
"""Prefix of a server's address in a configuration; each case replaces it by its own server's."""


class _Handler(BaseHTTPRequestHandler):
    """HTTP handler of requests for rewards and for an LLM judge's responses."""

    protocol_version = "HTTP/1.1"
    request_counts: ClassVar[Counter[bytes]] = Counter()

    def do_POST(self) -> None:
        request = self.rfile.read(int(self.headers["Content-Length"]))
        self.request_counts[request] += 1
        # The first request for each sample fails, and every third after it.
        if "flaky" in self.path and self.request_counts[request] % 3 == 1:
            self._send_json(503, {"error": "busy"})
            return

        body = json.loads(request)
        if "messages" in body:
            answer = judgement(body["messages"][-1]["content"])
            self._send_json(
                200,
                {"choices": [{"message": {"role": "assistant", "content": answer}}]},
            )
        else:
            self._send_json(
                200,
                {"rewards": [reward(sample, self.path) for sample in body["samples"]]},
            )

    def do_HEAD(self) -> None:
        self._send_json(404, {})

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def _send_json(self, code: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a killed run has closed."""


def reward(sample: dict[str, Any], path: str) -> Any:
    """Return the server's answer for a sample: a number, named numbers, or an error."""
    response = str(sample["response"])
    if "failing" in path and len(response) % 4 == 1:
        return {"error": "cannot judge this"}
    if "named" in path:
        return {"reward": len(set(response)) / 10, "length": len(response)}
    return len(response) / 10


def judgement(question: str) -> str:
    """Return the judge's response to a question; one response in seven has no verdict."""
    if len(question) % 7 == 0:
        return "I cannot say."
    return f"So it is.\nScore: {len(set(question)) % 11 / 10}"


@contextmanager
def reward_server() -> Iterator[str]:
    """Serve in a child process inside the block; yield the server's address."""
    # The port is bound before the fork, so that the address is known and free.
    server = _Server(("127.0.0.1", 0), _Handler)
    process = os.fork()
    if not process:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # The server would otherwise outlive a campaign that is killed.
            runs.die_with_parent()
            server.serve_forever()
        finally:
            os._exit(1)

    runs.HELPER_PROCESSES.add(process)
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.server_close()
        runs.HELPER_PROCESSES.discard(process)
        # The server keeps no state, so it can be killed.
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
