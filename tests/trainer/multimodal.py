"""Small random multimodal models in Hugging Face's files, with tokenizer and image processor, and chats with images for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.image_processors import image_processor
from tests.trainer.multimodal_configs import MODELS as MODELS  # tests import it here, and token
from tests.trainer.multimodal_configs import WITHOUT_VIDEOS
from tests.trainer.special_tokens import SPECIAL, START
from tests.trainer.special_tokens import token as token

NAMED = {
    "image_token": "<|image_pad|>", "boi_token": START, "eoi_token": "<end_of_image>",
}  # fmt: skip
"""Tokens that transformers' processors of text and images find by name."""
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\
{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLACEHOLDERS = {
    "gemma3": START,
    "aya_vision": "<image>",
    "qianfan_ocr": "<image>",
    "ovis2": "<image>",
}
"""Models whose template writes another token for an image than the one that its encoder's vectors replace."""
SIZES = ((56, 40), (24, 24), (64, 32), (33, 47))
"""(width, height) of the images of the chats."""


def chats() -> list[Any]:
    """Chats in all forms of images that a record may have, and one without an image."""
    return [
        _chat([_image("0.png"), _text("what is it?")], "a cat"),
        _chat([_text("compare "), _image("1.png"), _text(" and "), _url("2.png")], "they differ"),
        _chat("no image", "none"),
        {**_chat("<image>\nhello", "bye"), "images": ["3.png"]},
    ]


def _chat(asked: Any, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        ]
    }


def _text(text: str) -> Any:
    return {"type": "text", "text": text}


def _image(name: str) -> Any:
    return {"type": "image", "image": name}


def _url(name: str) -> Any:
    return {"type": "image_url", "image_url": {"url": name}}


def write_chats(directory: Path, records: Sequence[Any] | None = None) -> Path:
    """Write chats.jsonl and its images."""
    from PIL import Image

    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        pixels = random.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(directory / f"{number}.png")
    path = directory / "chats.jsonl"
    lines = map(json.dumps, chats() if records is None else records)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokenizer(kind: str = "") -> Any:
    """A tokenizer of bytes with the special tokens and the template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    if kind == "gemma3":  # Gemma's tokenizers have a token for each number of line breaks
        inner.add_tokens(["\n\n", "\n\n\n"])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED,
    )
    made.chat_template = TEMPLATE
    if kind in PLACEHOLDERS:
        written = "<|vision_start|><|image_pad|><|vision_end|>"
        made.chat_template = TEMPLATE.replace(written, PLACEHOLDERS[kind])
    return made


def create(kind: str, directory: Path, seed: int = 7) -> None:
    """Write a random model with its tokenizer and image processor."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config_class, fields = MODELS[kind](transformers)
    config = config_class(
        **fields,
        image_token_id=token("<|image_pad|>"),
        tie_word_embeddings=False,
        **({} if kind in WITHOUT_VIDEOS else {"video_token_id": token("<|video_pad|>")}),
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter.fill_(1.0)
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    if kind == "qianfan_ocr":
        _rename_as_published(directory / "model.safetensors")
    tokenizer(kind).save_pretrained(directory)
    image_processor(kind, transformers).save_pretrained(directory)


def _rename_as_published(path: Path) -> None:
    """Give Qianfan-OCR's language model the names of published files: transformers writes some words of the encoder's into them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    written, published = "language_model.model.encoder.layers.", "language_model.model.layers."
    renamed = {name.replace(written, published): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path, metadata={"format": "pt"})
