"""Calls of tools as Llama 4 writes them: an answer that is a list of Python's calls, with literals as arguments.

    [weather(city="Köln", days=3), time()]

Nothing of it is executed.
"""

import ast
import json
from typing import Any

_LONGEST = 1 << 16
"""Characters of a list of calls. A longer text takes too much time and memory."""
_OPENING, _DEEPEST = "([{", 100
"""Python's parser fails on deeply nested brackets."""


def read_python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, arguments) of each call, or nothing if the text is not such a list."""
    text = text.strip()
    nested = sum(map(text.count, _OPENING))
    if not text.startswith("[") or len(text) > _LONGEST or nested > _DEEPEST:
        return []
    try:
        (statement,) = ast.parse(text).body
        calls = statement.value if isinstance(statement, ast.Expr) else None
        items = calls.elts if isinstance(calls, ast.List) else []
        return [_call(item) for item in items]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call(item: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return one call. Raises ValueError or TypeError for another expression."""
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in item.keywords:
        if keyword.arg is None:
            raise ValueError("the arguments are not named")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(arguments, allow_nan=False)  # a set or bytes have no form in JSON
    return ast.unparse(item.func), arguments
