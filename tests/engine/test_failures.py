"""Broken checkpoints: one clear line, exit status 3 (6 where a file is hostile), nothing left behind, nothing changed."""

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.forks import start
from tests.models import write_llama
from tests.rank_states import edit, rank_paths
from tests.runs import assert_refused, finish, run, unchanged

Edit = Callable[[dict[str, Any]], object]


def assert_convert_refuses(source: Path, status: int, *words: str, saver: str = "core") -> None:
    """Neither a conversion nor anything that reads the checkpoint gets further than one clear line."""
    with unchanged(source.parent):
        arguments = [
            "convert",
            "--load-dir",
            source,
            "--saver",
            saver,
            "--save-dir",
            source.parent / "out",
        ]
        assert_refused(run(*arguments), status, *words)


# Hugging Face directories.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=2)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=2, shards=3)


def edit_json(path: Path, edit: Edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_tensors(model: Path, edit: Edit) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors")


def test_a_missing_tensor_is_named(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert_convert_refuses(model, 3, "model.layers.1.mlp.up_proj.weight", "missing")


def test_an_unknown_tensor_is_named(model: Path) -> None:
    edit_tensors(
        model, lambda tensors: tensors.update({"model.layers.1.mlp.extra.weight": torch.zeros(2)})
    )
    assert_convert_refuses(model, 3, "model.layers.1.mlp.extra.weight", "unknown")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    assert_convert_refuses(model, 3, "model.norm.weight", "[31]", "[32]")


def test_a_tensor_of_another_rank_is_refused(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, 1)}))
    assert_convert_refuses(model, 3, "model.norm.weight", "[32, 1]")


def test_a_tied_model_whose_head_differs_from_its_embedding_is_refused(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=2, tied=True)
    edit_tensors(
        model,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
        ),
    )
    assert_convert_refuses(model, 3, "lm_head.weight")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 5_000, -1])
def test_a_safetensors_file_that_is_cut_off_is_refused(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_convert_refuses(model, 3, "model.safetensors")


def test_a_safetensors_file_with_bytes_too_many_is_refused(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    assert_convert_refuses(model, 3, "model.safetensors")


def test_a_safetensors_file_of_garbage_is_refused(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x40" + bytes(7) + bytes(range(64)) * 10)
    assert_convert_refuses(model, 3, "model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_recognised(model: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    oid = "sha256:4665465468798465465465465465465465465465465465465465465465465465"
    (model / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid {oid}\nsize 4976698672\n"
    )
    assert_convert_refuses(model, 3, name, "git lfs pull")


@pytest.mark.parametrize("format", ["bin", "legacy_bin"])
@pytest.mark.parametrize("keep", [0, 10, 1_000, -100])
def test_a_bin_file_that_is_cut_off_is_refused(tmp_path: Path, format: str, keep: int) -> None:  # noqa: A002
    model = write_llama(tmp_path / "model", layers=2, format=format)
    file = model / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:keep])
    assert_convert_refuses(model, 3, "pytorch_model.bin")


@pytest.mark.parametrize(
    "content", [[torch.zeros(2)], {"model.norm.weight": "a word"}, {5: torch.zeros(2)}, None]
)
def test_a_bin_file_that_holds_something_else_is_refused(tmp_path: Path, content: object) -> None:
    model = write_llama(tmp_path / "model", layers=2, format="bin")
    torch.save(content, model / "pytorch_model.bin")
    assert_convert_refuses(model, 3, "pytorch_model.bin")


def test_a_directory_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert_convert_refuses(model, 3, "no weights", "model.safetensors")


def test_a_directory_without_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert_convert_refuses(tmp_path / "model", 3, "is an empty directory")


def test_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert_convert_refuses(tmp_path / "model", 2, "model: no such file or directory")


# Indexes of sharded models.


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "..", "sub/model.safetensors", ""]
)
def test_an_index_that_leaves_its_directory_is_unsafe(sharded: Path, name: str) -> None:
    index = sharded / "model.safetensors.index.json"
    edit_json(index, lambda content: content["weight_map"].update({"lm_head.weight": name}))
    assert_convert_refuses(sharded, 6, repr(name))


@pytest.mark.parametrize("name", ["model-00009-of-00009.safetensors", "a\0b", "x" * 300])
def test_an_index_that_names_a_file_that_is_not_there_is_refused(sharded: Path, name: str) -> None:
    index = sharded / "model.safetensors.index.json"
    edit_json(index, lambda content: content["weight_map"].update({"lm_head.weight": name}))
    assert_convert_refuses(sharded, 3, "no such file")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert_convert_refuses(
        sharded,
        3,
        f"{sharded / 'model-00002-of-00003.safetensors'}: no such file",
        "names 3 files, 1 of them missing",
    )


def test_a_whole_model_beside_shards_is_read_with_a_warning(
    sharded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does: the one file hides the shards, from an earlier or a later save."""
    other = write_llama(tmp_path / "other", layers=2, seed=7)
    shutil.copy(other / "model.safetensors", sharded)
    outcome = run("convert", sharded, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0
    assert "model.safetensors.index.json, two models; model.safetensors is read" in caplog.text
    assert run("diff", other, tmp_path / "out").status == 0


def test_a_run_in_the_directory_of_a_model_is_read_with_a_warning(
    sharded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_llama(tmp_path / "other", layers=2, seed=7)
    assert run("convert", other, tmp_path / "run", "--saver", "core").status == 0
    assert run("fingerprint", tmp_path / "run").status == 0
    assert "two models" not in caplog.text
    shutil.copytree(tmp_path / "run", sharded, dirs_exist_ok=True)
    assert run("diff", other, sharded).status == 0
    message = "holds a Megatron run and a Hugging Face model, two models; the run is read"
    assert message in caplog.text
    caplog.clear()
    (sharded / "megaconv.json").unlink()
    assert run("diff", other, sharded, "--loader-b", "hf").status == 4
    assert "two models" not in caplog.text


def test_shards_without_their_index_are_no_mystery(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "model-00002-of-00003.safetensors").unlink()  # with all shards, no index is needed
    assert_convert_refuses(
        sharded, 3, "model.safetensors.index.json is missing, which lists model-"
    )


def test_weights_of_another_name_are_named(sharded: Path) -> None:
    for path in sharded.glob("model*"):
        path.unlink()
    (sharded / "weights.pt").write_bytes(b"")
    assert_convert_refuses(sharded, 3, "it holds weights.pt", "expected one of model.safetensors")


def test_a_tensor_that_the_index_places_in_another_shard_is_named(sharded: Path) -> None:
    index, other = sharded / "model.safetensors.index.json", "model-00001-of-00003.safetensors"
    edit_json(index, lambda content: content["weight_map"].update({"lm_head.weight": other}))
    assert_convert_refuses(sharded, 3, "lm_head.weight", other)


def test_a_tensor_that_the_index_does_not_list_is_named(sharded: Path) -> None:
    edit_json(
        sharded / "model.safetensors.index.json",
        lambda content: content["weight_map"].pop("lm_head.weight"),
    )
    assert_convert_refuses(sharded, 3, "lm_head.weight", "model-00003-of-00003.safetensors")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "{}", '{"weight_map": []}', "\ufeff{}", "[" * 100_000]
)
def test_an_index_that_is_no_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert_convert_refuses(sharded, 3, "model.safetensors.index.json", "is not a ")


# config.json.


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"llama"', "[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert_convert_refuses(model, 3, "config.json")


def test_a_configuration_in_another_encoding_is_refused(model: Path) -> None:
    (model / "config.json").write_bytes(b"\xff\xfe{}")
    assert_convert_refuses(model, 3, "config.json")


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"],
)
@pytest.mark.parametrize("value", [None, "many", 0, -1, 1.5, True, []])
def test_a_configuration_without_a_size_is_refused_and_names_it(
    model: Path, key: str, value: object
) -> None:
    edit_json(model / "config.json", lambda config: config.update({key: value}))
    assert_convert_refuses(model, 3, "config.json", key)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": "four"},
        {"head_dim": -4},
        {"head_dim": 3.5},
        {"rms_norm_eps": "small"},
        {"rope_theta": "large"},
        {"rope_theta": None},
        {"rope_scaling": ["linear"]},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": "eight"}},
        {"rope_parameters": 7},
        {"max_position_embeddings": "long"},
        {"architectures": 5},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"quantization_config": "hqq"},
        {"eos_token_id": {"id": 2}},
        {"torch_dtype": 16},
    ],
    ids=str,
)
def test_a_configuration_with_values_of_a_wrong_kind_never_ends_in_a_traceback(
    model: Path, changes: Any
) -> None:
    """A conversion succeeds only if the value has no effect."""
    edit_json(model / "config.json", lambda config: config.update(changes))
    outcome = run(
        "convert", "--load-dir", model, "--saver", "core", "--save-dir", model.parent / "out"
    )
    # This key changes nothing: tensors have a dtype of their own.
    if changes == {"torch_dtype": 16}:
        assert outcome.status == 0, outcome.err
    else:
        assert outcome.status != 0
        assert_refused(outcome, outcome.status)


@pytest.mark.parametrize("layers", [3, 500, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_configuration_with_more_layers_than_there_are_tensors_for_is_refused_at_once(
    tmp_path: Path, layers: int
) -> None:
    model = write_llama(tmp_path / "model", layers=2)
    edit_json(model / "config.json", lambda config: config.update(num_hidden_layers=layers))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))"
    outcome = finish(
        start(
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            tmp_path / "out",
            before=limit,
        ),
        10,
    )
    assert_refused(outcome, 3, "missing", "model.layers.2.")


def test_a_configuration_with_fewer_layers_than_there_are_tensors_for_is_refused(
    model: Path,
) -> None:
    edit_json(model / "config.json", lambda config: config.update(num_hidden_layers=1))
    assert_convert_refuses(model, 3, "unknown", "model.layers.1.")


@pytest.mark.parametrize(
    ("asked", "words"),
    [("Lama2ForCausalLM", "LlamaForCausalLM"), ("BlenderbotModel", "megaconv formats")],
)
def test_an_unknown_architecture_is_refused_with_the_nearest_known_ones(
    asked: str, words: str, model: Path
) -> None:
    edit_json(model / "config.json", lambda config: config.update(architectures=[asked]))
    assert_convert_refuses(model, 3, asked, words)


def test_quantized_weights_are_refused(model: Path) -> None:
    edit_json(
        model / "config.json",
        lambda config: config.update(quantization_config={"quant_method": "hqq"}),
    )
    assert_convert_refuses(model, 3, "quantized", "hqq")


# Megatron directories.


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("core")
    write_llama(root / "model")
    outcome = run(
        "convert",
        "--load-dir",
        root / "model",
        "--saver",
        "core",
        "--save-dir",
        root / "ckpt",
        "--tp",
        2,
        "--pp",
        2,
    )
    assert outcome.status == 0, outcome.err
    return root / "ckpt"


@pytest.fixture
def ckpt(converted: Path, tmp_path: Path) -> Path:
    """A Megatron checkpoint, tp 2, pp 2."""
    return Path(shutil.copytree(converted, tmp_path / "ckpt"))


def rank_file(ckpt: Path, tp_rank: int, pp_rank: int) -> Path:
    return ckpt / "release" / f"mp_rank_{tp_rank:02d}_{pp_rank:03d}" / "model_optim_rng.pt"


def edit_rank(file: Path, edit: Edit) -> None:
    with torch.serialization.safe_globals([Namespace]):
        state = torch.load(file, weights_only=True)
    edit(state)
    torch.save(state, file)


FC1, NORM = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"


def test_a_tensor_that_a_rank_file_lacks_is_named_with_the_file(ckpt: Path) -> None:
    edit_rank(rank_file(ckpt, 1, 0), lambda state: state["model"].pop(FC1))
    assert_convert_refuses(ckpt, 3, FC1, "missing", "mp_rank_01_000", saver="hf")


def test_a_tensor_that_only_one_rank_file_has_is_named_with_the_file(ckpt: Path) -> None:
    edit_rank(
        rank_file(ckpt, 0, 1),
        lambda state: state["model"].update({"decoder.extra.weight": torch.zeros(2)}),
    )
    assert_convert_refuses(ckpt, 3, "decoder.extra.weight", "unknown", "mp_rank_00_001", saver="hf")


@pytest.mark.parametrize("shape", [(), (8,), (56, 31), (28, 32), (56, 32, 1), (0, 32)])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_tensor_of_another_shape_in_a_rank_file_is_refused(
    ckpt: Path, tp_rank: int, shape: tuple[int, ...]
) -> None:
    edit_rank(
        rank_file(ckpt, tp_rank, 0),
        lambda state: state["model"].update({FC1: torch.zeros(shape, dtype=torch.bfloat16)}),
    )
    assert_convert_refuses(ckpt, 3, FC1, str(list(shape)), saver="hf")


@pytest.mark.parametrize(
    "name", ["embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc2.weight"]
)
@pytest.mark.parametrize("shape", [(), (7,)])
def test_a_tensor_that_sizes_are_read_off_may_have_any_shape(
    ckpt: Path, name: str, shape: tuple[int, ...]
) -> None:
    edit_rank(
        rank_file(ckpt, 0, 0),
        lambda state: state["model"].update({name: torch.zeros(shape, dtype=torch.bfloat16)}),
    )
    assert_convert_refuses(ckpt, 3, saver="hf")


def test_ranks_of_different_dtypes_are_refused(ckpt: Path) -> None:
    edit_rank(
        rank_file(ckpt, 1, 0),
        lambda state: state["model"].update({FC1: state["model"][FC1].float()}),
    )
    assert_convert_refuses(ckpt, 3, FC1, "float32", "bfloat16", saver="hf")


def test_a_replica_that_differs_on_another_rank_is_reported_and_the_first_copy_wins(
    ckpt: Path,
) -> None:
    """Real training runs leave such differences; Megatron itself reads only one of the copies."""
    expected = run("fingerprint", ckpt).out
    edit_rank(rank_file(ckpt, 1, 1), lambda state: state["model"][NORM].add_(1))
    outcome = finish(start("fingerprint", ckpt))
    assert (outcome.status, outcome.out) == (0, expected)
    assert re.fullmatch(
        r"megaconv: warning: final_norm.*mp_rank_01_001.*other values.*\n",
        outcome.err,
        re.IGNORECASE,
    ), outcome.err


@pytest.mark.parametrize("value", [None, "a word", 7, [torch.zeros(2)]])
def test_a_parameter_that_is_no_tensor_is_refused(ckpt: Path, value: object) -> None:
    edit_rank(rank_file(ckpt, 0, 1), lambda state: state["model"].update({NORM: value}))
    assert_convert_refuses(ckpt, 3, NORM, "should be a tensor", saver="hf")


@pytest.mark.parametrize(
    "name", ["decoder.layers.x.mlp.linear_fc1.weight", "decoder.layers.", "", 5, None, (1, 2)]
)
def test_a_parameter_with_an_impossible_name_is_refused(ckpt: Path, name: object) -> None:
    edit_rank(rank_file(ckpt, 0, 1), lambda state: state["model"].update({name: torch.zeros(2)}))
    assert_convert_refuses(ckpt, 3, saver="hf")


def test_a_layer_number_beyond_all_bounds_is_refused_at_once(ckpt: Path) -> None:
    def edit(state: dict[str, Any]) -> None:
        state["model"]["decoder.layers.999999999999.mlp.linear_fc1.weight"] = torch.zeros(2)
        state["args"].num_layers = 1_000_000_000_002

    shutil.rmtree(ckpt / "hf")  # a config.json would contradict
    edit_rank(rank_file(ckpt, 0, 0), edit)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))"
    outcome = finish(
        start(
            "convert",
            "--load-dir",
            ckpt,
            "--saver",
            "hf",
            "--save-dir",
            ckpt.parent / "out",
            before=limit,
        ),
        10,
    )
    assert_refused(outcome, 3)


@pytest.mark.parametrize(
    "content",
    [[], {}, {"model": None}, {"model": []}, {"model": {}}, {"modelx": {}}, {1: 2}, {"model0": {}}],
)
def test_a_rank_file_without_a_model_is_refused(ckpt: Path, content: object) -> None:
    torch.save(content, rank_file(ckpt, 0, 0))
    assert_convert_refuses(ckpt, 3, "mp_rank_00_000", saver="hf")


def test_a_rank_file_without_arguments_is_refused(ckpt: Path) -> None:
    edit_rank(rank_file(ckpt, 0, 0), lambda state: state.pop("args"))
    assert_convert_refuses(ckpt, 3, "mp_rank_00_000", "args", saver="hf")


ARGUMENTS = (
    ("num_layers", "four"), ("num_attention_heads", 0), ("num_attention_heads", "8"), ("num_attention_heads", 3),
    ("num_query_groups", "4"), ("num_query_groups", 0), ("num_query_groups", 3), ("kv_channels", "4"), ("kv_channels", -4),
    ("max_position_embeddings", None), ("max_position_embeddings", "64"), ("norm_epsilon", "small"), ("rotary_base", "large"),
    ("rotary_base", None), ("window_size", 5), ("window_size", ("a", 0)), ("window_size", ()), ("make_vocab_size_divisible_by", "128"),
    ("make_vocab_size_divisible_by", -1), ("vocab_size", -5), ("vocab_size", "131"), ("rope_scaling_factor", "eight"),
    ("rotary_seq_len_interpolation_factor", "two"), ("consumed_train_samples", "many"), ("position_embedding_type", "learned_absolute"),
    ("normalization", "LayerNorm"), ("swiglu", False), ("layernorm_zero_centered_gamma", True),
)  # fmt: skip


WITHOUT_EFFECT = (("rotary_base", None), ("window_size", ()))
"""They are read as Megatron's default."""


@pytest.mark.parametrize(("name", "value"), ARGUMENTS)
def test_arguments_with_impossible_values_never_end_in_a_traceback(
    ckpt: Path, name: str, value: object
) -> None:
    """A conversion succeeds only if the value has no effect."""
    shutil.rmtree(ckpt / "hf")  # with a config.json, the arguments would not be read
    edit_rank(
        rank_file(ckpt, 0, 0),
        lambda state: state["args"].__dict__.update(
            {name: value, "use_rope_scaling": "rope" in name}
        ),
    )
    outcome = run("convert", "--load-dir", ckpt, "--saver", "hf", "--save-dir", ckpt.parent / "out")
    if (name, value) in WITHOUT_EFFECT:
        assert outcome.status == 0, outcome.err
    else:
        assert outcome.status != 0
        assert_refused(outcome, outcome.status)


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "max_position_embeddings", "num_query_groups"]
)
def test_a_missing_argument_is_named(ckpt: Path, name: str) -> None:
    shutil.rmtree(ckpt / "hf")
    edit_rank(rank_file(ckpt, 0, 0), lambda state: state["args"].__dict__.pop(name))
    assert_convert_refuses(ckpt, 3, name, "--config", saver="hf")


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 64},
        {"num_hidden_layers": 6},
        {"num_attention_heads": 4},
        {"hidden_size": 64},
    ],
)
def test_a_configuration_of_another_model_beside_the_rank_files_is_refused(
    ckpt: Path, changes: dict[str, int]
) -> None:
    edit_json(ckpt / "hf" / "config.json", lambda config: config.update(changes))
    assert_convert_refuses(ckpt, 3, "config.json", "another model", saver="hf")


def test_a_checkpoint_of_legacy_megatron_is_recognised(ckpt: Path) -> None:
    edit_rank(rank_file(ckpt, 0, 0), lambda state: state.update(model={"language_model": {}}))
    arguments = [
        "convert",
        "--loader",
        "core",
        "--load-dir",
        ckpt,
        "--saver",
        "hf",
        "--save-dir",
        ckpt.parent / "out",
    ]
    with unchanged(ckpt.parent):
        assert_refused(run(*arguments), 3, "legacy Megatron", "--loader legacy")


def test_a_checkpoint_that_is_legacy_in_part_is_refused(ckpt: Path) -> None:
    edit_rank(rank_file(ckpt, 0, 0), lambda state: state.update(model={"language_model": {}}))
    assert_convert_refuses(ckpt, 3, "layers", saver="hf")


@pytest.mark.parametrize("word", ["7", "5000000000000", "9" * 300, "9" * 4000, "release"])
def test_a_tracker_that_points_nowhere_is_refused(ckpt: Path, word: str) -> None:
    (ckpt / "release").rename(ckpt / "iter_0000001")
    (ckpt / "latest_checkpointed_iteration.txt").write_text(word)
    message = word if len(word) < 18 else f"{len(word)} characters"
    assert_convert_refuses(ckpt, 3, "latest_checkpointed_iteration.txt", message, saver="hf")


@pytest.mark.parametrize(
    "content", [b"", b"five", b"-1", b"1.0", b"../..", b"\xff\xfe", b"1\n2", b"\0", "²".encode()]
)
def test_a_tracker_of_garbage_is_refused(ckpt: Path, content: bytes) -> None:
    (ckpt / "latest_checkpointed_iteration.txt").write_bytes(content)
    assert_convert_refuses(
        ckpt, 3, "latest_checkpointed_iteration.txt", "iteration number", saver="hf"
    )


@pytest.mark.parametrize(("tp_rank", "pp_rank"), [(0, 0), (0, 1), (1, 0)])
def test_a_missing_rank_directory_is_named(ckpt: Path, tp_rank: int, pp_rank: int) -> None:
    shutil.rmtree(rank_file(ckpt, tp_rank, pp_rank).parent)
    assert_convert_refuses(
        ckpt, 3, f"tensor rank {tp_rank}", f"pipeline rank {pp_rank}", saver="hf"
    )


def test_a_missing_tensor_parallel_rank_is_noticed_by_the_sizes(ckpt: Path) -> None:
    for pp_rank in range(2):
        shutil.rmtree(rank_file(ckpt, 1, pp_rank).parent)
    assert_convert_refuses(ckpt, 3, saver="hf")


def test_a_missing_pipeline_stage_is_noticed_by_its_layers(ckpt: Path) -> None:
    """Args of old releases have no sizes, so only the layers show it."""
    for tp_rank in range(2):
        shutil.rmtree(rank_file(ckpt, tp_rank, 1).parent)
    edit(rank_paths(ckpt), args={"pipeline_model_parallel_size": None})
    assert_convert_refuses(ckpt, 3, "2 layers", "4", "stage missing", saver="hf")


def test_a_missing_rank_file_is_named(ckpt: Path) -> None:
    rank_file(ckpt, 1, 1).unlink()
    assert_convert_refuses(ckpt, 3, str(rank_file(ckpt, 1, 1)), saver="hf")


def test_rank_directories_of_different_kinds_are_refused(ckpt: Path) -> None:
    shutil.copytree(rank_file(ckpt, 0, 0).parent, ckpt / "release" / "mp_rank_00")
    assert_convert_refuses(ckpt, 3, "mp_rank_00,", "mp_rank_00_000", saver="hf")


@pytest.mark.parametrize("keep", [0, 3, 100, 20_000, -30, -1])
def test_a_rank_file_that_is_cut_off_is_refused(ckpt: Path, keep: int) -> None:
    file = rank_file(ckpt, 1, 1)
    file.write_bytes(file.read_bytes()[:keep])
    assert_convert_refuses(ckpt, 3, str(file), saver="hf")


# Hostile files.


class Attack:
    """Unpickled by torch.load(weights_only=False) it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("command", ["convert", "inspect", "fingerprint"])
def test_a_rank_file_that_would_run_code_is_unsafe_and_runs_none(
    ckpt: Path, tmp_path: Path, command: str
) -> None:
    edit_rank(
        rank_file(ckpt, 0, 1), lambda state: state.update(rng_state=Attack(tmp_path / "marker"))
    )
    arguments = (
        ["--load-dir", ckpt, "--saver", "hf", "--save-dir", tmp_path / "out"]
        if command == "convert"
        else [ckpt]
    )
    with unchanged(tmp_path):
        assert_refused(finish(start(command, *arguments)), 6, "system", str(rank_file(ckpt, 0, 1)))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("format", ["bin", "legacy_bin"])
def test_a_bin_file_that_would_run_code_is_unsafe_and_runs_none(
    tmp_path: Path,
    format: str,  # noqa: A002
) -> None:
    model = write_llama(tmp_path / "model", layers=2, format="bin")
    attack = {"model.norm.weight": Attack(tmp_path / "marker")}
    torch.save(attack, model / "pytorch_model.bin", _use_new_zipfile_serialization=format == "bin")
    assert_convert_refuses(model, 6, "system")
    assert not (tmp_path / "marker").exists()


# Files that change while they are read.


@pytest.mark.parametrize("transposed", [False, True])
def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, transposed: bool) -> None:
    model = write_llama(tmp_path / "model", layers=2, format="bin")
    file = model / "pytorch_model.bin"
    if transposed:
        tensors = torch.load(file)
        torch.save(
            {
                name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
                for name, tensor in tensors.items()
            },
            file,
        )
    shrink = f"""
from pathlib import Path
from megaconv.engine import preparation
opened = preparation.open_source
def then_shrink(*arguments):
    source = opened(*arguments)
    with Path({str(file)!r}).open("r+b") as stream:
        stream.truncate(5000)
    return source
preparation.open_source = then_shrink
"""
    outcome = finish(
        start(
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            tmp_path / "out",
            before=shrink,
        )
    )
    assert_refused(outcome, 3, str(file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
