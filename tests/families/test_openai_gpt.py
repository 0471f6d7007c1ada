"""GPT-1: files of the bare model with stored masks, other classes, adapters of matrices [in, out], and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family, read_config
from tests.families.test_published_models import PUBLISHED
from tests.runs import run
from tests.transformers_oracle import BEYOND_MEGATRON, compute, create, load

GPT: dict[str, Any] = PUBLISHED["openai-community/openai-gpt"]["config"]
TOKENS = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("gpt") / "hf"
    create(BEYOND_MEGATRON["openai_gpt"], path)
    return path


@pytest.mark.oracle
def test_the_published_form_has_the_weights_of_the_same_model(source: Path, tmp_path: Path) -> None:
    """It has the names of the bare model, the mask of each layer, and keys that the class doesn't read."""
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    raw = json.loads((source / "config.json").read_text())
    raw |= {"n_ctx": 96, "n_special": 0, "predict_special_tokens": True}
    (published / "config.json").write_text(json.dumps(raw))
    whole = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 96, 96).tril() for layer in range(4)}
    save_file(bare | masks, published / "model.safetensors", metadata={"format": "pt"})
    made = megaconv.convert(published, out, saver="hf", verify=True)
    assert made.fingerprint == megaconv.fingerprint(source)
    assert torch.equal(compute(load(out), TOKENS), compute(load(source), TOKENS))


def test_megatrons_formats_are_refused_by_the_place_of_the_norms(
    source: Path, tmp_path: Path
) -> None:
    for saver in ("core", "legacy"):
        with pytest.raises(NotExpressible, match=r"norm\.place is 'after_sum'"):
            megaconv.convert(source, tmp_path / "out", saver=saver)


def test_an_adapter_of_a_matrix_that_is_stored_transposed_is_merged(
    source: Path, tmp_path: Path
) -> None:
    module = "transformer.h.1.attn.c_attn"
    random = torch.Generator().manual_seed(1)
    before = load_file(source / "model.safetensors")
    inputs, outputs = before[f"{module}.weight"].shape
    a, b = torch.randn(2, inputs, generator=random), torch.randn(outputs, 2, generator=random)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = f"base_model.model.{module}.lora_"
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, adapter / "adapter_model.safetensors")
    done = run("merge", source, adapter, "--save-dir", tmp_path / "out")
    assert done.status == 0, done.err
    after = load_file(tmp_path / "out" / "model.safetensors")
    expected = before[f"{module}.weight"] + 2 * (b @ a).T
    torch.testing.assert_close(after[f"{module}.weight"], expected)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"afn": "gelu_new"}, "afn 'gelu_new' is not supported"),
        ({"n_head": 11}, "n_head 11 doesn't divide n_embd 768"),
        ({"n_layer": 0}, "n_layer should be a positive number, found 0"),
        ({"n_positions": "512"}, "n_positions should be a positive number, found '512'"),
        ({"vocab_size": None}, "vocab_size should be a positive number, found None"),
        ({"num_hidden_layers": 11}, "two names for one thing"),
        ({"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon: .* should be 0 or more"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings should be true or false"),
    ],
)
def test_a_config_that_no_gpt_has_is_refused_with_its_key(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("openai_gpt").read_hf(GPT | keys)


def test_a_class_with_other_heads_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT | {"architectures": ["OpenAIGPTDoubleHeadsModel"]}))
    with pytest.raises(CheckpointError, match="OpenAIGPTDoubleHeadsModel"):
        read_config(path)


def test_missing_keys_have_the_defaults_of_the_class() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.OpenAIGPTConfig()
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 40478}
    found = family("openai_gpt").read_hf({"model_type": "openai-gpt", **sizes})
    assert found.max_positions == theirs.n_positions
    assert found.norm.epsilon == theirs.layer_norm_epsilon
    assert found.tie_embeddings == theirs.tie_word_embeddings
    assert found.mlp.activation == "gelu_tanh"
