"""Calls of tools as DeepSeek V3.1 writes them, and as V3 and R1 do. DeepSeek's tokenizers have these marks as ordinary tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write `function` in place of the name, and behind `<｜tool▁sep｜>` the name and a block of code with JSON.
"""

import json
import re
from typing import Any

CALLS = re.compile(r"<｜tool▁calls▁begin｜>(.*?)(?:<｜tool▁calls▁end｜>|\Z)", re.DOTALL)
"""The part of an answer that has its calls."""
_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_CODE = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def read_deepseek_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, arguments) of the complete calls whose arguments are a JSON object."""
    found = []
    for name, arguments in _CALL.findall(text):
        code = _CODE.fullmatch(arguments)
        if code is not None:
            name, arguments = code.groups()
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append((name.strip(), value))
    return found
