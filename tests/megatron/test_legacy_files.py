"""Megatron's models before core: checkpoints of every version are read to the last bit, and ours are what Megatron writes."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from formats.tensor import Box, read_tensor
from loaders import core as core_loader
from loaders import legacy as legacy_loader
from megaconv.checkpoint import open_checkpoint
from megaconv.engine.conversion import convert, fingerprint
from megaconv.engine.opening import open_source
from megaconv.errors import (
    CorruptCheckpoint,
    LayoutError,
    NotExpressible,
    TensorMismatch,
    UnknownFamily,
    UnknownFormat,
)
from megaconv.input import find_input
from megaconv.megatron.states.legacy_names import flatten, nest, present
from megaconv.model.layout import LayerSplit
from megaconv.options import ConvertOptions, LoadOptions, SaveOptions
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.put_together import assert_holds, rank_files

NEW = sorted(path.name for path in FIXTURES.glob("legacy-*"))
OLD = sorted(path.name for path in FIXTURES.glob("old-gpt2-*"))
LOAD = LoadOptions(true_vocab_size=100)
"""Old files don't say."""

Edit = Callable[[dict[str, Any]], object]


def to_legacy(source: Path, target: Path, **save: Any) -> Path:
    convert(
        source, target, "legacy", ConvertOptions(load=LOAD, save=SaveOptions(**save), workers=2)
    )
    return target


def hf_to_legacy(source: Path, target: Path, **save: Any) -> Path:
    convert(
        source,
        target,
        "megatron",
        ConvertOptions(save=SaveOptions(tp=2, pp=2, vocab_divisor=8, **save)),
    )
    return target


def weights(path: Path, options: LoadOptions = LOAD) -> str:
    return fingerprint(path, options).weights


def weights_of(path: Path) -> str:
    return weights(path, LoadOptions())


def rank_paths(root: Path) -> list[Path]:
    return sorted(root.glob("*/mp_rank_*/model_optim_rng.pt"))


def load(path: Path) -> dict[str, Any]:
    """Load a file with torch, which executes nothing here. Our files may need only Namespace."""
    with torch.serialization.safe_globals([Namespace]):
        state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def edit_ranks(root: Path, edit: Edit) -> None:
    for path in rank_paths(root):
        state = load(path)
        edit(state)
        torch.save(state, path)


# Real files.


def test_the_fixtures_are_there() -> None:
    assert (len(NEW), len(OLD)) == (6, 3)


@pytest.mark.parametrize("name", NEW + OLD)
def test_every_weight_is_read_bit_for_bit(name: str) -> None:
    checkpoint = open_checkpoint(FIXTURES / name / "checkpoint", LOAD)
    assert_holds(checkpoint, FIXTURES / name / "expected.safetensors")


@pytest.mark.parametrize(
    ("name", "activation", "version"),
    [
        ("old-gpt2-tp2-ckptv0", "gelu", 0),
        ("old-gpt2-tp2-ckptv2", "gelu", 2),
        ("old-gpt2-tp2pp2-ckptv3", "gelu_tanh", 3),
    ],
)
def test_values_that_old_arguments_omit_are_known(name: str, activation: str, version: int) -> None:
    source = open_source(find_input(FIXTURES / name / "checkpoint", options=LOAD), LOAD)
    config = source.header.config
    assert (config.family, config.mlp.activation, config.positions.kind, config.norm.kind) == (
        "gpt2",
        activation,
        "learned",
        "LayerNorm",
    )
    assert (
        config.attention.head_dim,
        config.attention.kv_heads,
        config.mlp.ffn,
        config.tie_embeddings,
    ) == (8, 4, 128, True)
    assert source.header.source == f"legacy, torch format, checkpoint version {version}"


def test_without_a_vocabulary_size_old_files_keep_their_padding() -> None:
    assert open_checkpoint(FIXTURES / "old-gpt2-tp2-ckptv2" / "checkpoint").config.vocab == 112


@pytest.mark.parametrize("name", NEW)
def test_the_same_model_at_the_same_layout_becomes_the_same_files(
    name: str, tmp_path: Path
) -> None:
    source = FIXTURES / name / "checkpoint"
    theirs, ours = rank_files(source), rank_files(to_legacy(source, tmp_path / "out"))
    assert list(ours) == list(theirs)
    for file, state in theirs.items():
        assert (ours[file]["iteration"], ours[file]["checkpoint_version"]) == (
            state["iteration"],
            3.0,
        )
        assert_same(
            ours[file]["model"], state["model"], 100, int(file.split("mp_rank_")[1][:2]), ""
        )


def assert_same(
    ours: dict[str, Any], theirs: dict[str, Any], vocab: int, tp_rank: int, path: str
) -> None:
    """Compare two states, also in the order of their modules."""
    assert list(ours) == list(theirs), path
    for name, wanted in theirs.items():
        found, where = ours[name], f"{path}/{name}"
        if isinstance(wanted, dict):
            assert_same(found, wanted, vocab, tp_rank, where)
        elif wanted is None:
            assert found is None, where
        else:
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), where
            rows = len(read_tensor(wanted))
            if (
                "word_embeddings" in where
                or "output_layer" in where
                or where.endswith("/lm_head/bias")
            ):
                # Training leaves noise in padding rows.
                rows = min(rows, max(0, vocab - tp_rank * rows))
            assert np.array_equal(read_tensor(found)[:rows], read_tensor(wanted)[:rows]), where


@pytest.mark.parametrize("name", NEW)
def test_an_output_keeps_the_arguments_that_describe_the_model(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    theirs, ours = (
        next(iter(rank_files(root).values()))["args"]
        for root in (source, to_legacy(source, tmp_path / "out"))
    )
    for attribute in USED_ARGUMENTS:
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert ours.layernorm_epsilon == ours.norm_epsilon
    assert ours.layernorm_zero_centered_gamma is False
    assert ours.use_mcore_models is False


USED_ARGUMENTS = (
    "num_layers", "encoder_num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "max_position_embeddings", "padded_vocab_size", "num_query_groups", "group_query_attention", "position_embedding_type",
    "add_position_embedding", "rotary_percent", "rotary_interleaved", "rotary_base", "add_bias_linear", "add_qkv_bias",
    "swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion", "untie_embeddings_and_output_weights", "normalization",
    "norm_epsilon", "apply_layernorm_1p", "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size", "qk_layernorm", "make_vocab_size_divisible_by",
    "use_legacy_models", "transformer_impl", "params_dtype", "bf16", "fp16", "num_experts",
)  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_old_files_are_written_anew_as_version_3(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    assert weights(to_legacy(source, tmp_path / "out")) == weights(source)
    assert {load(path)["checkpoint_version"] for path in rank_paths(tmp_path / "out")} == {3.0}
    assert {
        tuple(load(path)["model"]["language_model"])[-1] for path in rank_paths(tmp_path / "out")
    } == {"encoder"}


# Older versions, made from newer ones as Megatron's own releases would have had them.


def reorder(state: dict[str, Any], version: int) -> None:
    """Rows [heads, q|k|v, head size] on a rank to the order of an older version."""
    heads = state["args"].num_attention_heads // state["args"].tensor_model_parallel_size
    axes = {0: (1, 0, 2, 3), 1: (0, 2, 1, 3)}[version]
    encoder = state["model"]["language_model"]["encoder"]
    for name, tensor in encoder.items():
        if ".query_key_value." in name and tensor is not None:
            rows = tensor.numpy().reshape(heads, 3, state["args"].kv_channels, -1)
            encoder[name] = torch.from_numpy(
                np.ascontiguousarray(rows.transpose(axes)).reshape(tensor.shape)
            )
    state["checkpoint_version"] = float(version)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    "name", ["old-gpt2-tp2-ckptv2", "legacy-gpt2-tp2pp2", "legacy-gpt2-tp1pp1"]
)
def test_older_orders_of_q_k_and_v_are_read(name: str, version: int, tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / name / "checkpoint", tmp_path / "out")
    edit_ranks(out, lambda state: reorder(state, version))
    checkpoint = open_checkpoint(out, LOAD)
    assert_holds(checkpoint, FIXTURES / name / "expected.safetensors")
    tensor = checkpoint.tensors["layers.1.attn.k.weight"]
    whole, part = read_tensor(tensor), np.empty((14, 32 * 4), np.uint8)
    tensor.read_into(Box(5, 19, 0, 32), part)
    assert np.array_equal(part, whole[5:19])
    convert(out, tmp_path / "core", "core", ConvertOptions(load=LOAD, max_memory=16 << 10))
    assert weights(tmp_path / "core") == weights(FIXTURES / name / "checkpoint")


def test_a_version_without_grouped_queries_can_not_have_them(tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / "legacy-llama-tp2pp2" / "checkpoint", tmp_path / "out")
    edit_ranks(out, lambda state: state.update(checkpoint_version=1.0))
    with pytest.raises(
        CorruptCheckpoint,
        match=r"query_key_value\.weight: checkpoint version 1 has no grouped queries",
    ):
        open_checkpoint(out)


@pytest.mark.parametrize("version", [4.0, 2.5, -1, "3.0", None])
def test_an_unknown_version_is_refused(version: object, tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / "legacy-llama-tp2pp2" / "checkpoint", tmp_path / "out")
    edit_ranks(out, lambda state: state.update(checkpoint_version=version))
    with pytest.raises(
        CorruptCheckpoint, match=r"mp_rank_00_000.*checkpoint_version.*known: 0, 1, 2 and 3"
    ):
        open_checkpoint(out)


def test_a_missing_version_is_not_guessed_for_new_files(tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / "legacy-gpt2-tp2pp2" / "checkpoint", tmp_path / "out")
    edit_ranks(out, lambda state: state.pop("checkpoint_version"))
    with pytest.raises(
        CorruptCheckpoint, match=r"no checkpoint_version.*the order of its q, k, v is unknown"
    ):
        open_checkpoint(out)


# Names.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("language_model.transformer.layers.3.attention.dense.bias", "language_model.encoder.layers.3.self_attention.dense.bias"),
        ("language_model.transformer.layers.0.input_layernorm.weight", "language_model.encoder.layers.0.input_norm.weight"),
        ("language_model.encoder.layers.0.post_attention_layernorm.bias", "language_model.encoder.layers.0.post_attention_norm.bias"),
        ("language_model.encoder.final_layernorm.weight", "language_model.encoder.final_norm.weight"),
        ("language_model.word_embeddings.weight", "language_model.embedding.word_embeddings.weight"),
        ("language_model.encoder.layers.0.self_attention.dense.weight",) * 2,
    ],
)  # fmt: skip
def test_old_spellings_become_present_ones(old: str, new: str) -> None:
    assert present(old) == new


def test_flattening_is_the_inverse_of_nesting() -> None:
    flat = {
        "language_model.embedding.word_embeddings.weight": 1,
        "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight": 2,
        "language_model.encoder.final_norm.weight": 3,
        "language_model.output_layer.weight": 4,
        "word_embeddings_for_head.weight": 5,
    }
    assert nest(flat) == {
        "language_model": {
            "embedding": {"word_embeddings": {"weight": 1}},
            "encoder": {"layers.0.mlp.dense_h_to_4h.weight": 2, "final_norm.weight": 3},
            "output_layer": {"weight": 4},
        },
        "word_embeddings_for_head": {"weight": 5},
    }
    assert dict(flatten(nest(flat))) == flat


def test_the_flat_names_of_the_oldest_files_are_read(tmp_path: Path) -> None:
    source = FIXTURES / "legacy-gpt2-tp1pp1" / "checkpoint"
    out = to_legacy(source, tmp_path / "out")

    def flat(state: dict[str, Any]) -> None:
        model = state["model"]["language_model"]
        state["model"]["language_model"] = {
            "word_embeddings.weight": model["embedding"]["word_embeddings"]["weight"],
            "position_embeddings": model["embedding"]["position_embeddings"],
            **{f"transformer.{name}": tensor for name, tensor in model["encoder"].items()},
        }

    edit_ranks(out, flat)
    assert weights(out) == weights(source)


def test_a_tensor_under_its_old_and_its_new_name_is_refused(tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / "legacy-llama-tp1pp1" / "checkpoint", tmp_path / "out")

    def double(state: dict[str, Any]) -> None:
        encoder = state["model"]["language_model"]["encoder"]
        encoder["final_layernorm.weight"] = encoder["final_norm.weight"]

    edit_ranks(out, double)
    with pytest.raises(
        CorruptCheckpoint, match=r"two tensors language_model\.encoder\.final_norm\.weight"
    ):
        open_checkpoint(out)


# Layouts.


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("legacy-gpt2-tp2pp2", {"tp": 4, "pp": 1}),
        ("legacy-gpt2-tp1pp1", {"tp": 2, "pp": 2}),
        ("legacy-llama-tp2pp2", {"tp": 1, "pp": 4}),
        ("legacy-llama-tp1pp1", {"tp": 4, "pp": 2, "vpp": 2}),
        ("old-gpt2-tp2-ckptv0", {"tp": 4, "pp": 2}),
    ],
)
def test_legacy_to_core_to_legacy_at_other_layouts_is_the_same_model(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    source = FIXTURES / name / "checkpoint"
    convert(source, tmp_path / "core", "core", ConvertOptions(load=LOAD, save=SaveOptions(**sizes)))
    back = to_legacy(tmp_path / "core", tmp_path / "legacy", tp=2, pp=1)
    assert weights(source) == weights(tmp_path / "core") == weights(back)
    assert open_checkpoint(back, LOAD).config == open_checkpoint(source, LOAD).config


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_virtual_stages_hold_the_layers_that_megatron_looks_for_there(
    tied: bool, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", tied=tied)
    out = hf_to_legacy(hf, tmp_path / "out", vpp=2)
    norms = [open_checkpoint(hf).load(f"layers.{layer}.input_norm.weight") for layer in range(4)]
    states = {path.parent.name: load(path) for path in rank_paths(out)}
    assert len(states) == 4
    for (pp_rank, vpp_rank), layer in {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}.items():
        model = states[f"mp_rank_01_{pp_rank:03d}"][f"model{vpp_rank}"]
        encoder = model["language_model"]["encoder"]
        assert torch.equal(encoder["layers.0.input_norm.weight"], norms[layer])
        assert not any(name.startswith("layers.1.") for name in encoder)
        assert ("embedding" in model["language_model"]) == (layer == 0)
        assert ("final_norm.weight" in encoder) == (layer == 3)
        assert ("word_embeddings_for_head" in model) == (tied and layer == 3)
        assert ("output_layer" in model["language_model"]) == (not tied and layer == 3)
    assert weights_of(out) == weights_of(hf)
    convert(out, tmp_path / "back", "hf", ConvertOptions())
    assert weights_of(tmp_path / "back") == weights_of(hf)


def test_a_llama_with_biases_everywhere_fits(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", extra_config={"attention_bias": True, "mlp_bias": True})
    assert weights_of(hf_to_legacy(hf, tmp_path / "out")) == weights_of(hf)


def test_copies_of_a_tied_head_that_differ_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = to_legacy(FIXTURES / "legacy-gpt2-tp2pp2" / "checkpoint", tmp_path / "out")
    before = weights(out)

    def change(state: dict[str, Any]) -> None:
        if "word_embeddings_for_head" in state["model"]:
            state["model"]["word_embeddings_for_head"]["weight"] += 1

    edit_ranks(out, change)
    assert weights(out) == before
    assert "the copy word_embeddings_for_head.weight" in caplog.text


# Which loader.


def test_a_legacy_checkpoint_is_recognised() -> None:
    for name in NEW + OLD:
        path = FIXTURES / name / "checkpoint"
        assert (core_loader.detect(path), legacy_loader.detect(path)) == (False, True)
    core = FIXTURES / "core-llama-tp2pp2" / "checkpoint"
    assert (core_loader.detect(core), legacy_loader.detect(core)) == (True, False)


def test_the_wrong_loader_names_the_right_one() -> None:
    with pytest.raises(UnknownFormat, match=r"is a legacy Megatron checkpoint.*--loader legacy"):
        open_source(find_input(FIXTURES / "legacy-llama-tp1pp1" / "checkpoint", "core"), LOAD)
    with pytest.raises(UnknownFormat, match=r"is a Megatron core checkpoint.*--loader core"):
        open_source(find_input(FIXTURES / "core-llama-tp1pp1" / "checkpoint", "megatron"), LOAD)


# What can't be.

TENSOR = torch.zeros(2)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (
            lambda model: model["language_model"]["encoder"].update(
                {"layers.0.mlp.router.weight": TENSOR}
            ),
            r"experts \(SwitchMLP\), .*not supported: its router has a bias and a sigmoid",
        ),
    ],
)
def test_a_legacy_model_of_another_family_is_refused(edit: Edit, what: str, tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / "legacy-gpt2-tp1pp1" / "checkpoint", tmp_path / "out")
    edit_ranks(out, lambda state: edit(state["model"]))
    with pytest.raises(UnknownFamily, match=f"mp_rank_00.*a legacy model with {what}"):
        open_checkpoint(out)


ENGINE_NAMES = {
    "input_norm.": "self_attention.layernorm_qkv.layer_norm_",
    "self_attention.query_key_value.": "self_attention.layernorm_qkv.",
    "self_attention.dense.": "self_attention.proj.",
    "post_attention_norm.": "layernorm_mlp.layer_norm_",
    "mlp.dense_h_to_4h.": "layernorm_mlp.fc1_",
    "mlp.dense_4h_to_h.": "layernorm_mlp.fc2_",
}


def with_engine_names(state: dict[str, Any]) -> None:
    """Rename the norms as --transformer-impl transformer_engine has them."""
    block = state["model"]["language_model"]["encoder"]
    for name in [name for name in block if name.startswith("layers.")]:
        value, renamed = block.pop(name), name
        for ours, theirs in ENGINE_NAMES.items():
            renamed = renamed.replace(f".{ours}", f".{theirs}")
        if not name.endswith("_extra_state"):
            block[renamed] = value


@pytest.mark.parametrize("name", ["legacy-gpt2-tp2pp2", "legacy-llama-tp2pp2"])
def test_layers_of_transformer_engine_are_read_under_their_names(name: str, tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / name / "checkpoint", tmp_path / "out")
    expected = fingerprint(out).weights
    edit_ranks(out, with_engine_names)
    assert fingerprint(out).weights == expected


def test_norms_after_the_residual_are_refused(tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / "legacy-gpt2-tp1pp1" / "checkpoint", tmp_path / "out")
    edit_ranks(
        out, lambda state: setattr(state["args"], "apply_residual_connection_post_layernorm", True)
    )
    (out / "hf" / "config.json").unlink()
    with pytest.raises(UnknownFamily, match="apply_residual_connection_post_layernorm"):
        open_checkpoint(out)


def test_a_tensor_that_is_unknown_or_missing_is_named(tmp_path: Path) -> None:
    out = to_legacy(FIXTURES / "legacy-gpt2-tp1pp1" / "checkpoint", tmp_path / "out")
    edit_ranks(
        out,
        lambda state: state["model"]["language_model"]["encoder"].update(
            {"layers.0.extra": TENSOR}
        ),
    )
    with pytest.raises(TensorMismatch, match=r"language_model\.encoder\.layers\.0\.extra"):
        open_checkpoint(out)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "norms on q and k"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": 16,
            },
            "a sliding window",
        ),
    ],
    ids=["qwen3", "mistral"],
)
def test_features_that_legacy_models_lack_are_refused(
    words: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", extra_config=words)
    with pytest.raises(
        NotExpressible,
        match=f"legacy models can't represent this model: it has {reason}.*--saver core",
    ):
        hf_to_legacy(hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotExpressible, match="it has experts"):
        to_legacy(FIXTURES / "core-mixtral-seq-tp1ep1" / "checkpoint", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("core-llama-tp1pp2-first1", {}),
        ("legacy-llama-tp1pp1", {"pp": 2, "split": LayerSplit(layers=(1, 3))}),
    ],
)
def test_stages_of_different_sizes_are_refused(
    name: str, save: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(LayoutError, match=r"as many layers on every stage, not 1\+3"):
        to_legacy(FIXTURES / name / "checkpoint", tmp_path / "out", **save)


def test_a_rope_that_legacy_models_would_not_follow_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = write_llama(tmp_path / "hf", extra_config={"rope_theta": 500000.0})
    hf_to_legacy(hf, tmp_path / "out")
    assert "rope theta is 500000, but Megatron's legacy models always use 10000" in caplog.text
