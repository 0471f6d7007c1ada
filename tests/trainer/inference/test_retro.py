"""Generation of a Retro with passages, and its loss with, without and with random neighbors."""

import json
from pathlib import Path

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import NullTokenizer
from megatron_lite.inference.retrieved import (
    RetrievedModel,
    neighbors_of,
    read_retrieved,
)
from megatron_lite.inference.slots import Feed
from megatron_lite.models.batch import Microbatch
from tests.trainer.parallel.test_retro import Case, array, make_engine


def test_each_token_is_the_one_of_the_whole_text_with_its_passages(tmp_path: Path) -> None:
    """Token by token, the logits are those of one pass over the text, whose chunks all have the passages."""
    engine = make_engine(Case("rope"), trains=False)
    (tmp_path / "asked.jsonl").write_text(
        json.dumps({"prompt": "1 2 3", "neighbors": ["5 6 7", "8 9", "10"]}) + "\n"
    )
    (asked,) = read_retrieved(str(tmp_path / "asked.jsonl"))
    source = neighbors_of(engine, NullTokenizer(95), asked)
    assert source.tolist() == [[5, 6, 7, *[95] * 13], [8, 9, *[95] * 14]]
    model, tokens = RetrievedModel(engine, source, 32), array("rope", "tokens")[0, :24].tolist()
    found = [model.extend([Feed(0, 0, tuple(tokens[:6]))])]
    for place in range(6, 24):
        found.append(model.extend([Feed(0, place, (tokens[place],))]))
    whole = engine.logits(
        Microbatch(torch.tensor([tokens]), torch.tensor([tokens]), source=source.repeat(3, 1))
    )
    assert whole is not None
    torch.testing.assert_close(torch.cat(found), whole[0, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "line", ["no JSON", '{"prompt": "a"}', '{"prompt": "a", "neighbors": "b"}', '{"prompt": "a", "neighbors": []}']
)  # fmt: skip
def test_a_line_without_passages_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=r'asked.jsonl, line 1: expected \{"prompt": text, "neigh'):
        read_retrieved(str(tmp_path / "asked.jsonl"))
