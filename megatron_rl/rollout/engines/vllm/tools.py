"""vLLM's parsers of tool calls, without its server."""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.rollout.engines.base import ToolParser
from megatron_rl.rollout.engines.vllm.setup import prepare_vllm


def make_tool_parser(name: str | None, tokenizer: Any) -> ToolParser | None:
    """Return a parser by vLLM's name of it, whatever the engine; None where there is no name.

    Raises UserError for one that is not known or refuses.
    """
    if name is None:
        return None
    prepare_vllm()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        make = ToolParserManager.get_tool_parser(name)
        make(tokenizer)
    except Exception as error:  # a parser may want tokens that the tokenizer has not
        raise UserError(
            "calls of tools cannot be parsed",
            where="rollout.environment.tool_parser",
            expected="a parser of vLLM that takes the model's tokenizer",
            got=f"{type(error).__name__}: {error}",
            fix="name the one that vLLM's documentation has for the model (--tool-call-parser)",
        ) from None

    def parse(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        request: Any = ChatCompletionRequest(messages=[], model="policy", tools=tools)  # pyright: ignore
        said = make(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in said.tool_calls]
        return said.content or "", calls

    return parse
