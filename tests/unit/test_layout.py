"""Layouts place ranks as Megatron does, and refuse what does not fit by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout, problems

SIZES = st.integers(1, 3)


@given(SIZES, SIZES, SIZES, SIZES, st.randoms())
def test_coordinates_and_ranks_are_inverse(tensor, context, data, pipeline, random):
    ranks = list(range(3, 3 + tensor * context * data * pipeline))
    random.shuffle(ranks)
    layout = ParallelLayout(tuple(ranks), tensor=tensor, context=context, pipeline=pipeline)
    assert layout.data == data
    for rank in ranks:
        place = layout.coordinates(rank)
        assert layout.rank_of(**place._asdict()) == rank


@given(SIZES, SIZES, SIZES, SIZES)
def test_groups_cut_the_ranks_into_disjoint_sets(tensor, context, data, pipeline):
    size = tensor * context * data * pipeline
    layout = ParallelLayout(tuple(range(size)), tensor=tensor, context=context, pipeline=pipeline)
    for dimensions in (("tensor",), ("data",), ("pipeline",), ("tensor", "pipeline"), ("data", "context")):
        groups = layout.groups(*dimensions)
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        assert len({len(group) for group in groups}) == 1


def test_order_is_tensor_context_data_pipeline():
    layout = ParallelLayout(tuple(range(16)), tensor=2, context=2, pipeline=2)
    assert layout.groups("tensor")[:2] == [(0, 1), (2, 3)]
    assert layout.groups("context")[0] == (0, 2)
    assert layout.groups("data")[0] == (0, 4)
    assert layout.groups("pipeline")[0] == (0, 8)
    assert layout.output_ranks() == (8, 12)


def test_expert_dimensions_cut_the_ranks_of_one_stage():
    layout = ParallelLayout(tuple(range(8)), tensor=2, pipeline=2, expert=2, expert_tensor=1)
    assert layout.expert_data == 2
    assert layout.groups("expert")[0] == (0, 1)
    assert layout.groups("expert_data")[0] == (0, 2)
    assert layout.groups("expert_tensor", "expert", "pipeline")[0] == (0, 1, 4, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": 3}, ["tensor 3 does not divide 4 ranks"]),
        ({"tensor": 2, "pipeline": 4}, ["tensor 2 x pipeline 4 = 8 does not divide 4 ranks"]),
        ({"tensor": 0, "context": -1}, ["must be 1 or more", "must be 1 or more"]),
        ({"expert": 3}, ["expert 3 x expert_tensor 1 x pipeline 1 = 3 does not divide 4 ranks"]),
        ({"virtual_pipeline": 2}, ["a virtual pipeline needs a pipeline"]),
        ({"sequence_parallel": True}, ["sequence parallelism needs tensor parallelism"]),
        ({"ranks": (0, 0, 1, 8)}, ["ranks that do not exist", "names a rank twice"]),
        ({"ranks": ()}, ["actor.layout has no ranks"]),
        ({"tensor": 4, "expert": 3, "virtual_pipeline": 2}, ["expert 3", "a virtual pipeline"]),
    ],
)
def test_every_problem_is_named_and_the_first_is_raised(changes, words):
    layout = ParallelLayout(**{"ranks": (0, 1, 2, 3), "path": "actor.layout", **changes})
    errors = problems(layout, 8)
    assert len(errors) == len(words)
    for error, text in zip(errors, words, strict=True):
        assert text in error.message
        assert error.where.startswith("actor.layout") and error.expected and error.got and error.fix
    if layout.ranks and max(layout.ranks) < 8:
        with pytest.raises(UserError, match=errors[0].message):
            layout.checked()


@given(SIZES, SIZES, SIZES, SIZES)
def test_sizes_that_fit_have_no_problems(tensor, context, data, pipeline):
    size = tensor * context * data * pipeline
    layout = ParallelLayout(tuple(range(size)), tensor=tensor, context=context, pipeline=pipeline)
    assert problems(layout, size) == [] and layout.checked() is layout
