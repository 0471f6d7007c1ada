"""Calls of tools as Granite 3 writes them: a JSON list behind a mark. Granite 4 writes those of hermes.py.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln"}}]
"""

from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.json_values import read_json

GRANITE_3 = CallForm(
    "granite-3", read_json, (("<|tool_call|>", ""),), signs=("<|tool_call|>",), quoted=True
)
