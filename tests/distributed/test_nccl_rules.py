"""The rules of NCCL are held against programs that gloo carries out."""

from __future__ import annotations

from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("nccl_rules_ranks.py")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("first_call_of_some", r"waits forever in its call \d+: batch .*, which members \[2\] do not enter"),
        ("crossed_groups", r"waits forever in its call \d+: allreduce"),
        ("another_order", r"device', 0, 1\): call 0 is \(0, 1, 4\) on member 0 and \(1, 0, 4\) on member 1"),
        ("wrong_tensors", r"send of torch.int16\n(.*\n)*broadcast of a tensor that is not contiguous"),
    ],
)
def test_a_program_that_nccl_would_not_carry_out_is_named(fork, program, words):
    with pytest.raises(pytest.fail.Exception, match=words):
        fork(RANKS, 3, program)


def test_groups_connect_their_members_when_they_are_used(fork):
    fork(RANKS, 3, "connections_when_used")
