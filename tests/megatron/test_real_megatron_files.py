"""Checkpoints written by NVIDIA's own Megatron: we read them to the last bit, and write the same files ourselves."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.tensor import read_tensor
from megaconv.checkpoint import open_checkpoint
from megaconv.engine.conversion import convert
from megaconv.options import ConvertOptions, SaveOptions
from tests.conftest import FIXTURES
from tests.put_together import assert_holds, rank_files

ALL = sorted(path.name for path in FIXTURES.glob("core-*"))
# megaconv reads experts in one tensor (legacygg). Megatron no longer writes them.
WRITTEN = [name for name in ALL if "legacygg" not in name]


def layout_options(args: Namespace) -> dict[str, Any]:
    engine = args.transformer_impl == "transformer_engine"
    return {
        "transformer_impl": args.transformer_impl,
        "grouped_experts": engine and args.moe_grouped_gemm,
    }


@pytest.mark.parametrize("name", ALL)
def test_every_weight_is_read_bit_for_bit(name: str) -> None:
    assert_holds(
        open_checkpoint(FIXTURES / name / "checkpoint"), FIXTURES / name / "expected.safetensors"
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_the_same_model_at_the_same_layout_becomes_the_same_files(
    name: str, tmp_path: Path
) -> None:
    source = FIXTURES / name / "checkpoint"
    theirs = rank_files(source)
    args = next(iter(theirs.values()))["args"]
    convert(
        source, tmp_path / "out", "core", ConvertOptions(save=SaveOptions(**layout_options(args)))
    )
    ours = rank_files(tmp_path / "out")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == (
        source / "latest_checkpointed_iteration.txt"
    ).read_text().strip()
    assert list(ours) == list(theirs)
    vocab = open_checkpoint(source).config.vocab
    for file, state in theirs.items():
        assert ours[file]["iteration"] == state["iteration"]
        assert ours[file]["checkpoint_version"] == state["checkpoint_version"]
        models = [key for key in state if key.startswith("model")]
        assert models == [key for key in ours[file] if key.startswith("model")]
        for model in models:
            assert_same_model(
                ours[file][model], state[model], vocab, int(file.split("mp_rank_")[1][:2])
            )


def assert_same_model(
    ours: dict[str, Any], theirs: dict[str, Any], vocab: int, tp_rank: int
) -> None:
    # The order must be equal too, because it numbers the optimizer state.
    assert list(ours) == list(theirs)
    for name, wanted in theirs.items():
        found = ours[name]
        if wanted is None:
            assert found is None, name
            continue
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
        rows = len(read_tensor(wanted))
        if name.startswith(("embedding.word", "output_layer", "lm_head.output_layer")):
            # Training leaves noise in padding rows.
            rows = min(rows, max(0, vocab - tp_rank * rows))
        assert np.array_equal(read_tensor(found)[:rows], read_tensor(wanted)[:rows]), name


@pytest.mark.parametrize("name", ALL)
def test_an_output_keeps_the_arguments_that_describe_the_model(name: str, tmp_path: Path) -> None:
    """Every attribute that --use-checkpoint-args takes, where Megatron wrote one, has the value that Megatron wrote."""
    source = FIXTURES / name / "checkpoint"
    theirs = next(iter(rank_files(source).values()))["args"]
    convert(
        source, tmp_path / "out", "core", ConvertOptions(save=SaveOptions(**layout_options(theirs)))
    )
    ours = next(iter(rank_files(tmp_path / "out").values()))["args"]
    for attribute in USED_ARGUMENTS:
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute


USED_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings",
    "padded_vocab_size", "num_query_groups", "group_query_attention", "position_embedding_type", "add_position_embedding",
    "rotary_percent", "rotary_interleaved", "rotary_base", "add_bias_linear", "add_qkv_bias", "swiglu", "squared_relu",
    "untie_embeddings_and_output_weights", "normalization", "apply_query_key_layer_scaling", "attention_dropout",
    "hidden_dropout", "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "layernorm_epsilon", "qk_layernorm", "make_vocab_size_divisible_by", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "params_dtype", "bf16", "fp16", "num_experts", "window_size",
)  # fmt: skip
