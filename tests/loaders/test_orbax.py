"""MaxText's checkpoints: arrays by Orbax itself, with MaxText's tree of a Llama; Mixtral's by tensorstore, by hand."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
from safetensors.torch import load_file

import megaconv
from tests.conftest import FIXTURES
from tests.runs import Outcome, assert_refused, run

SCANNED, UNSCANNED = (
    FIXTURES / "orbax-maxtext-scan-bf16",
    FIXTURES / "orbax-maxtext-unscanned-files",
)
LLAMA = FIXTURES / "peft-llama-all-linear/base"
"""A configuration of these sizes."""
HEADS, GROUPS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2
SPLIT = ("--option", "maxtext_rope=split")


def convert(
    path: Path, target: Path, *options: object, config: Path = LLAMA, saver: str = "hf"
) -> Outcome:
    return run("convert", path, target, "--saver", saver, "--config", config, *options)


def as_transformers_has_it(
    arrays: dict[str, torch.Tensor], *, pairs: bool
) -> dict[str, torch.Tensor]:
    """The tensors under transformers' names, by the rules of MaxText's own conversion."""
    arrays = {name.removeprefix("params.params."): tensor for name, tensor in arrays.items()}
    found = {
        "model.embed_tokens.weight": arrays["token_embedder.embedding"],
        "model.norm.weight": arrays["decoder.decoder_norm.scale"],
        "lm_head.weight": arrays["decoder.logits_dense.kernel"].T,
    }
    scanned = "decoder.layers.mlp.wo.kernel" in arrays
    for layer in range(LAYERS):

        def of(name: str, layer: int = layer) -> torch.Tensor:
            return (
                arrays[f"decoder.layers.{name}"].select(1, layer)
                if scanned
                else arrays[f"decoder.layers_{layer}.{name}"]
            )

        def rotating(heads: torch.Tensor) -> torch.Tensor:
            return torch.cat([heads[..., ::2], heads[..., 1::2]], -1) if pairs else heads

        query = (
            of("self_attention.query.kernel").float() * np.float32(np.sqrt(HEAD_DIM))
        ).bfloat16()
        found |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in {
                "self_attn.q_proj": rotating(query).reshape(HIDDEN, -1).T,
                "self_attn.k_proj": rotating(of("self_attention.key.kernel")).reshape(HIDDEN, -1).T,
                "self_attn.v_proj": of("self_attention.value.kernel").reshape(HIDDEN, -1).T,
                "self_attn.o_proj": of("self_attention.out.kernel").reshape(-1, HIDDEN).T,
                "mlp.gate_proj": of("mlp.wi_0.kernel").T,
                "mlp.up_proj": of("mlp.wi_1.kernel").T,
                "mlp.down_proj": of("mlp.wo.kernel").T,
                "input_layernorm": of("pre_self_attention_layer_norm.scale"),
                "post_attention_layernorm": of("post_self_attention_layer_norm.scale"),
            }.items()
        }
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("rope", ["split", "interleaved"])
@pytest.mark.parametrize("fixture", [SCANNED, UNSCANNED], ids=["scanned", "not scanned"])
def test_a_llama_of_maxtext_is_read_bit_for_bit(fixture: Path, rope: str, tmp_path: Path) -> None:
    outcome = convert(fixture / "checkpoint", tmp_path / "out", "--option", f"maxtext_rope={rope}")
    assert outcome.status == 0, outcome.err
    expected = as_transformers_has_it(
        load_file(fixture / "expected.safetensors"), pairs=rope == "interleaved"
    )
    assert_same(load_file(tmp_path / "out/model.safetensors"), expected)


def test_it_is_sharded_on_the_way_and_small_blocks_make_the_same(tmp_path: Path) -> None:
    options = ("--tp", 2, *SPLIT, "--max-memory", "64KiB", "--workers", 1)
    assert (
        convert(SCANNED / "checkpoint/0/items", tmp_path / "core", *options, saver="core").status
        == 0
    )
    assert convert(SCANNED / "checkpoint", tmp_path / "hf", *SPLIT).status == 0
    assert (
        megaconv.fingerprint(tmp_path / "core").weights
        == megaconv.fingerprint(tmp_path / "hf").weights
    )


def test_positions_scaled_as_in_llama_3_1_say_how_q_and_k_rotate(tmp_path: Path) -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text(json.dumps(config | {"rope_parameters": scaling}))
    outcome = convert(UNSCANNED / "checkpoint", tmp_path / "out", config=tmp_path / "config")
    assert outcome.status == 0, outcome.err
    expected = as_transformers_has_it(load_file(UNSCANNED / "expected.safetensors"), pairs=True)
    assert_same(load_file(tmp_path / "out/model.safetensors"), expected)


# Written by hand: zarr 3, experts, padding.


def write_tree(
    path: Path, arrays: dict[str, torch.Tensor], *, ocdbt: bool = True, zarr3: bool = True
) -> Path:
    """An unfinished thing to Orbax, but with all that a reader looks at; every array in chunks of at most 16 along each axis."""
    items = path / "7" / "items"
    items.mkdir(parents=True)
    tree = {}
    for name, tensor in arrays.items():
        words = ("params", "params", *name.split("."))
        base: dict[str, Any] = {"driver": "file", "path": f"{items}/"}
        key = ".".join(words)
        store = (
            {"driver": "ocdbt", "base": base, "path": f"{key}/"}
            if ocdbt
            else {"driver": "file", "path": f"{items}/{key}/"}
        )
        chunk = [min(16, size) for size in tensor.shape]
        written = ts.open(
            {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store}, create=True, dtype=ts.bfloat16, shape=list(tensor.shape),
            chunk_layout=ts.ChunkLayout(chunk_shape=chunk),
        ).result()  # fmt: skip
        bits = tensor.contiguous().view(torch.int16).numpy()
        written.write(bits.view(ts.bfloat16.numpy_dtype)).result()
        tree[str(words)] = {
            "key_metadata": [{"key": word, "key_type": 2} for word in words],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    (items / "_METADATA").write_text(
        json.dumps({"tree_metadata": tree, "use_ocdbt": ocdbt, "use_zarr3": zarr3})
    )
    return path


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def mixtral_arrays(config: dict[str, Any]) -> dict[str, Any]:
    """MaxText's arrays of a Mixtral, with stacked layers and a padded vocabulary."""
    experts, ffn, vocab = (
        config["num_local_experts"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    heads, groups, hidden = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["hidden_size"],
    )
    dim, layers = config.get("head_dim") or hidden // heads, config["num_hidden_layers"]
    return {
        "token_embedder.embedding": drawn(vocab + 29, hidden),
        "decoder.decoder_norm.scale": drawn(hidden),
        "decoder.logits_dense.kernel": drawn(hidden, vocab + 29),
        "decoder.layers.self_attention.query.kernel": drawn(hidden, layers, heads, dim),
        "decoder.layers.self_attention.key.kernel": drawn(hidden, layers, groups, dim),
        "decoder.layers.self_attention.value.kernel": drawn(hidden, layers, groups, dim),
        "decoder.layers.self_attention.out.kernel": drawn(heads, layers, dim, hidden),
        "decoder.layers.pre_self_attention_layer_norm.scale": drawn(hidden, layers),
        "decoder.layers.post_self_attention_layer_norm.scale": drawn(hidden, layers),
        "decoder.layers.MoeBlock_0.gate.kernel": drawn(hidden, layers, experts),
        "decoder.layers.MoeBlock_0.wi_0": drawn(experts, layers, hidden, ffn),
        "decoder.layers.MoeBlock_0.wi_1": drawn(experts, layers, hidden, ffn),
        "decoder.layers.MoeBlock_0.wo": drawn(experts, layers, ffn, hidden),
    }


@pytest.mark.parametrize("ocdbt", [True, False], ids=["OCDBT", "a directory each"])
def test_a_mixtral_with_experts_stacked_and_a_padded_vocabulary(
    ocdbt: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = FIXTURES / "peft-mixtral-experts/base"
    config = json.loads((source / "config.json").read_text())
    arrays, vocab = mixtral_arrays(config), config["vocab_size"]
    path = write_tree(tmp_path / "in", arrays, ocdbt=ocdbt)
    outcome = convert(path, tmp_path / "out", *SPLIT, config=source)
    assert outcome.status == 0, outcome.err
    assert f"{vocab + 29} rows for a vocabulary of {vocab}" in caplog.text
    found = load_file(tmp_path / "out/model.safetensors")
    moe = "model.layers.1.block_sparse_moe"
    assert torch.equal(
        found[f"{moe}.gate.weight"], arrays["decoder.layers.MoeBlock_0.gate.kernel"][:, 1].T
    )
    assert torch.equal(
        found[f"{moe}.experts.2.w3.weight"], arrays["decoder.layers.MoeBlock_0.wi_1"][2, 1].T
    )
    assert torch.equal(
        found[f"{moe}.experts.3.w2.weight"], arrays["decoder.layers.MoeBlock_0.wo"][3, 1].T
    )
    assert torch.equal(
        found["model.embed_tokens.weight"], arrays["token_embedder.embedding"][:vocab]
    )
    assert torch.equal(found["lm_head.weight"], arrays["decoder.logits_dense.kernel"].T[:vocab])


# What is refused.


def copy(tmp_path: Path, fixture: Path = UNSCANNED) -> Path:
    return Path(shutil.copytree(fixture / "checkpoint", tmp_path / "in"))


def refused(
    path: Path, tmp_path: Path, status: int, *words: str, options: tuple[str, ...] = SPLIT
) -> None:
    assert_refused(convert(path, tmp_path / "out", *options), status, *words)
    assert not (tmp_path / "out").exists()


def test_maxtext_needs_an_option_for_the_order_of_rotary_pairs(tmp_path: Path) -> None:
    refused(
        SCANNED / "checkpoint",
        tmp_path,
        2,
        "maxtext_rope=split",
        "maxtext_rope=interleaved",
        options=(),
    )
    refused(
        SCANNED / "checkpoint",
        tmp_path,
        2,
        "choose interleaved or split",
        options=("--option", "maxtext_rope=both"),
    )
    assert_refused(run("fingerprint", SCANNED / "checkpoint"), 2, "give --config")


def test_a_missing_chunk_is_named(tmp_path: Path) -> None:
    path = copy(tmp_path)
    next((path / "0/items").glob("*layers_1.mlp.wo.kernel/0.0")).unlink()
    refused(path, tmp_path, 3, "layers_1.mlp.wo.kernel/0.0 is missing")


def change_array(path: Path, **changed: Any) -> Path:
    """Change the metadata of one matrix; returns its directory."""
    (file,) = (path / "0/items").glob("*layers_1.mlp.wo.kernel/.zarray")
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return file.parent


def test_chunks_are_looked_for_under_the_keys_that_the_metadata_name(tmp_path: Path) -> None:
    """tensorstore reads a chunk that it doesn't find as zeros."""
    path = copy(tmp_path)
    array = change_array(path, dimension_separator="/")
    refused(path, tmp_path, 3, "layers_1.mlp.wo.kernel/0/0 is missing")
    (array / "0").mkdir()
    (array / "0.0").rename(array / "0/0")
    assert convert(path, tmp_path / "out", *SPLIT).status == 0
    assert convert(UNSCANNED / "checkpoint", tmp_path / "expected", *SPLIT).status == 0
    found, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected")
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("encoding", "key"),
    [
        ({"name": "default", "configuration": {"separator": "."}}, "c.0.0"),
        ({"name": "v2"}, "0.0"),
        ({"name": "v2", "configuration": {"separator": "/"}}, "0/0"),
    ],
)
def test_chunks_of_zarr_3_are_looked_for_under_the_keys_that_the_metadata_name(
    encoding: dict[str, Any], key: str, tmp_path: Path
) -> None:
    config = FIXTURES / "peft-mixtral-experts/base"
    raw = json.loads((config / "config.json").read_text())
    path = write_tree(tmp_path / "in", mixtral_arrays(raw), ocdbt=False)
    (file,) = path.glob("7/items/*token_embedder.embedding/zarr.json")
    described = json.loads(file.read_text()) | {"chunk_key_encoding": encoding}
    file.write_text(json.dumps(described))
    outcome = convert(path, tmp_path / "out", *SPLIT, config=config)
    assert_refused(outcome, 3, f"token_embedder.embedding/{key} is missing")


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    path = copy(tmp_path)
    change_array(path, dtype="<i2")
    refused(path, tmp_path, 3, "layers_1.mlp.wo.kernel is of int16, which no weights are")


@pytest.mark.parametrize("name", [".zarray", "0.0"])
def test_a_pipe_in_a_files_place_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = copy(tmp_path)
    file = next((path / "0/items").glob(f"*layers_1.mlp.wo.kernel/{name}"))
    file.unlink()
    os.mkfifo(file)
    refused(path, tmp_path, 3, "is a named pipe")


def test_a_chunk_of_more_than_its_array_is_refused(tmp_path: Path) -> None:
    """It would be decoded whole: from a few bytes, as many as there are."""
    path = copy(tmp_path)
    file = next((path / "0/items").glob("*layers_1.mlp.wo.kernel/.zarray"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chunks": [1 << 16, 1 << 16]}))
    refused(path, tmp_path, 3, "layers_1.mlp.wo.kernel", "more than the array")


def test_steps_in_steps_in_steps_are_no_checkpoint(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("1", dir_fd=descriptor)
        inner = os.open("1", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    outcome = run("fingerprint", tmp_path)
    subprocess.run(["rm", "-rf", tmp_path / "1"], check=True)
    assert_refused(outcome, 3)


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    path = copy(tmp_path, SCANNED)
    file = path / "0/items/manifest.ocdbt"
    file.write_bytes(file.read_bytes()[:-9])
    refused(path, tmp_path, 3, "tensorstore can't open it")


def test_an_array_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    path = copy(tmp_path)
    metadata = path / "0/items/_METADATA"
    found = json.loads(metadata.read_text())
    name = next(key for key in found["tree_metadata"] if "decoder_norm" in key)
    entry = found["tree_metadata"].pop(name)
    metadata.write_text(json.dumps(found))
    refused(path, tmp_path, 3, "lacks decoder.decoder_norm.scale")
    entry["key_metadata"][-1]["key"] = "../../escape"
    metadata.write_text(
        json.dumps({**found, "tree_metadata": found["tree_metadata"] | {name: entry}})
    )
    refused(path, tmp_path, 3, "is not the metadata of an Orbax tree")


def test_a_step_that_was_not_finished_is_refused(tmp_path: Path) -> None:
    path = copy(tmp_path)
    (path / "0").rename(path / "0.orbax-checkpoint-tmp-1")
    refused(path / "0.orbax-checkpoint-tmp-1", tmp_path, 3, "still writing")


def test_a_model_that_maxtext_has_otherwise_is_refused(tmp_path: Path) -> None:
    outcome = convert(
        SCANNED / "checkpoint", tmp_path / "out", config=FIXTURES / "peft-gpt2-conv1d/base"
    )
    assert_refused(outcome, 2, "a gpt2", "llama, mistral, mixtral")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 1}, "has 2 layers; the configuration has 1"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
            "has 8 elements per head; the configuration has 4",
        ),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
            "has 8 elements per head; the configuration has 16",
        ),
    ],
)
def test_stacked_layers_and_heads_are_counted(
    changed: dict[str, int], message: str, tmp_path: Path
) -> None:
    """The sizes of the matrices are right: only the array's axes show the difference."""
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text(json.dumps(config | changed))
    outcome = convert(SCANNED / "checkpoint", tmp_path / "out", *SPLIT, config=tmp_path / "config")
    assert_refused(outcome, 3, message)


def test_stacked_experts_are_counted(tmp_path: Path) -> None:
    source = FIXTURES / "peft-mixtral-experts/base"
    config = json.loads((source / "config.json").read_text())
    path = write_tree(tmp_path / "in", mixtral_arrays(config), ocdbt=False)
    (tmp_path / "config").mkdir()
    experts = config["num_local_experts"]
    fewer = config | {"num_local_experts": experts - 1}
    (tmp_path / "config/config.json").write_text(json.dumps(fewer))
    outcome = convert(path, tmp_path / "out", *SPLIT, config=tmp_path / "config")
    assert_refused(outcome, 3, f"has {experts} experts; the configuration has {experts - 1}")


def test_nothing_imports_tensorstore_that_doesnt_read_arrays() -> None:
    code = (
        "import loaders.orbax, formats.orbax_arrays, sys; assert 'tensorstore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
