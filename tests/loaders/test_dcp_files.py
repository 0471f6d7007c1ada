"""Plain distributed checkpoints: what torch.distributed.checkpoint writes is read, and it reads what we write."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megaconv
from formats import safetensors, sharded_safetensors
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.neighbours import write_automodel
from tests.runs import assert_refused, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "hf", layers=2)


def save(tensors: dict[str, Any], path: Path, **options: Any) -> Path:
    dcp.save(tensors, storage_writer=FileSystemWriter(path, **options), no_dist=True)
    return path


def load_all(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by PyTorch."""
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
@pytest.mark.parametrize("form", [SerializationFormat.TORCH_SAVE, SerializationFormat.SAFETENSORS])
def test_a_state_dict_with_transformers_names_is_read_below_any_prefix(
    prefix: str, form: SerializationFormat, model: Path, tmp_path: Path
) -> None:
    weights = load_file(model / "model.safetensors")
    state: dict[str, Any] = {prefix + name: tensor for name, tensor in weights.items()}
    state |= {
        f"optimizer.state.{name}.exp_avg": torch.zeros_like(tensor)
        for name, tensor in weights.items()
    }
    if form == SerializationFormat.TORCH_SAVE:
        state["train_state.step"] = 7
    path = save(state, tmp_path / "dcp", serialization_format=form)
    found = run("fingerprint", path, "--config", model)
    assert found.out.strip() == megaconv.fingerprint(model).weights
    assert_refused(run("fingerprint", path), 2, "--config")


def test_of_several_models_that_of_the_run_is_read_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(model / "model.safetensors")
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    state |= {f"ema.{name}": tensor + 1 for name, tensor in weights.items()}
    found = run("fingerprint", save(state, tmp_path / "dcp"), "--config", model)
    assert found.out.strip() == megaconv.fingerprint(model).weights
    assert "holds several models: model.* is read, ema.* left out" in caplog.text


def test_two_tensors_of_one_name_without_wrappers_are_refused(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    state = weights | {f"_orig_mod.{name}": tensor + 1 for name, tensor in weights.items()}
    path = save(state, tmp_path / "dcp")
    assert_refused(run("fingerprint", path, "--config", model), 3, "two names of one tensor")


def test_torchtitans_names_and_rotary_order_are_read(model: Path, tmp_path: Path) -> None:
    """Its Llama computes with Meta's order of rows, and is called as Meta's files are."""
    megaconv.convert(model, tmp_path / "meta", saver="llama_mistral")
    weights = torch.load(tmp_path / "meta/consolidated.00.pth", weights_only=True)
    path = save({**weights, "lr_scheduler": {"last_epoch": 3}}, tmp_path / "titan")
    (path / "config.json").write_bytes((model / "config.json").read_bytes())
    opened = megaconv.open(path)
    assert megaconv.diff(path, model).same
    assert "torchtitan" in megaconv.inspect(path).header.source
    assert opened.config.layer_count == 2


def test_pytorch_loads_what_we_write_and_we_read_it_again(model: Path, tmp_path: Path) -> None:
    outcome = run(
        "convert",
        "--load-dir",
        model,
        "--saver",
        "dcp",
        "--save-dir",
        tmp_path / "dcp",
        "--dist-files",
        3,
        "--verify",
    )
    assert outcome.status == 0
    assert sorted(path.name for path in (tmp_path / "dcp").glob("*.distcp")) == [
        f"__{n}_0.distcp" for n in range(3)
    ]
    found, expected = load_all(tmp_path / "dcp"), load_file(model / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert megaconv.diff(tmp_path / "dcp", model).same


def test_pytorch_reads_our_torch_dist(model: Path, tmp_path: Path) -> None:
    megaconv.convert(model, tmp_path / "dist", saver="core", ckpt_format="torch_dist", tp=2, pp=2)
    found, expected = load_all(tmp_path / "dist/release"), load_file(model / "model.safetensors")
    assert found["embedding.word_embeddings.weight"][:131].equal(
        expected["model.embed_tokens.weight"]
    )
    down = torch.stack(
        [expected[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(2)]
    )
    assert found["decoder.layers.mlp.linear_fc2.weight"].equal(down)
    gate, up = (expected[f"model.layers.1.mlp.{word}_proj.weight"] for word in ("gate", "up"))
    assert found["decoder.layers.mlp.linear_fc1.weight"][1].equal(torch.cat([gate, up]))


def test_gpt2s_transposed_matrices_survive(tmp_path: Path) -> None:
    source = FIXTURES / "dist-gpt2-tp2pp2"
    megaconv.convert(source, tmp_path / "dcp", saver="dcp")
    expected = load_file(source / "expected.safetensors")
    found = load_all(tmp_path / "dcp")
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def write_shards(directory: Path, ranks: int, files: int = 2) -> Path:
    """Parts of two tensors, each in a file of its own, by the names and headers of torch's writer."""
    directory.mkdir()
    whole = {"a.weight": torch.arange(48.0).view(12, 4), "b.weight": torch.arange(24.0).view(12, 2)}
    rows = 12 // ranks
    for rank in range(ranks):
        for number, (name, tensor) in enumerate(whole.items(), start=1):
            info = {name: {"saved_offsets": [rank * rows, 0]}}
            file = f"shard-{rank + 1:05d}-model-{number:05d}-of-{files:05d}.safetensors"
            part = tensor[rank * rows : (rank + 1) * rows].clone()
            save_file({name: part}, directory / file, {"DCP_SHARDING_INFO": json.dumps(info)})
    return directory


def without_family(directory: Path) -> Path:
    directory.mkdir()
    raw = {"architectures": ["StrangeForCausalLM"], "model_type": "strange", "hidden_size": 4}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_a_file_that_no_rank_has_is_missed(tmp_path: Path) -> None:
    config = without_family(tmp_path / "config")
    path = write_shards(tmp_path / "in", ranks=3)
    for file in path.glob("*-model-00002-*"):
        file.unlink()
    outcome = run("convert", path, tmp_path / "out", "--saver", "hf", "--config", config)
    assert_refused(outcome, 3, "has no shard-*-model-00002-of-00002.safetensors")


def test_shards_of_two_saves_are_refused(tmp_path: Path) -> None:
    config = without_family(tmp_path / "config")
    path = write_shards(tmp_path / "in", ranks=2)
    (path / "shard-00002-model-00001-of-00002.safetensors").rename(
        path / "shard-00002-model-00001-of-00003.safetensors"
    )
    outcome = run("convert", path, tmp_path / "out", "--saver", "hf", "--config", config)
    assert_refused(outcome, 3, "shards of models of 2 and 3 files")


def test_shards_whose_count_nothing_says_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the last rank's files, the tensors look complete and have fewer rows."""
    config = without_family(tmp_path / "config")
    path = write_shards(tmp_path / "in", ranks=3)
    for file in path.glob("shard-00003-*"):
        file.unlink()
    outcome = run("convert", path, tmp_path / "out", "--saver", "hf", "--config", config)
    assert outcome.status == 0
    assert "has files of 2 ranks, and nothing says whether that is all of them" in caplog.text


def test_shards_of_the_hugging_face_writer_are_put_together(tmp_path: Path) -> None:
    name = "shard-00001-model-00001-of-00001.safetensors"
    stored = sharded_safetensors.read(FIXTURES / "dcp-hf-writer/ckpt")
    assert stored.keys() == safetensors.read(FIXTURES / "dcp-hf-writer/expected.safetensors").keys()
    header = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [2, 0]}})}
    save_file({"a": torch.ones(1, 3)}, tmp_path / name, metadata=header)
    with pytest.raises(
        megaconv.errors.CorruptCheckpoint, match="a: its chunks hold 3 of 9 elements"
    ):
        sharded_safetensors.read(tmp_path)


def test_the_description_that_nemo_automodel_stores_beside_the_weights_is_read(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "epoch_0_step_99" / "model"
    write_automodel(model, path)
    outcome = run("convert", path, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    assert megaconv.diff(model, tmp_path / "out").same
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_model_that_the_configuration_does_not_describe_is_refused(
    model: Path, tmp_path: Path
) -> None:
    weights = load_file(model / "model.safetensors")
    weights.pop("model.norm.weight")
    path = save({**weights, "model.extra": torch.ones(2)}, tmp_path / "dcp")
    assert_refused(
        run("inspect", path, "--config", model), 3, "missing: model.norm.weight", "model.extra"
    )
    shutil.rmtree(path)
    save({"net.0.weight": torch.ones(2)}, path)
    assert_refused(
        run("inspect", path, "--config", model), 3, "model.embed_tokens.weight", "net.0.weight"
    )
