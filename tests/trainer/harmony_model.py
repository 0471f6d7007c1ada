"""A tiny GPT-OSS with harmony's special tokens, and a chat template that writes the same texts as OpenAI's."""

from pathlib import Path
from typing import Any

from megatron_lite.data.tokenizer import HuggingFaceTokenizer

SPECIAL = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>",
)  # fmt: skip

TEMPLATE = (
    "{{ '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n' }}"
    "{{ 'Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}"
    "{{ '\\n\\nReasoning: ' + (reasoning_effort or 'medium') }}"
    "{{ '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}"
    "{% if tools %}{{ \"\\nCalls to these tools must go to the commentary channel: 'functions'.\" }}{% endif %}"
    "{{ '<|end|>' }}{% set rest = messages %}{% set told = '' %}"
    "{% if messages[0].role in ['system', 'developer'] %}"
    "{% set told = messages[0].content %}{% set rest = messages[1:] %}{% endif %}"
    "{% if told or tools %}{{ '<|start|>developer<|message|>' }}"
    "{% if told %}{{ '# Instructions\\n\\n' + told + '\\n\\n' }}{% endif %}"
    "{% if tools %}{{ '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}{% for t in tools %}"
    "{{ '// ' + t.function.description + '\\ntype ' + t.function.name + ' = ' }}"
    "{% if t.function.parameters and t.function.parameters.properties %}{{ '(_: {\\n' }}"
    "{% for name, kind in t.function.parameters.properties.items() %}"
    "{{ name + ('' if name in t.function.parameters.required else '?') + ': ' + kind.type + ',\\n' }}{% endfor %}{{ '}) => any;\\n\\n' }}"
    "{% else %}{{ '() => any;\\n\\n' }}{% endif %}{% endfor %}{{ '} // namespace functions' }}{% endif %}"
    "{{ '<|end|>' }}{% endif %}{% set called = namespace(name='') %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson }}{{ '<|end|>' }}"
    "{% elif m.role == 'assistant' and 'tool_calls' in m %}{% set later = namespace(final=false) %}"
    "{% for n in rest[loop.index:] %}"
    "{% if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.final = true %}{% endif %}{% endfor %}"
    "{% if m.content and m.thinking %}{{ raise_exception('content and thinking beside a call') }}{% endif %}"
    "{% set thought = m.content or m.thinking %}{% if thought and not later.final %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}"
    "{% set call = m.tool_calls[0].function or m.tool_calls[0] %}{% set called.name = call.name %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{% set last = loop.last and not add_generation_prompt %}"
    "{% if last and 'thinking' in m %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if last else '<|end|>') }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "time", "description": "Get the time.", "parameters": {}},
}


def save_tokenizer(directory: Path, template: str = TEMPLATE) -> Any:
    """transformers' tokenizer with a token for each byte; its files are in the directory afterwards."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {word: number for number, word in enumerate([*SPECIAL, *letters])}
    inner = Tokenizer(models.BPE(ids, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=SPECIAL[0],
        eos_token="<|return|>",
        pad_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[3:]),
    )
    made.chat_template = template
    made.save_pretrained(directory)
    return made


def tokenizer_of(directory: Path, template: str = TEMPLATE) -> HuggingFaceTokenizer:
    save_tokenizer(directory, template)
    return HuggingFaceTokenizer(str(directory))


def save(directory: Path) -> None:
    """Save a tiny GPT-OSS that ends an answer at `<|return|>` only: nothing says that a call ends it too."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    tokenizer = save_tokenizer(directory)
    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=len(tokenizer), max_position_embeddings=2048, num_local_experts=4, num_experts_per_tok=2,
        eos_token_id=2, pad_token_id=1, bos_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    GptOssForCausalLM(config).save_pretrained(directory)
