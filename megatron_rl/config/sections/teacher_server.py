"""Teacher of a distillation behind a vLLM server, outside of the job."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.sections.bounds import SECONDS
from megatron_rl.config.sections.rewards import ServerConfig
from megatron_rl.config.setting import required, setting


@dataclass(frozen=True, kw_only=True)
class TeacherServerConfig(ServerConfig):
    """Teacher behind a vLLM server, which computes log-probs of complete rows (`prompt_logprobs`).

    The first rank that trains sends the token ids of each row. A row whose request fails is invalid, like a
    row whose reward fails. The server needs the actor's tokenizer, `--max-model-len` of at least the longest
    row plus one token, and `--max-logprobs` of at least `algorithm.distillation.k`.
    """

    url: str = required("Address of the server's API, without /completions.", example="http://host:8000/v1")
    model: str = required("Name of the model at the server.", example="Qwen/Qwen2.5-72B-Instruct")
    key_from: str | None = setting(
        None,
        "Name of the environment variable with the API key, such as TEACHER_API_KEY.",
        unset="no key",
    )
    # Enough time to prefill a long row after the other rows in the server's queue.
    timeout: float = setting(300.0, "Time after which a request without response has failed.", **SECONDS)
