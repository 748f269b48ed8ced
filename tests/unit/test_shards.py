"""Shards of a data set: a folder, a pattern or a list is read together, in order, or a way out is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.data.records import data_files, load_records, partial_shards_warning
from megatron_rl.errors import UserError


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        table = pyarrow.Table.from_pylist([{"prompt": f"{name} {row}"} for row in range(2)])
        pyarrow.parquet.write_table(table, folder / name)


def prompts(source: object) -> list[str]:
    return [record.values["prompt"] for record in load_records(source)]  # type: ignore[arg-type]


def fix_of(source: object, setting: str = "data.train") -> str:
    with pytest.raises(UserError) as caught:
        data_files(source, setting)  # type: ignore[arg-type]
    return caught.value.fix or ""


def test_a_folder_a_pattern_and_a_list_give_the_same_records_in_order(tmp_path: Path) -> None:
    names = [f"train-0000{index}-of-00003.parquet" for index in range(3)]
    write(tmp_path, *reversed(names))
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "_SUCCESS").write_text("")
    expected = [f"{name} {row}" for name in names for row in range(2)]
    assert prompts(tmp_path) == expected
    assert prompts(str(tmp_path / "train-*.parquet")) == expected
    assert prompts([str(tmp_path / name) for name in names]) == expected
    assert prompts([str(tmp_path / names[2]), str(tmp_path / names[0])])[0] == f"{names[2]} 0"


def test_a_folder_of_several_splits_names_the_likely_one(tmp_path: Path) -> None:
    write(tmp_path, "train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
    write(tmp_path, "test-00000-of-00001.parquet")
    assert fix_of(tmp_path) == f"set data.train={tmp_path}/train-*.parquet"
    assert fix_of(tmp_path, "evaluation.sets.a.data") == (
        f"set evaluation.sets.a.data={tmp_path}/test-00000-of-00001.parquet"
    )
    assert len(prompts(f"{tmp_path}/train-*.parquet")) == 4


def test_a_repository_names_the_folder_of_its_data(tmp_path: Path) -> None:
    write(tmp_path / "data", "train-00000-of-00001.parquet")
    assert fix_of(tmp_path) == f"set data.train={tmp_path / 'data'}"
    write(tmp_path / "more", "train-00000-of-00001.parquet")
    assert "one of the folders" in fix_of(tmp_path)


def test_shards_that_are_missing_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train-00000-of-00003.parquet", "train-00002-of-00003.parquet")
    with pytest.raises(UserError, match=r"without train-00001-of-00003\.parquet"):
        data_files(tmp_path, "data.train")
    alone = tmp_path / "train-00000-of-00003.parquet"
    warning = partial_shards_warning(alone, data_files(alone, "data.train"), "data.train")
    assert warning is not None
    assert "train-00001-of-00003.parquet, train-00002-of-00003.parquet" in (warning.got or "")
    write(tmp_path / "from_one", "a-00001-of-00002.parquet", "a-00002-of-00002.parquet")
    assert len(prompts(tmp_path / "from_one")) == 4


def test_files_that_are_no_data_set_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "kinds", "a.parquet")
    (tmp_path / "kinds" / "a.jsonl").write_text('{"prompt": "x"}\n')
    assert "/*.parquet" in fix_of(tmp_path / "kinds")
    one = str(tmp_path / "kinds" / "a.parquet")
    assert "repetition" in fix_of([one, str(tmp_path / "kinds" / "*.parquet")])
    assert "correct the pattern" in fix_of(str(tmp_path / "no-*.parquet"))
    assert "at least one file" in fix_of([])
    assert prompts([one, str(tmp_path / "kinds" / "a.jsonl")]) == ["a.parquet 0", "a.parquet 1", "x"]


def test_a_name_with_brackets_is_a_file_where_it_exists(tmp_path: Path) -> None:
    write(tmp_path, "train[1].parquet")
    assert len(prompts(tmp_path / "train[1].parquet")) == 2
