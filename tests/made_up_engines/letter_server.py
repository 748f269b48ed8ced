"""Server of the made-up engine `letters`: a plain torch model behind HTTP, with weights from the trainer."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_rl.distributed.groups import join_cross_job_group, leave_cross_job_group
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.types import GenerationRequest
from megatron_rl.types import SamplingParameters

MAX_REQUESTS = 8
"""Largest number of requests that a client may have open."""


class LetterOffice:
    """Handlers of the server's paths, one method each. The server calls one at a time."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._engine = self._make_engine(0)
        self._weights_name = "none"
        self._claimed_by: str | None = None

        # Set while the server shares a process group with the trainers.
        self._transfer: HybridEngine | None = None
        self._group: Any = None

    def _make_engine(self, rank: int) -> TorchEngine:
        """Return an engine whose boxes are on ``rank`` of the group with the trainers."""
        return TorchEngine.from_hf(self._model, rank=rank, max_model_len=self._max_model_len)

    def generate(self, sampling: dict[str, Any], **request_fields: Any) -> dict[str, Any]:
        """Generate one response."""
        # JSON has no tuples.
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        request = GenerationRequest(sampling=SamplingParameters(**sampling), **request_fields)

        with self._engine.sampling():
            self._engine.submit(request)
            # The torch engine completes a request in one step.
            (completion,) = self._engine.step()

        return {
            "tokens": list(completion.tokens),
            "log_probs": list(completion.log_probs),
            "finish_reason": completion.finish_reason,
            "weights": self._weights_name,
        }

    def most_requests(self) -> int:
        return MAX_REQUESTS

    def weights(self) -> str:
        return self._weights_name

    def claim(self, run: str, seconds: float) -> str | None:
        """Reserve the server for a run; return the name of the other run if one has reserved it."""
        if self._claimed_by not in (None, run):
            return self._claimed_by

        # A claim of zero seconds releases the server.
        if seconds:
            self._claimed_by = run
        else:
            self._claimed_by = None
        return None

    def reset(self) -> None:
        if self._group is not None:
            leave_cross_job_group(self._group)
        self._transfer = None
        self._group = None

    def join(
        self,
        address: str,
        port: int,
        trainers: int,
        workers: int,
        staging_bytes: int,
        verify: str,
    ) -> None:
        """Join the group of trainers and workers, and plan the weight sync. Collective over both."""
        # The server's ranks follow the trainers' in the shared group.
        self._engine = self._make_engine(trainers)
        self._group = join_cross_job_group(address, port, trainers, trainers + workers)
        self._transfer = HybridEngine(
            None,
            self._engine,
            staging_bytes=staging_bytes,
            verify=verify,
            group=self._group,
        )
        # The plan is collective: all trainers and workers compute it now, before the first transfer.
        _ = self._transfer.plan

    def receive(self, version: int) -> None:
        assert self._transfer is not None
        self._transfer.version = version
        self._transfer.sync()

    def finish(self, name: str) -> None:
        self._weights_name = name


def serve(office: LetterOffice, port: int) -> None:
    """Serve requests until the process ends."""
    # The engine is not thread-safe, while the HTTP server has a thread per request.
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            arguments = json.loads(self.rfile.read(length))

            # The path is the name of the method.
            method = getattr(office, self.path.strip("/"))
            with lock:
                result = method(**arguments)

            body = json.dumps({"answer": result}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Write no access log."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    model, port, max_model_len = sys.argv[1:]
    serve(LetterOffice(model, int(max_model_len)), int(port))
