"""vLLM in the ranks of the job: the only folder that imports vllm.

Nothing here imports vllm before `setup.prepare_vllm` has set its environment: vLLM reads it on import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.engines.base import Engine, ToolParser
from megatron_rl.shapes.layout import ParallelLayout


def make_engine(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    layout: ParallelLayout,
    rank: int,
    **arguments: Any,
) -> Engine | None:
    """See `rollout.engines.base.make_engine`. Collective over the world, to make the process groups."""
    from megatron_rl.rollout.engines.vllm.engine import VllmEngine
    from megatron_rl.rollout.engines.vllm.setup import create_layout_groups, prepare_vllm

    prepare_vllm()
    # Call it on ranks outside the layout, too: the creation of a process group is collective over the world.
    create_layout_groups(layout)
    if rank not in layout.ranks:
        return None
    return VllmEngine(model_path, config, layout=layout, rank=rank, **arguments)


def make_tool_parser(name: str | None, tokenizer: Any) -> ToolParser | None:
    """Make a function that parses tool calls with vLLM's parser ``name``; return None without a name.

    The function does not depend on the engine that sampled the text. Raises UserError for an unknown parser,
    and for a parser that refuses the tokenizer.
    """
    if name is None:
        return None
    from megatron_rl.rollout.engines.vllm.setup import prepare_vllm

    prepare_vllm()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class = ToolParserManager.get_tool_parser(name)
        parser_class(tokenizer)
    except Exception as error:
        # Catch any exception: a parser may need tokens that the tokenizer lacks, and each parser raises its
        # own class of error.
        raise UserError(
            "the tool-call parser cannot be constructed",
            where="rollout.environment.tool_parser",
            expected="a tool-call parser of vLLM that accepts the model's tokenizer",
            got=f"{type(error).__name__}: {error}",
            fix="name the parser that vLLM's documentation lists for the model (--tool-call-parser)",
        ) from None

    def parse_tool_calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """Parse the tool calls in a turn's text; return the text without them, and the calls."""
        request: Any = ChatCompletionRequest(messages=[], model="policy", tools=tools)  # pyright: ignore
        # Construct a parser for each turn, since some parsers have state.
        parsed = parser_class(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [
            {"name": call.function.name, "arguments": call.function.arguments} for call in parsed.tool_calls
        ]
        return parsed.content or "", calls

    return parse_tool_calls
