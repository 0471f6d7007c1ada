"""The parts of a 70B model's files: S3 allows 10,000 parts of 5 MiB to 5 GiB. No bytes of that size are held anywhere."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.very_large import MODELS, make_hugging_face
from formats.stores.checksums import CRC32
from formats.stores.part_file import PartFile, Sender
from formats.stores.part_sizes import PART_BYTES, part_bytes, part_count
from formats.stores.slots import Slots
from formats.stores.waiting import MEMORY_BYTES
from formats.stores.writing import Held, Upload, WritableStore
from megaconv import convert
from tests.stores.conftest import BUCKET
from tests.stores.small_store import SmallStore

LAYERS, HIDDEN, FFN, KV, VOCAB = 80, 8192, 28672, 1024, 128256
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": VOCAB,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_MOST_PARTS, _LEAST, _MOST = 10_000, 5 << 20, 5 << 30


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        yield f"{start}.input_layernorm.weight", (HIDDEN,)
        yield f"{start}.post_attention_layernorm.weight", (HIDDEN,)
        for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN)):
            yield f"{start}.self_attn.{name}_proj.weight", (rows, HIDDEN)
        yield f"{start}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{start}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{start}.mlp.down_proj.weight", (HIDDEN, FFN)


@pytest.fixture
def llama_70b(tmp_path: Path) -> Path:
    """One file of 141 GB without bytes: the disk stores only its header."""
    header: dict[str, Any] = {}
    position = 0
    for name, shape in _shapes():
        nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        {"saver": "hf", "max_shard_size": "200GB"},
        pytest.param({"saver": "core", "tp": 1}, marks=pytest.mark.slow),
        pytest.param({"saver": "core", "tp": 8, "pp": 2}, marks=pytest.mark.slow),
        {"saver": "core", "ckpt_format": "torch_dist"},
    ],
)
def test_the_files_of_a_70b_model_fit_into_the_parts_of_s3(
    writable: SmallStore, llama_70b: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("formats.stores.part_sizes.PART_BYTES", PART_BYTES)
    report = convert(llama_70b, f"s3://{BUCKET}/out", dry_run=True, **words)
    assert report.nbytes > 130 * 10**9
    assert max(layout.size for layout in report.plan.files.values()) > _MOST
    for layout in report.plan.files.values():
        step, count = part_bytes(layout.size), part_count(layout.size)
        assert count <= _MOST_PARTS
        assert count == 1 or _LEAST <= step <= _MOST
        assert (count - 1) * step < layout.size <= count * step
    waiting = report.waiting
    assert waiting is not None
    # The spool takes what memory doesn't.
    assert waiting.memory_bytes <= 200 << 20
    assert waiting.is_spooled or waiting.open_bytes <= waiting.memory_bytes
    assert waiting.spool_bytes < 16 << 30
    assert not writable.of("put")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({"tp": 1}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        {"tp": 8},
        {"ckpt_format": "torch_dist"},
        pytest.param({"tp": 8, "pp": 4}, marks=pytest.mark.slow),
        pytest.param({"ckpt_format": "torch_dist", "tp": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_parts_of_a_70b_model_need_no_spool(
    writable: SmallStore, llama_70b: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("formats.stores.part_sizes.PART_BYTES", PART_BYTES)
    _require_no_spool(llama_70b, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama_405b", {"tp": 8, "pp": 9}),
        pytest.param("llama_405b", {"ckpt_format": "torch_dist"}, marks=pytest.mark.slow),
        pytest.param("llama_405b", {"tp": 2, "pp": 9}, marks=pytest.mark.slow),
        pytest.param("llama_405b", {"tp": 1, "pp": 9}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"ckpt_format": "torch_dist"}, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v3",
            {"tp": 2, "pp": 16, "decoder_last_pipeline_num_layers": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_parts_of_the_largest_models_need_no_spool(
    writable: SmallStore,
    tmp_path: Path,
    name: str,
    words: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_hugging_face(tmp_path, MODELS[name])
    monkeypatch.setattr("formats.stores.part_sizes.PART_BYTES", PART_BYTES)
    _require_no_spool(tmp_path, words)


def _require_no_spool(source: Path, words: dict[str, Any]) -> None:
    report = convert(source, f"s3://{BUCKET}/out", saver="core", dry_run=True, workers=3, **words)
    assert report.waiting is not None
    assert not report.waiting.is_spooled, report.waiting
    assert report.waiting.memory_bytes == MEMORY_BYTES


class _Discarding:
    """A store that notes the parts, and keeps no bytes."""

    checksum = CRC32

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}

    def put_part(self, upload: Upload, number: int, content: bytearray, crc: int) -> str:
        self.sent[number] = len(content)
        return f'"{number:032x}"'


@pytest.mark.parametrize("size", [(6 << 30) + 12345, (141 << 30) + 7])
def test_a_large_file_goes_on_where_an_earlier_run_has_ended(size: int) -> None:
    """All parts but the last two are there. Positions, numbers and the checksum are those of the whole file."""
    step, count = part_bytes(size), part_count(size)
    store = _Discarding()
    sender = Sender(cast(WritableStore, store), Slots(2 * step), 1)
    zeros = CRC32.of(bytes(1))
    held = {
        number: Held(step, f'"{number:032x}"', zeros_of(step, zeros))
        for number in range(1, count - 1)
    }
    upload = Upload("out/file", "upload", 0.0)
    file = PartFile(sender, "out/file", size, upload=upload, parts=held)
    start, piece = (count - 2) * step, bytes(1 << 20)
    assert not file.holds(start, size)
    assert file.holds(0, start)
    for offset in range(start, size, len(piece)):
        file.write(offset, piece[: size - offset])
    sender.wait()
    assert store.sent == {count - 1: step, count: size - (count - 1) * step}
    whole = file.whole()
    assert (whole.size, whole.crc) == (size, zeros_of(size, zeros))
    assert whole.tag.endswith(f'-{count}"')
    sender.close()


def zeros_of(nbytes: int, of_one: int) -> int:
    """The CRC-32 of this number of zeros, by doubling."""
    found, length, doubled = 0, 1, of_one
    while nbytes:
        if nbytes & 1:
            found = CRC32.joined(found, doubled, length)
        doubled, length, nbytes = CRC32.joined(doubled, doubled, length), 2 * length, nbytes >> 1
    return found
