"""Rules on rollout servers (`rollout.engine: server`), and the command line that starts one for a run."""

from __future__ import annotations

import json
import shlex
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.check.engine.arguments import cpu_engine_arguments, sampling_arguments
from megatron_rl.check.model.tokenizer import has_multi_token_stop
from megatron_rl.config.derive import longest_row
from megatron_rl.config.engines import engines_with
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import CLOSED, OPEN, RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.pretrained import PretrainedModel, read_pretrained

WORKER_EXTENSION = "megatron_rl.hybrid_engine.worker_extension.HybridWorker"
"""Class of this package that vLLM's workers inherit from to receive weights."""

TRANSFER_BACKEND = "megatron_rl"
"""Name of our backend in vLLM's registry of weight transfers."""

_HOST_CACHE_BYTES = 2**30
"""Bytes of the key-value cache in the command for a host."""

_FILE_SETTINGS = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "head_dtype",
    "architectures",
)
"""Keys of config.json that describe the checkpoint's files and do not affect the model's outputs."""


def comparable_settings(settings: Mapping[str, Any], key_prefix: str = "") -> dict[str, Any]:
    """Return the settings of a config.json that a server with the same model must report unchanged.

    These are the top-level values, and the numbers in the sections for rotary positions, with keys such as
    ``rope_scaling.factor``. Other sections are left out, since vLLM renames their keys. ``key_prefix`` is the
    prefix of the returned keys.
    """
    comparable: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            # Rotary positions are the only nested setting that affects the model's outputs.
            if key_prefix or name.startswith("rope"):
                comparable |= comparable_settings(value, f"{key_prefix}{name}.")
            continue

        # Numbers below a prefix, and all values at the top level.
        is_compared = name not in _FILE_SETTINGS
        if key_prefix:
            is_compared = isinstance(value, int | float)
        if is_compared:
            # Convert through JSON, like the server's response: tuples become lists, other objects text.
            comparable[f"{key_prefix}{name}"] = json.loads(json.dumps(value, default=str))
    return comparable


def server_command_lines(config: RunConfig) -> list[str]:
    """Return the lines of the command that starts a server for this run.

    The last two lines have the additional environment and flags for a host without an accelerator.
    """
    model = read_pretrained(Path(config.model.path) / "config.json")
    rollout = config.rollout
    max_model_len = longest_row(config)

    # The command is for the first server, and the commands for the others differ only in the port.
    port: int | None = 8000
    for url in rollout.server.urls:
        if _is_server_url(url):
            port = urllib.parse.urlsplit(url).port
            break

    # Arguments of vLLM's server. The job sends the weights, so the server starts with dummy weights.
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "port": port,
        "enable_scale_out": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "load_format": "dummy",
    }
    arguments |= sampling_arguments(
        model,
        float32_head=rollout.float32_head,
        dtype=config.model.dtype,
        max_model_len=max_model_len,
    )
    if has_multi_token_stop(Path(config.model.path), rollout):
        # The server needs the tokenizer to end responses at texts of several tokens.
        arguments["skip_tokenizer_init"] = False
    if model.shape.experts:
        # Other kernels for experts store weights in an order that a weight sync does not write.
        arguments["moe_backend"] = "triton"

    # The endpoints for weight updates exist only in vLLM's development mode.
    command = "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server"
    lines = [command, *_format_flags(arguments)]

    # On a host without an accelerator, the size of the cache has to be given in bytes.
    host_flags = cpu_engine_arguments(max_model_len)
    host_flags["kv_cache_memory_bytes"] = _HOST_CACHE_BYTES
    continued_lines = [f"{line} \\" for line in lines[:-1]]
    return [
        *continued_lines,
        lines[-1],
        "on a host without accelerator, set VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1, and add:",
        " ".join(_format_flags(host_flags)),
    ]


def _format_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Format engine arguments as command-line flags; arguments that are empty dicts are omitted."""
    return [_format_flag(name.replace("_", "-"), value) for name, value in arguments.items() if value != {}]


def _format_flag(name: str, value: Any) -> str:
    """Format one engine argument as ``--name``, ``--no-name``, or ``--name VALUE`` quoted for a shell."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"

    value_text = str(value)
    if isinstance(value, dict):
        value_text = json.dumps(value)
    return f"--{name} {shlex.quote(value_text)}"


class _CapabilityRule(NamedTuple):
    """Rule that refuses a setting if the rollout engine lacks the capability that the setting needs."""

    is_refused: bool
    """Whether the setting is set and the engine lacks the capability."""
    setting: str
    """Configuration key of the setting."""
    reason: str
    """Predicate of an error sentence whose subject is the engine."""
    expected: str
    """Valid value of the setting with this engine."""
    engines: str
    """Setting of an engine that has the capability, such as ``rollout.engine=vllm``."""


def check_engine_servers(rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors for invalid server URLs and for settings that the rollout engine does not support.

    No request is sent to a server.
    """
    capabilities = rollout.capabilities
    yield from _server_url_errors(rollout)

    # Settings that need a capability of the engine. The settings of a server are in the command that starts
    # it. In the open order (`rollout.order: open`), a step trains on the responses that finish first, and the
    # engine interrupts the unfinished requests for a weight sync.
    rules = (
        _CapabilityRule(
            is_refused=bool(rollout.vllm) and not capabilities.in_process,
            setting="rollout.vllm",
            reason="has the settings of the servers' own command",
            expected="{}",
            engines=engines_with(in_process=True, tensor_parallel=True),
        ),
        _CapabilityRule(
            is_refused=rollout.truncates and not capabilities.sampling_masks,
            setting="rollout.top_p, top_k or min_p",
            reason="does not return the tokens that a filter keeps, which the trainer needs",
            expected="1, 0 and 0, in sampling profiles too",
            engines=engines_with(sampling_masks=True),
        ),
        _CapabilityRule(
            is_refused=rollout.order == OPEN and not capabilities.partial,
            setting="rollout.order",
            reason="answers whole requests, which the open order interrupts",
            expected=CLOSED,
            engines=engines_with(partial=True),
        ),
    )

    for rule in rules:
        if rule.is_refused:
            yield UserError(
                f"rollout.engine={rollout.engine} {rule.reason}",
                where=rule.setting.partition(",")[0],
                expected=rule.expected,
                got=f"{rule.setting} is set",
                fix=f"remove {rule.setting}, or set {rule.engines}",
            )


def engine_model_mismatch_errors(
    rollout: RolloutConfig, model: PretrainedModel, path: str
) -> Iterator[UserError]:
    """Yield the errors for a checkpoint at ``path`` from which servers load another model than the trainer.

    From a multimodal checkpoint, a server loads the complete model with other tensor names, but the run
    trains only the language model. For a model with sparse attention, a server's model has an indexer and the
    trainer's model has none.
    """
    # Sparse attention: the actor has no indexer, so its weights cannot be sent to the servers.
    if not rollout.capabilities.in_process and model.family.engine_family:
        in_process = engines_with(in_process=True, tensor_parallel=True)
        yield UserError(
            f"rollout.engine={rollout.engine} has an indexer of sparse attention, whose weights are "
            "not synced",
            where="rollout.engine",
            expected=in_process,
            got=f"{rollout.engine} with {model.family.architecture}",
            fix=f"set {in_process}",
        )

    # A multimodal checkpoint.
    if rollout.capabilities.in_process or not model.is_multimodal:
        return
    architecture = model.family.architecture
    yield UserError(
        f"rollout.engine={rollout.engine} loads the whole multimodal model, and only a part is trained",
        where="rollout.engine",
        expected=f"a checkpoint of {architecture}, or {engines_with(in_process=True, tensor_parallel=True)}",
        got=path,
        fix=f"save the language model alone: transformers.{architecture}.from_pretrained({path!r})"
        ".save_pretrained(FOLDER), and copy the tokenizer's files",
    )


def _server_url_errors(rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors for `rollout.server.urls`, which server engines require and other engines refuse."""
    urls = rollout.server.urls
    if rollout.capabilities.in_process:
        if urls:
            server_engines = engines_with(in_process=False)
            yield UserError(
                f"`rollout.server.urls` requires {server_engines}",
                where="rollout.server.urls",
                expected=f"{server_engines}, or no servers",
                got=f"rollout.engine={rollout.engine}",
                fix=f"set {server_engines}, or remove rollout.server",
            )
        return

    # Every URL must be valid.
    for url in urls:
        if not _is_server_url(url):
            yield UserError(
                "invalid server URL",
                where="rollout.server.urls",
                expected="http://HOST:PORT",
                # Do not print a user and password.
                got=repr(url) if "@" not in url else "a URL with a user or a password",
                fix="correct it",
            )

    # A server that is listed twice, even in a different spelling, would receive every weight twice.
    distinct_urls = {url.rstrip("/").lower() for url in urls}
    if not urls or len(distinct_urls) < len(urls):
        yield UserError(
            "`rollout.server.urls` is empty or names a server twice",
            where="rollout.server.urls",
            expected="the URL of each server once",
            got=f"[{', '.join(urls)}]",
            fix="set rollout.server.urls=[http://host:8000]",
        )


def _is_server_url(url: str) -> bool:
    """Return whether a URL is of the form ``http://HOST:PORT``, without a path."""
    try:
        split_url = urllib.parse.urlsplit(url)
        has_address = split_url.scheme == "http" and bool(split_url.hostname) and bool(split_url.port)
    except ValueError:
        return False

    has_path = bool(split_url.path.strip("/"))
    has_suffix = bool(split_url.query or split_url.fragment)
    return has_address and not (has_path or has_suffix or split_url.username)
