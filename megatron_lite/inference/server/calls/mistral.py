"""Calls of tools as Mistral's models write them: a JSON list in older ones, name and arguments in newer ones.

    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]time[ARGS]{}
    [TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Köln"}

Their templates refuse an id that doesn't have nine letters or digits.
"""

import re
import secrets
import string

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.json_values import object_at, read_json

_BEGIN = "[TOOL_CALLS]"
_HEADER = re.compile(r"\s*([^\s\[\]{}\"]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?={)")
_ID_LENGTH = 9


def _read(text: str, schemas: Schemas) -> list[Named]:
    if text.lstrip()[:1] in ("[", "{"):
        return read_json(text, schemas)
    header = _HEADER.match(text)
    if header is None:
        return []
    arguments, end = object_at(text, header.end())
    if text[end:].strip():
        raise ValueError("text follows the arguments")
    return [Named(header[1], arguments, header[2] or "")]


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


MISTRAL = CallForm(
    "mistral",
    _read,
    ((_BEGIN, ""),),
    signs=(_BEGIN,),
    inner=("[CALL_ID]", "[ARGS]"),
    quoted=True,
    new_id=_new_id,
)
