"""Ranks that are started again find each other and nobody who is gone; peaks count memory that was there."""

from __future__ import annotations

import inspect
import json
import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_rl.distributed import device
from megatron_rl.distributed.rendezvous import agree_on_attempt, open_single_host_store, open_store
from megatron_rl.megatron.transformer_settings import transformer_settings
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pretrained import parse_pretrained
from tests.conftest import run_forked
from tests.hf_models import COMMON

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=1)


def test_no_attempt_meets_in_the_place_of_an_earlier_one() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)

    def start(pool: ThreadPoolExecutor, number: int) -> Future[str]:
        client = dist.TCPStore("127.0.0.1", server.port, timeout=LONG)
        return pool.submit(agree_on_attempt, client, number, 3, LONG)

    with ThreadPoolExecutor(3) as pool:
        first = [start(pool, number) for number in (0, 1, 2)]
        assert {rank.result() for rank in first} == {"attempt 1"}
        # The others read first: what they find is of the ranks that are gone.
        others = [start(pool, number) for number in (2, 1)]
        time.sleep(0.2)
        assert not any(rank.done() for rank in others)
        assert {rank.result() for rank in (*others, start(pool, 0))} == {"attempt 2"}


def test_a_rank_whose_first_rank_is_gone_waits_no_longer_than_it_may() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SHORT)
    store.add("attempt", 1)
    with pytest.raises(dist.DistStoreError):
        agree_on_attempt(store, 1, 2, SHORT)


def test_ranks_of_one_host_meet_where_no_other_host_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(dist.DistNetworkError, match=str(port)):
            open_single_host_store(port, SHORT)
    store = open_single_host_store(port, LONG)
    store.set("a", "b")
    assert store.get("a") == b"b"
    listening = [item.laddr for item in psutil.Process().net_connections("tcp") if item.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
def test_one_process_meets_nobody_at_an_address_of_another_job(
    monkeypatch: pytest.MonkeyPatch, launched: dict[str, str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "29734", **launched}.items():
        monkeypatch.setenv(name, value)
    store = open_store(SHORT)
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_a_peak_leaves_out_what_a_sleeping_engine_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = peak = 0

    def allocate(size: int) -> None:
        nonlocal allocated, peak
        allocated += size
        peak = max(peak, allocated)

    def reset() -> None:
        nonlocal peak
        peak = allocated

    monkeypatch.setattr(device, "_ON_HOST", False)
    monkeypatch.setattr(device, "_is_accelerator_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    allocate(40)  # an engine, awake
    allocate(5)
    allocate(-5)
    device.set_unbacked_bytes(40)  # it sleeps, and still counts as allocated
    allocate(20)
    assert device.peak_memory(reset=True) == 45  # awake
    assert device.peak_memory(reset=True) == 20  # asleep
    device.set_unbacked_bytes(25)  # a part of it wakes
    allocate(-20)
    assert device.peak_memory(reset=True) == 35
    device.set_unbacked_bytes(0)
    assert device.peak_memory(reset=True) == 40


def test_hosts_need_no_deterministic_kernels() -> None:
    before = dict(os.environ)
    device.use_deterministic_kernels()
    assert not device.is_deterministic() and not torch.are_deterministic_algorithms_enabled()
    assert dict(os.environ) == before


def test_deterministic_kernels_are_asked_of_every_library_and_the_users_own_variables_stay() -> None:
    # In a process of its own, which acts as one with an accelerator: the choice holds until its end.
    def ask() -> None:
        os.environ["NCCL_ALGO"] = "Ring"
        device._ON_HOST = False
        device.use_deterministic_kernels()
        model = {"model_type": "llama", "rms_norm_eps": 1e-6, "initializer_range": 0.02, **COMMON}
        settings = transformer_settings(parse_pretrained(model), ParallelLayout(ranks=(0,)), torch.float32)
        algorithms = torch.are_deterministic_algorithms_enabled()
        print(json.dumps([dict(os.environ), algorithms, settings["deterministic_mode"]]))

    answer = run_forked(ask).stdout
    variables, algorithms, megatron = json.loads(answer.splitlines()[-1])
    assert (variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"], variables["NCCL_ALGO"]) == ("0", "Ring")
    assert algorithms and megatron


def test_torch_has_what_splitting_groups_takes() -> None:
    """Hosts cannot split; the call is that of `groups._split_world`."""
    inspect.signature(dist.split_group).bind(split_ranks=[[0, 1], [2, 3]], timeout=timedelta(seconds=1))
    group: Any = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group.bound_device_id = torch.device("cuda", 0)
    group.bound_device_id = None
    assert group.bound_device_id is None
