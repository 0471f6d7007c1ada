"""mT5 and UMT5: transformers computes the same logits from what we write, with the config.json that we write ourselves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import CheckpointError, CorruptCheckpoint, NotExpressible, TensorMismatch
from megaconv.families import family
from tests.config_models import raw_config
from tests.encoder_configs import T5
from tests.two_stacks import assert_files_and_logits_come_back, with_new_config
from tests.whole_models import elements_by_table, elements_of_class

VOCAB = 131
SIZES: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": VOCAB,
    "relative_attention_num_buckets": 6, "relative_attention_max_distance": 12,
}  # fmt: skip
CLASSES = {"mt5": "MT5", "umt5": "UMT5"}
KINDS = [
    pytest.param("mt5", {}, False, id="mt5"),
    pytest.param("mt5", {"feed_forward_proj": "relu"}, True, id="mt5, own head"),
    pytest.param("umt5", {}, False, id="umt5"),
    pytest.param("umt5", {"tie_word_embeddings": False}, False, id="umt5, unscaled"),
    pytest.param("umt5", {"tie_word_embeddings": False}, True, id="umt5, unscaled, own head"),
    pytest.param("umt5", {"feed_forward_proj": "gated-silu"}, True, id="umt5, scaled, own head"),
]
OTHERS: dict[str, dict[str, Any]] = {
    "epsilon": {"layer_norm_epsilon": 0.1},
    "distance": {"relative_attention_max_distance": 7},
    "activation": {"feed_forward_proj": "gated-silu"},
}
"""Other values of keys, none of which changes a tensor."""

Models = Callable[..., Path]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    transformers = pytest.importorskip("transformers")

    def create(kind: str, settings: dict[str, Any], own_head: bool = False) -> Path:
        torch.manual_seed(3)
        config = getattr(transformers, f"{CLASSES[kind]}Config")(**SIZES | settings)
        model = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(config)
        if own_head:
            model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, SIZES["d_model"]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
        directory = tmp_path / f"source-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(directory)
        return directory

    return create


def logits(directory: Path, **settings: Any) -> torch.Tensor:
    import transformers

    kind = json.loads((directory / "config.json").read_text())["model_type"]
    found = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")
    model = found.from_pretrained(directory, **settings).eval()
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        computed: torch.Tensor = model(input_ids=tokens, decoder_input_ids=tokens + 7).logits
    return computed


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "settings", "own_head"), KINDS)
@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_the_files_and_the_logits_come_back(
    kind: str,
    settings: dict[str, Any],
    own_head: bool,
    saver: str,
    models: Models,
    tmp_path: Path,
) -> None:
    source = models(kind, settings, own_head)
    assert_files_and_logits_come_back(source, saver, logits, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("change", OTHERS)
def test_each_setting_changes_the_logits_and_is_kept(
    kind: str, change: str, models: Models, tmp_path: Path
) -> None:
    usual, other = models(kind, {}), models(kind, OTHERS[change])
    expected = logits(other)
    assert not torch.allclose(logits(usual), expected)
    megaconv.convert(other, tmp_path / "copy", saver="hf")
    assert torch.equal(logits(with_new_config(tmp_path / "copy")), expected)


@pytest.mark.oracle
def test_outputs_of_a_umt5_are_scaled_or_not(models: Models, tmp_path: Path) -> None:
    scaled, unscaled = models("umt5", {}), models("umt5", {"tie_word_embeddings": False})
    root = SIZES["d_model"] ** 0.5
    assert torch.allclose(logits(scaled) * root, logits(unscaled), rtol=1e-4, atol=1e-4)
    found = [open_checkpoint(path).config.head.divisor for path in (scaled, unscaled)]
    assert found == [root, None]


@pytest.mark.oracle
def test_the_copies_in_older_files_are_read(models: Models, tmp_path: Path) -> None:
    """Files of transformers 4 hold the embedding in each stack."""
    source = models("mt5", {}, own_head=True)
    tensors = load_file(source / "model.safetensors")
    copies = {f"{stack}.embed_tokens.weight": tensors["shared.weight"].clone() for stack in ("encoder", "decoder")}  # fmt: skip
    before = logits(source)
    save_file({**tensors, **copies}, source / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(source, tmp_path / "copy", saver="hf")
    assert torch.equal(logits(tmp_path / "copy"), before)
    copies["decoder.embed_tokens.weight"] += 1
    save_file({**tensors, **copies}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"embed\.weight.*decoder\.embed_tokens"):
        megaconv.convert(source, tmp_path / "never", saver="hf")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
def test_megatrons_formats_are_refused(kind: str, models: Models, tmp_path: Path) -> None:
    source = models(kind, {})
    for saver in ("core", "legacy"):
        with pytest.raises(NotExpressible, match="has no names in Megatron's formats"):
            megaconv.convert(source, tmp_path / "never", saver=saver)
    assert not (tmp_path / "never").exists()


@pytest.mark.oracle
def test_a_table_of_a_layer_is_no_table_of_a_stack(models: Models, tmp_path: Path) -> None:
    """The config.json of the other family describes another function."""
    source = models("umt5", {})
    raw = json.loads((source / "config.json").read_text())
    of_mt5 = {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5"}
    (source / "config.json").write_text(json.dumps(raw | of_mt5))
    with pytest.raises(TensorMismatch, match=r"block\.1\.layer\.0.*relative_attention_bias"):
        open_checkpoint(source)


SMALL: dict[str, Any] = {
    "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6, "vocab_size": 250112,
}  # fmt: skip
"""google/mt5-small and google/umt5-small, whose sizes are the defaults of transformers' classes."""


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
def test_small_models_have_as_many_elements_as_transformers_class_and_a_head(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{CLASSES[kind]}Config")(**SMALL)
    tied = elements_of_class(f"{CLASSES[kind]}ForConditionalGeneration", config)
    assert elements_by_table(kind, raw_config(kind, **SMALL, tie_word_embeddings=True)) == tied
    head = SMALL["vocab_size"] * SMALL["d_model"]
    assert elements_by_table(kind, raw_config(kind, **SMALL)) == tied + head


CONTRADICTIONS = (
    ({"dense_act_fn": "relu"}, "dense_act_fn is 'relu', but feed_forward_proj 'gated-gelu' makes it 'gelu_new'"),
    ({"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu'"),
    ({"is_gated_act": False}, "is_gated_act is False"),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["t5", *CLASSES])
@pytest.mark.parametrize(("keys", "message"), CONTRADICTIONS)
def test_derived_keys_that_contradict_the_activation_are_refused(
    kind: str, keys: dict[str, Any], message: str
) -> None:
    """transformers' class lets them win over feed_forward_proj."""
    raw = T5 if kind == "t5" else raw_config(kind)
    family(kind).read_hf(raw | {"dense_act_fn": "gelu_new", "is_gated_act": True})
    with pytest.raises(CorruptCheckpoint, match=message):
        family(kind).read_hf(raw | keys)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5"])
def test_transformers_lets_the_derived_keys_win(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    stated = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"}
    assert getattr(transformers, f"{kind}Config").from_dict(stated).dense_act_fn == "relu"


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"feed_forward_proj": "swish"}, "feed_forward_proj 'swish' is not supported"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"is_decoder": True}, "is_decoder"),
        ({"d_model": 0}, "d_model should be a positive number"),
    ],
)
def test_settings_without_support_are_refused(
    kind: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        family(kind).read_hf(raw_config(kind, **keys))
