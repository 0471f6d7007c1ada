"""A small language model with a tokenizer that ends each text, and the vectors of its texts by transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

WORDS = tuple(f"w{number}" for number in range(60))
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
LENGTH = 64
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}  # fmt: skip


def save(directory: Path, name: str = "llama") -> Path:
    """Write a model and its tokenizer."""
    import transformers

    stem, more = MODELS[name]
    config = getattr(transformers, f"{stem}Config")(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    torch.manual_seed(3)
    getattr(transformers, f"{stem}ForCausalLM")(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer of words, which begins a text with <s> and ends it with </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)  # fmt: skip


def by_transformers(
    directory: Path, texts: Sequence[str], pooling: str, *, length: int = LENGTH
) -> Tensor:
    """The vectors of texts one by one, float32 [texts, hidden]."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=length, return_tensors="pt").input_ids
        with torch.no_grad():
            hidden = model(ids).last_hidden_state[0]
        found.append(hidden[-1] if pooling == "last" else hidden.mean(0))
    return F.normalize(torch.stack(found), dim=1)


def write_queries(path: Path, count: int = 24) -> None:
    """Queries of a topic, with documents of it and hard negatives of another one."""

    def text(topic: int, first: int, length: int) -> str:
        return " ".join(WORDS[(topic * 5 + (first + place) % 5) % 60] for place in range(length))

    with path.open("w") as file:
        for number in range(count):
            topic = number % 12
            record = {
                "query": text(topic, number, 2),
                "pos": [text(topic, number + 1, 4), text(topic, number + 2, 6)],
                "neg": [text((topic + 6) % 12, number, 3)] * (number % 3),
            }
            file.write(json.dumps(record) + "\n")
