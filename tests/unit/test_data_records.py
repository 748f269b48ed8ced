"""Records from every kind of file, and every way a file can be wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from megatron_rl.data.messages import require_fields
from megatron_rl.data.records import load_records
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
    assert "a Parquet file cannot be read" in error_of(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("prompt\n")
    text = error_of(tmp_path / "a.csv")
    assert "got:      .csv" in text and ".jsonl or .parquet file" in text


def test_directories_that_are_no_single_data_set(tmp_path: Path) -> None:
    assert "contains no data set" in error_of(tmp_path)
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


@pytest.mark.parametrize(
    ("encoding", "name", "first_bytes"),
    [
        ("utf-16", "UTF-16", "ff fe"),
        ("utf-16-le", "UTF-16LE", "7b 00"),
        ("utf-16-be", "UTF-16BE", "00 7b"),
        ("utf-32", "UTF-32", "ff fe 00 00"),
    ],
)
def test_a_file_in_another_encoding_is_one_error_with_the_command_that_converts_it(
    tmp_path: Path, encoding: str, name: str, first_bytes: str
) -> None:
    path = tmp_path / "train.jsonl"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    path.write_bytes(lines.encode(encoding))
    text = error_of(path)
    assert f"{path} is encoded in {name}" in text and first_bytes in text

    command = text.partition("fix:")[2].partition(", and set")[0].partition("convert it: ")[2]
    subprocess.run(command, shell=True, check=True)
    converted = tmp_path / "train.utf8.jsonl"
    assert f"set data.train={converted}" in text
    assert [dict(record.values) for record in load_records(converted)] == ROWS


def test_utf_8_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n", encoding="utf-8-sig")
    assert [dict(record.values) for record in load_records(path)] == ROWS[:1]


def test_a_compressed_file_is_one_error_with_the_command_that_decompresses_it(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    path = tmp_path / "train.jsonl"
    for module, name in ((gzip, "gzip"), (bz2, "bzip2"), (lzma, "xz")):
        path.write_bytes(module.compress(lines))
        text = error_of(path)
        assert f"{path} is compressed with {name}" in text and f"{name} -dc {path} > " in text

    path.write_bytes(gzip.compress(lines))
    command = error_of(path).partition("decompress it: ")[2].partition(", and set")[0]
    subprocess.run(command, shell=True, check=True)
    assert len(load_records(tmp_path / "train.plain.jsonl")) == len(ROWS)

    # By its suffix, in a setting and in a folder that has nothing else.
    shards = tmp_path / "shards"
    shards.mkdir()
    shard = path.rename(shards / "train.jsonl.gz")
    for source in (shard, shards):
        assert f"gzip -dc {shard} > {shards / 'train.jsonl'}" in error_of(source)


def test_a_parquet_file_that_is_named_jsonl_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    text = error_of(path)
    assert f"{path} is a Parquet file" in text and f"mv {path} {tmp_path / 'train.parquet'}" in text
