"""BERT and T5 of Megatron: its own checkpoints and logits, and megatron-core itself.

The fixtures are read and written again, file by file, in test_real_megatron_files.py and test_legacy_files.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.checkpoint import open_checkpoint
from megaconv.errors import TensorMismatch
from tests import encoder_forward
from tests.conftest import FIXTURES
from tests.encoder_cases import (
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

BERTS, T5S = ("core-bert-tp2pp2", "legacy-bert-tp2pp2"), ("core-t5-tp2pp1", "legacy-t5-tp2pp1")


# Checkpoints that Megatron wrote.


@pytest.mark.parametrize("name", BERTS)
def test_a_berts_weights_compute_what_megatron_computed(name: str) -> None:
    asked, expected = question(name)
    answer = encoder_forward.bert(
        open_checkpoint(FIXTURES / name / "checkpoint"), *bert_inputs(asked)
    )
    assert_answers(answer, asked, expected | {"logits": expected["logits"][..., :100]})


@pytest.mark.parametrize("name", T5S)
def test_a_t5s_weights_compute_what_megatron_computed(name: str) -> None:
    asked, expected = question(name)
    checkpoint = open_checkpoint(FIXTURES / name / "checkpoint")
    answer = encoder_forward.t5(checkpoint, asked["input_ids"], asked["decoder_input_ids"])
    assert_close(answer, expected["logits"][..., :100])


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in BERTS for layout in ((1, 1), (4, 1), (2, 2))]
)
def test_a_bert_of_megatron_computes_the_same_at_another_layout(
    name: str, layout: tuple[int, int], megatron: Megatron, tmp_path: Path
) -> None:
    asked, expected = question(name)
    core = convert(FIXTURES / name / "checkpoint", tmp_path / "core", tp=layout[0], pp=layout[1])
    answer = megatron.answer(core, asked)
    assert_answers(answer, asked, expected | {"logits": expected["logits"][..., :100]})


@pytest.mark.oracle
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_t5_of_megatron_core_computes_the_same_at_another_layout(
    tp: int, megatron: Megatron, tmp_path: Path
) -> None:
    asked, expected = question("core-t5-tp2pp1")
    core = convert(FIXTURES / "core-t5-tp2pp1" / "checkpoint", tmp_path / "core", tp=tp)
    assert_close(megatron.answer(core, asked)[..., :100], expected["logits"][..., :100])


@pytest.mark.oracle
def test_a_head_of_its_own_is_cut_as_megatron_core_does(megatron: Megatron, tmp_path: Path) -> None:
    """A model that Megatron core itself loads, made from its own: read, and loaded again at another layout."""
    core = convert(FIXTURES / "core-t5-tp2pp1" / "checkpoint", tmp_path / "core", tp=1)
    state = read_rank_file(first_file(core))
    model, args = state["model"], state["args"]
    for name in [name for name in model if name.endswith("output_layer.bias")]:
        del model[name]
    head = 0.1 * torch.randn(args.padded_vocab_size, 32, generator=torch.Generator().manual_seed(6))
    model |= {"lm_head.output_layer.weight": head, "output_layer.weight": head.clone()}
    args.untie_embeddings_and_output_weights = True
    torch.save(state, first_file(core))
    (core / "megaconv.json").unlink()
    assert not open_checkpoint(core).config.tie_embeddings
    asked, expected = question("core-t5-tp2pp1")
    answer = megatron.answer(core, asked)[..., :100]
    assert (answer - expected["logits"][..., :100]).abs().max() > 0.1
    cut = convert(core, tmp_path / "cut", tp=2)
    assert weights(cut) == weights(core)
    assert_close(megatron.answer(cut, asked)[..., :100], answer)


def test_every_rank_has_the_biases_of_relative_positions_for_all_heads(tmp_path: Path) -> None:
    """Megatron core computes with them in Transformer Engine's attention only, so that no processor can be asked."""
    core = convert(FIXTURES / "core-t5-tp2pp1" / "checkpoint", tmp_path / "core", tp=1)
    state = read_rank_file(first_file(core))
    model, args = state["model"], state["args"]
    for name in [name for name in model if "position_embeddings" in name]:
        del model[name]
    biases = {
        f"{stack}_relative_pos_emb.relative_attention_bias.weight": torch.randn(8, 4)
        for stack in ("encoder", "decoder")
    }
    model |= biases
    (
        args.position_embedding_type,
        args.relative_attention_num_buckets,
        args.relative_attention_max_distance,
    ) = (
        "relative",
        8,
        12,
    )
    torch.save(state, first_file(core))
    (core / "megaconv.json").unlink()
    found = open_checkpoint(core).config
    assert (found.positions.kind, found.positions.buckets, found.positions.max_distance) == (
        "relative",
        8,
        12,
    )
    cut = convert(core, tmp_path / "cut", tp=2)
    assert weights(cut) == weights(core)
    for path in cut.glob("*/mp_rank_*/model_optim_rng.pt"):
        state = read_rank_file(path)
        assert all(torch.equal(state["model"][name], table) for name, table in biases.items())
        assert (
            state["args"].position_embedding_type,
            state["args"].relative_attention_num_buckets,
        ) == ("relative", 8)
    assert "relative positions" in refused(core, tmp_path / "out", "legacy")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("core-bert-tp2pp2", [("legacy", {"tp": 1, "pp": 2}), ("core", {"tp": 4, "pp": 1}), ("core", {"tp": 2, "pp": 2})]),
        ("legacy-bert-tp2pp2", [("core", {"transformer_impl": "transformer_engine"}), ("legacy", {"tp": 1, "pp": 1})]),
        ("core-t5-tp2pp1", [("core", {"tp": 4}), ("core", {"tp": 1})]),
        ("legacy-t5-tp2pp1", [("legacy", {"tp": 4}), ("legacy", {"tp": 1})]),
    ],
    ids=["core bert", "legacy bert", "core t5", "legacy t5"],
)  # fmt: skip
def test_every_step_of_a_chain_holds_the_same_model(
    name: str, steps: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    path = FIXTURES / name / "checkpoint"
    first = open_checkpoint(path)
    for number, (saver, options) in enumerate(steps):
        path = convert(path, tmp_path / str(number), saver, **options)
        assert weights(path) == weights(FIXTURES / name / "checkpoint"), (saver, options)
    assert open_checkpoint(path).config == first.config


def test_a_legacy_t5_with_stacks_alike_becomes_core_and_comes_back(tmp_path: Path) -> None:
    legacy = convert(same_depths(tmp_path / "cut"), tmp_path / "legacy", "legacy", tp=2)
    engine = convert(legacy, tmp_path / "engine", tp=1, transformer_impl="transformer_engine")
    names = read_rank_file(first_file(engine))["model"]
    assert "decoder.layers.0.pre_cross_attn_layernorm._extra_state" in names
    assert "decoder.layers.0.cross_attention.core_attention._extra_state" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_bias" in names
    back = convert(convert(engine, tmp_path / "local", tp=4), tmp_path / "back", "legacy", tp=2)
    assert weights(legacy) == weights(engine) == weights(back)


def same_depths(target: Path) -> Path:
    """Megatron's legacy T5 of 2 + 1 layers without the second of its encoder."""
    source = FIXTURES / "legacy-t5-tp2pp1" / "checkpoint"
    convert(source, target, "legacy", tp=1)
    path = first_file(target)
    state = read_rank_file(path)
    encoder = state["model"]["language_model"]["encoder"]
    for name in [name for name in encoder if name.startswith("layers.1.")]:
        del encoder[name]
    state["args"].num_layers = state["args"].encoder_num_layers = 1
    torch.save(state, path)
    (target / "megaconv.json").unlink()
    return target


# What one side has and the other hasn't.


@pytest.mark.parametrize("name", T5S)
def test_megatrons_t5_is_none_of_transformers(name: str, tmp_path: Path) -> None:
    message = refused(FIXTURES / name / "checkpoint", tmp_path / "out", "hf")
    assert "T5ForConditionalGeneration" in message
    assert "square root of the head size" in message


@pytest.mark.parametrize("name", [*BERTS, *T5S])
def test_metas_files_have_no_place_for_an_encoder(name: str, tmp_path: Path) -> None:
    assert "an encoder" in refused(
        FIXTURES / name / "checkpoint", tmp_path / "out", "llama_mistral"
    )


def test_stacks_of_different_depths_and_missing_norms_are_refused_where_they_can_not_be(
    tmp_path: Path,
) -> None:
    legacy, core = (
        FIXTURES / name / "checkpoint" for name in ("legacy-t5-tp2pp1", "core-t5-tp2pp1")
    )
    assert "1 in its decoder and 2 in its encoder" in refused(legacy, tmp_path / "out", "core")
    assert "no norms at the end of its stacks" in refused(core, tmp_path / "out", "legacy")
    engine = {"transformer_impl": "transformer_engine"}
    assert "no norms at the end of its stacks" in refused(core, tmp_path / "out", "core", **engine)


# Files that hold something else.


def test_parts_of_another_model_are_named(tmp_path: Path) -> None:
    core = convert(FIXTURES / "core-bert-tp2pp2" / "checkpoint", tmp_path / "core", tp=1, pp=1)
    path = first_file(core)
    state = read_rank_file(path)
    del state["model"]["pooler.dense.bias"]
    torch.save(state, path)
    with pytest.raises(TensorMismatch, match=r"missing: pooler\.dense\.bias"):
        open_checkpoint(core)
