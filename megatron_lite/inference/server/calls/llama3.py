"""Calls of tools as Llama 3.1 to 3.3 write them: an answer that is only JSON. Some answers begin with a mark.

{"name": "weather", "parameters": {"city": "Köln"}}
<|python_tag|>{"name": "weather", "parameters": {"city": "Köln"}}; {"name": "time", "parameters": {}}
"""

from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.json_values import read_json

LLAMA_3 = CallForm(
    "llama-3",
    read_json,
    (("<|python_tag|>", ""),),
    signs=('{"name": function name',),
    alone=True,
    quoted=True,
)
