"""Rules on a checkpoint's tokenizer and chat template, without importing transformers.

transformers takes seconds to import; the library `tokenizers` and the checkpoint's JSON files are enough to
detect a tokenizer that is missing, damaged, or made for a different model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.check.files import FileFindings
from megatron_rl.config.sections.rollout import (
    RolloutConfig,
    biased_token_texts,
    explicit_token_id,
    rule_token_error,
    stop_engine_error,
    stop_strings,
    stop_text_error,
    unknown_token_id_error,
)
from megatron_rl.data.chat_format import NAMED_TOKENS, listed_end_ids
from megatron_rl.data.template_renderer import DEFAULT, TemplateRenderer, can_render
from megatron_rl.errors import UserError, unreadable_file_error
from megatron_rl.shapes.pretrained import read_json_object

_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Alternative sets of files; transformers can load a tokenizer from any one set."""

_COPY_AGAIN = "copy the tokenizer files of the model into its directory again"

_MALFORMED_VOCABULARY = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""Exceptions that reading token ids raises for a JSON file that is not a tokenizer."""


def check_tokenizer(path: Path, key: str, files: FileFindings, vocabulary_size: int | None) -> None:
    """Check the tokenizer of the model at ``path``, the value of ``key``; findings are added to ``files``.

    ``vocabulary_size`` is the number of rows of the model's embedding, or None if not available.
    """
    has_tokenizer = False
    for names in _TOKENIZER_FILES:
        if all((path / name).is_file() for name in names):
            has_tokenizer = True
    if not has_tokenizer:
        files.record_missing(
            path / "tokenizer.json",
            "the model has no tokenizer",
            key,
            "tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
            "copy the tokenizer files of the model into its directory",
        )

    # Report the files that cannot be read, and apply the rules on token ids to the other files.
    settings = _read_json_or_report(path / "tokenizer_config.json", files) or {}
    generation = _read_json_or_report(path / "generation_config.json", files) or {}
    code_reference = settings.get("auto_map")
    if code_reference:
        files.warnings.append(
            UserError(
                "the tokenizer comes with Python code, which no part of a run executes",
                where=f"{path / 'tokenizer_config.json'}: auto_map",
                expected="a tokenizer.json that transformers loads without it",
                got=str(code_reference)[:200],
                fix="remove auto_map if tokenizer.json has the same tokens",
            )
        )
    tokenizer = _read_json_or_report(path / "tokenizer.json", files)
    if tokenizer is not None:
        try:
            _load_tokenizer(path)
        except Exception as error:  # `tokenizers` raises bare Exceptions (seen in 0.23)
            files.errors.append(_unreadable_error(path / "tokenizer.json", error))
            return

    vocab_json = _read_json_or_report(path / "vocab.json", files)
    try:
        id_by_text, special_texts = _collect_token_ids(tokenizer or {}, vocab_json, settings)
    except _MALFORMED_VOCABULARY as error:
        files.errors.append(_unreadable_error(path / "tokenizer.json", error))
        return

    # Every token id in the model's input needs a row of the embedding.
    files.errors.extend(_generation_end_errors(path, generation, vocabulary_size))
    if vocabulary_size is not None and id_by_text:
        files.errors.extend(_vocabulary_errors(path, id_by_text, special_texts, vocabulary_size))
        files.errors.extend(_end_token_errors(path, settings, id_by_text, vocabulary_size))


def stop_errors(path: Path, rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors for stop texts that can never end a response of the model at ``path``."""
    for setting, text, encoded in _encode_stop_texts(path, rollout):
        error = stop_text_error(setting, text, encoded.tokens, encoded.unknown_token, encoded.decoded)
        if error is not None:
            yield error
        elif len(encoded.tokens) > 1 and not rollout.capabilities.stop_texts:
            yield stop_engine_error(setting, text, rollout.engine)


def has_multi_token_stop(path: Path, rollout: RolloutConfig) -> bool:
    """Return whether any stop text is several tokens in the tokenizer of the model at ``path``."""
    return any(len(encoded.tokens) > 1 for _, _, encoded in _encode_stop_texts(path, rollout))


class _EncodedText(NamedTuple):
    """Tokens of a stop text, and the text that they decode to, which must equal the stop text."""

    tokens: list[str]
    """Texts of the tokens."""
    unknown_token: str | None
    """The tokenizer's token for unknown text, or None if it has none."""
    decoded: str
    """Text that the tokens decode to."""


def _encode_stop_texts(path: Path, rollout: RolloutConfig) -> Iterator[tuple[str, str, _EncodedText]]:
    """Yield the setting, text and tokens of each stop text, or nothing if no tokenizer can be read."""
    # Without stop texts the tokenizer need not be loaded.
    texts_by_setting = stop_strings(rollout)
    if not any(texts_by_setting.values()):
        return

    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        return

    # A character that is not in the vocabulary is encoded as the unknown token. A stop text with such a
    # character cannot be recognised in a response, so the caller gets the unknown token to compare with.
    unknown_token = getattr(tokenizer.model, "unk_token", None)
    for setting, texts in texts_by_setting.items():
        for text in texts:
            encoding = tokenizer.encode(text, add_special_tokens=False)
            decoded = tokenizer.decode(encoding.ids, skip_special_tokens=False)
            yield setting, text, _EncodedText(encoding.tokens, unknown_token, decoded)


def biased_token_errors(path: Path, rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield an error for each token in ``logit_bias`` or ``banned_tokens`` that the tokenizer lacks."""
    # Without such settings the tokenizer need not be loaded.
    texts_by_setting = biased_token_texts(rollout)
    if not any(texts_by_setting.values()):
        return

    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        return

    unknown_token = getattr(tokenizer.model, "unk_token", None)
    vocabulary_size = tokenizer.get_vocab_size()
    for setting, texts in texts_by_setting.items():
        for text in texts:
            # A text such as ``token_id:17`` names the id itself.
            token_id = explicit_token_id(text)
            if token_id is not None:
                if token_id >= vocabulary_size:
                    yield unknown_token_id_error(setting, text, vocabulary_size)
                continue
            tokens = tokenizer.encode(text, add_special_tokens=False).tokens
            if len(tokens) != 1 or tokens[0] == unknown_token:
                yield rule_token_error(setting, text, tokens)


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a folder; None if it cannot be read, which `check_tokenizer` reports."""
    try:
        return _load_tokenizer(path)
    except Exception:
        return None


def read_token_ids(path: Path) -> dict[str, int]:
    """Return token text -> id for all tokens in a tokenizer's files; empty if the files contain no tokens."""
    files = FileFindings()
    tokenizer = _read_json_or_report(path / "tokenizer.json", files) or {}
    settings = _read_json_or_report(path / "tokenizer_config.json", files) or {}
    vocab_json = _read_json_or_report(path / "vocab.json", files)
    try:
        id_by_text, _ = _collect_token_ids(tokenizer, vocab_json, settings)
    except _MALFORMED_VOCABULARY:
        return {}  # reported by `check_tokenizer`
    return id_by_text


def read_vocabulary_size(path: Path) -> int | None:
    """Return the number of token ids in a tokenizer's files, or None if the files contain no ids."""
    id_by_text = read_token_ids(path)
    if not id_by_text:
        return None
    return 1 + max(id_by_text.values())


def _load_tokenizer(path: Path) -> Any:
    """Load a folder's tokenizer, or return None if tokenizer.json or the library `tokenizers` is missing."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    return Tokenizer.from_file(str(file))


def _read_json_or_report(file: Path, files: FileFindings) -> dict[str, Any] | None:
    """Read a JSON object from a file; return None if the file is missing or unreadable.

    The error for an unreadable file is added to ``files``.
    """
    if not os.path.lexists(file):
        return None

    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        files.errors.append(_unreadable_error(file, error))
        return None


def _unreadable_error(file: Path, error: Exception) -> UserError:
    """Return the error for an existing JSON file of the model that cannot be read because of ``error``."""
    return unreadable_file_error(
        f"the model's {file.name}",
        file,
        error,
        expected="a JSON object, as save_pretrained writes it",
        fix="copy the file again from the checkpoint",
    )


def _collect_token_ids(
    tokenizer: Mapping[str, Any],
    vocab_json: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> tuple[dict[str, int], set[str]]:
    """Return token text -> id for all tokens, and the texts of special tokens.

    ``tokenizer`` is the content of tokenizer.json, ``vocab_json`` of vocab.json and ``settings`` of
    tokenizer_config.json. Raises one of `_MALFORMED_VOCABULARY` for malformed content.
    """
    # A unigram model lists [text, score] in the order of the ids.
    vocabulary = tokenizer.get("model", {}).get("vocab") or vocab_json or {}
    if isinstance(vocabulary, list):
        id_by_text = {text_and_score[0]: token_id for token_id, text_and_score in enumerate(vocabulary)}
    else:
        id_by_text = dict(vocabulary)

    # Added tokens extend the vocabulary; older checkpoints list them in tokenizer_config.json.
    added_tokens: list[Any] = list(tokenizer.get("added_tokens") or ())
    added_tokens_decoder = settings.get("added_tokens_decoder") or {}
    for id_text, token in added_tokens_decoder.items():
        added_tokens.append({**token, "id": int(id_text)})

    special_texts: set[str] = set()
    for token in added_tokens:
        text = token["content"]
        id_by_text[text] = token["id"]
        if token.get("special"):
            special_texts.add(text)

    if not all(isinstance(token_id, int) for token_id in id_by_text.values()):
        raise ValueError("a token whose id is not an integer")
    return id_by_text, special_texts


def _vocabulary_errors(
    path: Path,
    id_by_text: Mapping[str, int],
    special_texts: set[str],
    vocabulary_size: int,
) -> Iterator[UserError]:
    """Yield the error for tokens whose id has no row in the embedding.

    Special tokens with such an id are common in published checkpoints, and valid: no text contains them.
    """
    out_of_vocabulary_ids: dict[str, int] = {}
    for text, token_id in id_by_text.items():
        if token_id >= vocabulary_size and text not in special_texts:
            out_of_vocabulary_ids[text] = token_id
    if not out_of_vocabulary_ids:
        return

    # Show the token with the largest id.
    text = max(out_of_vocabulary_ids, key=out_of_vocabulary_ids.__getitem__)
    token_id = out_of_vocabulary_ids[text]
    yield UserError(
        "the tokenizer has more tokens than the model has embeddings",
        where=str(path),
        expected=f"ids below vocab_size ({vocabulary_size}) in config.json",
        got=f"{len(out_of_vocabulary_ids)} tokens beyond, up to {token_id} ({text!r})",
        fix=_COPY_AGAIN,
    )


def _end_token_errors(
    path: Path,
    settings: Mapping[str, Any],
    id_by_text: Mapping[str, int],
    vocabulary_size: int,
) -> Iterator[UserError]:
    """Yield the error for an ``eos_token`` that the tokenizer or the embedding lacks."""
    text = _token_text(settings.get("eos_token"))
    if text is None:
        return

    token_id = None
    if isinstance(text, str):
        token_id = id_by_text.get(text)
    if token_id is not None and token_id < vocabulary_size:
        return

    problem = f"id {token_id}"
    if token_id is None:
        problem = "which the tokenizer does not have"
    yield UserError(
        "the eos_token is not a token of the model",
        where=f"{path / 'tokenizer_config.json'}: eos_token",
        expected=f"a token of the tokenizer with an id below vocab_size ({vocabulary_size})",
        got=f"{text!r}, {problem}",
        fix="correct eos_token, or copy the tokenizer files again",
    )


def _generation_end_errors(
    path: Path,
    generation_config: Mapping[str, Any],
    vocabulary_size: int | None,
) -> Iterator[UserError]:
    """Yield the error for an ``eos_token_id`` in generation_config.json that is not a token id."""
    id_or_ids = generation_config.get("eos_token_id")
    if id_or_ids is None:
        return

    # The value is the id of one end token, or a list of ids.
    token_ids = [id_or_ids]
    if isinstance(id_or_ids, list):
        token_ids = id_or_ids
    if all(_is_token_id(token_id, vocabulary_size) for token_id in token_ids):
        return

    expected = "a token id, or a list of ids"
    if vocabulary_size is not None:
        expected += f", below vocab_size ({vocabulary_size})"
    yield UserError(
        "the generation config ends responses at an id that is not a token of the model",
        where=f"{path / 'generation_config.json'}: eos_token_id",
        expected=expected,
        got=repr(id_or_ids)[:200],
        fix="correct eos_token_id, or copy generation_config.json again from the checkpoint",
    )


def _is_token_id(value: Any, vocabulary_size: int | None) -> bool:
    """Return whether a value is an integer of at least 0, and below ``vocabulary_size`` if that is known."""
    if type(value) is not int or value < 0:
        return False
    return vocabulary_size is None or value < vocabulary_size


def has_chat_template(path: Path) -> bool:
    """Return whether a checkpoint's folder contains a chat template."""
    return bool(read_chat_templates(path))


def build_template_renderer(path: Path) -> TemplateRenderer | None:
    """Return the renderer of a checkpoint's chat templates, or None if it has no template."""
    templates = read_chat_templates(path)
    if not templates or not can_render():
        return None
    return TemplateRenderer(templates, read_special_tokens(path))


def read_chat_templates(path: Path) -> dict[str, str]:
    """Return a checkpoint's chat templates by name, from the same files as transformers."""
    # Files have precedence over the tokenizer's settings.
    templates: dict[str, str] = {}
    for file in sorted(path.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = _read_text_or_empty(file)
    default_file = path / "chat_template.jinja"
    if default_file.is_file():
        templates[DEFAULT] = _read_text_or_empty(default_file)
    if templates:
        return {name: text for name, text in templates.items() if text}

    # Older checkpoints have one template, or a list of named templates, in the tokenizer's settings.
    setting = _read_object_or_empty(path / "tokenizer_config.json").get("chat_template")
    if isinstance(setting, list):
        named_templates = [template for template in setting if isinstance(template, Mapping)]
        setting = {template.get("name"): template.get("template") for template in named_templates}
    if isinstance(setting, str):
        setting = {DEFAULT: setting}
    if not isinstance(setting, Mapping):
        return {}

    for name, text in setting.items():
        if isinstance(text, str) and text:
            templates[str(name)] = text
    return templates


def read_special_tokens(path: Path) -> dict[str, str]:
    """Return a checkpoint's special tokens: setting, such as ``eos_token`` -> text of the token."""
    # tokenizer_config.json has precedence.
    settings = dict(_read_object_or_empty(path / "special_tokens_map.json"))
    settings |= _read_object_or_empty(path / "tokenizer_config.json")

    texts: dict[str, str] = {}
    for name in NAMED_TOKENS:
        text = _token_text(settings.get(name))
        if isinstance(text, str):
            texts[name] = text
    return texts


def _token_text(token: Any) -> Any:
    """Return the text of a special token, which is a string or an object with ``content``."""
    if isinstance(token, Mapping):
        return token.get("content")
    return token


def added_token_texts(tokenizer: Any) -> dict[int, str]:
    """Return the tokens that a `tokenizers.Tokenizer` adds to its base vocabulary: id -> text."""
    added_tokens = tokenizer.get_added_tokens_decoder()
    return {token_id: token.content for token_id, token in added_tokens.items()}


def end_token_texts(path: Path, tokenizer: Any) -> dict[int, str]:
    """Return the tokens that end a response according to the checkpoint's files: id -> text."""
    token_ids: list[int] = []
    eos_text = read_special_tokens(path).get("eos_token")
    if eos_text is not None:
        eos_id = tokenizer.token_to_id(eos_text)
        if eos_id is not None:
            token_ids.append(eos_id)
    token_ids += listed_end_ids(path, added_token_texts(tokenizer))

    # Files may list ids that the tokenizer does not have.
    texts: dict[int, str] = {}
    for token_id in token_ids:
        text = tokenizer.id_to_token(token_id)
        if text is not None:
            texts[token_id] = text
    return texts


def _read_text_or_empty(file: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read_object_or_empty(file: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty if it cannot be read, which `check_tokenizer` reports."""
    try:
        return read_json_object(file)
    except (OSError, ValueError):
        return {}
