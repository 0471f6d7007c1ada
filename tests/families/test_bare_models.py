"""Models without a head (MistralModel), as sentence-transformers stores them: their class, keys, names and bits come back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.families.parts.bare import FAMILIES
from tests import transformers_oracle as oracle
from tests.runs import run

pytestmark = pytest.mark.oracle
ALL = {
    **oracle.VARIANTS, **oracle.MIXTURES, **oracle.NAMED, **oracle.MIXED_LAYERS, **oracle.BEYOND_MEGATRON,
    **oracle.UNTRAINED, **oracle.CONVERTED,
}  # fmt: skip
VARIANTS = {name: variant for name, variant in ALL.items() if name.partition(",")[0] in FAMILIES}
QUICK = ("llama", "mistral", "qwen3", "gemma3_text", "mixtral", "gpt2")


def held(directory: Path) -> dict[str, Tensor]:
    """All tensors of a model's files by name."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def raw(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def require_same(found: Path, expected: Path) -> None:
    """Both hold the same tensors, and the same config.json."""
    theirs, ours = held(expected), held(found)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert raw(found) == raw(expected)


def create(name: str, directory: Path) -> Path:
    from transformers import AutoModel

    oracle.create(VARIANTS[name], directory, AutoModel)
    assert raw(directory)["architectures"][0].endswith("Model")
    return directory


def test_every_listed_family_has_a_variant() -> None:
    assert {name.partition(",")[0] for name in VARIANTS} == FAMILIES


def require_through_hf(name: str, directory: Path) -> None:
    made = create(name, directory / "model")
    family = name.partition(",")[0]
    assert open_checkpoint(made).config.family == family
    megaconv.convert(made, directory / "out", saver="hf")
    require_same(directory / "out", made)


@pytest.mark.parametrize("name", QUICK)
def test_a_model_without_a_head_stays_one(name: str, tmp_path: Path) -> None:
    require_through_hf(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - set(QUICK)))
def test_every_model_without_a_head_stays_one(name: str, tmp_path: Path) -> None:
    require_through_hf(name, tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_it_comes_back_from_megatron(name: str, tmp_path: Path) -> None:
    made = create(name, tmp_path / "model")
    megaconv.convert(made, tmp_path / "core", saver="core", tp=2, pp=2, ckpt_format="torch_dist")
    assert open_checkpoint(tmp_path / "core").config.tie_embeddings
    megaconv.convert(tmp_path / "core", tmp_path / "out", saver="hf")
    require_same(tmp_path / "out", made)


def test_the_base_of_a_model_without_a_head_gives_its_files_and_bits(tmp_path: Path) -> None:
    made = create("qwen3", tmp_path / "model")
    megaconv.convert(made, tmp_path / "core", saver="core", tp=2)
    for source in (made, tmp_path / "core"):
        out = tmp_path / f"from-{source.name}"
        megaconv.convert(source, out, saver="hf", base=made)
        require_same(out, made)


def test_a_quantized_model_without_a_head_names_its_own_matrices(tmp_path: Path) -> None:
    made = create("qwen3", tmp_path / "model")
    megaconv.convert(made, tmp_path / "out", saver="hf", quantize="fp8-per-channel")
    assert held(made).keys() <= held(tmp_path / "out").keys()
    ignored = raw(tmp_path / "out")["quantization_config"]["ignore"]
    assert "embed_tokens" in ignored
    assert not [name for name in ignored if name.startswith("model.")]
    assert open_checkpoint(tmp_path / "out").config.tie_embeddings


def test_mlx_has_no_class_for_a_model_without_a_head(tmp_path: Path) -> None:
    made = create("qwen3", tmp_path / "model")
    done = run("convert", made, tmp_path / "out", "--saver", "mlx")
    assert (done.status, (tmp_path / "out").exists()) == (2, False)
    assert "mlx-lm's classes have a head for words, and this model has none" in done.err


def test_inspect_shows_that_there_is_no_head(tmp_path: Path) -> None:
    made = create("qwen3", tmp_path / "model")
    assert "vocabulary  131, no head" in run("inspect", made).out


def test_a_model_that_no_family_describes_is_copied_by_its_own_names(tmp_path: Path) -> None:
    """Each token of it attends to the later ones too, as in many embedding models."""
    made = create("qwen3", tmp_path / "model")
    described = raw(made) | {"is_causal": False}
    (made / "config.json").write_text(json.dumps(described))
    done = run("convert", made, tmp_path / "out", "--saver", "hf")
    assert done.status == 0
    assert "tensors keep their names and shapes" in done.err
    assert (
        "this Qwen3Model is not supported: config.json: is_causal False makes an encoder"
        in done.err
    )
    require_same(tmp_path / "out", made)
