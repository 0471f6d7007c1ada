"""A checkpoint of a tiny chat model: transformers' files, a tokenizer of bytes, a chat template."""

from pathlib import Path
from typing import Any

from tests.trainer.inference.models import tiny

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def save(directory: Path, model_type: str = "llama", **settings: Any) -> Any:
    """The model; its files are in the directory afterwards."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate([*SPECIAL, *letters])}, [])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    model = tiny(
        model_type, vocab_size=len(tokenizer), eos_token_id=0, bos_token_id=None, **settings
    )
    model.save_pretrained(directory)
    return model


def decoded(directory: Path, ids: Any) -> str:
    from transformers import AutoTokenizer

    text: str = AutoTokenizer.from_pretrained(directory).decode(ids, skip_special_tokens=True)
    return text
