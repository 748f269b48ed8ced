"""The coverage gate of an engine's weights, on boxes made by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.rollout.engines.vllm.weights import clear_padding
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import CoverageError, check_coverage

PARAMETERS = {"w": torch.zeros(4, 6)}


def box(
    start: tuple[int, int], size: tuple[int, int], offset: int, stride: tuple[int, int] = (6, 1)
) -> TensorBox:
    return TensorBox("t", start, size, 0, "w", offset, stride)


HALVES = [box((0, 0), (4, 3), 0), box((0, 3), (4, 3), 3)]


def test_complete_boxes_pass_however_they_are_cut():
    assert check_coverage(HALVES, PARAMETERS, {}) == {}
    assert check_coverage([box((0, 0), (6, 4), 0, (1, 6))], PARAMETERS, {}) == {}  # transposed storage


def test_a_gap_is_named_with_its_size():
    with pytest.raises(CoverageError, match="w: 12 of 24 elements are never written"):
        check_coverage(HALVES[:1], PARAMETERS, {})
    with pytest.raises(CoverageError, match=r"w: 24 of 24 elements are never written"):
        check_coverage([], PARAMETERS, {})


def test_a_double_write_is_named_with_its_size():
    with pytest.raises(CoverageError, match="w: 3 elements are written more than once"):
        check_coverage([*HALVES, box((9, 0), (1, 3), 6)], PARAMETERS, {})


def test_every_faulty_parameter_is_named():
    with pytest.raises(CoverageError, match=r"w: 24 of 24.*\n.*v: 5 of 5"):
        check_coverage([], {**PARAMETERS, "v": torch.zeros(5)}, {})


def test_padding_may_stay_unwritten_and_is_cleared():
    rows = [box((0, 0), (3, 6), 0)]
    gaps = check_coverage(rows, PARAMETERS, {"w": 18})
    assert gaps == {"w": ((18, 24),)}
    weights = {"w": torch.ones(4, 6)}
    clear_padding(weights, gaps)
    assert weights["w"].sum(1).tolist() == [6, 6, 6, 0]
    with pytest.raises(CoverageError):
        check_coverage(rows, PARAMETERS, {"w": 19})
