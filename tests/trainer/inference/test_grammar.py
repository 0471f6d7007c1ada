"""Answers in JSON: a model that chooses at random writes what the schema allows, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from megatron_lite.inference.batching import generate
from megatron_lite.inference.grammar import ANY_OBJECT, Grammar, json_grammar
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.server.tools import Tools
from megatron_lite.inference.slots import Recomputed
from tests.trainer.inference.conversations import save

pytest.importorskip("llguidance", reason="llguidance is not installed (extra `serve`)")
pytestmark = pytest.mark.oracle

END = 0
VOCAB = 272
"""More than the tokenizer has: models have padded vocabularies."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save(directory)
    return HuggingFaceTokenizer(str(directory))


def written(tokenizer: HuggingFaceTokenizer, grammar: Grammar, count: int, most: int) -> list[str]:
    """Answers of a model whose logits are all equal."""
    model = Recomputed(lambda rows: [torch.zeros(len(row), VOCAB) for row in rows], count, 4096)
    requests = [
        Request((7,), most, Sampling(seed=seed), frozenset([END]), grammar=grammar)
        for seed in range(count)
    ]
    answers = generate(model, requests)
    assert all(answer.end == "stop" for answer in answers)
    return [tokenizer.detokenize(answer.tokens) for answer in answers]


def test_every_answer_is_json_of_the_schema(tokenizer: HuggingFaceTokenizer) -> None:
    grammar = json_grammar(PERSON, tokenizer, VOCAB, frozenset([END]))
    for text in written(tokenizer, grammar, 8, 400):
        person = json.loads(text)
        assert list(person) == ["name", "age", "tags"]
        assert len(person["name"]) <= 5
        assert 0 <= person["age"] <= 150
        assert set(person["tags"]) <= {"a", "b"}


def test_an_answer_ends_with_its_last_brace(tokenizer: HuggingFaceTokenizer) -> None:
    schema = {"const": {"a": 1}}
    grammar = json_grammar(schema, tokenizer, VOCAB, frozenset([END]))
    (text,) = written(tokenizer, grammar, 1, 100)
    assert json.loads(text) == {"a": 1}
    assert text.endswith("}")


PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TRIP = {
    "type": "object",
    "$defs": {"Place": PLACE},
    "properties": {"to": {"$ref": "#/$defs/Place"}},
    "required": ["to"],
    "additionalProperties": False,
}
"""Parameters as clients make them of classes within classes."""


def test_parameters_of_a_demanded_call_may_refer_to_their_definitions(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    names = "go", "fly"
    described = [{"function": {"name": name, "parameters": TRIP}} for name in names]
    schema = Tools(tuple(described), forced=names).schema
    grammar = json_grammar(schema, tokenizer, VOCAB, frozenset([END]))
    for text in written(tokenizer, grammar, 8, 400):
        call = json.loads(text)
        assert call["name"] in names
        assert call["arguments"]["to"]["city"] in ("Bonn", "Rome")


@pytest.mark.parametrize(
    "schema", [{"type": "strange"}, {"$ref": "#/nowhere"}, {"enum": []}, {"$ref": "#"}]
)
def test_a_schema_that_nothing_fits_is_refused(
    tokenizer: HuggingFaceTokenizer, schema: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="the schema can't be"):
        json_grammar(schema, tokenizer, VOCAB, frozenset([END]))


def test_a_tokenizer_without_texts_of_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="NullTokenizer"):
        json_grammar(ANY_OBJECT, NullTokenizer(100), 101, frozenset([100]))
