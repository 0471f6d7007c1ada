"""The embeddings of Megatron's own checkpoints of biencoders."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from megaconv.errors import UsageError
from megatron_lite.inference.towers import open_towers
from tests.conftest import FIXTURES
from tests.trainer.retriever import FIXTURES as OF_TRAINER
from tests.trainer.retriever import SAMPLES

VOCABULARY = Namespace(
    vocab_file=str(OF_TRAINER / "retriever" / "vocab.txt"),
    merge_file=None,
    tokenizer_type=None,
    tokenizer_model=None,
    training=None,
)


@pytest.mark.parametrize("name", ["separate", "shared"])
def test_towers_of_a_checkpoint_embed_rows_of_any_length(name: str) -> None:
    towers = open_towers(VOCABULARY, str(FIXTURES / f"biencoder-legacy-{name}"), None)
    queries = SAMPLES["train/query"][:4].astype(np.int64)
    whole = towers.query(queries)
    assert whole.shape == (4, towers.width)
    assert towers.width == {"separate": 16, "shared": 32}[name]
    assert towers.seq_length == 64
    shorter = int((queries != 0).sum(1).max())
    assert np.allclose(towers.query(queries[:, :shorter]), whole, atol=1e-5)
    same_tower = np.array_equal(towers.context(queries), whole)
    assert same_tower == (name == "shared")


def test_another_model_is_refused() -> None:
    place: Path = FIXTURES / "legacy-bert-tp2pp2" / "checkpoint"
    with pytest.raises(UsageError, match="is a bert; a biencoder was expected"):
        open_towers(VOCABULARY, str(place), None)
