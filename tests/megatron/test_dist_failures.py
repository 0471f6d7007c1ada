"""Distributed checkpoints that are broken, hostile or incomplete: one line that names file and tensor, nothing half-written."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorstore

import megaconv
from formats import pickle_guard, torch_zip
from formats.pickle_records import Opaque
from formats.pickle_writer import dumps
from tests.conftest import FIXTURES
from tests.engine.test_interrupted import KILL
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run, unchanged

KEY = "decoder.layers.mlp.linear_fc2.weight"
State = dict[str, Any]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "dist-llama-tp2pp2", tmp_path / "dist")


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "zarr-llama-tp2pp2" / "checkpoint", tmp_path / "zarr")


def edit_metadata(checkpoint: Path, edit: Callable[[State], object]) -> None:
    """Change what `.metadata` says, written anew as the inert records that it was read into."""
    path = checkpoint / "iter_0000010/.metadata"
    top = pickle_guard.load(path.read_bytes(), source=str(path))
    assert isinstance(top, Opaque)
    assert isinstance(top.state, dict)
    del top.state["all_local_plans"]
    edit(top.state)
    path.write_bytes(dumps(top)[0])


def entry(state: State) -> State:
    found: State = state["state_dict_metadata"][KEY].state
    return found


def place_of(state: State, key: str = KEY) -> State:
    return next(
        info.state for index, info in state["storage_data"].items() if index.state["fqn"] == key
    )


def drop_place(state: State) -> None:
    index = next(index for index in state["storage_data"] if index.state["fqn"] == KEY)
    del state["storage_data"][index]


def chunks(state: State) -> list[Opaque]:
    found: list[Opaque] = entry(state)["chunks"]
    return found


def wider(state: State) -> None:
    """A tensor of two columns more than its chunks really have."""
    entry(state)["size"] = (4, 32, 50)
    for chunk in chunks(state):
        layer, _, col = chunk.state["offsets"]  # type: ignore[index]
        chunk.state.update(offsets=(layer, 0, col // 24 * 25), sizes=(1, 32, 25))  # type: ignore[attr-defined]


EDITS: Mapping[str, tuple[Callable[[State], object], int, tuple[str, ...]]] = {
    "a file elsewhere": (
        lambda state: place_of(state).update(relative_path="../../secret"), 6, (KEY, "../../secret", ".metadata"),
    ),
    "an absolute file": (
        lambda state: place_of(state).update(relative_path="/etc/passwd"), 6, (KEY, "/etc/passwd", ".metadata"),
    ),
    "a transformed blob": (
        lambda state: place_of(state).update(transform_descriptors=["zstd"]), 3, (KEY, "zstd", "without extensions"),
    ),
    "a blob past the end": (
        lambda state: place_of(state).update(offset=1 << 30), 3, (KEY, ".distcp", "1073741824"),
    ),
    "a negative offset": (lambda state: place_of(state).update(offset=-1), 3, (KEY, ".metadata")),
    "a missing chunk": (lambda state: chunks(state).pop(), 3, (KEY, "missing", ".metadata")),
    "a doubled chunk": (lambda state: chunks(state).append(chunks(state)[0]), 3, (KEY, "overlap", ".metadata")),
    "a chunk outside": (
        lambda state: chunks(state)[0].state.update(sizes=(9, 32, 24)), 3, (KEY, "reaches out of the tensor"),  # type: ignore[attr-defined]
    ),
    "a chunk without a place": (drop_place, 3, (KEY, "has no file for the chunk")),
    "a shape of words": (lambda state: entry(state).update(size=("a", 2)), 3, (".metadata",)),
    "no tensors at all": (lambda state: state.pop("state_dict_metadata"), 3, (".metadata",)),
    "a tensor of another shape": (
        wider,
        3, (KEY,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_metadata_that_cannot_be_true_is_refused(
    edit: str, checkpoint: Path, tmp_path: Path
) -> None:
    change, status, words = EDITS[edit]
    edit_metadata(checkpoint, change)
    with unchanged(tmp_path):
        outcome = run(
            "convert", "--load-dir", checkpoint, "--saver", "hf", "--save-dir", tmp_path / "out"
        )
    assert_refused(outcome, status, *words)


def test_metadata_that_asks_to_run_code_is_not_obeyed(checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (checkpoint / "iter_0000010/.metadata").write_bytes(
        f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    )
    assert_refused(run("inspect", checkpoint), 6, "os.system", ".metadata")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("__1_0.distcp", ("no such file", "is the copy complete?")),
        ("common.pt", ("no such file", "args")),
        (".metadata", ("no such file", "begin with a dot")),
        ("metadata.json", ("incomplete",)),
    ],
)
def test_a_missing_file_is_named(name: str, words: tuple[str, ...], checkpoint: Path) -> None:
    (checkpoint / "iter_0000010" / name).unlink()
    assert_refused(run("inspect", checkpoint), 3, name, *words)


def test_a_file_that_was_cut_off_is_named(checkpoint: Path) -> None:
    path = checkpoint / "iter_0000010/__3_1.distcp"
    os.truncate(path, path.stat().st_size - 1)
    assert_refused(run("inspect", checkpoint), 3, "__3_1.distcp", "copy it again")


def test_files_of_two_checkpoints_do_not_mix(checkpoint: Path, tmp_path: Path) -> None:
    """Blobs that are valid by themselves but are other tensors."""
    path = checkpoint / "iter_0000010/__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    with unchanged(tmp_path):
        outcome = run(
            "convert", "--load-dir", checkpoint, "--saver", "hf", "--save-dir", tmp_path / "out"
        )
    assert_refused(outcome, 3, "__0_0.distcp", "decoder.layers")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda array: (array / "1.0.0").unlink(), ("1.0.0", "no such file")),
        (lambda array: os.truncate(array / "3.1.0", 5), ("3.1.0", "5 bytes")),
        (lambda array: (array / ".zarray").write_text("{}"), (".zarray", "shape")),
        (lambda array: rewrite(array, compressor={"id": "blosc"}), (".zarray", "compressor")),
        (lambda array: rewrite(array, chunks=[0, 1, 1]), (".zarray", "chunks")),
        (lambda array: rewrite(array, shape=[1 << 40, 64, 32]), ("4.0.0", "no such file")),
        (lambda array: rewrite(array, dtype=">f4"), (".zarray", ">f4")),
    ],
)
def test_a_broken_zarr_array_is_named(
    edit: Callable[[Path], object], words: tuple[str, ...], zarr: Path
) -> None:
    key = "decoder.layers.self_attention.linear_qkv.weight"
    edit(zarr / "iter_0000005" / key)
    assert_refused(run("inspect", zarr), 3, key, *words)


def rewrite(array: Path, **words: Any) -> None:
    said = json.loads((array / ".zarray").read_text())
    (array / ".zarray").write_text(json.dumps(said | words))


def test_an_unknown_format_is_named(checkpoint: Path) -> None:
    (checkpoint / "iter_0000010/metadata.json").write_text('{"sharded_backend": "tar"}')
    assert_refused(run("fingerprint", checkpoint), 3, "metadata.json", "'tar'")
    (checkpoint / "iter_0000010/metadata.json").write_text("[]")
    assert_refused(run("inspect", checkpoint), 3, "metadata.json", "sharded_backend")


def test_core_0_19_keeps_its_common_state_in_an_object(checkpoint: Path) -> None:
    """That release writes no common.pt, and two keys in metadata.json."""
    version = checkpoint / "iter_0000010"
    before = megaconv.fingerprint(checkpoint).weights
    archive = torch_zip.plan([torch_zip.read(version / "common.pt")], "archive")
    (version / "common.pt").unlink()
    (version / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    size = archive.size
    (version / "__9_0.distcp").write_bytes(b"".join(data for _, data in archive.headers({})))

    def add(state: State) -> None:
        name = "common_state/shard_0_1"
        index = next(iter(state["storage_data"]))
        info = state["storage_data"][index]
        records = (index.module, index.name, ()), (info.module, info.name, ())
        place = {"relative_path": "__9_0.distcp", "offset": 0, "length": size}
        state["storage_data"][Opaque(*records[0], {"fqn": name, "index": None})] = Opaque(
            *records[1], place
        )
        module = "torch.distributed.checkpoint.metadata"
        state["state_dict_metadata"][name] = Opaque(module, "BytesStorageMetadata", (), {})

    edit_metadata(checkpoint, add)
    assert megaconv.fingerprint(checkpoint).weights == before
    assert megaconv.open(checkpoint).layout.pp == 2


# What we write.


def test_zarr_arrays_that_we_write_are_read_by_tensorstore(tmp_path: Path) -> None:
    source = FIXTURES / "zarr-llama-tp2pp2" / "checkpoint"
    megaconv.convert(source, tmp_path / "out", saver="core", ckpt_format="zarr", tp=4, pp=1)
    for array in sorted((source / "iter_0000005").glob("*/.zarray")):
        name = array.parent.name
        found, expected = (
            open_array(root / "iter_0000005" / name) for root in (tmp_path / "out", source)
        )
        rows = 100 if "embedding" in name or name.startswith("output_layer") else None
        assert found.shape[1:] == expected.shape[1:]
        assert (found[:rows].view("uint16") == expected[:rows].view("uint16")).all(), name
    objects = {
        path.name for path in (tmp_path / "out").glob("iter_0000005/*linear_proj._extra_state/*")
    }
    assert objects == {f"shard_{layer}_4.pt" for layer in range(4)}
    common = torch_zip.read(tmp_path / "out/iter_0000005/common.pt")
    assert isinstance(common, dict)
    assert common["args"].ckpt_format == "zarr"


def open_array(path: Path) -> Any:
    store = {"driver": "file", "path": str(path)}
    spec = {"driver": "zarr", "metadata_key": ".zarray", "kvstore": store}
    return tensorstore.open(spec).result().read().result()


def test_experts_objects_have_the_name_that_every_version_reads(tmp_path: Path) -> None:
    megaconv.convert(
        FIXTURES / "dist-mixtral-tp2ep2", tmp_path / "out", saver="core", ckpt_format="zarr"
    )
    (folder,) = (tmp_path / "out").glob("*/*experts.experts.linear_fc1._extra_state")
    assert {path.name for path in folder.iterdir()} == {
        f"shard_{i}.{e}_2.pt" for i in range(2) for e in range(4)
    }


def test_files_are_of_about_one_size_and_as_many_as_asked_for(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "hf", layers=8, hidden=64, ffn=160)
    options = ("--saver", "core", "--ckpt-format", "torch_dist", "--tp", 2, "--dist-files", 4)
    assert run("convert", "--load-dir", model, *options, "--save-dir", tmp_path / "out").status == 0
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*/*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)
    dry = run(
        "convert",
        "--load-dir",
        model,
        *options,
        "--save-dir",
        tmp_path / "dry",
        "--dry-run",
        "--json",
    )
    files = {
        name: size for name, size in json.loads(dry.out)["files"].items() if name != "megaconv.json"
    }
    assert files == {
        str(path.relative_to(tmp_path / "out")): path.stat().st_size
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and path.name != "megaconv.json"
    }


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "zarr"])
def test_a_killed_run_is_resumed_and_verified(ckpt_format: str, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "hf")
    files = ("--dist-files", 2) if ckpt_format == "torch_dist" else ()
    options = (
        "--load-dir",
        model,
        "--saver",
        "core",
        "--ckpt-format",
        ckpt_format,
        "--tp",
        2,
        *files,
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run("convert", *options, "--save-dir", whole, "--verify").status == 0
    kill = KILL.format(owner="os", name="pwrite", number=40, journaled="time.sleep(0.2)").replace(
        "import os", "import os, time"
    )
    killed = finish(start("convert", *options, "--save-dir", resumed, before=kill))
    assert killed.status == -9
    assert not resumed.exists()
    assert run("convert", *options, "--save-dir", resumed, "--resume", "--verify").status == 0
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert all((whole / path).read_bytes() == (resumed / path).read_bytes() for path in files)


def test_inspecting_reads_neither_tensors_nor_objects(checkpoint: Path) -> None:
    for path in (checkpoint / "iter_0000010").glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    found = json.loads(run("inspect", checkpoint, "--json").out)
    assert (found["layout"]["tp"], found["layout"]["pp"], found["padded_vocab"]) == (2, 2, 128)
    assert found["format"] == "core, torch_dist format"


def test_a_format_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "hf")
    for saver, ckpt_format, known in (
        ("core", "tar", "torch_dist"),
        ("legacy", "torch_dist", "has no effect"),
    ):
        arguments = ("--load-dir", model, "--saver", saver, "--ckpt-format", ckpt_format)
        assert_refused(
            run("convert", *arguments, "--save-dir", tmp_path / "out"), 2, ckpt_format, known
        )
