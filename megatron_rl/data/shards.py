"""Files of a data set: one file, a folder of shards, a pattern, or a list of these.

Each form resolves to the same thing, a sequence of files whose records follow one another. Every reader,
the digest of token files and the rules of `check` use that sequence, so that all of them read the same.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.errors import UserError, neighbours

DataPath = str | Path | Sequence[str]
"""What a setting may name: a path, a pattern, or a list of both."""
SUFFIXES = (".jsonl", ".parquet")
KINDS = (
    "a .jsonl or .parquet file, a directory saved by HF datasets, a folder of shards, "
    "a pattern such as data/train-*.parquet, or a list of these"
)
_SHARD = re.compile(r"(?P<split>.+)-(?P<index>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]+)?\.(?P<suffix>\w+)")
"""Name of a shard on the Hub: train-00000-of-00002.parquet, in older data sets with a digest behind it."""
_HUB_NAME = re.compile(r"[\w-]+/[\w.-]+(?<!\.jsonl)(?<!\.parquet)")
_DOWNLOAD = "; a data set of the Hub is downloaded first: hf download --repo-type dataset {0} --local-dir {0}"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "held_out")


def data_files(source: DataPath, setting: str) -> tuple[Path, ...]:
    """Return the files and saved directories that hold the records of a data set, in reading order.

    A folder and a pattern are read in the order of their names, a list in its own. ``setting`` is the
    configuration path that errors name. Raises UserError where a path does not exist, is of no kind that can
    be read, names several splits, or lacks shards.
    """
    if isinstance(source, str | Path):
        return _expand(Path(source), setting)

    files: list[Path] = []
    for item in source:
        if not str(item).strip():
            raise missing_error(Path(item), setting)
        files.extend(_expand(Path(item), setting))

    if not files:
        raise UserError(
            "the list of data files is empty",
            where=setting,
            expected=KINDS,
            got="an empty list",
            fix=f"name at least one file in {setting}",
        )
    repeated = sorted({str(file) for file in files if files.count(file) > 1})
    if repeated:
        raise UserError(
            f"{setting} names a file twice",
            where=setting,
            expected="each file once",
            got=", ".join(repeated[:3]),
            fix="remove the repetition, or copy the file where its records are to count twice",
        )
    return tuple(files)


def source_text(source: DataPath) -> str:
    """Return a data set's paths as one text for messages."""
    return str(source) if isinstance(source, str | Path) else ", ".join(map(str, source))


def single_directory(source: DataPath) -> bool:
    """Return whether a setting names one directory."""
    return isinstance(source, str | Path) and Path(source).is_dir()


def missing_shards(files: Iterable[Path]) -> list[str]:
    """Return the names of shards that belong to a set of which only some shards are among ``files``.

    Example:
        >>> missing_shards([Path("a/train-00000-of-00002.parquet")])
        ['train-00001-of-00002.parquet']
    """
    present: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in files:
        name = _SHARD.fullmatch(file.name)
        if name is not None:
            shard_set = (file.parent, name["split"], name["count"], name["suffix"])
            present.setdefault(shard_set, set()).add(int(name["index"]))

    missing = []
    for (_, split, count, suffix), indices in present.items():
        # A name that counts from 1 has an index equal to the count, and none that is 0.
        first = 1 if int(count) in indices and 0 not in indices else 0
        for index in range(first, first + min(int(count), 100_000)):
            if index not in indices:
                missing.append(f"{split}-{index:0{len(count)}d}-of-{count}.{suffix}")
    return missing


def partial_warning(source: DataPath, files: Sequence[Path], setting: str) -> UserError | None:
    """Return the warning of a data set of which only some shards are named; None where all are."""
    missing = missing_shards(files)
    if not missing:
        return None
    return UserError(
        f"{setting} names only some of the shards of a data set",
        where=setting,
        expected="every shard of the set, or a single file that is no shard",
        got=f"{source_text(source)}; not read: {', '.join(missing[:3])}"
        + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
        fix=f"set {setting} to the folder of the shards, if all of them are to be read",
    )


def source_error(path: Path, setting: str) -> UserError | None:
    """Return why records cannot be read from what is at a path, by its kind alone; None where they can."""
    if path.is_dir():
        return None if (path / "state.json").is_file() else _splits_error(path, setting)
    if not path.is_file():
        return unreadable_error(path, setting, "a pipe, a socket or a device", "name a file of records")
    if path.suffix in SUFFIXES:
        return None
    return UserError(
        f"{path} is of no kind that can be read",
        where=setting,
        expected=KINDS,
        got=path.suffix or "a file without a suffix",
        fix="one JSON object per line in a file that ends in .jsonl"
        if path.suffix in (".json", ".csv", ".txt", "")
        else "convert the file, or correct its suffix",
    )


def missing_error(path: Path, setting: str) -> UserError:
    """Return the error of a data set that is not there."""
    if glob.has_magic(str(path)):
        return UserError(
            f"no file matches the pattern {path}",
            where=setting,
            expected=KINDS,
            got="no match",
            fix="correct the pattern; * stands for any part of a name, ** for any folders",
        )
    return UserError(
        f"the data set {path} does not exist",
        where=setting,
        expected=KINDS,
        got=neighbours(path),
        fix="correct the path" + (_DOWNLOAD.format(path) if _HUB_NAME.fullmatch(str(path)) else ""),
    )


def unreadable_error(path: Path, setting: str, problem: str, fix: str) -> UserError:
    """Return the error of a data set whose bytes cannot be read."""
    return UserError(
        f"{path} cannot be read",
        where=setting,
        expected="a file that can be read again and again, with a record a line",
        got=problem,
        fix=fix,
    )


def _expand(path: Path, setting: str) -> tuple[Path, ...]:
    """Return the files of one entry: a file, a saved directory, a folder of shards or a pattern."""
    if not path.exists():
        # A name that holds [ or * literally exists, and is no pattern.
        matched = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else []
        if not matched:
            raise missing_error(path, setting)
        files = [Path(name) for name in matched]
    elif path.is_dir() and not (path / "state.json").is_file():
        files = _shards(path, setting)
    else:
        files = [path]

    for file in files:
        error = source_error(file, setting)
        if error is not None:
            raise error
    return tuple(files)


def _shards(folder: Path, setting: str) -> list[Path]:
    """Return the shards of a folder; raises UserError where they are not one whole data set."""
    error = _splits_error(folder, setting)
    if error is not None:
        raise error

    inside = sorted(item.name for item in folder.iterdir())
    shards = [folder / name for name in inside if _is_data(name)]
    if not shards:
        raise UserError(
            f"the directory {folder} holds no data set",
            where=setting,
            expected=KINDS,
            got=f"the files {', '.join(inside[:8]) or '(none)'}",
            fix=_deeper_fix(folder, setting),
        )

    suffixes = {shard.suffix for shard in shards}
    if len(suffixes) > 1:
        raise UserError(
            f"the folder {folder} holds files of two kinds",
            where=setting,
            expected="shards of one kind",
            got=", ".join(shard.name for shard in shards[:8]),
            fix=f"set {setting}={folder}/*.parquet or {setting}={folder}/*.jsonl, if one of them is a copy; "
            "else name the files in a list",
        )

    splits = sorted({_split_of(shard.name) for shard in shards} - {""})
    if len(splits) > 1:
        likely = _likely_split(splits, setting)
        chosen = [shard for shard in shards if _split_of(shard.name) == likely]
        named = f"{folder}/{likely}-*{chosen[0].suffix}" if len(chosen) > 1 else str(chosen[0])
        raise UserError(
            f"the folder {folder} holds several splits",
            where=setting,
            expected="the shards of one split",
            got=f"the splits {', '.join(splits)}",
            fix=f"set {setting}={named}",
        )

    missing = missing_shards(shards)
    if missing:
        raise UserError(
            f"the folder {folder} lacks shards of its data set",
            where=setting,
            expected="every shard that the names count",
            got=f"{len(shards)} files, without {', '.join(missing[:3])}",
            fix="download the missing shards, or list the files that are to be read",
        )
    return shards


def _splits_error(folder: Path, setting: str) -> UserError | None:
    """Return the error of a folder written by ``DatasetDict.save_to_disk``, which holds a folder a split."""
    splits = sorted(item.name for item in folder.iterdir() if (item / "state.json").is_file())
    if not splits:
        return None
    return UserError(
        f"{folder} holds several splits",
        where=setting,
        expected="the directory of one split",
        got=f"the splits {', '.join(splits)}",
        fix=f"set {setting}={folder / _likely_split(splits, setting)}",
    )


def _deeper_fix(folder: Path, setting: str) -> str:
    """Return the way to shards below a folder that has none itself, as a repository of the Hub has them."""
    below = sorted(item for item in folder.rglob("*") if _is_data(item.name) and item.is_file())
    folders = sorted({item.parent for item in below})
    if len(folders) == 1:
        return f"set {setting}={folders[0]}"
    if folders:
        return f"set {setting} to one of the folders {', '.join(map(str, folders[:5]))}"
    return "write the data set with save_to_disk, or name a file"


def _is_data(name: str) -> bool:
    """Return whether a file's name is that of records; names with a dot or _ in front belong to tools."""
    return name.endswith(SUFFIXES) and not name.startswith((".", "_"))


def _split_of(name: str) -> str:
    """Return the split in a shard's name, empty where the name has none.

    Example:
        >>> _split_of("train-00000-of-00002.parquet"), _split_of("test.jsonl"), _split_of("part-0.jsonl")
        ('train', 'test', '')
    """
    shard = _SHARD.fullmatch(name)
    if shard is not None:
        return shard["split"]
    stem = name.rpartition(".")[0]
    return next((split for split in _SPLITS if re.match(rf"{split}(?![a-z])", stem)), "")


def _likely_split(splits: Sequence[str], setting: str) -> str:
    """Return the split that a setting most likely means: training data, or data to measure on."""
    learns = not (setting.startswith("evaluation.") or setting.endswith(".held_out"))
    return next((name for name in splits if name.startswith("train") is learns), splits[0])
