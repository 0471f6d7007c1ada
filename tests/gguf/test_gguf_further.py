"""GGUF of the families in megaconv/gguf/architectures.py: read again without a config.json, and refused values."""

from pathlib import Path

import pytest

import megaconv
from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import read_config
from megaconv.gguf.architectures import BY_FAMILY, described
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.meaning import lost_fields
from tests.gguf.further_models import FURTHER
from tests.transformers_oracle import Variant, create, family_of, rope

pytestmark = pytest.mark.oracle

QUICK = ("granite", "gpt_neox")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FURTHER]
WITHOUT_TOKENIZER = {"tokenizer": "none"}


ROUNDED = ("nemotron",)
"""Its norms are stored with 1 added, which rounds float32 values once. A second trip changes nothing."""


def there_and_back(source: Path, place: Path) -> Path:
    megaconv.convert(source, place / "gguf", saver="gguf", options=WITHOUT_TOKENIZER)
    megaconv.convert(place / "gguf", place / "hf", saver="hf")
    return place / "hf"


@pytest.mark.parametrize("name", CASES)
def test_a_file_says_the_whole_model(name: str, tmp_path: Path) -> None:
    source_of_trip = tmp_path / "hf"
    create(FURTHER[name], source_of_trip)
    if name in ROUNDED:
        source_of_trip = there_and_back(source_of_trip, tmp_path / "first")
    back = there_and_back(source_of_trip, tmp_path / "second")
    _, source = read_config(tmp_path / "hf" / "config.json")
    _, found = read_config(back / "config.json")
    assert lost_fields(source, found, but=NOT_COMPUTED) == {}
    assert megaconv.fingerprint(source_of_trip) == megaconv.fingerprint(back)


def test_every_further_family_is_tried() -> None:
    assert {family_of(variant) for variant in FURTHER.values()} == set(BY_FAMILY)


def test_a_file_with_too_many_layers_is_refused_before_they_are_listed() -> None:
    sizes = dict.fromkeys(
        ("embedding_length", "feed_forward_length", "attention.head_count", "context_length"), 8
    )
    keys = {**sizes, "block_count": 2**32 - 1, "attention.layer_norm_epsilon": 1e-5}
    with pytest.raises(CorruptCheckpoint, match=r"layers\.count should be at most"):
        described("cohere2", keys.get, (), 16, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "named"),
    [
        (Variant("phi", {"num_key_value_heads": 8, "hidden_act": "gelu", "layer_norm_eps": 1e-3}), "activation"),
        (Variant("starcoder2", {"norm_epsilon": 1e-3, "sliding_window": 7}), "window"),
        (Variant("arcee", rope(5000.0, rope_type="linear", factor=2.0)), "rope scaling"),
    ],
    ids=["exact gelu", "a window", "rope scaling"],
)  # fmt: skip
def test_a_value_that_llama_cpp_does_not_compute_is_refused(
    variant: Variant, named: str, tmp_path: Path
) -> None:
    create(variant, tmp_path / "hf")
    with pytest.raises(NotExpressible, match=named):
        megaconv.convert(
            tmp_path / "hf", tmp_path / "gguf", saver="gguf", options=WITHOUT_TOKENIZER
        )
    assert not (tmp_path / "gguf").exists()
