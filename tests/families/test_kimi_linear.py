"""Kimi Linear under the names of transformers' class, where the gate of the state is a module and experts are stacked."""

from pathlib import Path

import pytest

import megaconv
from tests.transformers_oracle import KIMIS, create, load
from tests.whole_models import weights

pytestmark = pytest.mark.oracle


def test_files_under_the_names_of_transformers_class_are_the_same_model(tmp_path: Path) -> None:
    published, of_class = tmp_path / "published", tmp_path / "class"
    create(KIMIS["kimi_linear"], published)
    load(published).save_pretrained(of_class, save_original_format=False)
    names = weights(of_class)
    assert "model.layers.0.self_attn.forget_gate.A_log" in names
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    megaconv.convert(of_class, tmp_path / "back", saver="hf", verify=True, workers=1)
    assert megaconv.diff(tmp_path / "back", published).same
