"""Calls of tools as Hermes, Qwen 2.5 and 3, Granite 4 and many others write them.

<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>
"""

from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.json_values import read_json

TOOL_CALL = ("<tool_call>", "</tool_call>")
HERMES = CallForm("hermes", read_json, (TOOL_CALL,), signs=TOOL_CALL[:1], quoted=True)
