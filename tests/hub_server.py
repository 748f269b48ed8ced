"""A Hub on this machine: enough of its HTTP interface for huggingface_hub's own `snapshot_download`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Server of the repositories below a folder: ``models/ORG/NAME`` and ``datasets/ORG/NAME``."""

    root: Path
    requests: list[str]
    stall_at: str | None
    """End of the path of a file of which only the first half is sent; the connection then stays open."""
    gated: str | None
    """ORG/NAME of a repository whose files are only for those who accepted its terms."""
    stalled: threading.Event
    """Set when a client waits for the second half."""
    released: threading.Event
    """Set when stalled connections may end."""

    @property
    def address(self) -> str:
        """Base URL, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Print no line per request."""

    def _answer(self, with_body: bool) -> None:
        """Answer a request for the files of a repository or for one of its files."""
        assert isinstance(self.server, Hub)
        # The client adds parameters, which change nothing here.
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith(("/api/models/", "/api/datasets/")):
            self._answer_listing(path, with_body)
        else:
            self._answer_file(path, with_body)

    def _answer_listing(self, path: str, with_body: bool) -> None:
        """Answer a request for the files of a repository, with their sizes if it asks for its tree."""
        assert isinstance(self.server, Hub)
        kind, organisation, name, *view = path.removeprefix("/api/").split("/")
        folder = self.server.root / kind / organisation / name
        if not folder.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            return

        files = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
        content: Any
        if view[:1] == ["tree"]:
            # The client compares sizes and digests with the files that it has.
            content = [
                {
                    "type": "file",
                    "path": str(file),
                    "size": (folder / file).stat().st_size,
                    "oid": _digest(folder / file),
                }
                for file in files
            ]
        else:
            content = {
                "id": f"{organisation}/{name}",
                "sha": COMMIT,
                "siblings": [{"rfilename": str(file)} for file in files],
            }
        self._send(200, json.dumps(content).encode(), {}, with_body)

    def _answer_file(self, path: str, with_body: bool) -> None:
        """Answer a request for a file, or for its bytes from an offset."""
        assert isinstance(self.server, Hub)
        repository, _, revision_path = path.partition("/resolve/")
        # Models have no prefix, data sets do.
        if not repository.startswith("/datasets/"):
            repository = f"/models{repository}"

        _, _, file = revision_path.partition("/")
        target = self.server.root / repository[1:] / file
        if not target.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            return
        if self.server.gated is not None and repository.endswith(f"/{self.server.gated}"):
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            return

        headers = {"ETag": f'"{_digest(target)}"', "X-Repo-Commit": COMMIT}
        body = target.read_bytes()
        # A client resumes an interrupted download with a range.
        byte_range = self.headers.get("Range", "")
        if byte_range.startswith("bytes=") and with_body:
            first = int(byte_range.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            self._send(206, body[first:], headers, with_body)
            return
        self._send(200, body, headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        assert isinstance(self.server, Hub)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return

        # A file that stalls sends half of its bytes, then waits until the test releases it.
        stall_at = self.server.stall_at
        if stall_at is not None and unquote(self.path).endswith(stall_at):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.released.wait()
            return
        self.wfile.write(body)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub(root: Path, port: int = 0) -> Iterator[Hub]:
    """Serve the repositories of a folder while the block runs, on a free port by default."""
    server = Hub(("127.0.0.1", port), _Handler)
    server.root = root
    server.requests = []
    server.stall_at = None
    server.gated = None
    server.stalled = threading.Event()
    server.released = threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
