"""Records from every kind of file, and every way a file can be wrong."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from megatron_rl.data.records import load_records, require_fields
from megatron_rl.errors import UserError

ROWS = [{"prompt": f"{n}+1=", "ground_truth": str(n + 1), "level": n} for n in range(5)]
FIELDS = {"prompt": "data.prompt_field", "ground_truth": "data.ground_truth_field"}


def error_of(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        for record in load_records(path, "data.train"):
            require_fields(record, FIELDS, "data.train")
    return str(caught.value)


def test_jsonl_parquet_and_datasets_give_the_same_records(tmp_path: Path) -> None:
    jsonl, parquet, saved = tmp_path / "a.jsonl", tmp_path / "a.parquet", tmp_path / "saved"
    Dataset.from_list(ROWS).to_json(str(jsonl))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    Dataset.from_list(ROWS).save_to_disk(str(saved))
    for path in (jsonl, parquet, saved):
        assert [dict(record.values) for record in load_records(path)] == ROWS
    assert load_records(jsonl)[2].where == f"{jsonl}:3"
    assert load_records(parquet)[2].where == f"{parquet}, row 2"


def test_blank_lines_keep_the_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [record.where for record in load_records(path)] == [f"{path}:2", f"{path}:4"]


def test_a_missing_path_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    text = error_of(tmp_path / "trian.jsonl")
    assert "does not exist" in text and "data.train" in text and "there is train.jsonl" in text
    assert f"no directory {tmp_path / 'no'}" in error_of(tmp_path / "no" / "a.jsonl")


def test_broken_files_say_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("")
    assert "is empty" in error_of(path)
    path.write_text('{"prompt": "a", "ground_truth": 1}\n{"prompt": \n')
    assert "a line is not JSON" in error_of(path) and "a.jsonl:2 (data.train)" in error_of(path)
    path.write_text("[1]\n")
    assert "not a JSON object" in error_of(path) and "list" in error_of(path)
    path.write_bytes(b'{"prompt": "\xff"}\n')
    assert "a.jsonl:1" in error_of(path)
    path.write_text('{"prompt": "a", "ground_thruth": 1}\n')
    assert "a record has no `ground_truth`" in error_of(path)
    assert "set data.ground_truth_field=ground_thruth" in error_of(path)
    path.write_text('{"prompt": "a", "judge": {"style": "rule", "ground_truth": 1}}\n')
    assert "set data.ground_truth_field=judge.ground_truth" in error_of(path)
    path.write_text('{"prompt": "a", "ground_truth": null}\n')
    assert "is null" in error_of(path)


def test_a_broken_parquet_file_and_unknown_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    assert "cannot be read as Parquet" in error_of(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("prompt\n")
    text = error_of(tmp_path / "a.csv")
    assert "got:      .csv" in text and ".jsonl or .parquet file" in text


def test_directories_that_are_no_single_data_set(tmp_path: Path) -> None:
    assert "holds no data set" in error_of(tmp_path)
    both = tmp_path / "both"
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS)).save_to_disk(str(both))
    assert "several splits" in error_of(both) and "test, train" in error_of(both)
    for setting, split in (
        ("data.train", "train"),
        ("sft.held_out", "test"),
        ("evaluation.sets.a.data", "test"),
    ):
        with pytest.raises(UserError, match=f"set {setting}={both / split}"):
            load_records(both, setting)
    assert len(load_records(both / "train")) == 5
    saved = tmp_path / "saved"
    Dataset.from_list(ROWS).save_to_disk(str(saved))
    next(saved.glob("*.arrow")).unlink()
    assert "cannot be read" in error_of(saved)


def test_two_fields_of_one_name_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    texts = pyarrow.array(["1+1=", "2+2="])
    path = tmp_path / "twice.parquet"
    outer = pyarrow.Table.from_arrays([texts, texts, texts], ["prompt", "ground_truth", "prompt"])
    inner = pyarrow.table({"judge": pyarrow.StructArray.from_arrays([texts, texts], ["prompt", "prompt"])})
    for table, name in ((outer, "prompt"), (inner, "judge.prompt")):
        pyarrow.parquet.write_table(table, path)
        assert f"two columns named `{name}`" in error_of(path)

    lines = tmp_path / "twice.jsonl"
    for line, key in (
        ('{"prompt": "1+1=", "prompt": "2+2="}', "prompt"),
        ('{"prompt": [{"role": "user", "role": "system"}]}', "role"),
    ):
        lines.write_text(line + "\n")
        assert f"has the key `{key}` twice" in error_of(lines)
        assert "twice.jsonl:1" in error_of(lines)

    ordinary = pyarrow.table({"prompt": texts, "lists": [[[{"a": 1, "b": 2}]]] * 2, "names": [["x"]] * 2})
    pyarrow.parquet.write_table(ordinary, path)
    assert "ground_truth" in error_of(path)  # read, and then missed


def test_half_of_a_character_is_named_by_its_line(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00 \\u00e9"}\n{"prompt": "1+1 \\ud800"}\n')
    with pytest.raises(UserError, match="half of a character") as caught:
        load_records(path, "data.train")
    assert f"{path}:2" in str(caught.value) and r"'1+1 \ud800'" in str(caught.value).replace('"', "'")
