"""Round trips: Hugging Face to Megatron core, to another layout, and back, bit for bit, for random models and layouts."""

import json
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from formats.tensor import Box, read_tensor
from megaconv.checkpoint import open_checkpoint
from megaconv.engine import conversion
from megaconv.engine.conversion import fingerprint
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible, TensorMismatch, UsageError
from megaconv.model.layout import LayerSplit
from megaconv.model.meaning import config_differences
from megaconv.options import ConvertOptions, LoadOptions, SaveOptions
from megaconv.values.cast import CastTensor
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.strategies import Draw, stage_splits

Tensors = dict[str, torch.Tensor]

WORDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 16,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
"""The keys of config.json that each kind of model has in addition to a Llama's."""


# An independent view of the files: by safetensors, torch, json and blake3 alone.


def weights_of(directory: Path) -> Tensors:
    """All tensors of a Hugging Face directory."""
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rank_state(path: Path) -> dict[str, Any]:
    """A rank file as torch loads it when it executes nothing; Namespace is all that it may need."""
    with torch.serialization.safe_globals([Namespace]):
        state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def rank_paths(root: Path) -> list[Path]:
    return sorted(root.glob("*/mp_rank_*/model_optim_rng.pt"))


CANONICAL = {
    r"model\.embed_tokens\.(.*)": r"embed.\1",
    r"model\.layers\.(\d+)\.input_layernorm\.(.*)": r"layers.\1.input_norm.\2",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.(.*)": r"layers.\1.mlp_norm.\2",
    r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.*)": r"layers.\1.attn.\2.\3",
    r"model\.layers\.(\d+)\.self_attn\.([qk]_norm)\.(.*)": r"layers.\1.attn.\2.\3",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.*)": r"layers.\1.mlp.\2.\3",
    r"model\.norm\.(.*)": r"final_norm.\1",
    r"lm_head\.(.*)": r"head.\1",
}


def canonical_name(name: str) -> str:
    (found,) = [
        re.sub(pattern, name_, name)
        for pattern, name_ in CANONICAL.items()
        if re.fullmatch(pattern, name)
    ]
    return found


def fingerprint_of_files(directory: Path) -> str:
    """The fingerprint of a directory, computed as megaconv.engine.fingerprints documents it."""
    lines = {}
    for name, tensor in weights_of(directory).items():
        label = f"{str(tensor.dtype).removeprefix('torch.')}\0{','.join(map(str, tensor.shape))}\0".encode()
        lines[canonical_name(name)] = blake3(label + bits(tensor)).hexdigest()
    return blake3(
        "".join(f"{name}\0weight\0{lines[name]}\n" for name in sorted(lines)).encode()
    ).hexdigest()


def assert_same_files(found: Path, wanted: Path) -> None:
    assert json.loads((found / "config.json").read_text()) == json.loads(
        (wanted / "config.json").read_text()
    )
    ours, theirs = weights_of(found), weights_of(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype, bits(ours[name])) == (
            tensor.shape,
            tensor.dtype,
            bits(tensor),
        ), name


def convert(
    source: Path, target: Path, saver: str = "core", load: LoadOptions | None = None, **save: Any
) -> Path:
    conversion.convert(
        source,
        target,
        saver,
        ConvertOptions(load=load or LoadOptions(), save=SaveOptions(**save), workers=2),
    )
    return target


# Any model, any two layouts, any way to cut the work into blocks.


@dataclass(frozen=True)
class Trip:
    """A model and the ways it goes."""

    model: dict[str, Any]
    first: ConvertOptions
    second: ConvertOptions
    back: ConvertOptions
    block_bytes: int


@st.composite
def hops(draw: Draw, layers: int, widths: tuple[int, ...]) -> ConvertOptions:
    """One conversion into Megatron core."""
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    save = SaveOptions(
        tp=draw(st.sampled_from(widths)),
        pp=pp,
        vpp=vpp,
        split=LayerSplit(layers=draw(stage_splits(layers, pp * vpp))),
        transformer_impl=draw(st.sampled_from(("transformer_engine", "local"))),
        vocab_divisor=draw(st.integers(1, 17)),
        vocab_padding=draw(st.sampled_from(("repeat", "zero"))),
    )
    return ConvertOptions(
        save=save,
        workers=draw(st.integers(1, 3)),
        max_memory=draw(st.sampled_from((16 << 10, 256 << 20))),
    )


@st.composite
def trips(draw: Draw) -> Trip:
    widths = draw(st.sampled_from(((1,), (1, 2), (1, 2, 4), (3, 1))))
    layers, kv_heads = draw(st.integers(1, 4)), max(widths) * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    model = {
        "layers": layers,
        "hidden": heads * draw(st.integers(1, 4)),  # its class needs a multiple
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": draw(st.integers(1, 5)),
        "ffn": max(widths) * draw(st.integers(1, 5)),
        "vocab": draw(st.integers(1, 70)),
        "tied": draw(st.booleans()),
        "dtype": draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        "shards": draw(st.integers(1, 3)),
        "extra_config": draw(st.sampled_from(list(WORDS.values()))),
    }
    back = ConvertOptions(
        save=SaveOptions(max_shard_bytes=draw(st.sampled_from((1, 1000, 5000, 10**9)))),
        workers=draw(st.integers(1, 3)),
    )
    return Trip(
        model,
        draw(hops(layers, widths)),
        draw(hops(layers, widths)),
        back,
        draw(st.integers(8, 300)),
    )


@given(trips())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_there_and_elsewhere_and_back_every_bit_is_the_same(trip: Trip) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "block_bytes", lambda max_memory, workers: trip.block_bytes)
        hf, first, second, back = (
            Path(folder) / name for name in ("hf", "first", "second", "back")
        )
        write_llama(hf, **trip.model)
        expected = fingerprint_of_files(hf)
        for source, target, saver, options in (
            (hf, first, "core", trip.first),
            (first, second, "core", trip.second),
            (second, back, "hf", trip.back),
        ):
            report = conversion.convert(source, target, saver, options)
            assert report.fingerprint is not None
            assert report.fingerprint.weights == fingerprint(target).weights == expected
        assert_same_files(back, hf)


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_kind_of_model_comes_back_from_an_uneven_interleaved_layout(
    words: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", layers=5, tied=tied, head_dim=6, extra_config=words)
    core = convert(
        hf,
        tmp_path / "core",
        tp=4,
        pp=2,
        vpp=2,
        split=LayerSplit(layers=(2, 0, 1, 2)),
        vocab_divisor=8,
    )
    assert len(rank_paths(core)) == 8
    assert_same_files(convert(core, tmp_path / "back", "hf"), hf)


@pytest.mark.parametrize("padding", ["repeat", "zero"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_rows_that_are_wider_than_a_block_arrive_whole(
    tied: bool, padding: str, tmp_path: Path
) -> None:
    """The smallest block has 4096 bytes; with little memory and a wide model it is less than a row."""
    hf = write_llama(
        tmp_path / "hf",
        layers=1,
        hidden=1100,
        heads=2,
        kv_heads=2,
        head_dim=2,
        ffn=4,
        vocab=9,
        tied=tied,
        dtype="float32",
    )
    save = SaveOptions(tp=2, pp=1, vocab_divisor=8, vocab_padding=padding)
    conversion.convert(
        hf, tmp_path / "core", "core", ConvertOptions(save=save, max_memory=16 << 10)
    )
    check_padding(tmp_path / "core", weights_of(hf)["model.embed_tokens.weight"], padding)
    assert_same_files(convert(tmp_path / "core", tmp_path / "back", "hf"), hf)


@pytest.mark.parametrize("pattern", [0x7F81, 0xFFFF, 0x0001, 0x8000])
def test_bits_that_are_no_ordinary_numbers_survive(pattern: int, tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", layers=1)
    odd = torch.full((16,), pattern, dtype=torch.uint16).view(torch.bfloat16)
    tensors = weights_of(hf)
    for tensor in tensors.values():
        tensor.reshape(-1)[3:19] = odd
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    core = convert(hf, tmp_path / "core", tp=2)
    assert_same_files(convert(core, tmp_path / "back", "hf"), hf)


@pytest.mark.parametrize("kind", ["bin", "legacy_bin"])
def test_torch_files_become_the_same_safetensors(kind: str, tmp_path: Path) -> None:
    expected = write_llama(tmp_path / "safetensors", seed=3)
    source = write_llama(tmp_path / "bin", seed=3, format=kind, shards=3)
    assert_same_files(convert(source, tmp_path / "out", "hf"), expected)


def test_tensors_of_several_dtypes_keep_theirs(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf")
    tensors = {
        name: tensor.float() if "norm" in name else tensor
        for name, tensor in weights_of(hf).items()
    }
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    core = convert(hf, tmp_path / "core", tp=2, pp=2)
    assert_same_files(convert(core, tmp_path / "back", "hf"), hf)


def test_tensors_of_several_dtypes_that_megatron_would_join_are_refused(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf")
    tensors = {
        name: tensor.float() if "k_proj" in name else tensor
        for name, tensor in weights_of(hf).items()
    }
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        NotExpressible,
        match=r"linear_qkv\.weight: would join tensors of bfloat16 and float32; give --dtype",
    ):
        convert(hf, tmp_path / "core")


def test_tokenizer_and_generation_files_travel_along(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf")
    files = {
        "tokenizer.json": "{}",
        "generation_config.json": '{"eos_token_id": 2}',
        "LICENSE": "free",
        "vocab.txt": "",
    }
    for name, content in {
        **files,
        "modeling_llama.py": "import os",
        "training_args.bin": "x",
    }.items():
        (hf / name).write_text(content)
    core = convert(hf, tmp_path / "core", tp=2)
    back = convert(core, tmp_path / "back", "hf")
    for directory in (core / "hf", back):
        assert {
            path.name: path.read_text() for path in directory.iterdir() if path.name in files
        } == files
        assert not list(directory.glob("*.py"))


# A tied head that is stored all the same.


def test_a_second_copy_of_a_tied_embedding_is_left_out(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", tied=True)
    tensors = weights_of(hf)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        hf / "model.safetensors",
    )
    back = convert(convert(hf, tmp_path / "core", tp=2, pp=2), tmp_path / "back", "hf")
    assert weights_of(back).keys() == tensors.keys()


def test_a_second_copy_of_a_tied_embedding_that_differs_is_an_error(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", tied=True)
    tensors = weights_of(hf)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        hf / "model.safetensors",
    )
    with pytest.raises(
        TensorMismatch, match=r"embed\.weight: the copy lm_head\.weight .* other values"
    ):
        convert(hf, tmp_path / "core")
    assert not (tmp_path / "core").exists()


@pytest.mark.parametrize(("pp", "copies"), [(1, 0), (2, 1)])
def test_megatron_gets_the_copy_of_a_tied_embedding_only_on_another_stage(
    pp: int, copies: int, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", tied=True)
    core = convert(hf, tmp_path / "core", pp=pp, vocab_divisor=8)
    heads = [
        state["model"]["output_layer.weight"]
        for state in map(rank_state, rank_paths(core))
        if "output_layer.weight" in state["model"]
    ]
    assert len(heads) == copies
    for head in heads:
        assert torch.equal(
            head, rank_state(rank_paths(core)[0])["model"]["embedding.word_embeddings.weight"]
        )


# The vocabulary.


def check_padding(core: Path, embedding: torch.Tensor, padding: str) -> None:
    """Check that the rows of all ranks together are the embedding, then padding."""
    states = [rank_state(path) for path in rank_paths(core)]
    stored = torch.cat([state["model"]["embedding.word_embeddings.weight"] for state in states])
    filler = embedding[-1:] if padding == "repeat" else torch.zeros_like(embedding[-1:])
    assert len(stored) == states[0]["args"].padded_vocab_size > len(embedding)
    assert torch.equal(stored[: len(embedding)], embedding)
    assert torch.equal(stored[len(embedding) :], filler.expand(len(stored) - len(embedding), -1))


@pytest.mark.parametrize("padding", ["repeat", "zero"])
@pytest.mark.parametrize(
    ("vocab", "tp", "divisor"),
    [(131, 1, 8), (131, 4, 8), (100, 4, 8), (3, 4, 8), (129, 2, 128), (127, 1, 128)],
)
def test_padding_rows_are_the_last_row_again_or_zero(
    vocab: int, tp: int, divisor: int, padding: str, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", vocab=vocab, layers=1)
    core = convert(hf, tmp_path / "core", tp=tp, vocab_divisor=divisor, vocab_padding=padding)
    check_padding(core, weights_of(hf)["model.embed_tokens.weight"], padding)


def test_the_vocabulary_divisor_of_the_source_is_kept(tmp_path: Path) -> None:
    core = convert(write_llama(tmp_path / "hf", vocab=100), tmp_path / "core", vocab_divisor=8)
    for tp, rows in ((1, 104), (2, 112), (4, 128)):
        out = convert(core, tmp_path / f"tp{tp}", tp=tp)
        args = rank_state(rank_paths(out)[0])["args"]
        assert (args.make_vocab_size_divisible_by, args.padded_vocab_size, args.vocab_size) == (
            8,
            rows,
            100,
        )


def test_the_default_vocabulary_divisor_is_megatrons_own(
    tmp_path: Path,
) -> None:
    core = convert(write_llama(tmp_path / "hf", vocab=100), tmp_path / "core")
    assert rank_state(rank_paths(core)[0])["args"].padded_vocab_size == 128


def edit_args(root: Path, edit: Callable[[Namespace], None]) -> None:
    """Change what the rank files say about their model."""
    for path in rank_paths(root):
        state = rank_state(path)
        edit(state["args"])
        torch.save(state, path)


def without_true_vocab(tmp_path: Path) -> Path:
    """A core checkpoint of 100 padded to 112 tokens that doesn't say how many of them are real."""
    core = convert(
        write_llama(tmp_path / "hf", vocab=100),
        tmp_path / "core",
        tp=2,
        pp=2,
        vocab_divisor=8,
        vocab_padding="zero",
    )
    shutil.rmtree(core / "hf")
    (core / "megaconv.json").unlink()
    edit_args(core, lambda args: delattr(args, "vocab_size"))
    return core


def test_an_unknown_true_vocabulary_keeps_all_rows_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    back = convert(without_true_vocab(tmp_path), tmp_path / "back", "hf")
    assert "the true vocabulary size is unknown; all 112 rows are kept" in caplog.text
    ours, theirs = weights_of(back), weights_of(tmp_path / "hf")
    assert ours["model.embed_tokens.weight"].shape == ours["lm_head.weight"].shape == (112, 32)
    assert torch.equal(ours["lm_head.weight"][:100], theirs["lm_head.weight"])
    assert json.loads((back / "config.json").read_text())["vocab_size"] == 112


def test_the_true_vocabulary_size_cuts_padding_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    back = convert(
        without_true_vocab(tmp_path), tmp_path / "back", "hf", LoadOptions(true_vocab_size=100)
    )
    assert not caplog.text
    ours, theirs = weights_of(back), weights_of(tmp_path / "hf")
    assert {name: bits(tensor) for name, tensor in ours.items()} == {
        name: bits(tensor) for name, tensor in theirs.items()
    }
    assert json.loads((back / "config.json").read_text())["vocab_size"] == 100


@pytest.mark.parametrize("saver", ["hf", "core"])
def test_a_true_vocabulary_size_counts_more_than_the_config_beside_the_ranks(
    saver: str, tmp_path: Path
) -> None:
    core = convert(write_llama(tmp_path / "hf", vocab=100), tmp_path / "core", vocab_divisor=8)
    out = convert(core, tmp_path / "out", saver, LoadOptions(true_vocab_size=90))
    assert open_checkpoint(out).config.vocab == 90
    assert (
        json.loads((out / ("config.json" if saver == "hf" else "hf/config.json")).read_text())[
            "vocab_size"
        ]
        == 90
    )


@pytest.mark.parametrize("size", [105, -1, 0])
def test_a_true_vocabulary_size_that_cannot_be_is_refused(size: int, tmp_path: Path) -> None:
    core = convert(write_llama(tmp_path / "hf", vocab=100), tmp_path / "core", vocab_divisor=8)
    with pytest.raises(UsageError):
        convert(core, tmp_path / "out", "hf", LoadOptions(true_vocab_size=size))


def test_a_hugging_face_source_has_no_padding_to_remove(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", vocab=100)
    with pytest.raises(UsageError, match="--true-vocab-size is for Megatron checkpoints"):
        convert(hf, tmp_path / "out", "core", LoadOptions(true_vocab_size=90))


# What a source says about its training and layout.


@pytest.mark.parametrize("name", ["core-llama-tp2pp2vpp2", "core-llama-optim-tp2pp2"])
def test_the_iteration_is_kept(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    iteration = int((source / "latest_checkpointed_iteration.txt").read_text())
    out = convert(source, tmp_path / "out", tp=1, pp=1)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
    (path,) = rank_paths(out)
    state = rank_state(path)
    assert path.parent.parent.name == f"iter_{iteration:07d}"
    assert state["iteration"] == iteration
    assert (
        state["args"].consumed_train_samples
        == open_checkpoint(source).header.training.consumed_train_samples
    )


def test_a_source_without_an_iteration_becomes_a_release(tmp_path: Path) -> None:
    core = convert(write_llama(tmp_path / "hf"), tmp_path / "core")
    assert (core / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert rank_paths(core)[0].parent.parent.name == "release"


def test_a_release_has_its_own_directory_and_stays_a_release(tmp_path: Path) -> None:
    core = convert(write_llama(tmp_path / "hf"), tmp_path / "core", release=True, tp=2)
    again = convert(core, tmp_path / "again", tp=1)
    for root in (core, again):
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "release"
        assert rank_paths(root)[0].parent.parent.name == "release"
        assert open_checkpoint(root).header.training.release
    assert_same_files(convert(again, tmp_path / "back", "hf"), tmp_path / "hf")


def test_sizes_that_are_left_out_stay_as_the_source_has_them(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf")
    core = convert(hf, tmp_path / "core", tp=2, pp=2, vpp=2, split=LayerSplit(pattern="Ett|t|t|L"))
    layout = open_checkpoint(core).layout
    assert layout is not None
    assert (layout.tp, layout.pp, layout.vpp, layout.stage_layers) == (2, 2, 2, (2, 1, 1, 0))
    assert open_checkpoint(convert(core, tmp_path / "same")).layout == layout
    narrower = open_checkpoint(convert(core, tmp_path / "tp1", tp=1)).layout
    assert narrower is not None
    assert (narrower.tp, narrower.stage_layers) == (1, (2, 1, 1, 0))
    shallower = open_checkpoint(convert(core, tmp_path / "pp4", pp=4)).layout
    assert shallower is not None
    assert (shallower.tp, shallower.pp, shallower.vpp, shallower.stage_layers) == (
        2,
        4,
        1,
        (1, 1, 1, 1),
    )


def test_without_its_config_a_checkpoint_still_says_which_model_it_is(tmp_path: Path) -> None:
    """Token ids are all that Megatron's own arguments lose."""
    for name, words in WORDS.items():
        hf = write_llama(
            tmp_path / name / "hf",
            head_dim=6,
            extra_config={**words, "bos_token_id": None, "eos_token_id": None},
        )
        core = convert(hf, tmp_path / name / "core", tp=2, pp=2)
        shutil.rmtree(core / "hf")
        back = convert(core, tmp_path / name / "back", "hf")
        assert config_differences(open_checkpoint(back).config, open_checkpoint(hf).config) == []
        assert fingerprint_of_files(back) == fingerprint_of_files(hf)


# Dtypes.


def test_the_dtype_is_that_of_the_tensors_whatever_the_arguments_claim(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", dtype="bfloat16")
    core = convert(hf, tmp_path / "core", tp=2)
    edit_args(core, lambda args: vars(args).update(params_dtype=torch.float32, bf16=False))
    again = convert(core, tmp_path / "again", tp=1)
    state = rank_state(rank_paths(again)[0])
    assert {tensor.dtype for name, tensor in state["model"].items() if name.endswith("weight")} == {
        torch.bfloat16
    }
    assert (state["args"].params_dtype, state["args"].bf16, state["args"].fp16) == (
        torch.bfloat16,
        True,
        False,
    )
    assert_same_files(convert(core, tmp_path / "back", "hf"), hf)


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("word", "target"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
@pytest.mark.parametrize("saver", ["hf", "core"])
def test_a_cast_is_what_torch_does(
    source: str, word: str, target: str, saver: str, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", dtype=source, extra_config={"torch_dtype": source})
    conversion.convert(
        hf,
        tmp_path / "out",
        saver,
        ConvertOptions(dtype=word, save=SaveOptions(tp=2) if saver == "core" else SaveOptions()),
    )
    if saver == "core":
        args = rank_state(rank_paths(tmp_path / "out")[0])["args"]
        assert args.params_dtype == getattr(torch, target)
    back = tmp_path / "out" if saver == "hf" else convert(tmp_path / "out", tmp_path / "back", "hf")
    ours, theirs = weights_of(back), weights_of(hf)
    assert {name: bits(tensor) for name, tensor in ours.items()} == {
        name: bits(tensor.to(getattr(torch, target))) for name, tensor in theirs.items()
    }
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == target


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_cast_of_any_bits_in_any_rectangle_is_what_torch_does(
    source: str, target: str, data: st.DataObject
) -> None:
    rows, cols = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    before, after = getattr(torch, source), getattr(torch, target)
    nbytes = rows * cols * before.itemsize
    content = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    values = torch.frombuffer(bytearray(content), dtype=before).reshape(rows, cols)
    cast = CastTensor(as_lazy(values), target, "x", overflow=True)
    expected = values.to(after)
    found = torch.from_numpy(read_tensor(cast)).view(after)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    last_column = torch.empty(rows, 1, dtype=after)
    cast.read_into(Box(0, rows, cols - 1, cols), last_column.view(torch.uint8).numpy())
    assert torch.equal(last_column.nan_to_num(nan=0.0), expected[:, -1:].nan_to_num(nan=0.0))


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="dtype 'int4' is not known; choose one of bf16, fp16, fp32"
    ):
        conversion.convert(
            write_llama(tmp_path / "hf"), tmp_path / "out", "hf", ConvertOptions(dtype="int4")
        )
