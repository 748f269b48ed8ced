"""Ranks that are started again by a launcher that keeps its store find each other, and nobody who is gone."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_rl.parallel.device import meet

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=1)


def test_no_attempt_meets_in_the_place_of_an_earlier_one() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)

    def start(pool: ThreadPoolExecutor, number: int) -> Future[str]:
        client = dist.TCPStore("127.0.0.1", server.port, timeout=LONG)
        return pool.submit(meet, client, number, 3, LONG)

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
        meet(store, 1, 2, SHORT)
