"""`.nemo` archives: Megatron core's own rank files under NeMo's names, in archives of Python's tarfile. NeMo itself wrote none of them."""

import gzip
import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from formats import tar_archive
from formats.errors import CheckpointError
from formats.tensor import InputFile
from megaconv.checkpoint import open_checkpoint
from megaconv.options import LoadOptions
from tests.conftest import FIXTURES
from tests.put_together import assert_holds
from tests.runs import assert_refused, run

LLAMA, EXPERTS = FIXTURES / "core-te-llama-tp2pp2", FIXTURES / "core-mixtral-seq-tp1ep1"
Names = Callable[[int, int], str]


def of_ranks(fixture: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """(tensor rank, pipeline rank) -> its parameters by Megatron core's names."""
    found = {}
    for file in sorted(fixture.rglob("model_optim_rng.pt")):
        numbers = [int(word) for word in file.parent.name.split("_")[2:]]
        found[numbers[0], numbers[1] if len(numbers) > 1 else 0] = torch.load(
            file, map_location="cpu", weights_only=False
        )["model"]
    return found


def both(tp: int, pp: int) -> str:
    return f"tp_rank_{tp:02d}_pp_rank_{pp:03d}/model_weights.ckpt"


def one(tp: int, pp: int) -> str:
    return "model_weights.ckpt"


def files(fixture: Path, names: Names = both) -> dict[str, bytes]:
    """The files of an archive, by name."""
    found = {"model_config.yaml": b"mcore_gpt: true\n", "0f1e_tokenizer.model": b"pieces"}
    for (tp, pp), model in of_ranks(fixture).items():
        stored = io.BytesIO()
        torch.save({f"model.{name}": value for name, value in model.items()}, stored)
        found[names(tp, pp)] = stored.getvalue()
    return found


def write(
    path: Path, members: dict[str, bytes], prefix: str = "./", kind: int = tarfile.GNU_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of the fixture's model."""
    target = tmp_path_factory.mktemp("llama") / "hf"
    assert run("convert", LLAMA / "checkpoint", target, "--saver", "hf").status == 0
    return target


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [("./", tarfile.GNU_FORMAT), ("", tarfile.PAX_FORMAT), ("model/", tarfile.USTAR_FORMAT)],
)
def test_all_ranks_are_read_where_they_lie_in_the_archive(
    prefix: str, kind: int, llama: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "llama.nemo", files(LLAMA), prefix, kind)
    checkpoint = open_checkpoint(path, LoadOptions(config=llama))
    assert_holds(checkpoint, LLAMA / "expected.safetensors")
    assert checkpoint.header.layout is not None
    assert (checkpoint.header.layout.tp, checkpoint.header.layout.pp) == (2, 2)


def test_it_is_converted_from_a_shell(llama: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "llama.nemo", files(LLAMA))
    outcome = run(
        "convert",
        path,
        tmp_path / "out",
        "--saver",
        "core",
        "--tp",
        4,
        "--pp",
        1,
        "--config",
        llama,
        "--verify",
    )
    assert outcome.status == 0, outcome.err
    assert_holds(open_checkpoint(tmp_path / "out"), LLAMA / "expected.safetensors")


def test_the_archive_of_one_rank_and_what_it_unpacks_to(tmp_path: Path) -> None:
    run("convert", EXPERTS / "checkpoint", tmp_path / "hf", "--saver", "hf")
    path = write(tmp_path / "mixtral.nemo", files(EXPERTS, one), prefix="")
    options = LoadOptions(config=tmp_path / "hf")
    assert_holds(open_checkpoint(path, options), EXPERTS / "expected.safetensors")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert_holds(open_checkpoint(tmp_path / "unpacked", options), EXPERTS / "expected.safetensors")


# What is refused.


def refused(path: Path, llama: Path, status: int, *words: str) -> None:
    assert_refused(
        run("convert", path, path.parent / "out", "--saver", "hf", "--config", llama),
        status,
        *words,
    )
    assert not (path.parent / "out").exists()


AGREEING = """\
mcore_gpt: true
num_layers: ${oc.env:LAYERS}
num_attention_heads: 8
num_query_groups: 4
kv_channels: null
layernorm_epsilon: 1.0e-05
position_embedding_type: rope
rotary_base: 10000
rotary_percentage: 1.0
seq_len_interpolation_factor: null
moe_router_topk: 7
"""


def with_settings(target: Path, settings: str) -> Path:
    return write(target, files(LLAMA) | {"model_config.yaml": settings.encode()})


def test_settings_that_agree_are_read(llama: Path, tmp_path: Path) -> None:
    path = with_settings(tmp_path / "x.nemo", AGREEING)
    assert_holds(open_checkpoint(path, LoadOptions(config=llama)), LLAMA / "expected.safetensors")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_attention_heads: 8", "num_attention_heads: 4"),
        ("num_query_groups: 4", "num_query_groups: 2"),
        ("kv_channels: null", "kv_channels: 16"),
        ("layernorm_epsilon: 1.0e-05", "layernorm_epsilon: 1.0e-06"),
        ("rotary_base: 10000", "rotary_base: 500000"),
        ("rotary_percentage: 1.0", "rotary_percentage: 0.5"),
        ("seq_len_interpolation_factor: null", "seq_len_interpolation_factor: 4"),
        ("moe_router_topk: 7", "scale_positional_embedding: true"),
        ("num_layers: ${oc.env:LAYERS}", "num_layers: 3"),
    ],
)
def test_settings_that_contradict_the_configuration_are_refused(
    old: str, new: str, llama: Path, tmp_path: Path
) -> None:
    assert old in AGREEING
    path = with_settings(tmp_path / "x.nemo", AGREEING.replace(old, new))
    refused(path, llama, 3, "model_config.yaml: says", new.partition(":")[0])


def test_the_settings_of_an_unpacked_archive_are_compared_too(llama: Path, tmp_path: Path) -> None:
    path = with_settings(tmp_path / "x.nemo", AGREEING.replace("heads: 8", "heads: 4"))
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    refused(tmp_path / "unpacked", llama, 3, "says num_attention_heads = 4")


def test_settings_that_are_no_yaml_are_refused(llama: Path, tmp_path: Path) -> None:
    refused(with_settings(tmp_path / "x.nemo", "a: [1"), llama, 3, "is not a readable YAML file")


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/../../b"])
def test_names_that_reach_out_of_the_archive_are_refused(
    name: str, llama: Path, tmp_path: Path
) -> None:
    refused(
        write(tmp_path / "x.nemo", {name: b"x"}, prefix=""), llama, 6, "reaches out of the archive"
    )


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_are_refused(kind: bytes, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.nemo"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("model_weights.ckpt")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    refused(path, llama, 6, "is a link or a device")


def test_an_archive_that_is_compressed_is_refused(llama: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.nemo", {"model_weights.ckpt": b"x"})
    path.write_bytes(gzip.compress(path.read_bytes()))
    refused(path, llama, 3, "is compressed", "tar xzf")


def test_an_archive_that_ends_early_is_refused(llama: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.nemo", files(LLAMA))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(path, llama, 3, "the archive ends before")


def test_a_changed_header_is_refused(llama: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.nemo", {"model_weights.ckpt": b"x"})
    content = bytearray(path.read_bytes())
    content[130] ^= 1
    path.write_bytes(content)
    refused(path, llama, 3, "its checksum is wrong")


def test_a_missing_rank_is_named(llama: Path, tmp_path: Path) -> None:
    members = files(LLAMA)
    del members[both(1, 1)]
    refused(
        write(tmp_path / "x.nemo", members),
        llama,
        3,
        "tensor rank 1, pipeline rank 1",
        "tp=2, pp=2",
    )


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"model_weights/.metadata": b"x"}, ["a distributed checkpoint", "unpack it"]),
        ({"readme.txt": b"x"}, ["holds no model_weights.ckpt"]),
    ],
)
def test_other_contents_are_named(
    members: dict[str, bytes], words: list[str], llama: Path, tmp_path: Path
) -> None:
    refused(write(tmp_path / "x.nemo", members), llama, 3, *words)


def test_models_before_megatron_core_are_refused(llama: Path, tmp_path: Path) -> None:
    stored = io.BytesIO()
    torch.save({"model.language_model.embedding.word_embeddings.weight": torch.zeros(4, 4)}, stored)
    refused(
        write(tmp_path / "x.nemo", {"model_weights.ckpt": stored.getvalue()}),
        llama,
        3,
        "before Megatron core",
    )


def test_two_files_of_one_rank_in_a_directory_are_refused(llama: Path, tmp_path: Path) -> None:
    with tarfile.open(
        write(tmp_path / "x.nemo", files(LLAMA, lambda tp, pp: both(tp, pp)))
    ) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    shutil.copytree(
        tmp_path / "unpacked/tp_rank_00_pp_rank_000", tmp_path / "unpacked/tp_rank_00_pp_rank_0"
    )
    refused(tmp_path / "unpacked", llama, 3, "two files of one rank")


def test_without_a_configuration_it_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "x.nemo", files(LLAMA))
    assert_refused(run("fingerprint", path), 2, "give --config")


def test_headers_that_no_archive_has_end_in_our_own_errors(tmp_path: Path) -> None:
    """Every bit of the first header flipped, one at a time."""
    whole = write(tmp_path / "x.tar", {"a": b"content"}).read_bytes()
    for index in range(0, 512 * 8, 7):
        changed = bytearray(whole)
        changed[index // 8] ^= 1 << index % 8
        (tmp_path / "y.tar").write_bytes(changed)
        with pytest.raises(CheckpointError):
            tar_archive.read_members(InputFile.open(tmp_path / "y.tar"))


def _header(name: bytes, size: bytes, kind: bytes) -> bytes:
    """The tar header of a file, with the right checksum."""
    header = bytearray(
        name.ljust(124, b"\0") + size.ljust(12, b"\0") + bytes(12) + b" " * 8 + kind
    ).ljust(512, b"\0")
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("kind", [b"0", b"5", b"x", b"g", b"L"])
@pytest.mark.parametrize("size", [b"-1000", b"-777", b"0o10", b"1_0", b"+10", b"9"])
def test_a_size_that_is_no_octal_number_is_refused_at_once(
    size: bytes, kind: bytes, tmp_path: Path
) -> None:
    """A negative one would lead back to where the archive was read before."""
    path = tmp_path / "x.tar"
    path.write_bytes(_header(b"before", b"0", b"5") + _header(b"a", size, kind) + bytes(1024))
    with pytest.raises(CheckpointError, match="no header of a tar archive"):
        tar_archive.read_members(InputFile.open(path))


@pytest.mark.parametrize(
    "text",
    [
        b"1" * 60_000,
        b"6 x=y\nz",
        b"5 x=y\n",
        b"99 x=y\n",
        b"6 xyz\n",
        b"0 \n",
        b"-6 x=y\n",
        b"6 x=y\n\0",
        b"13 size=1_00\n",
    ],
)
def test_an_extended_header_of_no_whole_lines_is_refused_at_once(
    text: bytes, tmp_path: Path
) -> None:
    path, padding = tmp_path / "x.tar", bytes(-len(text) % 512)
    path.write_bytes(
        _header(b"p", b"%o" % len(text), b"x")
        + text
        + padding
        + _header(b"a", b"0", b"0")
        + bytes(1024)
    )
    with pytest.raises(CheckpointError, match="extended header"):
        tar_archive.read_members(InputFile.open(path))


def test_scan_examines_the_members_of_an_archive(tmp_path: Path) -> None:
    assert run("scan", write(tmp_path / "good.nemo", files(LLAMA))).status == 0
    calls = b"cos\nsystem\n(S'true'\ntR."
    for number, content in enumerate((b"\x80\x02" + calls, _torch_file(b"\x80\x02" + calls))):
        outcome = run("scan", write(tmp_path / f"{number}.nemo", {"model_weights.ckpt": content}))
        assert (outcome.status, "os.system" in outcome.out) == (6, True), outcome
    path = write(tmp_path / "link.nemo", {"../model_weights.ckpt": b"x"}, prefix="")
    assert run("scan", path).status == 6


def _torch_file(pickled: bytes) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return stored.getvalue()


def test_a_file_larger_than_a_header_can_say_has_its_size_before_it(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x" * 150)
    info.size = 9 << 30
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        header = info.tobuf(kind)
        path = tmp_path / f"{kind}.tar"
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + info.size + 1024)
        (member,) = tar_archive.read_members(InputFile.open(path)).values()
        assert (member.offset, member.size) == (len(header), info.size)
