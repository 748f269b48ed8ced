"""Recurring forms of errors: each has its four parts."""

from __future__ import annotations

from pathlib import Path

from megatron_rl import errors


def test_a_choice_without_a_near_name_suggests_nothing():
    error = errors.unknown_choice_error("precision", "int4", ["bfloat16", "float32"])
    assert "did you mean" not in error.message
    assert error.expected == "one of bfloat16, float32"


def test_two_keys_that_exclude_each_other_are_fixed_by_removing_one():
    error = errors.exclusive_error("model.path", "model.provider", "each names the model")
    assert error.where == "model.path"
    assert error.fix == "remove one of `model.path` and `model.provider`"


def test_a_missing_file_names_the_near_one(tmp_path: Path):
    (tmp_path / "tokenizer.json").touch()
    error = errors.missing_file_error(
        tmp_path / "tokenzier.json", where="model.tokenizer", expected="a tokenizer"
    )
    assert error.got is not None
    assert "there is tokenizer.json" in error.got


def test_an_unreadable_file_gives_the_first_line_of_the_reason():
    reason = ValueError("line 3: no comma\nTraceback of the parser")
    error = errors.unreadable_file_error("the index", Path("index.json"), reason, expected="a JSON object")
    assert error.got == "ValueError: line 3: no comma"
    assert error.where == "index.json"


def test_an_exception_without_text_has_the_name_of_its_class_as_first_line():
    assert errors.first_line(OSError("no space\nwritten: 3")) == "OSError: no space"
    assert errors.first_line(AssertionError()) == "AssertionError"
