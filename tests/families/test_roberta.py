"""RoBERTa and its like: transformers computes the same logits from what we write, with the config.json that we write ourselves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import CheckpointError, NotExpressible, TensorMismatch
from megaconv.families import family
from tests.config_models import raw_config
from tests.whole_models import elements_by_table, elements_of_class

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 131,
    "max_position_embeddings": 40, "type_vocab_size": 1, "layer_norm_eps": 1e-3, "bos_token_id": 0, "pad_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
CLASSES = ("Roberta", "XLMRoberta", "Camembert")
OTHERS: dict[str, dict[str, Any]] = {
    "epsilon": {"layer_norm_eps": 0.1},
    "activation of the layers": {"hidden_act": "gelu_new"},
    "first position": {"pad_token_id": 5},
}
"""Other values of keys, none of which changes a tensor."""

Models = Callable[..., Path]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    transformers = pytest.importorskip("transformers")

    def create(name: str, **settings: Any) -> Path:
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**SIZES | settings)
        model = getattr(transformers, f"{name}ForMaskedLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
        directory = tmp_path / f"source-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(directory)
        return directory

    return create


def logits(directory: Path) -> torch.Tensor:
    """Those of a whole text, and of a text with padding at its end."""
    import transformers

    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(directory).eval()
    tokens = 7 + torch.arange(40).reshape(2, 20)
    tokens[1, 15:] = model.config.pad_token_id
    with torch.no_grad():
        computed: torch.Tensor = model(tokens, attention_mask=tokens != tokens[1, -1]).logits
    return torch.cat([computed[0], computed[1, :15]])


def with_new_config(directory: Path) -> Path:
    """The directory with a config.json made from the description of its model alone."""
    written = family("roberta").write_hf(open_checkpoint(directory).config)
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def stored(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return found


def store(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def assert_same_tensors(found: Path, expected: Path) -> None:
    ours, theirs = stored(found), stored(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.oracle
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_the_files_and_the_logits_come_back(
    name: str, saver: str, models: Models, tmp_path: Path
) -> None:
    """The classes compute the same, so that a new config.json may name the first one."""
    source = models(name)
    megaconv.convert(source, tmp_path / "there", saver=saver)
    megaconv.convert(tmp_path / "there", tmp_path / "back", saver="hf")
    assert_same_tensors(tmp_path / "back", source)
    kept = json.loads((tmp_path / "back" / "config.json").read_text())
    assert kept["architectures"] == [f"{name}ForMaskedLM"]
    expected = logits(source)
    assert torch.equal(logits(tmp_path / "back"), expected)
    assert torch.equal(logits(with_new_config(tmp_path / "back")), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("change", OTHERS)
def test_each_setting_changes_the_logits_and_is_kept(
    change: str, models: Models, tmp_path: Path
) -> None:
    usual, other = models("Roberta"), models("Roberta", **OTHERS[change])
    expected = logits(other)
    assert not torch.allclose(logits(usual), expected, rtol=0, atol=1e-5)
    megaconv.convert(other, tmp_path / "copy", saver="hf")
    assert torch.equal(logits(with_new_config(tmp_path / "copy")), expected)


@pytest.mark.oracle
def test_xlm_roberta_base_has_as_many_elements_as_transformers_class() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 250002,
        "max_position_embeddings": 514, "type_vocab_size": 1,
    }  # fmt: skip
    counted = elements_by_table("roberta", raw_config("roberta", **sizes))
    config = transformers.XLMRobertaConfig(**sizes)
    assert counted == elements_of_class("XLMRobertaForMaskedLM", config)
    assert family("roberta").read_hf(raw_config("roberta", **sizes)).max_positions == 512


@pytest.mark.oracle
def test_the_transform_before_the_head_has_an_exact_gelu_whatever_the_layers_have(
    models: Models,
) -> None:
    config = open_checkpoint(models("Roberta", hidden_act="gelu_new")).config
    assert (config.mlp.activation, config.head.activation) == ("gelu_tanh", "gelu")


@pytest.mark.oracle
def test_what_published_files_hold_besides_is_kept_or_known(models: Models, tmp_path: Path) -> None:
    """A pooler is kept. Position numbers and second names of shared tensors need no tensor of their own."""
    source = models("XLMRoberta")
    tensors = stored(source)
    pooler = {"roberta.pooler.dense.weight": torch.randn(32, 32), "roberta.pooler.dense.bias": torch.randn(32)}  # fmt: skip
    store(source, tensors | pooler)
    megaconv.convert(source, tmp_path / "plain", saver="hf")
    assert_same_tensors(tmp_path / "plain", source)
    megaconv.convert(source, tmp_path / "dcp", saver="dcp")
    megaconv.convert(tmp_path / "dcp", tmp_path / "back", saver="hf")
    assert_same_tensors(tmp_path / "back", source)
    embedding = tensors["roberta.embeddings.word_embeddings.weight"]
    second = {
        "roberta.embeddings.position_ids": torch.arange(40)[None],
        "lm_head.decoder.weight": embedding.clone(),
        "lm_head.decoder.bias": tensors["lm_head.bias"].clone(),
    }
    store(source, tensors | pooler | second)
    megaconv.convert(source, tmp_path / "again", saver="hf")
    assert logits(tmp_path / "again").equal(logits(tmp_path / "plain"))
    second["lm_head.decoder.bias"] += 1
    store(source, tensors | pooler | second)
    with pytest.raises(TensorMismatch, match=r"head\.bias.*decoder\.bias"):
        megaconv.convert(source, tmp_path / "never", saver="hf")


@pytest.mark.oracle
@pytest.mark.parametrize("saver", ["core", "legacy", "torch_dist"])
def test_megatrons_formats_are_refused(saver: str, models: Models, tmp_path: Path) -> None:
    options = {"saver": "core", "ckpt_format": saver} if saver == "torch_dist" else {"saver": saver}
    refused = "XLMRobertaForMaskedLM has no names in Megatron's formats"
    with pytest.raises(NotExpressible, match=refused):
        megaconv.convert(models("XLMRoberta"), tmp_path / "never", **options)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id should be a number from 0 to 62.*found None"),
        ({"pad_token_id": -1}, "pad_token_id should be a number from 0 to 62.*found -1"),
        ({"pad_token_id": 63}, "pad_token_id should be a number from 0 to 62.*found 63"),
        ({"pad_token_id": True}, "pad_token_id should be a number from 0 to 62.*found True"),
        ({"is_decoder": True}, "is_decoder True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"type_vocab_size": 0}, "type_vocab_size should be a positive number"),
    ],
)
def test_settings_without_support_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family("roberta").read_hf(raw_config("roberta", **keys))


def test_a_text_is_as_long_as_the_rows_after_the_padding_token() -> None:
    config = family("roberta").read_hf(raw_config("roberta", pad_token_id=5))
    assert (config.positions.offset, config.max_positions) == (6, 58)
