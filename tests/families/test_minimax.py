"""MiniMax-Text-01: rates that files hold and the class computes, names of experts, the published sizes, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, create
from tests.whole_models import (
    elements_by_table,
    elements_of_class,
    logits_of_text,
    raw_config_of,
    weights,
    write_model_files,
)

PUBLISHED: dict[str, Any] = {
    "model_type": "minimax", "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32, "num_experts_per_tok": 2,
    "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
}  # fmt: skip
"""The sizes of MiniMax-Text-01, which has 456 billion parameters."""
RATE = "model.layers.0.self_attn.slope_rate"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("minimax") / "hf"
    create(CONVERTED["minimax"], directory)
    return directory


@pytest.mark.oracle
def test_rates_are_left_out_and_computed_again(source: Path, tmp_path: Path) -> None:
    assert RATE in weights(source)
    megaconv.convert(source, tmp_path / "dcp", saver="dcp", workers=1)
    megaconv.convert(tmp_path / "dcp", tmp_path / "hf", saver="hf", verify=True, workers=1)
    written = weights(tmp_path / "hf")
    assert RATE not in written
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in written
    found, expected = (load(path) for path in (tmp_path / "hf", source))
    assert torch.equal(logits_of_text(found), logits_of_text(expected))


def load(directory: Path) -> Any:
    """The model, with the rates of a file or, without them, those that the class computes."""
    transformers = pytest.importorskip("transformers")
    return transformers.MiniMaxForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.oracle
def test_the_published_sizes_give_as_many_elements_as_transformers_class() -> None:
    """The class counts its rates as well: four numbers or tables for each head of each layer of lightning attention."""
    transformers = pytest.importorskip("transformers")
    counted = elements_by_table("minimax", PUBLISHED)
    block = transformers.MiniMaxConfig().block_size
    rates = 70 * 64 * (1 + 2 * block + block**2)
    config = transformers.AutoConfig.for_model(**PUBLISHED)
    assert counted + rates == elements_of_class("MiniMaxForCausalLM", config)
    assert counted / 1e9 == pytest.approx(456, rel=2e-3)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.layers.0.self_attn.output_gate.weight", None, "missing"),
        ("model.layers.0.self_attn.qkv_proj.weight", torch.ones(96, 64), r"is \[96, 64\]"),
        ("model.layers.1.self_attn.norm.weight", torch.ones(96), "unknown|not part|unexpected"),
    ],
)
def test_a_missing_misshapen_or_unknown_tensor_is_refused_by_name(
    name: str, change: torch.Tensor | None, words: str, source: Path, tmp_path: Path
) -> None:
    held = weights(source)
    held.pop(name, None)
    changed = held if change is None else held | {name: change}
    hf = write_model_files(tmp_path / "hf", changed, raw_config_of(source))
    with pytest.raises(CheckpointError, match=f"(?s){name}.*({words})|({words}).*{name}"):
        megaconv.convert(hf, tmp_path / "out", saver="hf", workers=1)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
    ({"layer_types": ["linear_attention"]}, "layer_types lists 1 layer, the model has 4"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"mlp_alpha_factor": None}, "mlp_alpha_factor should be a number, found None"),
)


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_settings_that_no_such_model_has_are_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("minimax").read_hf(raw_config("minimax", **keys))
