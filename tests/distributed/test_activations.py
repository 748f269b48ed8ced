"""The memory model against real and simulated ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_a_rank_keeps_what_is_counted(fork, tmp_path):
    script = Path(__file__).with_name("activation_ranks.py")
    assert "all cases" in fork(script, 2, tmp_path, timeout=400).stdout


def measured(fork, mode: str) -> dict:
    script = Path(__file__).with_name("simulation_ranks.py")
    line = next(line for line in fork(script, 1, mode).stdout.splitlines() if "measured:" in line)
    return json.loads(line.partition("measured:")[2])


COLUMNS = 2 * 8 * 256 * 29
"""Bytes of the batch's columns on an accelerator and in pinned memory; a host computes with them in place."""


def test_a_simulated_step_holds_what_a_real_one_holds(fork):
    real, simulated = measured(fork, "real"), measured(fork, "simulated")
    for phase, (begin, peak) in real.items():
        assert simulated[phase][0] == pytest.approx(begin, rel=0.001, abs=COLUMNS), phase
        assert simulated[phase][1] == pytest.approx(peak, rel=0.001, abs=COLUMNS), phase


def test_the_estimate_of_a_shipped_configuration_agrees_with_its_simulation(fork):
    found = measured(fork, "shipped")
    differences = found["differences"]
    assert max(map(abs, differences.values())) < 0.05, differences
    assert abs(differences["generate"]) < 0.001  # weights, gradients and optimizer states are counted exactly
    assert found["groups"][0] == ["the job", 8] and ["data", 4] in found["groups"], found
    assert found["connections"] == 10, found
    # Groups of equal ranks are one, so that the rank created as many as are counted without it.
    several = [size for _, size in found["groups"] if size > 1]
    assert len(several) == found["expected_groups"] == 3, found
    assert found["sync"] == {"peers": 0, "sent": 0, "received": 0}, found
    # The outputs of a scoring pass are read once, and the metrics of a step after all of its updates.
    assert found["waits"] == {"score": [2, 1], "learn": [2, 0]}, found


def test_the_host_waits_for_the_device_in_no_micro_batch(fork):
    found = measured(fork, "waits")
    assert found == dict.fromkeys(found, 0) and len(found) == 6, found
