"""The run says how many tokens images have, and which of them don't fit into a sample."""

from pathlib import Path

import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.finetuning.examples import ReadingOptions, read_examples
from megatron_lite.data.finetuning.pieces import pieces_for
from megatron_lite.data.finetuning.splits import split_datasets
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.objectives.examples import remarks
from tests.trainer.multimodal import create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
SMALLER = "a smaller size in preprocessor_config.json gives images fewer tokens"


@pytest.mark.oracle
def test_images_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """The chats have 74, 90, 33 and 56 tokens. Their images have 35, 9 and 32, none, and 24."""
    create("qwen2_5_vl", tmp_path / "model")
    options = ReadingOptions(images=ImageReader(tmp_path / "model"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "model"))
    examples = read_examples([str(write_chats(tmp_path))], tokenizer, options)

    def said(length: int) -> list[str]:
        return list(remarks(pieces_for(examples, length), length, "example", ""))

    assert said(90) == []
    # Without its last token, a chat keeps its images.
    assert said(88) == ["warning: 1 example is longer than --seq-length 88 and was cut"]
    assert said(64)[-1] == (
        f"warning: 3 images are in no sample, because --seq-length 64 is too short; {SMALLER}"
    )
    assert said(54)[-1].startswith("warning: 3 images are in no sample")
    assert said(40)[-1].startswith("warning: 4 images are in no sample")
    with pytest.raises(CorruptCheckpoint, match=f"An image has up to 35 tokens; {SMALLER}"):
        split_datasets(pieces_for(examples, 20), None, None, 20, 1, (None, 0, 0))
