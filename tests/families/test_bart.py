"""BART, mBART, M2M-100, Marian and Pegasus: transformers computes the same logits from what we write, with our own config.json too."""

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
from megaconv.model.config import ModelConfig
from megaconv.model.meaning import lost_fields
from megatron_lite.models.trainable import check_computed
from tests.config_models import raw_config
from tests.two_stacks import assert_files_and_logits_come_back, with_new_config
from tests.whole_models import elements_by_table, elements_of_class

VOCAB = 131
SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 8,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 48, "vocab_size": VOCAB, "max_position_embeddings": 40, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
CLASSES = {
    "bart": ("Bart", "BartForConditionalGeneration"),
    "mbart": ("MBart", "MBartForConditionalGeneration"),
    "m2m_100": ("M2M100", "M2M100ForConditionalGeneration"),
    "marian": ("Marian", "MarianMTModel"),
    "pegasus": ("Pegasus", "PegasusForConditionalGeneration"),
}
OTHERS: dict[str, dict[str, Any]] = {
    "scale": {"scale_embedding": True},
    "activation": {"activation_function": "swish"},
    "encoder's heads": {"encoder_attention_heads": 8},
    "decoder's heads": {"decoder_attention_heads": 4},
}
"""Other values of keys, none of which changes a tensor."""

Models = Callable[..., Path]


def described(kind: str, **keys: Any) -> ModelConfig:
    return family(kind).read_hf(raw_config(kind, **keys))


@pytest.fixture
def models(tmp_path: Path) -> Models:
    transformers = pytest.importorskip("transformers")

    def create(kind: str, **settings: Any) -> Path:
        torch.manual_seed(3)
        name, model_class = CLASSES[kind]
        usual = {"scale_embedding": False, "activation_function": "gelu"}
        config = getattr(transformers, f"{name}Config")(**SIZES | usual | settings)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.3)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name == "final_logits_bias":
                    buffer.normal_(0.0, 0.3)
        directory = tmp_path / f"source-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(directory)
        return directory

    return create


def logits(directory: Path, **settings: Any) -> torch.Tensor:
    import transformers

    kind = json.loads((directory / "config.json").read_text())["model_type"]
    model = getattr(transformers, CLASSES[kind][1]).from_pretrained(directory, **settings).eval()
    tokens = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        computed: torch.Tensor = model(input_ids=tokens, decoder_input_ids=tokens + 7).logits
    return computed


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_the_files_and_the_logits_come_back(
    kind: str, saver: str, models: Models, tmp_path: Path
) -> None:
    source = models(kind)
    assert_files_and_logits_come_back(source, saver, logits, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("change", OTHERS)
def test_each_setting_changes_the_logits_and_is_kept(
    kind: str, change: str, models: Models, tmp_path: Path
) -> None:
    usual, other = models(kind), models(kind, **OTHERS[change])
    expected = logits(other)
    assert not torch.allclose(logits(usual), expected)
    found = [open_checkpoint(path).config for path in (usual, other)]
    assert lost_fields(*found)
    megaconv.convert(other, tmp_path / "copy", saver="hf")
    assert torch.equal(logits(with_new_config(tmp_path / "copy")), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
def test_copies_and_numbers_of_fairseq_in_older_files_are_read(
    kind: str, models: Models, tmp_path: Path
) -> None:
    """Files of transformers 4 hold the embedding in each stack, and as the head."""
    source = models(kind)
    path = source / "model.safetensors"
    tensors, before = load_file(path), logits(source)
    stacks = ("encoder", "decoder")
    names = ["lm_head.weight", *(f"model.{stack}.embed_tokens.weight" for stack in stacks)]
    copies = {name: tensors["model.shared.weight"].clone() for name in names}
    further = {f"model.{stack}.version": torch.ones(1) for stack in stacks}
    if kind in ("m2m_100", "marian"):
        further["model.encoder.embed_positions.weight"] = torch.ones(42, 32)
    save_file({**tensors, **copies, **further}, path, metadata={"format": "pt"})
    megaconv.convert(source, tmp_path / "copy", saver="hf")
    assert torch.equal(logits(tmp_path / "copy"), before)
    copies["model.decoder.embed_tokens.weight"] += 1
    save_file({**tensors, **copies}, path, metadata={"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"embed\.weight.*decoder\.embed_tokens"):
        megaconv.convert(source, tmp_path / "never", saver="hf")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
def test_megatrons_formats_and_training_are_refused(
    kind: str, models: Models, tmp_path: Path
) -> None:
    source = models(kind)
    for saver in ("core", "legacy"):
        with pytest.raises(NotExpressible, match="has no names in Megatron's formats"):
            megaconv.convert(source, tmp_path / "never", saver=saver)
    assert not (tmp_path / "never").exists()
    with pytest.raises(NotExpressible, match="can't be trained yet: its models have an encoder"):
        check_computed(described(kind))


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["bart", "mbart", "marian", "pegasus"])
def test_another_vocabulary_is_refused_because_of_the_bias_of_the_head(
    kind: str, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(NotExpressible, match=r"head\.bias of a \w+ depends on the vocabulary"):
        megaconv.convert(models(kind), tmp_path / "out", saver="hf", vocab_size=140)


@pytest.mark.oracle
def test_an_m2m_100_gets_another_vocabulary(models: Models, tmp_path: Path) -> None:
    source = models("m2m_100")
    megaconv.convert(source, tmp_path / "out", saver="hf", vocab_size=140)
    assert torch.equal(logits(tmp_path / "out")[..., :VOCAB], logits(source))


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CLASSES)
def test_default_models_have_as_many_elements_as_transformers_class(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    name, model_class = CLASSES[kind]
    raw = {"architectures": [model_class], "model_type": kind}
    config = getattr(transformers, f"{name}Config")()
    # The class holds two tables of sines, which files of Marian don't hold. Those of Pegasus may.
    computed = 2 * 1024 * 1024 if kind in ("marian", "pegasus") else 0
    assert elements_by_table(kind, raw) == elements_of_class(model_class, config) - computed


@pytest.mark.oracle
def test_a_pegasus_without_its_tables_of_sines_computes_the_same(
    models: Models, tmp_path: Path
) -> None:
    """transformers computes the tables that files lack."""
    source = models("pegasus")
    path, before = source / "model.safetensors", logits(source)
    tensors = load_file(path)
    tables = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    short = {name: tensor for name, tensor in tensors.items() if name not in tables}
    assert len(tensors) == len(short) + 2
    fingerprints = [megaconv.fingerprint(source).tensors]
    save_file(short, path, metadata={"format": "pt"})
    fingerprints.append(megaconv.fingerprint(source).tensors)
    assert fingerprints[1].items() < fingerprints[0].items()
    megaconv.convert(source, tmp_path / "out", saver="hf")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == short.keys()
    assert torch.equal(logits(tmp_path / "out"), before)
    save_file({**short, tables[0]: tensors[tables[0]]}, path, metadata={"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"model\.decoder\.embed_positions\.weight"):
        megaconv.convert(source, tmp_path / "never", saver="hf")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_new_config_is_read_back_as_the_same_model(kind: str) -> None:
    table = family(kind)
    for raw in (raw_config(kind), raw_config(kind, encoder_attention_heads=8, encoder_ffn_dim=56)):
        written = table.write_hf(table.read_hf(raw))
        assert json.loads(json.dumps(written)) == written
        assert not lost_fields(table.read_hf(raw), table.read_hf(written))
    assert (described(kind).encoder.heads, described(kind).encoder.ffn) == (4, 40)
    same = described(kind, encoder_attention_heads=8, encoder_ffn_dim=56)
    assert (same.encoder.heads, same.encoder.ffn) == (0, 0)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"activation_function": "tanh"}, "activation_function 'tanh' is not supported"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False is not supported"),
        ({"is_decoder": True}, "is_decoder True is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        ({"d_model": 0}, "d_model should be a positive number"),
        ({"encoder_attention_heads": 5}, "encoder_attention_heads 5 doesn't divide d_model 32"),
        ({"decoder_attention_heads": 5}, "decoder_attention_heads 5 doesn't divide d_model 32"),
        ({"decoder_ffn_dim": "wide"}, "decoder_ffn_dim should be a positive number, found 'wide'"),
        ({"encoder_layers": 0}, "encoder_layers should be a positive number"),
        ({"scale_embedding": "yes"}, "scale_embedding should be true or false"),
        ({"hidden_size": 64}, "d_model is 32 and hidden_size 64, two names for one thing"),
    ],
)
def test_settings_without_support_are_refused(kind: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        described(kind, **keys)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"decoder_vocab_size": 99}, "decoder_vocab_size 99 is not supported in this architecture, only vocab_size 131 is"),
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings False is not supported"),
    ],
)  # fmt: skip
def test_a_marian_with_two_embeddings_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        described("marian", **keys)
