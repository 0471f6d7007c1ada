"""Checksums of zip entries: compared once an entry was read whole, in whatever pieces."""

import random
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import megaconv
from formats import torch_zip
from formats.entry_check import Entry, EntryCheck
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.opened import OpenedFiles
from formats.tensor import Box, FileTensor, StridedTensor, read_tensor, row_blocks
from tests.models import write_llama

CONTENT = random.Random(7).randbytes(1000)


def feed(check: EntryCheck, pieces: list[tuple[int, int]], content: bytes = CONTENT) -> None:
    for start, end in pieces:
        check.add(100 + start, np.frombuffer(content[start:end], np.uint8))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 999), unique=True, max_size=30),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_an_entry_read_in_any_pieces_and_any_order_is_compared_with_the_last(
    cuts: list[int], chance: random.Random, twice: bool
) -> None:
    edges = [0, *sorted(cuts), 1000]
    pieces = list(pairwise(edges)) * (1 + twice)
    chance.shuffle(pieces)
    feed(EntryCheck(Path("x"), 100, 1000, crc32(CONTENT), set()), pieces)
    wrong = EntryCheck(Path("x"), 100, 1000, crc32(CONTENT) ^ 1, set())
    with pytest.raises(
        CorruptCheckpoint, match="x: the checksum of the tensor at byte 100 is wrong"
    ):
        feed(wrong, pieces)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(0, 1000))
        .map(sorted)
        .filter(lambda pair: pair[0] < pair[1]),
        max_size=30,
    )
)
def test_no_pieces_of_what_is_intact_are_ever_refused(pieces: list[list[int]]) -> None:
    feed(
        EntryCheck(Path("x"), 100, 1000, crc32(CONTENT), set()),
        [(first, end) for first, end in pieces],
    )


def test_a_row_that_was_looked_at_before_does_not_matter() -> None:
    """The search for a tied head reads such a row early."""
    wrong = EntryCheck(Path("x"), 100, 1000, 1, set())
    with pytest.raises(CorruptCheckpoint):
        feed(wrong, [(0, 10), (500, 510), (990, 1000), (0, 400), (400, 800), (800, 1000)])


def test_an_entry_that_is_read_in_part_is_not_compared() -> None:
    begun = set[Entry]()
    feed(EntryCheck(Path("x"), 100, 1000, 1, begun), [(0, 999), (5, 999)])
    assert begun == {Entry("x", 100, 1000, 1)}


def test_an_entry_is_begun_until_it_was_compared() -> None:
    begun = set[Entry]()
    check = EntryCheck(Path("x"), 100, 1000, crc32(CONTENT), begun)
    check.touch()
    assert begun == {check.entry}
    feed(check, [(400, 1000), (0, 400)])
    assert begun == set()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "x.pt"
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 16, generator=generator)
    torch.save(
        {
            "a": torch.randn(64, 32, generator=generator),
            "upper": base[:25],
            "lower": base[25:],
            "tied": base,
        },
        path,
    )
    return path


def test_a_storage_that_several_tensors_share_is_compared_when_all_of_it_was_read(
    saved: Path, tmp_path: Path
) -> None:
    value = torch_zip.read(saved)
    assert isinstance(value, dict)
    upper = value["upper"]
    content = bytearray(saved.read_bytes())
    content[upper.offset] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    damaged = torch_zip.read(tmp_path / "x.pt")
    assert isinstance(damaged, dict)
    read_tensor(damaged["upper"])
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        read_tensor(damaged["lower"])


def test_blocks_and_columns_are_read_as_before(saved: Path) -> None:
    value = torch_zip.read(saved)
    assert isinstance(value, dict)
    tensor, whole = value["a"], torch.load(saved)["a"]
    assert isinstance(tensor, FileTensor)
    assert tensor.check is not None
    for box in row_blocks(tensor.shape, tensor.dtype, 500):
        out = np.empty((box.rows, box.cols * 4), np.uint8)
        tensor.read_into(box, out)
    out = np.empty((64, 8), np.uint8)
    tensor.read_into(Box(0, 64, 3, 5), out)
    assert out.tobytes() == whole[:, 3:5].contiguous().numpy().tobytes()


def test_every_flipped_bit_of_a_file_of_torch_is_reported_or_changes_nothing(
    saved: Path, tmp_path: Path
) -> None:
    def everything(path: Path) -> dict[str, bytes]:
        value = torch_zip.read(path)
        assert isinstance(value, dict)
        return {name: read_tensor(tensor).tobytes() for name, tensor in value.items()}

    intact, chance, found = everything(saved), random.Random(1), 0
    for _ in range(300):
        content = bytearray(saved.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (tmp_path / "x.pt").write_bytes(content)
        try:
            assert everything(tmp_path / "x.pt") == intact
        except CheckpointError:
            found += 1
    assert found > 250


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    value = torch_zip.read(tmp_path / "x.pt")
    assert isinstance(value, dict)
    assert (
        value["a"].check is None
        or read_tensor(value["a"]).tobytes() == torch.ones(3).numpy().tobytes()
    )


@pytest.mark.parametrize(
    ("box", "found"),
    [(Box(0, 40, 0, 32), True), (Box(3, 5, 0, 32), True), (Box(0, 64, 3, 5), True), (None, False)],
    ids=["most", "little", "columns", "nothing"],
)
def test_the_rest_of_what_was_read_in_part_is_read_at_the_end(
    box: Box | None, found: bool, saved: Path, tmp_path: Path
) -> None:
    intact = torch_zip.read(saved)
    assert isinstance(intact, dict)
    content = bytearray(saved.read_bytes())
    content[intact["a"].offset] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    opened = OpenedFiles()
    with opened:
        value = torch_zip.read(tmp_path / "x.pt")
    assert isinstance(value, dict)
    if box is not None:
        value["a"].read_into(box, np.empty((box.rows, box.cols * 4), np.uint8))
    if found:
        with pytest.raises(CorruptCheckpoint, match="checksum"):
            opened.require_as_stored()
    else:
        opened.require_as_stored()


@pytest.mark.parametrize("vocab", [131, 17], ids=["hardly padded", "mostly padding"])
def test_a_damaged_vocabulary_that_is_padded_is_not_converted(vocab: int, tmp_path: Path) -> None:
    megaconv.convert(
        write_llama(tmp_path / "hf", layers=1, vocab=vocab), tmp_path / "core", saver="core"
    )
    (tmp_path / "core" / "megaconv.json").unlink()
    (file,) = (tmp_path / "core").rglob("model_optim_rng.pt")
    state = torch_zip.read(file)
    assert isinstance(state, dict)
    embedding = state["model"]["embedding.word_embeddings.weight"]
    assert embedding.shape[0] > vocab
    content = bytearray(file.read_bytes())
    content[embedding.offset] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        megaconv.convert(tmp_path / "core", tmp_path / "out", saver="hf")
    assert not (tmp_path / "out").exists()


def test_damaged_padding_is_found_by_verify_and_fingerprint(tmp_path: Path) -> None:
    megaconv.convert(
        write_llama(tmp_path / "hf", layers=1, vocab=17), tmp_path / "core", saver="core"
    )
    (file,) = (tmp_path / "core").rglob("model_optim_rng.pt")
    state = torch_zip.read(file)
    assert isinstance(state, dict)
    embedding = state["model"]["embedding.word_embeddings.weight"]
    content = bytearray(file.read_bytes())
    content[embedding.offset + embedding.shape[1] * 2 * 100] ^= 1  # row 100 is after the vocabulary
    file.write_bytes(content)
    for command in (megaconv.verify, megaconv.fingerprint):
        with pytest.raises(CorruptCheckpoint, match="checksum"):
            command(tmp_path / "core")


@pytest.mark.parametrize("box", [Box(0, 40, 0, 32), Box(3, 4, 5, 6)], ids=["whole", "an element"])
def test_damage_of_a_transposed_tensor_is_found_after_it_was_read(box: Box, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1280.0).view(32, 40).t()}, tmp_path / "x.pt")
    content = bytearray((tmp_path / "x.pt").read_bytes())
    for is_damaged in (False, True):
        opened = OpenedFiles()
        with opened:
            value = torch_zip.read(tmp_path / "x.pt")
        assert isinstance(value, dict)
        assert isinstance(value["a"], StridedTensor)
        value["a"].read_into(box, np.empty((box.rows, box.cols * 4), np.uint8))
        if is_damaged:
            with pytest.raises(CorruptCheckpoint, match="checksum"):
                opened.require_as_stored()
        else:
            opened.require_as_stored()
            content[value["a"].offset + 7] ^= 1
            (tmp_path / "x.pt").write_bytes(content)


def test_a_damaged_transposed_weight_is_not_converted(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", layers=1)
    weights = load_file(hf / "model.safetensors")
    transposed = {
        name: each.t().contiguous().t() if each.dim() == 2 else each
        for name, each in weights.items()
    }
    (hf / "model.safetensors").unlink()
    file = hf / "pytorch_model.bin"
    torch.save(transposed, file)
    content = bytearray(file.read_bytes())
    content[torch_zip.read(file)["model.layers.0.self_attn.q_proj.weight"].offset + 5] ^= 64  # type: ignore[index]
    file.write_bytes(content)
    for workers in (0, 2):
        with pytest.raises(CorruptCheckpoint, match="checksum"):
            megaconv.convert(hf, tmp_path / "out", saver="core", workers=workers)
        assert not (tmp_path / "out").exists()
