"""Calls of tools as Llama 4 and LFM 2 write them: a list of Python's calls, with literals as arguments.

    [weather(city="Köln", days=3), time()]
    <|python_start|>[weather(city="Köln", days=3)]<|python_end|>
    <|tool_call_start|>[weather(city="Köln", days=3)]<|tool_call_end|>

Without marks it is the whole answer. Nothing of it is executed. Templates of LFM 2.5 write objects as JSON, so `true`, `false`
and `null` are literals too.
"""

import ast
import json
from typing import Any

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas

_LONGEST = 1 << 16
"""Characters of a list of calls. A longer text takes too much time and memory."""
_OPENING, _DEEPEST = "([{", 100
"""Python's parser fails on deeply nested brackets."""
_WORDS = {"true": True, "false": False, "null": None}


def _read(text: str, schemas: Schemas) -> list[Named]:
    """Return the calls, or nothing if the text is not such a list."""
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


def _call(item: ast.expr) -> Named:
    """Return one call. Raises ValueError or TypeError for another expression."""
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError("no call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in item.keywords:
        if keyword.arg is None:
            raise ValueError("the arguments are not named")
        arguments[keyword.arg] = ast.literal_eval(_OfJson().visit(keyword.value))
    json.dumps(arguments, allow_nan=False)  # a set or bytes have no form in JSON
    return Named(ast.unparse(item.func), arguments)


class _OfJson(ast.NodeTransformer):
    """Replaces JSON's words by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


_PYTHON = ("<|python_start|>", "<|python_end|>")
_TOOL = ("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA_4 = CallForm("llama-4", _read, (_PYTHON,), signs=_PYTHON[:1], alone=True)
LFM_2 = CallForm("lfm-2", _read, (_TOOL,), signs=_TOOL[:1])
