"""vLLM's API servers as rollout engine: what their command says, and which settings do not go with them."""

from __future__ import annotations

import json
import shlex
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.derive import longest_row
from megatron_rl.config.engines import engines_with
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import CLOSED, OPEN, RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.pretrained import PretrainedModel, read_pretrained

EXTENSION = "megatron_rl.hybrid_engine.worker_extension.HybridWorker"
BACKEND = "megatron_rl"
HOST_BATCHED_TOKENS = 4096
"""vLLM's own default on the host for one step, per tensor-parallel rank."""

_OF_FILES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "head_dtype", "architectures")
"""Settings of a model's config.json that say nothing of what the model computes."""


def plain_settings(settings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return those of a model's settings that a server of the same model has, too.

    They are the plain ones, and the numbers of those of positions, whose names vLLM changes in part.
    """
    plain = dict[str, Any]()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            of_positions = section or name.startswith("rope")
            plain |= plain_settings(value, f"{section}{name}.") if of_positions else {}
        elif isinstance(value, int | float) if section else name not in _OF_FILES:
            plain[f"{section}{name}"] = json.loads(json.dumps(value, default=str))
    return plain


def sampling_arguments(
    model: PretrainedModel, *, float32_head: bool, dtype: str, max_model_len: int
) -> dict[str, Any]:
    """Return the engine arguments with which vLLM samples as the trainer computes, wherever it runs."""
    head = {"head_dtype": "float32"} if float32_head else {}
    return {
        "hf_overrides": dict(model.family.engine_keys) | head,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "dtype": dtype,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",
    }


def host_arguments(max_model_len: int, tensor: int = 1) -> dict[str, Any]:
    """Return the engine arguments that vLLM needs beside them on a host without accelerator."""
    return {
        "enforce_eager": True,
        # A generator on the host cannot be set back, which vLLM does where a prompt is read in parts.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(HOST_BATCHED_TOKENS * tensor, max_model_len),
    }


def host_errors(values: Mapping[str, Any]) -> list[UserError]:
    """Return the error of ``rollout.vllm`` on a host without accelerator that `host_arguments` avoids."""
    where, value = "rollout.vllm.enable_chunked_prefill", values.get("enable_chunked_prefill")
    if not value:
        return []
    return [
        UserError(
            "prompts are to be read in parts, on a host without accelerator",
            where=where,
            expected="no value: a generator on the host cannot be set back, which vLLM does after each part",
            got=str(value).lower(),
            fix=f"remove {where}, which is false on a host, and true on an accelerator",
        )
    ]


def server_commands(config: RunConfig) -> list[str]:
    """Return the lines of the command that starts a server for this run, and what a bare host adds."""
    model = read_pretrained(Path(config.model.path) / "config.json")
    rollout, longest = config.rollout, longest_row(config)
    ports = [urllib.parse.urlsplit(url).port for url in rollout.server.urls if _is_address(url)]
    arguments = {
        "model": config.model.path,
        "port": ports[0] if ports else 8000,
        "enable_scale_out": True,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "load_format": "dummy",  # the job brings the weights
        **sampling_arguments(
            model, float32_head=rollout.float32_head, dtype=config.model.dtype, max_model_len=longest
        ),
    }
    if model.shape.experts:
        arguments["moe_backend"] = "triton"
    start = "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server"
    host = {**host_arguments(longest), "kv_cache_memory_bytes": 2**30}
    *words, last = [start, *_flags(arguments)]
    return [
        *(f"{word} \\" for word in words),
        last,
        "on a host without accelerator also, behind VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1:",
        " ".join(_flags(host)),
    ]


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    return [_flag(name.replace("_", "-"), value) for name, value in arguments.items() if value != {}]


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {shlex.quote(json.dumps(value) if isinstance(value, dict) else str(value))}"


def check_engine_servers(rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors of servers, and of settings that need a capability that the engine lacks.

    No server is asked.
    """
    capabilities = rollout.capabilities
    yield from _check_addresses(rollout)

    lacking = {
        "rollout.vllm": (
            bool(rollout.vllm) and not capabilities.in_process,
            "a server's settings stand in its own command",
            "{}",
            engines_with(in_process=True, tensor_parallel=True),
        ),
        "rollout.top_p, top_k or min_p": (
            rollout.truncates and not capabilities.sampling_masks,
            "the engine does not say which tokens a filter left, which the trainer must know,",
            "1, 0 and 0, in sampling profiles too",
            engines_with(sampling_masks=True),
        ),
        "rollout.order": (
            rollout.order == OPEN and not capabilities.partial,
            "the engine answers whole requests, and the open order cuts them,",
            CLOSED,
            engines_with(partial=True),
        ),
    }
    for where, (wrong, reason, expected, engines) in lacking.items():
        if wrong:
            yield UserError(
                f"{reason} with rollout.engine={rollout.engine}",
                where=where.partition(",")[0],
                expected=expected,
                got=f"{where} is set",
                fix=f"remove {where}, or set {engines}",
            )


def _check_addresses(rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors of `rollout.server.urls`: a server engine needs them, and no other takes them."""
    urls = rollout.server.urls
    if rollout.capabilities.in_process:
        if urls:
            yield UserError(
                "servers are named, and another engine is to generate",
                where="rollout.server.urls",
                expected=f"{engines_with(in_process=False)}, or no servers",
                got=f"rollout.engine={rollout.engine}",
                fix=f"set {engines_with(in_process=False)}, or remove rollout.server",
            )
        return

    yield from (_bad_address(url) for url in urls if not _is_address(url))
    if not urls or len({url.rstrip("/").lower() for url in urls}) < len(urls):
        yield UserError(
            "servers are to generate, and none is named, or one of them twice",
            where="rollout.server.urls",
            expected="the address of each server once",
            got=f"[{', '.join(urls)}]",
            fix="set rollout.server.urls=[http://host:8000]",
        )


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        bare = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
        return parts.scheme == "http" and bool(parts.hostname) and bool(parts.port) and bare
    except ValueError:
        return False


def _bad_address(url: str) -> UserError:
    return UserError(
        "invalid server URL",
        where="rollout.server.urls",
        expected="http://HOST:PORT",
        got=repr(url) if "@" not in url else "an address with a user or a password",
        fix="correct it",
    )
