"""All forms of calls, and the one that a chat template writes."""

from megatron_lite.inference.server.calls.deepseek import DEEPSEEK_V3
from megatron_lite.inference.server.calls.dsml import DEEPSEEK_V3_2, DEEPSEEK_V4
from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.gemma import FUNCTION_GEMMA, GEMMA_4
from megatron_lite.inference.server.calls.glm import GLM
from megatron_lite.inference.server.calls.granite import GRANITE_3
from megatron_lite.inference.server.calls.hermes import HERMES
from megatron_lite.inference.server.calls.hunyuan import HUNYUAN_3, HUNYUAN_A13B
from megatron_lite.inference.server.calls.kimi import KIMI_K2
from megatron_lite.inference.server.calls.llama3 import LLAMA_3
from megatron_lite.inference.server.calls.llama4 import LFM_2, LLAMA_4
from megatron_lite.inference.server.calls.minimax import MINIMAX_M2
from megatron_lite.inference.server.calls.mistral import MISTRAL
from megatron_lite.inference.server.calls.nemotron import NEMOTRON_2
from megatron_lite.inference.server.calls.qwen import QWEN_CODER

FORMS = (
    KIMI_K2, MISTRAL, DEEPSEEK_V3_2, DEEPSEEK_V4, DEEPSEEK_V3, MINIMAX_M2, GEMMA_4, FUNCTION_GEMMA, GRANITE_3, LFM_2, HUNYUAN_3, GLM,
    QWEN_CODER, HUNYUAN_A13B, NEMOTRON_2, HERMES, LLAMA_4, LLAMA_3,
)  # fmt: skip
"""The forms, those with the most particular signs first."""
BY_TEMPLATE = "auto"
NAMES = (BY_TEMPLATE, *sorted(form.name for form in FORMS))
"""The values of --tool-calls."""


def forms_of(name: str, template: str) -> tuple[CallForm, ...]:
    """Return the form of a name, or for `auto` the form that a chat template writes.

    A template without any form's signs leaves all forms open. An empty text is no template.
    """
    if name != BY_TEMPLATE:
        return tuple(form for form in FORMS if form.name == name)
    written = [form for form in FORMS if all(sign in template for sign in form.signs)]
    return tuple(written[:1]) or FORMS
