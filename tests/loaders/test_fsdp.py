"""FSDP checkpoints as verl saves them: files by torch's own FSDP2 and torch.save, three ranks and two times two."""

import json
import shutil
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import megaconv
from formats import dtensor
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

RANKS, HYBRID = FIXTURES / "fsdp-verl-dp3", FIXTURES / "fsdp-verl-hybrid-2x2"
ORIGINAL = FIXTURES / "peft-llama-all-linear/base"
"""The model that both hold."""
HIDDEN, BF16_BYTES = 32, 2


@pytest.mark.parametrize(
    ("path", "ranks"), [(RANKS, 3), (HYBRID, 4)], ids=["sharded", "replicated too"]
)
def test_the_parts_of_all_ranks_make_the_model_that_was_saved(
    path: Path, ranks: int, tmp_path: Path
) -> None:
    outcome = run("convert", "--load-dir", path, "--saver", "hf", "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    found, expected = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(ORIGINAL / "model.safetensors"),
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert f"fsdp of verl, {ranks} ranks" in run("inspect", path).out
    # The parts of a DTensor raise no warning.
    assert "which no checkpoint needs" not in outcome.err


def test_they_are_converted_to_any_layout(tmp_path: Path) -> None:
    megaconv.convert(RANKS, tmp_path / "core", saver="core", tp=2, pp=2)
    assert megaconv.fingerprint(tmp_path / "core").weights == megaconv.fingerprint(ORIGINAL).weights


def test_parts_lie_where_torch_has_them() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    shapes, meshes = [(7, 5), (3, 9), (16, 4), (1, 2)], [(2, 3), (4, 2), (1, 5)]
    for shape, mesh, axes in product(shapes, meshes, product((None, 0, 1), repeat=2)):
        placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
        for at in product(*map(range, mesh)):
            size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
            ours = dtensor.place(shape, axes, mesh, at)
            assert ours[1] == tuple(size), (shape, mesh, axes, at)
            if 0 not in size:
                assert ours[0] == tuple(offset), (shape, mesh, axes, at)


def copy(tmp_path: Path, path: Path = RANKS) -> Path:
    return Path(shutil.copytree(path, tmp_path / "in"))


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    path = copy(tmp_path)
    (path / "model_world_size_3_rank_1.pt").unlink()
    assert_refused(
        run("fingerprint", path), 3, "model_world_size_3_rank_1.pt: no such file; 2 of 3 ranks"
    )


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    path = copy(tmp_path)
    shutil.copy(path / "model_world_size_3_rank_1.pt", path / "model_world_size_2_rank_1.pt")
    assert_refused(run("fingerprint", path), 3, "runs with 2 and 3 ranks")


def test_a_rank_in_anothers_place_is_found_out(tmp_path: Path) -> None:
    path = copy(tmp_path)
    shutil.copy(path / "model_world_size_3_rank_1.pt", path / "model_world_size_3_rank_2.pt")
    assert_refused(run("fingerprint", path), 3, "a part is missing")


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_another_run_is_found_out_by_its_copy(rank: int, tmp_path: Path) -> None:
    """Two ranks hold each part. The file of the other run has the same names, shapes and places."""
    path = copy(tmp_path, HYBRID)
    file = path / f"model_world_size_4_rank_{rank}.pt"
    rewrite_a_storage(file)
    assert_refused(run("fingerprint", path), 3, "other values than the copy of another rank")


def rewrite_a_storage(file: Path) -> None:
    """Write a torch file anew with another value in the storage of a query, and right checksums."""
    with zipfile.ZipFile(file) as stored:
        contents = {each.filename: stored.read(each) for each in stored.infolist()}
    name = next(name for name, held in contents.items() if len(held) == 16 * HIDDEN * BF16_BYTES)
    contents[name] = b"\x01\x3f" + contents[name][2:]
    with zipfile.ZipFile(file, "w") as stored:
        for each, content in contents.items():
            stored.writestr(each, content)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = copy(tmp_path)
    shutil.copy(path / "model_world_size_3_rank_1.pt", path / "model_world_size_3_rank_01.pt")
    assert_refused(run("fingerprint", path), 3, "another file of a rank that has one")


def test_a_tensor_that_only_some_ranks_have_whole_is_refused(tmp_path: Path) -> None:
    path = copy(tmp_path)
    for rank in range(3):
        file = path / f"model_world_size_3_rank_{rank}.pt"
        torch.save({"model.norm.weight": torch.zeros(4 + rank)}, file)
    assert_refused(
        run("fingerprint", path), 3, "model.norm.weight differs from model_world_size_3_rank_0.pt"
    )


def test_a_truncated_rank_is_refused(tmp_path: Path) -> None:
    path = copy(tmp_path)
    file = path / "model_world_size_3_rank_2.pt"
    file.write_bytes(file.read_bytes()[:-4000])
    assert_refused(run("fingerprint", path), 3, file.name)


def test_without_a_configuration_it_is_asked_for(tmp_path: Path) -> None:
    path = copy(tmp_path)
    shutil.rmtree(path / "huggingface")
    assert_refused(run("fingerprint", path), 2, "huggingface/config.json; give --config")


def test_tensors_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    path = copy(tmp_path)
    for rank in range(3):
        torch.save(
            {"model.norm.weight": torch.sparse_coo_tensor([[0]], [1.0], (4,))},
            path / f"model_world_size_3_rank_{rank}.pt",
        )
    assert_refused(
        run("fingerprint", path), 3, "model.norm.weight is neither a tensor nor a DTensor", "sparse"
    )


# torchtitan's names, written.


def test_sharded_tensors_of_fsdp_1_get_their_next_step(tmp_path: Path) -> None:
    """The file is torch 2.13's own: init_from_local_shards in a group of one rank."""
    (tmp_path / "huggingface").mkdir()
    shutil.copy(ORIGINAL / "config.json", tmp_path / "huggingface")
    file = "model_world_size_1_rank_0.pt"
    shutil.copy(FIXTURES / "fsdp1-sharded-tensor" / file, tmp_path)
    assert_refused(
        run("fingerprint", tmp_path),
        3,
        file,
        "ShardedTensor",
        "without a device mesh",
        "FULL_STATE_DICT",
    )


def test_a_llama_is_written_with_the_names_that_torchtitan_has(tmp_path: Path) -> None:
    outcome = run(
        "convert",
        ORIGINAL,
        tmp_path / "out",
        "--saver",
        "dcp",
        "--option",
        "names=torchtitan",
        "--verify",
        "--dtype",
        "fp32",
    )
    assert outcome.status == 0, outcome.err
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {
        "tok_embeddings.weight",
        "layers.1.attention.wq.weight",
        "layers.0.feed_forward.w2.weight",
        "output.weight",
    } <= metadata.keys()
    found = {
        "layers.1.attention.wk.weight": torch.empty(metadata["layers.1.attention.wk.weight"].size)
    }
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    whole = load_file(ORIGINAL / "model.safetensors")[
        "model.layers.1.self_attn.k_proj.weight"
    ].float()
    # Each of the two heads has 8 rows. Halves become pairs.
    heads = whole.view(2, 2, 4, 32).transpose(1, 2).reshape(16, 32)
    assert torch.equal(found["layers.1.attention.wk.weight"], heads)


@pytest.mark.parametrize(
    ("fixture", "names", "words"),
    [
        (ORIGINAL, "meta", ["choose transformers, transformers-stacked, torchtitan"]),
        (FIXTURES / "peft-gpt2-conv1d/base", "torchtitan", ["gpt2"]),
    ],
)
def test_names_that_a_family_hasnt_are_refused(
    fixture: Path, names: str, words: list[str], tmp_path: Path
) -> None:
    outcome = run(
        "convert", fixture, tmp_path / "out", "--saver", "dcp", "--option", f"names={names}"
    )
    assert_refused(outcome, 2, *words)
    assert json.loads((fixture / "config.json").read_text())


ADAPTER = FIXTURES / "peft-llama-all-linear/adapter"
MERGED = FIXTURES / "peft-llama-all-linear/merged"


def with_adapter(directory: Path, adapters: tuple[str, ...] = ("default",)) -> Path:
    """verl's checkpoint of one rank with the model inside of peft's: names as peft's own state_dict has them."""
    shutil.copytree(RANKS / "huggingface", directory / "huggingface")
    adapted = load_file(ADAPTER / "adapter_model.safetensors")
    modules = {name.partition(".lora_")[0] for name in adapted}
    state = {}
    for name, tensor in load_file(ORIGINAL / "model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        state[f"{module}.base_layer.weight" if module in modules else f"{module}.weight"] = tensor
    for each in adapters:
        for name, tensor in adapted.items():
            state[f"{name.removesuffix('.weight')}.{each}.weight"] = tensor
    torch.save(state, directory / "model_world_size_1_rank_0.pt")
    return directory


@pytest.mark.parametrize(
    ("place", "initialization"),
    [
        ("lora_train_meta.json", True),
        ("lora_adapter/adapter_config.json", True),
        ("lora_adapter/adapter_config.json", "pissa"),
        ("lora_adapter/adapter_config.json", "pissa_niter_4"),
    ],
)
def test_the_adapter_of_a_run_is_merged_as_peft_merges_it(
    place: str, initialization: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The base in the file is the one of the training, however the adapter was initialized."""
    path = with_adapter(tmp_path / "actor")
    settings = json.loads((ADAPTER / "adapter_config.json").read_text())
    (path / place).parent.mkdir(exist_ok=True)
    (path / place).write_text(
        json.dumps(
            {key: settings[key] for key in ("r", "lora_alpha", "task_type")}
            | {"init_lora_weights": initialization}
        )
    )
    megaconv.convert(path, tmp_path / "out", saver="hf")
    found, expected = (load_file(each / "model.safetensors") for each in (tmp_path / "out", MERGED))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert f"adapter is merged into its base (rank {settings['r']}" in caplog.text


def test_an_adapter_without_its_base_is_called_one(tmp_path: Path) -> None:
    """verl 0.9 saves no base with save_lora_only."""
    path = with_adapter(tmp_path / "actor")
    file = path / "model_world_size_1_rank_0.pt"
    state = torch.load(file)
    torch.save({name: tensor for name, tensor in state.items() if ".lora_" in name}, file)
    assert_refused(run("fingerprint", path), 2, "without its base (save_lora_only of verl)")


def test_an_adapter_without_its_alpha_and_a_second_one_are_refused(tmp_path: Path) -> None:
    path = with_adapter(tmp_path / "actor")
    assert_refused(run("fingerprint", path), 2, "no lora_train_meta.json or lora_adapter/")
    other = with_adapter(tmp_path / "other", ("default", "reference"))
    assert_refused(run("fingerprint", other), 3, "2 adapters (default, reference)")
