"""BERT and T5 of transformers: the same logits from Megatron and from legacy weights, the same files on the way back."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import CorruptCheckpoint, NotExpressible, TensorMismatch
from megaconv.families import families
from tests import encoder_forward
from tests.conftest import FIXTURES
from tests.encoder_cases import (
    TOLERANCE,
    Tensors,
    assert_answers,
    assert_close,
    bert_inputs,
    convert,
    first_file,
    question,
    refused,
    weights,
)
from tests.megatron_oracle import Megatron, read_rank_file

pytestmark = pytest.mark.oracle

VOCAB, LAYERS = 131, 4


# BERT in transformers.

KINDS = {
    "MegatronBertForPreTraining": "megatron-bert",
    "MegatronBertForMaskedLM": "megatron-bert",
    "BertForPreTraining": "bert",
    "BertForMaskedLM": "bert",
    "MegatronBertForSequenceClassification": "megatron-bert",
    "MegatronBertForMultipleChoice": "megatron-bert",
    "BertForSequenceClassification": "bert",
    "BertForMultipleChoice": "bert",
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40,
    "layer_norm_eps": 1e-3,
    "pad_token_id": 0,
}

Models = Callable[..., Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Directories of transformers' models, random in every weight."""
    import transformers

    @cache
    def create(kind: str, activation: str = "gelu") -> Path:
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(KINDS[kind], **SIZES, hidden_act=activation)
        model = getattr(transformers, kind)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2)
        directory = tmp_path_factory.mktemp("bert")
        model.save_pretrained(directory)
        return directory

    return create


def ask() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    tokens, types = (torch.randint(0, high, (2, 16), generator=generator) for high in (VOCAB, 2))
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types}


def transformers_answers(directory: Path) -> Tensors:
    import transformers

    (kind,) = said_by(directory)["architectures"]
    model = getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(**ask())
    return {"logits": found.prediction_logits, "binary_logits": found.seq_relationship_logits}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 1, "pp": 1}, marks=pytest.mark.slow),
        {"tp": 2, "pp": 2},
        pytest.param({"tp": 1, "pp": 2, "vpp": 2}, marks=pytest.mark.slow),
        {"tp": 2, "pp": 2, "layer_split": (1, 3)},
    ],
    ids=str,
)
def test_megatron_computes_what_transformers_computes_with_megatrons_bert(
    layout: dict[str, Any], models: Models, megatron: Megatron, tmp_path: Path
) -> None:
    source = models("MegatronBertForPreTraining")
    core = convert(source, tmp_path / "core", **layout)
    assert_answers(megatron.answer(core, ask()), ask(), transformers_answers(source))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("kind", ["MegatronBertForPreTraining", "BertForPreTraining"])
def test_legacy_weights_compute_what_transformers_computes(
    kind: str, activation: str, models: Models, tmp_path: Path
) -> None:
    """The original BERT too, whose norms lie elsewhere; read from the rank files and their args alone."""
    source = models(kind, activation)
    legacy = convert(source, tmp_path / "legacy", "legacy", tp=2, pp=2)
    (legacy / "hf" / "config.json").unlink()
    answer = encoder_forward.bert(open_checkpoint(legacy), *bert_inputs(ask()))
    assert_answers(answer, ask(), transformers_answers(source))
    args = read_rank_file(first_file(legacy))["args"]
    assert args.apply_residual_connection_post_layernorm == (kind == "BertForPreTraining")
    assert (args.openai_gelu, args.bias_gelu_fusion) == (activation == "gelu_new", False)


@pytest.mark.parametrize(
    ("kind", "saver"),
    [
        ("MegatronBertForPreTraining", "core"), ("MegatronBertForPreTraining", "legacy"), ("BertForPreTraining", "legacy"),
        ("MegatronBertForSequenceClassification", "core"), ("MegatronBertForMultipleChoice", "core"),
        ("BertForSequenceClassification", "legacy"), ("MegatronBertForMultipleChoice", "legacy"),
    ],
)  # fmt: skip
def test_from_hugging_face_and_back_are_the_same_files(
    kind: str, saver: str, models: Models, tmp_path: Path
) -> None:
    source = models(kind)
    there = convert(source, tmp_path / "there", saver, tp=2, pp=2)
    back = convert(there, tmp_path / "back", "hf")
    found, expected = load_file(back / "model.safetensors"), load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert said_by(back) == said_by(source)
    (there / "hf" / "config.json").unlink()
    alone = convert(there, tmp_path / "alone", "hf")
    assert weights(alone) == weights(source)
    written, said = said_by(alone), said_by(source)
    for name in (*SIZES, "architectures", "model_type", "hidden_act"):
        assert written[name] == said[name] or name == "pad_token_id"  # no args record it


def said_by(directory: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((directory / "config.json").read_text()))


def test_older_files_with_copies_and_position_numbers_are_read(
    models: Models, tmp_path: Path
) -> None:
    source = models("BertForPreTraining")
    tensors = load_file(source / "model.safetensors")
    embedding, bias = (
        tensors["bert.embeddings.word_embeddings.weight"],
        tensors["cls.predictions.bias"],
    )
    copies = {
        "cls.predictions.decoder.weight": embedding.clone(),
        "cls.predictions.decoder.bias": bias.clone(),
    }
    numbers = {"bert.embeddings.position_ids": torch.arange(40)[None]}
    save_as(tmp_path / "old", source, tensors | copies | numbers)
    assert weights(tmp_path / "old") == weights(source)
    save_as(
        tmp_path / "torn", source, tensors | copies | {"cls.predictions.decoder.bias": bias + 1}
    )
    with pytest.raises(TensorMismatch, match=r"head\.bias.*decoder\.bias"):
        convert(tmp_path / "torn", tmp_path / "out", "legacy")


def save_as(target: Path, source: Path, tensors: Tensors, **words: Any) -> Path:
    target.mkdir()
    (target / "config.json").write_text(json.dumps(said_by(source) | words))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kind", ["SequenceClassification", "MultipleChoice"])
def test_a_tasks_head_has_the_names_of_megatrons_tasks_in_its_legacy_files(
    kind: str, models: Models, tmp_path: Path
) -> None:
    """Classification and MultipleChoice of megatron/legacy/model: a language model, and a head of one linear layer beside it."""
    source = models(f"BertFor{kind}")
    head = {"SequenceClassification": "classification_head", "MultipleChoice": "multichoice_head"}[
        kind
    ]
    legacy = convert(source, tmp_path / "legacy", "legacy", pp=2)
    last = read_rank_file(legacy / "release" / "mp_rank_00_001" / "model_optim_rng.pt")
    stored, expected = last["model"], load_file(source / "model.safetensors")
    assert stored.keys() == {"language_model", head}
    assert all(
        torch.equal(stored[head][name], expected[f"classifier.{name}"])
        for name in ("weight", "bias")
    )
    assert stored["language_model"]["pooler"].keys() == {"dense.weight", "dense.bias"}
    assert not last["args"].untie_embeddings_and_output_weights
    first = read_rank_file(legacy / "release" / "mp_rank_00_000" / "model_optim_rng.pt")
    assert first["model"].keys() == {"language_model"}


def test_the_refusal_for_core_says_that_core_has_no_such_head(
    models: Models, tmp_path: Path
) -> None:
    report = megaconv.convert(
        models("MegatronBertForMultipleChoice"), tmp_path / "core", saver="core"
    )
    assert any(
        "Megatron core's BERT has no multiple-choice head" in notice for notice in report.notices
    )


def test_a_masked_language_models_files_may_hold_the_other_head_too(
    models: Models, tmp_path: Path
) -> None:
    """Files of bert-base-uncased do."""
    source = models("BertForPreTraining")
    tensors = load_file(source / "model.safetensors")
    said = save_as(tmp_path / "said", source, tensors, architectures=["BertForMaskedLM"])
    legacy = convert(said, tmp_path / "legacy", "legacy", tp=2)
    assert open_checkpoint(legacy).config.head.binary
    assert weights(legacy) == weights(source)


def test_norms_under_the_names_of_the_first_files_are_read(models: Models, tmp_path: Path) -> None:
    source = models("BertForPreTraining")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    assert weights(save_as(tmp_path / "old", source, renamed)) == weights(source)


@pytest.mark.parametrize(("now", "older"), [("weight", "gamma"), ("bias", "beta")])
def test_a_norm_under_both_names_is_refused(
    models: Models, tmp_path: Path, now: str, older: str
) -> None:
    source = models("BertForPreTraining")
    tensors = load_file(source / "model.safetensors")
    name = f"bert.encoder.layer.1.output.LayerNorm.{now}"
    second = name.removesuffix(now) + older
    both = save_as(tmp_path / "both", source, {**tensors, second: tensors[name] + 1})
    one, other = sorted([name, second])
    with pytest.raises(
        TensorMismatch, match=f"holds both {one} and {other}, two names of one tensor"
    ):
        open_checkpoint(both)


# What one side has and the other hasn't.


def test_the_original_bert_is_refused_where_norms_only_come_first(
    models: Models, tmp_path: Path
) -> None:
    assert "choose --saver legacy" in refused(
        models("BertForPreTraining"), tmp_path / "out", "core"
    )


def test_a_bert_without_its_binary_head_is_refused(models: Models, tmp_path: Path) -> None:
    message = refused(models("MegatronBertForMaskedLM"), tmp_path / "out", "core")
    assert "2 token types and no binary head" in message


def test_two_activations_are_refused_unless_that_is_allowed(models: Models, tmp_path: Path) -> None:
    """Megatron's usual ones to transformers, and the other way round."""
    core = FIXTURES / "core-bert-tp2pp2" / "checkpoint"
    assert "--allow-lossy activation" in refused(core, tmp_path / "out", "hf")
    hf = convert(core, tmp_path / "hf", "hf", allow_lossy=("activation",))
    assert said_by(hf)["hidden_act"] == "gelu_new"
    assert weights(hf) == weights(core)
    assert "--allow-lossy activation" in refused(hf, tmp_path / "again", "core")
    back = convert(hf, tmp_path / "back", allow_lossy=("activation",))
    assert (
        open_checkpoint(back).config.mlp.activation,
        open_checkpoint(back).config.head.activation,
    ) == ("gelu_tanh", "gelu")
    assert open_checkpoint(core).config.head.activation == "gelu"


def test_the_allowed_change_of_the_activation_changes_logits_little(tmp_path: Path) -> None:
    asked, expected = question("core-bert-tp2pp2")
    hf = convert(
        FIXTURES / "core-bert-tp2pp2" / "checkpoint",
        tmp_path / "hf",
        "hf",
        allow_lossy=("activation",),
    )
    import transformers

    model = transformers.MegatronBertForPreTraining.from_pretrained(hf).eval()
    with torch.no_grad():
        found = model(**asked)
    difference = (
        (found.prediction_logits - expected["logits"][..., :100])[asked["attention_mask"].bool()]
        .abs()
        .max()
    )
    assert TOLERANCE < difference < 1e-3
    assert_close(found.seq_relationship_logits, expected["binary_logits"])


# transformers' T5.

T5_SIZES = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCAB,
    "relative_attention_num_buckets": 6,
}


@pytest.fixture(scope="session")
def hf_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    config = transformers.T5Config(**T5_SIZES)
    torch.manual_seed(4)
    directory = tmp_path_factory.mktemp("t5")
    transformers.T5ForConditionalGeneration(config).save_pretrained(directory)
    return directory


def test_transformers_t5_is_read_and_written_and_nothing_that_megatron_has(
    hf_t5: Path, tmp_path: Path
) -> None:
    config = open_checkpoint(hf_t5).config
    assert (
        config.encoder.layers,
        config.layer_count,
        config.positions.kind,
        config.positions.buckets,
    ) == (3, 2, "relative", 6)
    copy = convert(hf_t5, tmp_path / "copy", "hf")
    found, expected = (load_file(path / "model.safetensors") for path in (copy, hf_t5))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for saver in ("core", "legacy"):
        assert "square root of the head size" in refused(hf_t5, tmp_path / "out", saver)
    written = families()["t5"].write_hf(config)
    said = said_by(hf_t5)
    assert {name: said[name] for name in written if name in said} == {
        name: value for name, value in written.items() if name in said
    }


@pytest.fixture(scope="session")
def newer_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 1.1, with a head of its own and outputs without a scale, as transformers 5 saves it."""
    import transformers

    config = transformers.T5Config(
        **T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    torch.manual_seed(5)
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    directory = tmp_path_factory.mktemp("newer-t5")
    model.save_pretrained(directory)
    return directory


def t5_logits(directory: Path) -> torch.Tensor:
    import transformers

    model = transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, decoder_input_ids=tokens + 7).logits
    return logits


def test_a_head_of_its_own_is_known_by_the_scale_of_outputs(newer_t5: Path, tmp_path: Path) -> None:
    said = said_by(newer_t5)
    assert (said["tie_word_embeddings"], said["scale_decoder_outputs"]) == (True, False)
    config = open_checkpoint(newer_t5).config
    assert not config.tie_embeddings
    copy = convert(newer_t5, tmp_path / "copy", "hf")
    found, expected = (load_file(path / "model.safetensors") for path in (copy, newer_t5))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(t5_logits(copy), t5_logits(newer_t5))
    (copy / "config.json").write_text(json.dumps(families()["t5"].write_hf(config)))
    assert torch.equal(t5_logits(copy), t5_logits(newer_t5))


@pytest.mark.parametrize("activation", ["relu", "gated-gelu", "gated-silu"])
@pytest.mark.parametrize("saver", ["hf", "dcp"])
def test_a_shared_head_without_a_scale_is_read_as_transformers_5_saves_it(
    saver: str, activation: str, tmp_path: Path
) -> None:
    """A T5 1.1 that was made with transformers 5: it has no head of its own."""
    import transformers

    config = transformers.T5Config(
        **T5_SIZES, feed_forward_proj=activation, tie_word_embeddings=False
    )
    torch.manual_seed(6)
    source = tmp_path / "source"
    transformers.T5ForConditionalGeneration(config).save_pretrained(source)
    said = said_by(source)
    assert (said["tie_word_embeddings"], said["scale_decoder_outputs"]) == (True, False)
    assert "lm_head.weight" not in load_file(source / "model.safetensors")
    found = open_checkpoint(source).config
    assert (found.tie_embeddings, found.head.divisor) == (True, None)

    convert(source, tmp_path / "there", saver)
    copy = convert(tmp_path / "there", tmp_path / "copy", "hf")
    tensors, expected = (load_file(path / "model.safetensors") for path in (copy, source))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert said_by(copy)["scale_decoder_outputs"] is False
    assert torch.equal(t5_logits(copy), t5_logits(source))
    (copy / "config.json").write_text(json.dumps(families()["t5"].write_hf(found)))
    assert torch.equal(t5_logits(copy), t5_logits(source))


def test_a_tied_t5_divides_its_outputs_by_the_root_of_the_width(hf_t5: Path) -> None:
    config = open_checkpoint(hf_t5).config
    assert config.head.divisor == config.hidden**0.5


def test_a_t5_of_transformers_4_without_its_own_head_is_refused(
    newer_t5: Path, tmp_path: Path
) -> None:
    tensors = load_file(newer_t5 / "model.safetensors")
    del tensors["lm_head.weight"]
    broken = save_as(tmp_path / "broken", newer_t5, tensors, tie_word_embeddings=False)
    with pytest.raises(TensorMismatch, match=r"lm_head\.weight"):
        open_checkpoint(broken)


def test_outputs_that_are_scaled_without_a_tied_head_are_refused(
    newer_t5: Path, tmp_path: Path
) -> None:
    scaled = save_as(
        tmp_path / "scaled",
        newer_t5,
        load_file(newer_t5 / "model.safetensors"),
        tie_word_embeddings=False,
        scale_decoder_outputs=True,
    )
    with pytest.raises(NotExpressible, match="outputs are scaled if its head is tied"):
        open_checkpoint(scaled)


def test_an_encoder_of_an_impossible_depth_is_refused_at_once(hf_t5: Path, tmp_path: Path) -> None:
    broken = save_as(
        tmp_path / "broken", hf_t5, load_file(hf_t5 / "model.safetensors"), num_layers=10**9
    )
    with pytest.raises(CorruptCheckpoint, match="num_layers should be at most 2,000"):
        open_checkpoint(broken)
