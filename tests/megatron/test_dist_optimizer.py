"""Optimizer state in Megatron's distributed checkpoints: of every form that it was ever saved in, and in ours."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megaconv
from formats import torch_dist, torch_zip, zarr_arrays
from megaconv.errors import CheckpointError, NotExpressible, TensorMismatch, UsageError
from megaconv.megatron.optimizer.buffers import BufferParameter, fill, fitting, matching
from tests.conftest import FIXTURES
from tests.megatron.test_optimizer import assert_includes
from tests.put_together import assert_holds_optimizer
from tests.runs import assert_refused, run, unchanged

CORRUPT = "dist-llama-optim-dp2buckets-fully_reshardable-CORRUPT"
BUCKETS, GATHERED = (
    "dist-llama-optim-dp2buckets-dp_reshardable",
    "dist-llama-optim-dp2-dp_zero_gather_scatter",
)
FLATTENED, ZARR = "dist-v0.9-llama-optim-dp2-fully_sharded_model_space", "zarr-llama-optim-tp2pp2"
EXPERTS, EXPERT_BUCKETS = (
    "dist-mixtral-optim-ep2-fully_reshardable",
    "dist-mixtral-optim-ep2-dp_reshardable",
)
ZARR_BUCKETS, ZARR_GATHERED = "zarr-llama-distopt-fullyparallel-tp2dp2", "zarr-llama-distopt-tp2dp2"

EXPECTED = {
    path.parent.name: path
    for pattern in ("dist-*optim*/expected.safetensors", "zarr-*/expected_optim.safetensors")
    for path in sorted(FIXTURES.glob(pattern))
    if path.parent.name != CORRUPT
}


def root(name: str) -> Path:
    return FIXTURES / name / ("checkpoint" if name.startswith(("zarr", "core")) else "")


def prints(path: Path) -> tuple[str, str | None]:
    found = megaconv.fingerprint(path)
    return found.weights, found.optimizer


@pytest.mark.parametrize("name", EXPECTED)
def test_every_optimizer_tensor_of_a_distributed_checkpoint_is_read_bit_for_bit(name: str) -> None:
    checkpoint = megaconv.open(root(name))
    assert_holds_optimizer(checkpoint, EXPECTED[name])
    state = checkpoint.header.training
    assert state.optimizer is not None
    assert (state.optimizer.step, len(state.optimizer.groups)) == (2, 2)
    assert state.scheduler is not None
    assert state.scheduler["num_steps"] == 8


@pytest.mark.parametrize(
    "names",
    [(BUCKETS, GATHERED, FLATTENED), (EXPERTS, EXPERT_BUCKETS), (ZARR_BUCKETS, ZARR_GATHERED)],
)
def test_one_optimizer_saved_in_several_forms_has_one_fingerprint(names: tuple[str, ...]) -> None:
    assert len({prints(root(name)) for name in names}) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (BUCKETS, "distributed, dp_reshardable"),
        (FLATTENED, "distributed, fully_sharded_model_space"),
        ("dist-llama-optim-dp2-fsdp_dtensor", "Megatron-FSDP"),
        ("dist-llama-optim-dp2-nondist-fp32", "fp32"),
        (ZARR, "mixed precision"),
    ],
)
def test_inspect_tells_the_kind_and_the_step(name: str, kind: str) -> None:
    assert f"{kind}, step 2, " in run("inspect", root(name)).out


STEPS: list[dict[str, Any]] = [
    {"ckpt_format": "torch_dist", "tp": 2},
    {"ckpt_format": "zarr", "tp": 1},
    {"ckpt_format": "torch", "tp": 2, "use_distributed_optimizer": True},
    {
        "ckpt_format": "torch_dist",
        "tp": 1,
        "use_distributed_optimizer": False,
        "transformer_impl": "local",
    },
    {"ckpt_format": "torch", "tp": 2, "transformer_impl": "local"},
]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (BUCKETS, {"pp": 3}),
        (EXPERT_BUCKETS, {"ep": 4}),
        ("dist-llama-optim-dp2-nondist-fp32", {}),
        (ZARR_GATHERED, {"pp": 2, "vocab_padding": "zero"}),
        ("core-te-mixtral-optim-ep2", {"ep": 1}),
    ],
)
def test_from_format_to_format_the_optimizer_stays_the_same(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    before, expected = root(name), prints(root(name))
    assert expected[1] is not None
    for number, step in enumerate(STEPS):
        after = tmp_path / str(number)
        megaconv.convert(before, after, saver="core", **(more if number < 3 else {"pp": 1}), **step)
        assert prints(after) == expected, step
        before = after
    state = megaconv.open(before).header.training
    assert state.optimizer is not None
    assert state.optimizer.step == 2


def test_fp32_weights_that_become_16_bit_have_masters_in_a_distributed_checkpoint(
    tmp_path: Path,
) -> None:
    """Megatron-FSDP keeps them so. Afterwards the optimizer continues like any other."""
    source = root("dist-llama-optim-dp2-fsdp_dtensor")
    megaconv.convert(
        source, tmp_path / "bf16", saver="core", ckpt_format="torch_dist", dtype="bf16"
    )
    megaconv.convert(tmp_path / "bf16", tmp_path / "fp32", saver="core", dtype="fp32")
    assert (
        "optimizer.state.param.output_layer.weight"
        in torch_dist.open_directory(tmp_path / "bf16" / "iter_0000002").tensors()
    )
    assert prints(tmp_path / "fp32") == prints(source)


def test_the_same_optimizer_has_the_keys_that_megatron_gave_it(tmp_path: Path) -> None:
    megaconv.convert(root(EXPERTS), tmp_path / "dist", saver="core", ckpt_format="torch_dist")
    theirs, ours = (
        torch_dist.open_directory(path / "iter_0000002")
        for path in (root(EXPERTS), tmp_path / "dist")
    )
    shapes = {key: tensor.shape for key, tensor in theirs.tensors().items()}
    assert {key: tensor.shape for key, tensor in ours.tensors().items()} == shapes
    assert_common(theirs.path, ours.path)


def test_the_same_optimizer_has_the_arrays_that_megatron_gave_it(tmp_path: Path) -> None:
    megaconv.convert(root(ZARR), tmp_path / "zarr", saver="core", ckpt_format="zarr")
    theirs, ours = (
        zarr_arrays.open_directory(path / "iter_0000002")
        for path in (root(ZARR), tmp_path / "zarr")
    )
    described = {key: (tensor.shape, tensor.dtype) for key, tensor in theirs.tensors().items()}
    assert {
        key: (tensor.shape, tensor.dtype) for key, tensor in ours.tensors().items()
    } == described
    assert_common(theirs.path, ours.path)


def assert_common(theirs: Path, ours: Path) -> None:
    wanted, found = torch_zip.read(theirs / "common.pt"), torch_zip.read(ours / "common.pt")
    assert isinstance(wanted, dict)
    assert isinstance(found, dict)
    for key in ("optimizer", "opt_param_scheduler", "content_metadata", "iteration"):
        if key in wanted:
            assert_includes(found[key], wanted[key], vocab=101)
    assert not found["args"].no_save_optim  # None, as the run had it


# What can't be trusted.


def test_an_optimizer_that_megatron_saved_wrongly_is_refused_and_the_weights_convert(
    tmp_path: Path,
) -> None:
    """Megatron core 0.15 to 0.19 with several buckets: the weights are right, what belongs to them is not."""
    out = tmp_path / "out"
    command = [
        "convert",
        "--load-dir",
        root(CORRUPT),
        "--saver",
        "core",
        "--save-dir",
        out,
        "--ckpt-format",
        "torch_dist",
    ]
    with unchanged(tmp_path):
        assert_refused(
            run(*command), 3, "does not round to the weight", "several buckets", "--no-optimizer"
        )
    assert run(*command, "--no-optimizer").status == 0
    assert megaconv.fingerprint(out).weights == megaconv.fingerprint(root(BUCKETS)).weights
    assert run("diff", root(CORRUPT), root(BUCKETS), "--no-optimizer").status == 0


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return Path(shutil.copytree(root(ZARR), tmp_path / "zarr"))


def test_a_parameter_without_state_is_named(zarr: Path) -> None:
    shutil.rmtree(zarr / "iter_0000002" / "optimizer.state.exp_avg.output_layer.weight")
    with pytest.raises(TensorMismatch, match=r"no exp_avg of output_layer\.weight"):
        megaconv.fingerprint(zarr)


def test_state_of_another_shape_is_named(zarr: Path) -> None:
    version = zarr / "iter_0000002"
    shutil.rmtree(version / "optimizer.state.exp_avg.output_layer.weight")
    shutil.copytree(
        version / "optimizer.state.exp_avg.decoder.final_layernorm.weight",
        version / "optimizer.state.exp_avg.output_layer.weight",
    )
    with pytest.raises(
        TensorMismatch, match=r"output_layer\.weight is \[112, 32\], its exp_avg .* \[32\]"
    ):
        megaconv.fingerprint(zarr)


@pytest.mark.parametrize("slot", ["max_exp_avg_sq", "momentum_buffer"])
def test_more_state_than_one_optimizer_has_is_refused(slot: str, zarr: Path) -> None:
    version = zarr / "iter_0000002"
    key = "decoder.final_layernorm.weight"
    shutil.copytree(
        version / f"optimizer.state.exp_avg.{key}", version / f"optimizer.state.{slot}.{key}"
    )
    with pytest.raises(NotExpressible, match=rf"{slot}.*only Adam's"):
        megaconv.fingerprint(zarr)
    assert megaconv.convert(zarr, zarr.parent / "out", saver="core", optimizer=False).notices


@pytest.mark.parametrize("what", ["param_state", "optimizer"])
def test_a_rank_whose_objects_are_missing_is_named(what: str, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(root(ZARR_GATHERED), tmp_path / "zarr"))
    shutil.rmtree(broken / "iter_0000002" / f"optimizer.distributed.dp_group_idx_1.{what}")
    with pytest.raises(CheckpointError, match="tensor rank 1"):
        megaconv.fingerprint(broken)
    assert megaconv.inspect(broken).header.has_optimizer


def test_the_distributed_form_is_not_written_into_zarr(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="zarr"):
        megaconv.convert(
            root(ZARR), tmp_path / "out", saver="core", ckpt_format="zarr", use_distributed_optimizer=True
        )  # fmt: skip


# Buffers.

PARAMETERS = st.lists(
    st.tuples(st.integers(1, 300), st.booleans()).map(lambda found: BufferParameter("", (found[0],), found[1] and found[0] > 200)),
    min_size=1, max_size=12,
).map(lambda listed: [p._replace(name=str(number)) for number, p in enumerate(listed)])  # fmt: skip


@given(PARAMETERS, st.sampled_from((64, 1)), st.none() | st.integers(1, 500))
def test_stored_lengths_of_buckets_tell_how_they_were_filled(
    parameters: list[BufferParameter], alignment: int, bucket_size: int | None
) -> None:
    buffer = fill(parameters, alignment, bucket_size)
    starts = {(place.bucket, place.offset) for place in buffer.places.values()}
    assert len(starts) == len(parameters)
    found = fitting(parameters, buffer.unpadded)
    assert found is not None
    assert found.places == buffer.places
    if alignment == 64:
        assert matching(parameters, buffer.numel, [bucket_size]) == buffer
        assert fitting(parameters, [*buffer.unpadded[:-1], buffer.unpadded[-1] + 64]) is None
