"""Calls of tools as Nemotron Nano 2 writes them. Nemotron 3 writes those of qwen.py.

<TOOLCALL>[{"name": "weather", "arguments": {"city": "Köln"}}]</TOOLCALL>
"""

from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.json_values import read_json

_CALLS = ("<TOOLCALL>", "</TOOLCALL>")
NEMOTRON_2 = CallForm("nemotron-2", read_json, (_CALLS,), signs=_CALLS[:1], quoted=True)
