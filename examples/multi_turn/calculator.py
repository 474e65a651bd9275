"""An agent of several turns: after each turn a calculator answers, until it has answered often enough.

:func:`play` is the whole agent. It keeps no state but the sample, so that a sample that was aborted anywhere, between
the calculator and the next turn too, is resumed by calling it again.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ANSWERS = 3  # of the calculator; one turn more than that is generated
TOKENS_PER_TURN = 64
MARK = "\n[calculator] "  # begins each of its answers

_EXPRESSION = re.compile(r"\d+(?:\s*[-+*/]\s*\d+)+")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(text: str) -> str:
    """Evaluate the last expression in a text, such as ``17 * 3``."""
    found = _EXPRESSION.findall(text)
    if not found:
        return "write an expression, such as 17 * 3"
    try:
        return f"{found[-1]} = {_value(ast.parse(found[-1], mode='eval').body):g}"
    except (ArithmeticError, SyntaxError) as error:
        return f"{found[-1]}: {error}"


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.BinOp):
        return float(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    if not isinstance(node, ast.Constant):
        raise SyntaxError("not a number")
    return float(node.value)


def _last_turn(response: str) -> str:
    """What the model wrote behind the calculator's last answer, which is one line."""
    _, mark, rest = response.rpartition(MARK)
    return rest.partition("\n")[2] if mark else rest


async def play(
    sample: Any,  # noqa: ANN401  # streamfold's, or a trainer's
    *,
    turn: Callable[[Any], Awaitable[Any]],
    append: Callable[[Any, list[int], str], bool],
    encode: Callable[[str], list[int]],
) -> Any:  # noqa: ANN401
    """Generate turns until the calculator has answered often enough, or the response is full.

    Args:
        sample: a new one, or one that was aborted: then it goes on where that was.
        turn: generates a turn, or what is left of one.
        append: appends an answer to the sample, and returns whether there was room for it.
        encode: the token ids of a text, without special tokens.
    """
    while True:
        sample = await turn(sample)
        if sample.status.name == "ABORTED" or sample.response.count(MARK) >= ANSWERS:
            return sample
        answer = f"{MARK}{calculate(_last_turn(sample.response))}\n"
        if not append(sample, encode(answer), answer):
            return sample
