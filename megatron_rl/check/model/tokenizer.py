"""Rules on a checkpoint's tokenizer: there, whole, and with no token that the model has no embedding for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.check.files import Files
from megatron_rl.config.sections.rollout import RolloutConfig, stop_error, stop_strings
from megatron_rl.errors import UserError

_KINDS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_COPY = "copy the tokenizer files of the model into its directory again"


def check_tokenizer(path: Path, where: str, files: Files, vocabulary: int | None) -> None:
    """Check the tokenizer against the rows of the embedding, None where they are not known."""
    if not any(all((path / name).is_file() for name in names) for names in _KINDS):
        files.miss(
            path / "tokenizer.json",
            "the model has no tokenizer",
            where,
            "tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
            "copy the tokenizer files of the model into its directory",
        )
    settings = _read(path / "tokenizer_config.json", files)
    generation = _read(path / "generation_config.json", files)
    words = _read(path / "tokenizer.json", files)
    if words is not None:
        try:
            _load(path)
        except Exception as error:  # the library raises nothing more exact
            files.errors.append(_broken(path / "tokenizer.json", str(error)))
            return
    try:
        ids, special = _token_ids(words or {}, _read(path / "vocab.json", files), settings or {})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        files.errors.append(_broken(path / "tokenizer.json", f"{type(error).__name__}: {error}"))
        return
    files.errors.extend(_end_errors(path, generation or {}, vocabulary))
    if vocabulary is not None and ids:
        files.errors.extend(_vocabulary_errors(path, ids, special, vocabulary))
        files.errors.extend(_end_token_errors(path, settings or {}, ids, vocabulary))


def stop_errors(path: Path, rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors of stop strings that are not one token of the tokenizer, where it can be read."""
    stops = stop_strings(rollout)
    if not any(stops.values()):
        return
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        return
    unknown = getattr(tokenizer.model, "unk_token", None)
    for setting, texts in stops.items():
        for text in texts:
            tokens = tokenizer.encode(text, add_special_tokens=False).tokens
            if len(tokens) != 1 or tokens[0] == unknown:
                yield stop_error(setting, text, tokens)


def tokenizer_of(path: Path) -> Any:
    """Return a folder's tokenizer, None where it cannot be read, which `check_tokenizer` says."""
    try:
        return _load(path)
    except Exception:
        return None


def _load(path: Path) -> Any:
    """Return a folder's tokenizer, None without one or without the library; raises what that raises."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    file = path / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _read(file: Path, files: Files) -> dict[str, Any] | None:
    """Return the object of a JSON file, None where there is none; add what cannot be read to ``files``."""
    if not file.is_file():
        if os.path.lexists(file):  # transformers would read on and on, or not at all
            files.errors.append(_broken(file, "a folder, a pipe, a device or a link that leads to nothing"))
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        problem = None if isinstance(values, dict) else type(values).__name__
    except (OSError, ValueError, RecursionError) as error:
        values, problem = None, str(error)
    if problem is not None:
        files.errors.append(_broken(file, problem))
        return None
    return values


def _broken(file: Path, problem: str) -> UserError:
    return UserError(
        f"the model's {file.name} cannot be read",
        where=str(file),
        expected="a JSON object, as save_pretrained writes it",
        got=problem,
        fix="copy the file again from the checkpoint",
    )


def _token_ids(
    words: Mapping[str, Any], plain: Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> tuple[dict[str, int], set[str]]:
    """Return the id of each token by its text, and which of them stand for no text."""
    stated = words.get("model", {}).get("vocab") or plain or {}
    # A unigram model lists its tokens with their scores, in the order of their ids.
    ids = {item[0]: place for place, item in enumerate(stated)} if isinstance(stated, list) else dict(stated)
    added = [*(words.get("added_tokens") or ())]
    added += [{**item, "id": int(key)} for key, item in (settings.get("added_tokens_decoder") or {}).items()]
    special = {item["content"] for item in added if item.get("special")}
    ids |= {item["content"]: item["id"] for item in added}
    if not all(isinstance(number, int) for number in ids.values()):
        raise ValueError("a token whose id is no integer")
    return ids, special


def _vocabulary_errors(
    path: Path, ids: Mapping[str, int], special: set[str], vocabulary: int
) -> Iterator[UserError]:
    """Yield the error of tokens of text beyond the embedding; control tokens there are common, and unused."""
    beyond = {text: number for text, number in ids.items() if number >= vocabulary and text not in special}
    if beyond:
        text, number = max(beyond.items(), key=lambda item: item[1])
        yield UserError(
            "the tokenizer has more tokens than the model has embeddings",
            where=str(path),
            expected=f"ids below vocab_size ({vocabulary}) in config.json",
            got=f"{len(beyond)} tokens beyond, up to {number} ({text!r})",
            fix=_COPY,
        )


def _end_token_errors(
    path: Path, settings: Mapping[str, Any], ids: Mapping[str, int], vocabulary: int
) -> Iterator[UserError]:
    stated = settings.get("eos_token")
    text = stated.get("content") if isinstance(stated, dict) else stated
    if text is None:
        return
    number = ids.get(text) if isinstance(text, str) else None
    if number is None or number >= vocabulary:
        yield UserError(
            "the token that ends a response is none of the model's",
            where=f"{path / 'tokenizer_config.json'}: eos_token",
            expected=f"a token of the tokenizer with an id below vocab_size ({vocabulary})",
            got=f"{text!r}, " + ("which the tokenizer does not have" if number is None else f"id {number}"),
            fix="correct eos_token, or copy the tokenizer files again",
        )


def _end_errors(path: Path, generation: Mapping[str, Any], vocabulary: int | None) -> Iterator[UserError]:
    stated = generation.get("eos_token_id")
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    most = vocabulary if vocabulary is not None else 1 << 62
    wrong = [item for item in listed if type(item) is not int or not 0 <= item < most]
    if wrong:
        yield UserError(
            "the generation config ends responses at what is no token of the model",
            where=f"{path / 'generation_config.json'}: eos_token_id",
            expected="a token id, or a list of ids"
            + (f", below vocab_size ({vocabulary})" if vocabulary else ""),
            got=repr(stated)[:200],
            fix="correct eos_token_id, or copy generation_config.json again from the checkpoint",
        )


def vocabulary_of(path: Path) -> int | None:
    """Return how many token ids a tokenizer's files list, None where they do not say it."""
    files = Files()
    words, settings = _read(path / "tokenizer.json", files), _read(path / "tokenizer_config.json", files)
    try:
        ids, _ = _token_ids(words or {}, _read(path / "vocab.json", files), settings or {})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # the tokenizer's own check says so
    return 1 + max(ids.values()) if ids else None
