"""A calculator for word problems: the tool of configs/8gpu/tools.yaml, for models with a chat template."""

from __future__ import annotations

import ast
import operator
import re

from megatron_rl import StepEnvironment
from megatron_rl.rewards.math_answer import marked_number

CALL = re.compile(r"<calc>([\d\s.,+*/()-]{1,100})</calc>")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> float:
    """Compute an arithmetic expression; raise ValueError, SyntaxError or ArithmeticError for other text.

    Example:
        >>> evaluate("(12 + 3) * 7")
        105
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case _:
                raise ValueError(f"not arithmetic: {expression}")

    return value(ast.parse(expression.replace(",", "").strip(), mode="eval").body)


class WordProblem(StepEnvironment):
    """Environment that answers `<calc>12*7</calc>` with 84; any other text is the policy's answer."""

    def reset(self, episode):
        self.truth = episode.ground_truth

    def step(self, response):  # -> observation, reward, done
        # A response without a call is the answer, which ends the episode.
        call = CALL.search(response)
        if call is None:
            reward = marked_number(
                prompt="",
                response=response,
                ground_truth=self.truth,
                metadata={},
            )
            return None, reward["reward"], True

        try:
            result = f"{evaluate(call[1]):.10g}"
        except (ValueError, SyntaxError, ArithmeticError):
            result = "not an expression that I can compute"
        return result, 0.0, False
