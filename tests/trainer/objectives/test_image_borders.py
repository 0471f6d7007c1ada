"""The vectors around and between tiles stand where transformers' processor of Ovis2 writes their tokens."""

import re

import numpy as np
import pytest
import torch

from megatron_lite.objectives.image_borders import with_borders
from tests.trainer.special_tokens import BORDERS

ATOM = "<IMG_ATOM>"


@pytest.mark.oracle
def test_borders_stand_where_the_processor_writes_them() -> None:
    import transformers

    grids = np.array([(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)])
    processor = object.__new__(transformers.Ovis2Processor)
    processor.image_seq_length = 2
    text = "".join(
        processor.replace_image_token({"grids": grids}, number) for number in range(len(grids))
    )
    words = re.findall("<[^>]+>", text)
    tiles = torch.arange(words.count(ATOM)).reshape(-1, 2, 1) + 10
    found = torch.cat(list(with_borders(tiles, torch.arange(5).unsqueeze(1), grids))).flatten()
    numbers = iter(tiles.flatten().tolist())
    expected = [next(numbers) if word == ATOM else BORDERS.index(word) for word in words]
    assert found.tolist() == expected
