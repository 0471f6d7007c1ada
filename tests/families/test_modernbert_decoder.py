"""ModernBERT's decoders (Ettin): published sizes, both forms of keys, transformers' own save, DCP, and refusals."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.fields import fields_of
from tests.families.test_published_models import PUBLISHED
from tests.transformers_oracle import CONVERTED, assert_comes_back, create
from tests.whole_models import elements_by_table, elements_of_class

SMALL: dict[str, Any] = PUBLISHED["jhu-clsp/ettin-decoder-17m"]["config"]
LARGE: dict[str, Any] = PUBLISHED["jhu-clsp/ettin-decoder-1b"]["config"]


@pytest.mark.oracle
@pytest.mark.parametrize(("raw", "millions"), [(SMALL, 17), (LARGE, 1028)])
def test_published_models_have_as_many_elements_as_transformers_class(
    raw: dict[str, Any], millions: float
) -> None:
    transformers = pytest.importorskip("transformers")
    counted = elements_by_table("modernbert_decoder", raw)
    config = transformers.AutoConfig.for_model(**raw)
    assert counted == elements_of_class("ModernBertDecoderForCausalLM", config)
    assert counted / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.oracle
@pytest.mark.parametrize("raw", [SMALL, LARGE], ids=["17m", "1b"])
def test_transformers_reads_the_older_keys_as_we_do(raw: dict[str, Any]) -> None:
    """The file that transformers 5 writes for them describes the same model."""
    transformers = pytest.importorskip("transformers")
    table = family("modernbert_decoder")
    saved = transformers.AutoConfig.for_model(**raw, dtype="float32").to_dict()
    without = {key: value for key, value in saved.items() if "theta" not in key}
    assert fields_of(table.read_hf(without)) == fields_of(table.read_hf(raw))


def test_every_third_layer_has_no_window_and_a_rope_of_its_own() -> None:
    small = family("modernbert_decoder").read_hf(SMALL)
    assert [kind.window for kind in small.layers] == [None, 64, 64, None, 64, 64, None]
    assert (small.positions.theta, small.positions.local_theta) == (160000.0, 10000.0)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["modernbert_decoder", "modernbert_decoder, biases"])
def test_what_transformers_saves_after_dcp_is_the_same_model(name: str, tmp_path: Path) -> None:
    create(CONVERTED[name], tmp_path / "hf")
    assert_comes_back(tmp_path / "hf", "dcp", tmp_path)


@pytest.mark.oracle
def test_the_first_layer_has_no_norm_before_attention(tmp_path: Path) -> None:
    create(CONVERTED["modernbert_decoder"], tmp_path / "hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", verify=True, workers=1)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    norms = [name for name in sorted(names) if "attn_norm" in name]
    assert norms == [f"model.layers.{layer}.attn_norm.weight" for layer in (1, 2, 3)]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"classifier_bias": True}, "classifier_bias True is not supported"),
        ({"classifier_activation": "relu"}, "classifier_activation 'relu' is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"local_attention": None}, "local_attention should be a positive number, found None"),
        ({"local_attention": 1}, "sliding_window should be a positive number, found 0"),
        ({"sliding_window": 128}, "sliding_window is 128, but half of local_attention is 64; correct one of them"),
        ({"head_dim": 32}, "head_dim is 32, but hidden_size 256 divided by 4 heads is 64; leave head_dim out"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 doesn't divide hidden_size 256"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layer, the model has 7"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling .* is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters should have full_attention and sliding_attention"),
        ({"global_rope_theta": "high"}, "rope_theta should be a number, found 'high'"),
    ],
)  # fmt: skip
def test_a_config_that_no_such_decoder_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("modernbert_decoder").read_hf(SMALL | keys)
