"""What vLLM is given to live inside the ranks of a training job."""

from __future__ import annotations

import _posixshmem
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from megatron_rl.errors import UserError
from megatron_rl.rollout.engines.servers import Lease
from megatron_rl.rollout.engines.vllm.setup import apply_linear, make_shared_memory_name, set_local_rank
from megatron_rl.rollout.engines.vllm_server.server import ServerRequirements, VllmServer, _require_same_model

# As vLLM names a group of two ranks that a launcher started.
GROUP = "//-tp:0-[0-1]-cpushm"


def test_the_operating_system_takes_the_name_of_a_groups_shared_memory() -> None:
    name = make_shared_memory_name(GROUP)
    os.close(_posixshmem.shm_open(name, os.O_CREAT | os.O_RDWR, mode=0o600))
    _posixshmem.shm_unlink(name)


def test_names_of_shared_memory_differ_by_job_restart_and_group(monkeypatch) -> None:
    names = {make_shared_memory_name(GROUP), make_shared_memory_name(GROUP.replace("tp", "pp"))}
    monkeypatch.setenv("MASTER_PORT", "29501")
    names.add(make_shared_memory_name(GROUP))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    names.add(make_shared_memory_name(GROUP))
    assert len(names) == 4


def test_an_engine_counts_the_devices_that_its_process_sees(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    with set_local_rank(0):
        assert os.environ["LOCAL_RANK"] == "0"
    with set_local_rank(None):
        assert os.environ["LOCAL_RANK"] == "5"
    assert os.environ["LOCAL_RANK"] == "5"

    # Without a launcher the variable is absent, before and after.
    monkeypatch.delenv("LOCAL_RANK")
    with set_local_rank(0):
        assert os.environ["LOCAL_RANK"] == "0"
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7, 48])
def test_a_host_multiplies_by_the_weights_that_are_written_in_place(dtype, rows) -> None:
    values, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, 36), (20, 36), (20,)))
    for number in (1.0, -2.0):
        weight.fill_(number)
        for added in (bias, None):
            expected = torch.nn.functional.linear(values, weight, added)
            torch.testing.assert_close(apply_linear(values, weight, added), expected)


@pytest.mark.parametrize("vllm", [False, True])
def test_a_server_that_does_not_say_how_it_is_set_up_is_told_from_one_of_another_kind(vllm: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        """Answer one path of vLLM's, or none."""

        def do_GET(self) -> None:
            self.send_response(200 if vllm and self.path == "/version" else 404)
            self.end_headers()
            self.wfile.write(b'{"version": "0.32.0"}')

        def log_message(self, *_: object) -> None:
            """Write no access log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server = VllmServer(f"http://127.0.0.1:{other.server_address[1]}")
        with pytest.raises(UserError) as refused:
            server.require_compatible_settings({}, ServerRequirements("float32", True, 16, "cpu"))
        other.shutdown()
    assert ("VLLM_SERVER_DEV_MODE" in str(refused.value.expected)) == vllm


@pytest.mark.parametrize(
    ("served", "other"),
    [
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            "rope_parameters.rope_theta: 1000000",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "mrope"}, "task": {"size": 2}}, None),
        ({"hidden_size": 8}, "hidden_size: 8"),
        ({"model_type": "kimi_k2"}, None),  # vLLM's name of the same layers
        ({"model_type": "deepseek_v2"}, "model_type: deepseek_v2"),
    ],
)
def test_a_server_of_a_model_with_other_positions_is_refused(served: dict, other: str | None) -> None:
    settings = {
        "model_type": "deepseek_v3",
        "hidden_size": 4,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "task": {"size": 1},
    }
    if other is None:
        _require_same_model(settings, served, "here")
        return
    with pytest.raises(UserError) as refused:
        _require_same_model(settings, served, "here")
    assert str(refused.value.got).startswith(other)


def test_two_addresses_of_one_server_are_told_apart_from_a_server_of_another_run() -> None:
    holders: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        """Return the holder of the server, as its worker does."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            holders.append(body["args"][0])
            other = None if holders[-1] == holders[0] else holders[0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"results": [other]}).encode())

        def log_message(self, *_: object) -> None:
            """Write no access log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        port = one.server_address[1]
        lease = Lease([VllmServer(f"http://{name}:{port}") for name in ("127.0.0.1", "localhost")], "run")
        with pytest.raises(UserError, match="two URLs name the same server") as refused:
            lease.acquire()
        one.shutdown()
    assert refused.value.fix == f"remove http://localhost:{port}"
