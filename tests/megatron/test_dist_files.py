"""Distributed checkpoints that NVIDIA's Megatron and PyTorch wrote, read bit for bit, and what comes of them in our formats."""

from pathlib import Path

import numpy as np
import pytest

import megaconv
from formats import safetensors, torch_dist
from formats.chunked import ChunkedTensor
from formats.tensor import Box, FileTensor, read_tensor
from megaconv.families import families
from megaconv.megatron.distributed.chunks import chunks_of
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor, Region, native_tensors
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.put_together import elements, put_together
from tests.runs import assert_refused, run, unchanged

TORCH_DIST = sorted(path.name for path in FIXTURES.glob("dist-*"))
ZARR = sorted(path.name for path in FIXTURES.glob("zarr-*"))
DCP = sorted(path.name for path in FIXTURES.glob("dcp-*") if (path / "ckpt/.metadata").is_file())


def root(name: str) -> Path:
    return FIXTURES / name / ("checkpoint" if name in ZARR else "")


def expected_weights(name: str) -> dict[str, FileTensor]:
    """The expected weights by Hugging Face's names. Megatron's FSDP keeps the weights of a bf16 model in fp32."""
    stored = safetensors.read(FIXTURES / name / "expected.safetensors")
    if name.endswith("fsdp_dtensor"):
        return {
            key.removeprefix("fp32."): tensor
            for key, tensor in stored.items()
            if key.startswith("fp32.")
        }
    state = ("exp_avg.", "exp_avg_sq.", "fp32.", "step")
    if name == "dist-t5-tp1pp1":
        # Megatron's local T5 has no final norms, so its files have none.
        state = (*state, "encoder.final_layer_norm.", "decoder.final_layer_norm.")
    return {hf_name(key): tensor for key, tensor in stored.items() if not key.startswith(state)}


def hf_name(key: str) -> str:
    """The T5 names its sublayers where Hugging Face counts them."""
    last = 1 if key.startswith("encoder") else 2
    for word, number, module in (
        ("self_attn", 0, "SelfAttention"),
        ("cross_attn", 1, "EncDecAttention"),
        ("mlp", last, "DenseReluDense"),
    ):
        key = key.replace(f".{word}_layer_norm.", f".layer.{number}.layer_norm.")
        key = key.replace(f".block.0.{word}.", f".block.0.layer.{number}.{module}.")
    return key


def assert_holds_weights(path: Path, expected: dict[str, FileTensor]) -> None:
    checkpoint = megaconv.open(path)
    config = checkpoint.config
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    rows = families()[config.family].rows
    natives = [
        n
        for n in native_tensors(rows, config, HF, Layout(), 0, whole, config.vocab)
        if n.copy is None
    ]
    assert {native.name for native in natives} == set(expected)
    for native in natives:
        wanted = expected[native.name]
        assert {checkpoint.tensors[name].dtype for name in native.parts} == {wanted.dtype}
        assert np.array_equal(put_together(native, checkpoint.tensors), elements(wanted)), (
            native.name
        )


@pytest.mark.parametrize("name", TORCH_DIST + ZARR)
def test_every_weight_of_a_real_distributed_checkpoint_is_read_bit_for_bit(name: str) -> None:
    assert_holds_weights(root(name), expected_weights(name))


@pytest.mark.parametrize("name", DCP)
def test_every_tensor_that_pytorch_stored_is_read_bit_for_bit(name: str) -> None:
    """Whatever its strides, its storage's size, its dtype and the number of its axes."""
    tensors = torch_dist.open_directory(FIXTURES / name / "ckpt").tensors()
    found = {
        key.removeprefix("model.") if f"model.{key}" in tensors else key: key for key in tensors
    }
    for key, wanted in safetensors.read(FIXTURES / name / "expected.safetensors").items():
        tensor: ChunkedTensor = (
            tensors[key] if key in tensors else tensors[found.get(key, f"model.{key}")]
        )
        assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype), key
        assert np.array_equal(read_tensor(tensor), read_tensor(wanted)), key


@pytest.mark.parametrize(
    "name", ["dist-llama-tp2pp2", "dist-mixtral-ep2-nonhomog", "zarr-llama-tp2pp2"]
)
def test_the_layout_is_that_of_the_run_that_wrote_the_checkpoint(name: str, tmp_path: Path) -> None:
    sizes = {
        "dist-llama-tp2pp2": (2, 2, 1),
        "dist-mixtral-ep2-nonhomog": (1, 1, 2),
        "zarr-llama-tp2pp2": (2, 2, 1),
    }
    layout = megaconv.open(root(name)).layout
    assert (layout.tp, layout.pp, layout.ep) == sizes[name]
    assert (
        run(
            "convert", "--load-dir", root(name), "--saver", "core", "--save-dir", tmp_path / "out"
        ).status
        == 0
    )
    assert megaconv.open(tmp_path / "out").layout == layout


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dist-llama-tp2pp2", {}),
        ("dist-gpt2-tp2pp2", {"tp": 4, "pp": 1}),
        ("dist-mixtral-tp2ep2", {"tp": 2, "ep": 4, "etp": 1}),
        ("dist-mixtral-ep2-nonhomog", {"pp": 2}),
        ("core-moe-shared-tp2ep2", {"tp": 1}),
        ("core-te-llama-tp2pp2", {"vocab_padding": "zero"}),
    ],
)  # fmt: skip
def test_from_format_to_format_the_model_stays_the_same(
    name: str, sizes: dict[str, int | str], tmp_path: Path
) -> None:
    """torch -> torch_dist -> zarr -> torch_dist -> torch, cut anew on the way there; the last one is as the first."""
    source = FIXTURES / name / ("checkpoint" if name.startswith("core-") else "")
    before, fingerprint = source, megaconv.fingerprint(source).weights
    for step, ckpt_format in enumerate(["torch", "torch_dist", "zarr", "torch_dist", "torch"]):
        after = tmp_path / f"{step}-{ckpt_format}"
        megaconv.convert(
            before, after, saver="core", ckpt_format=ckpt_format, **(sizes if step == 1 else {})
        )
        assert megaconv.fingerprint(after).weights == fingerprint
        before = after
    assert megaconv.open(before).layout == megaconv.open(tmp_path / "1-torch_dist").layout


def test_a_tensor_with_an_inner_axis_keeps_it_in_its_chunks() -> None:
    """A convolution [channels, 1, kernel], as the two ranks read it that have half of the channels each."""
    conv = NativeTensor("conv", {"conv": (Region(Box(0, 6, 0, 3), 0),)}, (6, 1, 3), tp=0)
    found = [
        (chunk.offset, chunk.shape, chunk.parts)
        for chunk in chunks_of(conv, "conv", (4,), "float32", 2)
    ]
    assert found == [
        ((4, 0, 0, 0), (1, 3, 1, 3), [("conv", (Region(Box(0, 3, 0, 3), 0),))]),
        ((4, 3, 0, 0), (1, 3, 1, 3), [("conv", (Region(Box(3, 6, 0, 3), 0),))]),
    ]


@pytest.mark.parametrize("form", ["torch", "torch_dist", "zarr"])
def test_a_latent_projection_that_ranks_cannot_share_is_refused(form: str, tmp_path: Path) -> None:
    """Megatron's own layers shard the down projection of latent attention. Transformer Engine's replicate it."""
    source = write_model(tmp_path / "hf", "deepseek_v2", kv_lora_rank=5)
    local = ("--ckpt-format", form, "--tp", 2, "--transformer-impl", "local")
    with unchanged(tmp_path):
        refused = run("convert", source, tmp_path / "out", "--saver", "core", *local)
    assert_refused(refused, 2, "kv_down", "= 7 can't be divided over tensor parallel size (tp) = 2")
