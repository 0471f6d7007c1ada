"""The tokens of a large image are written once and multiplied: as if all of them were tokenized."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.chat import ChatTemplate
from megatron_lite.data.finetuning.forms import Chat
from megatron_lite.data.finetuning.image_dataset import READ_AT_ONCE, ImageDataset
from megatron_lite.data.finetuning.image_texts import ImageTexts
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.loop.run import threads_for
from megatron_lite.settings.learning import Data
from tests.trainer.multimodal import tokenizer

IMAGE, TOKEN, BREAK = {"type": "image"}, "<|image_pad|>", "<|video_pad|>"
"""A token between the rows of an image is made of the video's."""


def template(directory: Path) -> ChatTemplate:
    tokenizer().save_pretrained(directory)
    return ChatTemplate(HuggingFaceTokenizer(str(directory)))


def chat(asked: Any, answer: Any) -> Chat:
    return Chat([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}])


@pytest.mark.oracle
def test_multiplied_tokens_are_those_of_the_whole_text(tmp_path: Path) -> None:
    texts = [TOKEN * 300, BREAK.join([TOKEN * 7] * 3) + "end", "\n\n" + TOKEN + "\n\n"]
    made = template(tmp_path).encode(
        chat(
            [IMAGE, {"type": "text", "text": " and "}, IMAGE],
            [IMAGE, {"type": "text", "text": "b"}],
        ),
        ImageTexts(TOKEN, texts, TOKEN),
    )
    first, second, third = (f"<|vision_start|>{text}<|vision_end|>" for text in texts)
    asked = f"<|im_start|>user\n{first} and {second}<|im_end|>\n"
    whole = f"{asked}<|im_start|>assistant\n{third}b<|im_end|>\n"
    inner = tokenizer()
    assert made.ids == inner(whole, add_special_tokens=False).input_ids
    learned = np.array(made.ids)[np.array(made.learned)]
    assert inner.decode(learned) == "<|vision_start|><|vision_end|>b<|im_end|>"


@pytest.mark.oracle
def test_a_text_with_the_token_of_images_is_refused_where_another_word_stands_for_an_image(
    tmp_path: Path,
) -> None:
    """Gemma's template writes another word than the token that is multiplied."""
    images = ImageTexts("<|vision_start|><|image_pad|>", ["<|video_pad|>" * 4], "<|video_pad|>")
    encoder = template(tmp_path)
    made = encoder.encode(chat([IMAGE], "a cat"), images)
    assert inner_count(made.ids, "<|video_pad|>") == 4
    with pytest.raises(BadRecord, match=r"has <\|video_pad\|> in a text, which stands for images"):
        encoder.encode(chat([IMAGE], "a <|video_pad|>"), images)


def inner_count(ids: list[int], word: str) -> int:
    return ids.count(tokenizer().convert_tokens_to_ids(word))


def test_images_of_several_samples_are_read_at_the_same_time() -> None:
    images = ImageDataset.__new__(ImageDataset)
    assert threads_for(images, Data()) == READ_AT_ONCE > 1
    assert threads_for([], Data()) == 1  # type: ignore[arg-type]
