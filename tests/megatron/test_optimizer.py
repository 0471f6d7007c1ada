"""Optimizer state: every bit of it is read, resharded and written, and the run goes on as if nothing had happened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megaconv
from formats.pickle_writer import Constant
from formats.tensor import read_tensor
from megaconv.errors import CheckpointError, NotExpressible, TensorMismatch, UsageError
from megaconv.megatron.optimizer.buffers import BufferParameter, fill, gaps
from megaconv.megatron.optimizer.training_output import written_rng
from megaconv.model.ir import Key
from megaconv.model.training import ADAM, MASTER, SGD
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.megatron_oracle import for_this_release, installed_minor, read_rank_file
from tests.optimizer_models import (
    SCHEDULER,
    load,
    trained,
    write_trained,
    write_trained_critic,
    write_trained_llama,
    write_trained_mamba,
    write_trained_rewards_of_experts,
)
from tests.optimizer_oracle import adamw, gradient, sgd, step
from tests.put_together import assert_holds, assert_holds_optimizer, rank_files
from tests.runs import run, unchanged

ALL = sorted(path.parent.name for path in FIXTURES.glob("core-*/expected_optim.safetensors"))
PLAIN, DISTRIBUTED, MIXTURE = (
    "core-llama-optim-tp2pp2",
    "core-te-llama-distopt-tp2dp2",
    "core-te-mixtral-optim-ep2",
)
FP32 = "core-llama-optim-fp32-tp1pp1"


def source_of(name: str) -> Path:
    return FIXTURES / name / "checkpoint"


def prints(path: Path) -> tuple[str, str | None]:
    found = megaconv.fingerprint(path)
    return found.weights, found.optimizer


# What Megatron wrote.


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_tensor_of_megatron_is_read_bit_for_bit(name: str) -> None:
    checkpoint = megaconv.open(source_of(name))
    assert_holds(checkpoint, FIXTURES / name / "expected.safetensors")
    assert_holds_optimizer(checkpoint, FIXTURES / name / "expected_optim.safetensors")
    state = checkpoint.header.training
    assert state.optimizer is not None
    assert state.optimizer.step == 2
    assert state.scheduler is not None
    assert state.scheduler["num_steps"] == 8
    assert set(state.optimizer.group_of) == set(checkpoint.tensors)


@pytest.mark.parametrize("name", ALL)
def test_the_same_optimizer_at_the_same_layout_becomes_the_same_files(
    name: str, tmp_path: Path
) -> None:
    source, theirs = source_of(name), rank_files(source_of(name))
    args = next(iter(theirs.values()))["args"]
    megaconv.convert(
        source, tmp_path / "out", saver="core", transformer_impl=args.transformer_impl,
        moe_grouped_gemm=args.transformer_impl == "transformer_engine" and bool(args.num_experts),
        use_distributed_optimizer=args.use_distributed_optimizer,
    )  # fmt: skip
    ours = rank_files(tmp_path / "out")
    vocab = megaconv.open(source).config.vocab
    for file, state in theirs.items():
        assert_includes(ours[file]["optimizer"], state["optimizer"], vocab)
        assert_includes(ours[file]["opt_param_scheduler"], state["opt_param_scheduler"], vocab)
        assert_includes(ours[file]["rng_state"], state["rng_state"], vocab)


def assert_includes(ours: Any, theirs: Any, vocab: int, path: str = "") -> None:
    """Check that our state has all that Megatron's has. Rows of padding are noise and are not compared."""
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            assert_includes(ours[key], value, vocab, f"{path}/{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for index, value in enumerate(theirs):
            assert_includes(ours[index], value, vocab, f"{path}/{index}")
    elif hasattr(theirs, "read_into"):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), path
        found, wanted = read_tensor(ours), read_tensor(theirs)
        rows = len(wanted) if len(wanted) not in (104, 56) else min(len(wanted), vocab - 56)
        assert np.array_equal(found[:rows], wanted[:rows]), path
    else:
        assert ours == theirs, path


def test_buffers_are_laid_out_as_in_the_files_of_megatron() -> None:
    """core-te-llama-distopt-tp2dp2, mp_rank_00: offsets found in the file by its values."""
    layer = [
        ("proj", (32, 16)),
        ("qkv norm", (32,)),
        ("qkv", (32, 32)),
        ("fc1 norm", (32,)),
        ("fc1", (40, 32)),
        ("fc2", (32, 20)),
    ]
    listed = [BufferParameter("embedding", (56, 32))]
    listed += [
        BufferParameter(f"{index} {name}", shape) for index in range(2) for name, shape in layer
    ]
    listed += [BufferParameter("norm", (32,)), BufferParameter("head", (56, 32))]
    buffer = fill(listed)
    assert buffer.unpadded == (10816,)
    assert {name: buffer.offset(name) for name in ("head", "norm", "1 fc2", "1 fc1", "1 qkv norm", "0 proj", "embedding")} == {
        "head": 0, "norm": 1792, "1 fc2": 1856, "1 fc1": 2496, "1 qkv norm": 4864, "0 proj": 8512, "embedding": 9024,
    }  # fmt: skip
    assert sum(length for _, length in gaps(buffer, listed)) == 5 * 32
    assert fill(listed, alignment=1).unpadded == (10656,)


# Resharding.


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_llama(tmp_path_factory.mktemp("trained") / "tied")


@pytest.fixture(scope="module")
def sgd_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_llama(tmp_path_factory.mktemp("trained") / "sgd", kind="sgd")


@pytest.fixture(scope="module")
def few_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two key/value heads, and biases on q, k and v."""
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return write_trained_llama(
        tmp_path_factory.mktemp("trained") / "few", tied=False, kv_heads=2, extra_config=qwen2
    )


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with gated delta nets in two of three layers."""
    root = tmp_path_factory.mktemp("trained")
    return write_trained(write_model(root / "hybrid-hf", "qwen3_5"), root / "hybrid")


@pytest.fixture(scope="module")
def tied_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its head tied to its embedding, which the MTP layer reads too."""
    root = tmp_path_factory.mktemp("trained")
    return write_trained(
        write_model(root / "hybrid-hf", "qwen3_5", tie_word_embeddings=True), root / "hybrid"
    )


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_critic(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def rewards_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_rewards_of_experts(tmp_path_factory.mktemp("rewards"))


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_mamba(tmp_path_factory.mktemp("trained-mamba"))


@pytest.mark.parametrize(
    "options", [{}, {"ckpt_format": "torch_dist"}, {"tp": 2, "use_distributed_optimizer": True}]
)
def test_masters_of_norms_that_are_stored_less_one_go_there_and_back(
    hybrid: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    megaconv.convert(
        hybrid, tmp_path / "te", saver="core", transformer_impl="transformer_engine", **options
    )
    assert prints(tmp_path / "te") == prints(hybrid)
    megaconv.convert(
        tmp_path / "te", tmp_path / "back", saver="core", transformer_impl="local", tp=1
    )
    assert prints(tmp_path / "back") == prints(hybrid)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_head_that_the_stage_of_mtp_layers_never_computes_with_has_state_and_means_nothing(
    tied_hybrid: Path, distributed: bool, tmp_path: Path
) -> None:
    out, last = tmp_path / "out", "mp_rank_00_001/model_optim_rng.pt"
    megaconv.convert(
        tied_hybrid,
        out,
        saver="core",
        pp=2,
        layer_split=(1, 2),
        use_distributed_optimizer=distributed,
    )
    assert prints(out) == prints(tied_hybrid)
    (file,) = out.glob(f"*/{last}")
    state = load(file)
    assert "embedding.word_embeddings.weight" in state["model"]
    if not distributed:
        ids = [
            number
            for group in state["optimizer"]["optimizer"]["param_groups"]
            for number in group["params"]
        ]
        trained = [
            t for n, t in state["model"].items() if t is not None and not n.endswith("_extra_state")
        ]
        assert len(ids) == len(trained)
    state["model"]["output_layer.weight"].zero_()
    torch.save(state, file)
    (out / "megaconv.json").unlink()
    if not distributed:
        # The weights prove buffers of a distributed optimizer, also of this parameter.
        assert prints(out)[0] == prints(tied_hybrid)[0]
    megaconv.convert(out, tmp_path / "hf", saver="hf", optimizer=False)
    assert megaconv.diff(tmp_path / "hf", tied_hybrid, optimizer=False).same


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist", "zarr"])
def test_momentum_of_sgd_arrives_bit_for_bit(
    sgd_trained: Path, ckpt_format: str, tmp_path: Path
) -> None:
    megaconv.convert(
        sgd_trained, tmp_path / "out", saver="core", tp=2, pp=2, ckpt_format=ckpt_format
    )
    megaconv.convert(
        tmp_path / "out", tmp_path / "back", saver="core", transformer_impl="local", tp=1, pp=1
    )
    assert prints(tmp_path / "out") == prints(tmp_path / "back") == prints(sgd_trained)
    assert {key.slot for key in megaconv.open(tmp_path / "out").slots} == {MASTER, *SGD}


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_the_distributed_optimizer_is_adams_alone(
    sgd_trained: Path, ckpt_format: str, tmp_path: Path
) -> None:
    with unchanged(tmp_path), pytest.raises(UsageError, match="was trained with SGD"):
        megaconv.convert(
            sgd_trained,
            tmp_path / "out",
            saver="core",
            ckpt_format=ckpt_format,
            use_distributed_optimizer=True,
        )


LAYOUTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from((1, 2, 4)),
        "pp": st.sampled_from((1, 2, 4)),
        "transformer_impl": st.sampled_from(("local", "transformer_engine")),
        "use_distributed_optimizer": st.booleans(),
        "make_vocab_size_divisible_by": st.sampled_from((1, 8, 128)),
    }
)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=LAYOUTS, second=LAYOUTS, virtual=st.booleans())
def test_the_optimizer_survives_any_two_layouts_and_forms(
    tied: Path,
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, Any],
    second: dict[str, Any],
    virtual: bool,
) -> None:
    directory = tmp_path_factory.mktemp("layouts")
    split = {"layer_split": (1, 0, 2, 1)} if virtual and first["pp"] == 2 else {}
    megaconv.convert(tied, directory / "a", saver="core", **first, **split)
    megaconv.convert(directory / "a", directory / "b", saver="core", **second)
    expected = prints(tied)
    assert expected[1] is not None
    assert prints(directory / "a") == prints(directory / "b") == expected


FORMS: list[dict[str, Any]] = [
    {"use_distributed_optimizer": False},
    {"use_distributed_optimizer": True},
    {"ckpt_format": "torch_dist"},
    {"ckpt_format": "zarr"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_optimizer_of_a_critic_survives(
    form: dict[str, Any], critic: Path, tmp_path: Path
) -> None:
    megaconv.convert(critic, tmp_path / "many", saver="core", tp=2, pp=2, **form)
    megaconv.convert(tmp_path / "many", tmp_path / "back", saver="core", pp=4)
    expected = prints(critic)
    assert expected[1] is not None
    assert prints(tmp_path / "many") == prints(tmp_path / "back") == expected


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_optimizer_of_a_reward_model_of_experts_survives_virtual_stages(
    form: dict[str, Any], rewards_of_experts: Path, tmp_path: Path
) -> None:
    """The head is in float32 beside bfloat16."""
    many = {"tp": 2, "ep": 2, "etp": 1, "pp": 2, "vpp": 2, **form}
    megaconv.convert(rewards_of_experts, tmp_path / "many", saver="core", **many)
    megaconv.convert(tmp_path / "many", tmp_path / "back", saver="core", tp=1, ep=4, pp=4)
    head = megaconv.open(tmp_path / "back").tensors["score.weight"]
    assert head.dtype == "float32"
    expected = prints(rewards_of_experts)
    assert expected[1] is not None
    assert prints(tmp_path / "many") == prints(tmp_path / "back") == expected


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_optimizer_of_ranks_that_share_key_value_heads_survives(
    form: dict[str, Any], few_heads: Path, tmp_path: Path
) -> None:
    megaconv.convert(few_heads, tmp_path / "many", saver="core", tp=4, pp=2, **form)
    megaconv.convert(tmp_path / "many", tmp_path / "back", saver="core", tp=2)
    assert prints(tmp_path / "many") == prints(tmp_path / "back") == prints(few_heads)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "ep": 1}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"tp": 1, "ep": 4}],
    ids=str,
)
def test_the_optimizers_of_experts_and_of_the_rest_survive_any_expert_layout(
    sizes: dict[str, int], distributed: bool, tmp_path: Path
) -> None:
    source = source_of(MIXTURE)
    megaconv.convert(
        source, tmp_path / "a", saver="core", use_distributed_optimizer=distributed, **sizes
    )
    megaconv.convert(
        tmp_path / "a", tmp_path / "b", saver="core", tp=1, ep=2, etp=1, moe_grouped_gemm=True
    )
    assert prints(tmp_path / "a") == prints(tmp_path / "b") == prints(source)
    state = next(iter(rank_files(tmp_path / "a").values()))["optimizer"]
    assert isinstance(state, list) == (sizes["ep"] > 1)


def test_legacy_models_keep_their_optimizer_too(tied: Path, tmp_path: Path) -> None:
    megaconv.convert(tied, tmp_path / "legacy", saver="legacy", tp=2, pp=2)
    megaconv.convert(
        tmp_path / "legacy",
        tmp_path / "back",
        saver="core",
        tp=1,
        pp=1,
        use_distributed_optimizer=True,
    )
    assert prints(tmp_path / "legacy") == prints(tmp_path / "back") == prints(tied)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_tensor_with_two_names_has_one_optimizer_state(distributed: bool, tmp_path: Path) -> None:
    """Megatron's T5 lists its positions and the head's bias twice, and its optimizer knows them once."""
    source = tmp_path / "t5"
    megaconv.convert(
        source_of("core-t5-tp2pp1"), source, saver="core", tp=1, transformer_impl="local"
    )
    (file,) = source.glob("*/mp_rank_00/model_optim_rng.pt")
    state = load(file)
    model = {
        name: tensor for name, tensor in state["model"].items() if isinstance(tensor, torch.Tensor)
    }
    again = {
        "position_embeddings.weight": "embedding.position_embeddings.weight",
        "output_layer.bias": "lm_head.output_layer.bias",
    }
    state["optimizer"] = trained(
        {name: model[name] for name in model if name not in again}, float16=False
    )
    state["opt_param_scheduler"] = dict(SCHEDULER)
    state["model"] |= {alias: model[name] for alias, name in again.items()}
    torch.save(state, file)
    (source / "megaconv.json").unlink()  # the record of what was written
    options = {"transformer_impl": "local", "use_distributed_optimizer": distributed}
    megaconv.convert(source, tmp_path / "two", saver="core", tp=2, **options)
    megaconv.convert(
        tmp_path / "two", tmp_path / "one", saver="core", tp=1, transformer_impl="local"
    )
    megaconv.convert(
        tmp_path / "two", tmp_path / "dist", saver="core", ckpt_format="torch_dist", **options
    )
    expected = prints(source)
    assert expected[1] is not None
    assert {prints(tmp_path / name) for name in ("two", "one", "dist")} == {expected}


def test_random_number_generators_go_along_at_the_same_layout_only(tmp_path: Path) -> None:
    source = source_of(DISTRIBUTED)
    form = {"use_distributed_optimizer": False}
    same = megaconv.convert(source, tmp_path / "same", saver="core", **form)
    other = megaconv.convert(source, tmp_path / "other", saver="core", tp=1, **form)
    assert same.notices == ()
    (notice,) = other.notices
    assert "they mean nothing at another layout: start the run with --no-load-rng" in notice
    state = read_rank_file(next((tmp_path / "same").glob("*/mp_rank_01/model_optim_rng.pt")))
    assert state["rng_state"][0]["np_rng_state"][1].shape == (624,)
    # These arguments have the values of the run.
    assert (state["args"].no_save_rng, state["args"].no_save_optim) == (None, None)
    (file,) = (tmp_path / "other").glob("*/mp_rank_00/model_optim_rng.pt")
    assert "rng_state" not in load(file)
    assert load(file)["args"].no_save_rng is True


def test_generators_with_a_value_that_no_file_can_hold_are_left_out() -> None:
    state = {"random_rng_state": (3, (1, 2), None)}
    assert written_rng({(0, 0, 0): [state]}) == {(0, 0, 0): [state]}
    assert written_rng({(0, 0, 0): [state | {"more": b"bytes"}]}) == {}


@pytest.mark.parametrize(("asked", "is_said"), [(None, True), (True, False), (False, False)])
def test_a_notice_says_that_a_distributed_optimizer_becomes_another_one(
    asked: bool | None, is_said: bool, tmp_path: Path
) -> None:
    report = megaconv.convert(
        source_of(DISTRIBUTED), tmp_path / "out", saver="core",
        use_distributed_optimizer=asked, dry_run=True,
    )  # fmt: skip
    said = [notice for notice in report.notices if "--use-distributed-optimizer" in notice]
    assert bool(said) == is_said


@pytest.mark.parametrize(("ckpt_format", "is_said"), [("zarr", True), ("torch_dist", False)])
def test_a_notice_says_that_zarr_has_no_distributed_optimizer(
    ckpt_format: str, is_said: bool, tmp_path: Path
) -> None:
    report = megaconv.convert(
        source_of(DISTRIBUTED),
        tmp_path / "out",
        saver="core",
        ckpt_format=ckpt_format,
        dry_run=True,
    )
    said = [notice for notice in report.notices if "zarr checkpoints have no other form" in notice]
    assert bool(said) == is_said


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "zarr"])
def test_random_number_generators_go_through_distributed_formats_bit_for_bit(
    ckpt_format: str, tmp_path: Path
) -> None:
    source = source_of(DISTRIBUTED)
    there = megaconv.convert(source, tmp_path / "dist", saver="core", ckpt_format=ckpt_format)
    back = megaconv.convert(
        tmp_path / "dist", tmp_path / "back", saver="core", use_distributed_optimizer=True
    )
    assert not [notice for notice in (*there.notices, *back.notices) if "generators" in notice]
    ours = rank_files(tmp_path / "back")
    for file, state in rank_files(source).items():
        (expected,), (found,) = state["rng_state"], ours[file]["rng_state"]
        assert found.keys() == expected.keys()
        assert found["random_rng_state"] == expected["random_rng_state"]
        assert found["np_rng_state"] == expected["np_rng_state"]
        assert np.array_equal(
            read_tensor(found["torch_rng_state"]), read_tensor(expected["torch_rng_state"])
        )
    other = megaconv.convert(
        tmp_path / "dist", tmp_path / "other", saver="core", ckpt_format=ckpt_format, tp=1
    )
    assert [("--no-load-rng" in notice) for notice in other.notices] == [True]


# Dtypes.


def values(tensor: Any) -> torch.Tensor:
    raw: Any = torch.from_numpy(read_tensor(tensor).reshape(-1))
    found: torch.Tensor = raw.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
    return found


def test_fp32_weights_become_the_masters_of_a_16_bit_output_and_come_back_whole(
    tmp_path: Path,
) -> None:
    source = source_of(FP32)
    megaconv.convert(source, tmp_path / "half", saver="core", dtype="bf16")
    megaconv.convert(tmp_path / "half", tmp_path / "back", saver="core", dtype="fp32")
    half, whole = megaconv.open(tmp_path / "half"), megaconv.open(source)
    name = "layers.1.attn.k.weight"
    assert half.tensors[name].dtype == "bfloat16"
    assert values(half.slots[Key(name, MASTER)]).equal(values(whole.tensors[name]))
    assert prints(tmp_path / "back") == prints(source)


def test_16_bit_weights_are_rounded_from_their_masters(tmp_path: Path) -> None:
    megaconv.convert(source_of(PLAIN), tmp_path / "fp16", saver="core", dtype="fp16")
    found, source = megaconv.open(tmp_path / "fp16"), megaconv.open(source_of(PLAIN))
    for name, tensor in found.tensors.items():
        master = values(source.slots[Key(name, MASTER)])
        assert values(tensor).equal(master.half()), name
        assert values(found.slots[Key(name, MASTER)]).equal(master), name


def test_the_loss_scale_of_fp16_goes_along(tmp_path: Path) -> None:
    source = write_trained_llama(tmp_path / "fp16", dtype="float16", layers=2)
    edit(source, lambda state: state["optimizer"].update(grad_scaler=SCALER))
    megaconv.convert(
        source, tmp_path / "out", saver="core", tp=2, pp=1, use_distributed_optimizer=True
    )
    for file in (tmp_path / "out").glob("*/*/model_optim_rng.pt"):
        scaler = load(file)["optimizer"]["grad_scaler"]
        assert (
            scaler["scale"].tolist(),
            scaler["growth_tracker"],
            scaler["hysteresis_tracker"],
        ) == ([65536.0], 7, 2)
    assert prints(tmp_path / "out") == prints(source)


@pytest.mark.parametrize("options", [{}, {"ckpt_format": "torch_dist"}])
def test_optimizers_with_loss_scales_of_their_own_are_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Experts' optimizer lowers its scale for itself, and an output has a place for one scale."""
    made = tmp_path / "made"
    megaconv.convert(source_of(MIXTURE), made, saver="core", dtype="fp16", **options)
    for file in [*made.glob("*/*/model_optim_rng.pt"), *made.glob("*/common.pt")]:
        state = read_rank_file(file)
        listed = state["optimizer"]
        dense, experts = listed if isinstance(listed, list) else listed.values()
        dense["grad_scaler"], experts["grad_scaler"] = SCALER, {**SCALER, "growth_tracker": 8}
        torch.save(state, file)
    (made / "megaconv.json").unlink()
    with pytest.raises(
        NotExpressible, match=r"different loss scales .*growth_tracker 7.*growth_tracker 8"
    ):
        megaconv.fingerprint(made)


SCALER = {"scale": torch.tensor([65536.0]), "growth_tracker": 7, "hysteresis_tracker": 2}


# The run goes on.


@pytest.mark.slow
@pytest.mark.oracle
def test_megatrons_own_optimizers_go_on_from_every_layout_with_the_same_step(
    tied: Path,
    sgd_trained: Path,
    few_heads: Path,
    hybrid: Path,
    tied_hybrid: Path,
    mamba: Path,
    critic: Path,
    tmp_path: Path,
) -> None:
    """megatron-core loads, steps and saves bit for bit the same at two layouts. The result equals AdamW's on the
    source."""
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "plain": (source_of(PLAIN), {"tp": 1, "pp": 2}),
        "plain, again": (source_of(PLAIN), {"tp": 2, "pp": 1}),
        "distributed": (source_of(PLAIN), {"tp": 2, "pp": 2, "use_distributed_optimizer": True}),
        "fp32": (source_of(FP32), {"tp": 2, "pp": 2}),
        "experts": (source_of(MIXTURE), {"tp": 2, "ep": 2}),
        "experts, distributed": (
            source_of(MIXTURE),
            {"tp": 1, "ep": 4, "use_distributed_optimizer": True},
        ),
        "torch_dist": (source_of(PLAIN), {"tp": 1, "pp": 2, "ckpt_format": "torch_dist"}),
        "torch_dist, plain": (
            source_of(PLAIN),
            {"tp": 2, "ckpt_format": "torch_dist", "use_distributed_optimizer": False},
        ),
        "torch_dist, experts": (
            source_of(MIXTURE),
            {"tp": 2, "ep": 2, "ckpt_format": "torch_dist"},
        ),
        "tied": (tied, {"tp": 1, "pp": 2, "vpp": 2}),
        "sgd": (sgd_trained, {"tp": 2, "pp": 2}),
        "shared heads": (few_heads, {"tp": 4}),
        "shared heads, distributed": (few_heads, {"tp": 4, "use_distributed_optimizer": True}),
        "shared heads, torch_dist": (few_heads, {"tp": 4, "ckpt_format": "torch_dist"}),
        "tied, distributed": (tied, {"tp": 2, "pp": 2, "use_distributed_optimizer": True}),
        "hybrid": (hybrid, {"tp": 2, "pp": 2, "layer_split": (1, 2)}),
        "hybrid, torch_dist": (hybrid, {"tp": 2, "ckpt_format": "torch_dist"}),
        "hybrid, distributed": (hybrid, {"tp": 2, "use_distributed_optimizer": True}),
        "hybrid, stages, distributed": (
            hybrid,
            {"pp": 2, "layer_split": (1, 2), "use_distributed_optimizer": True},
        ),
        "hybrid, tied": (tied_hybrid, {"pp": 2, "layer_split": (1, 2)}),
        "hybrid, tied, distributed": (
            tied_hybrid,
            {"pp": 2, "layer_split": (1, 2), "use_distributed_optimizer": True},
        ),
        "mamba": (mamba, {"tp": 2, "pp": 2, "layer_split": (1, 2)}),
        "mamba, torch_dist": (mamba, {"tp": 2, "ckpt_format": "torch_dist"}),
        "mamba, distributed": (mamba, {"tp": 2, "use_distributed_optimizer": True}),
        "critic": (critic, {"tp": 2, "pp": 2}),
        "critic, torch_dist": (critic, {"tp": 2, "pp": 2, "ckpt_format": "torch_dist"}),
        "critic, distributed": (critic, {"tp": 2, "pp": 2, "use_distributed_optimizer": True}),
    }
    if installed_minor() >= 19:
        stages = {"pp": 2, "layer_split": (1, 2), "options": {"model": "hybrid"}}
        cases |= {
            "HybridModel": (hybrid, {"tp": 2, **stages}),
            "HybridModel, torch_dist": (hybrid, {**stages, "ckpt_format": "torch_dist"}),
            "HybridModel, distributed": (hybrid, {**stages, "use_distributed_optimizer": True}),
        }
    for name, (source, options) in cases.items():
        asked = options.pop("options", {})
        release = for_this_release(options.get("ckpt_format", "torch"))
        megaconv.convert(
            source,
            tmp_path / "from" / name,
            saver="core",
            transformer_impl="local",
            options={**release, **asked},
            **options,
        )
    step([(tmp_path / "from" / name, tmp_path / "to" / name) for name in cases], tmp_path)
    assert prints(tmp_path / "to" / "plain") == prints(tmp_path / "to" / "plain, again")
    for name, (source, _) in cases.items():
        assert_one_step(megaconv.open(source), megaconv.open(tmp_path / "to" / name), name)


def assert_one_step(before: Any, after: Any, case: str) -> None:
    """AdamW (or SGD) on the full tensors; sums of two fp32 products may be rounded once or twice."""
    state = before.header.training.optimizer
    kept = ADAM if any(key.slot in ADAM for key in before.slots) else SGD
    if kept == ADAM:  # SGD counts no steps
        assert after.header.training.optimizer.step == state.step + 1, case
    for name, weight in before.tensors.items():
        if name not in state.group_of:  # routers' expert biases, which no optimizer has
            assert name.endswith("router.bias"), case
            assert torch.equal(values(weight), values(after.tensors[name])), f"{case}: {name}"
            continue
        found = [
            values(before.slots.get(Key(name, slot), weight)).clone() for slot in (MASTER, *kept)
        ]
        group = state.groups[state.group_of[name]].settings
        if kept == ADAM:
            adamw(*found, gradient(found[0]), state.step + 1, group)
        else:
            sgd(*found, gradient(found[0]), group)
        for slot, wanted in zip((MASTER, *kept), found, strict=True):
            stepped = values(after.slots.get(Key(name, slot), after.tensors[name]))
            assert torch.allclose(stepped, wanted, rtol=2e-6, atol=1e-8), f"{case}: {name} {slot}"


# Old and odd forms.


def edit(
    checkpoint: Path, change: Callable[[dict[str, Any]], object], rank: str = "mp_rank_00*"
) -> None:
    for file in checkpoint.glob(f"*/{rank}/model_optim_rng.pt"):
        state = load(file)
        change(state)
        torch.save(state, file)


@pytest.fixture
def plain(tied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied, tmp_path / "plain"))


@pytest.fixture
def distributed(tied: Path, tmp_path: Path) -> Path:
    megaconv.convert(
        tied,
        tmp_path / "distributed",
        saver="core",
        transformer_impl="local",
        use_distributed_optimizer=True,
    )
    return tmp_path / "distributed"


def test_groups_in_another_order_are_matched_by_their_values(plain: Path, tied: Path) -> None:
    """Stages of core 0.6 to 0.15 have such groups. Releases before 2022 also lack some keys."""

    def turn(state: dict[str, Any]) -> None:
        optimizer = state["optimizer"]
        decayed, others = optimizer["optimizer"]["param_groups"]
        count = len(others["params"])
        old = {count + n: decayed["params"][n] for n in range(len(decayed["params"]))}
        old |= {n: others["params"][n] for n in range(count)}
        optimizer["optimizer"]["state"] = {
            new: optimizer["optimizer"]["state"][n] for new, n in old.items()
        }
        others["params"], decayed["params"] = list(range(count)), list(range(count, len(old)))
        optimizer["optimizer"]["param_groups"] = [others, decayed]
        optimizer["fp32_from_fp16_params"].reverse()
        for group in (others, decayed):
            for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"):
                del group[key]

    edit(plain, turn)
    assert prints(plain) == prints(tied)


def test_a_learning_rate_of_their_own_for_embedding_and_head_goes_along(
    plain: Path, tied: Path, tmp_path: Path
) -> None:
    """Core 0.6 to 0.15 mark the group. Core 0.16 shows it by max_lr, and puts it before the group without decay."""

    def apart(state: dict[str, Any]) -> None:
        groups, masters = (
            state["optimizer"]["optimizer"]["param_groups"],
            state["optimizer"]["fp32_from_fp16_params"],
        )
        own = {
            **groups[0],
            "params": groups[0]["params"][:1],
            "is_decoupled_lr": True,
            "max_lr": 0.05,
            "min_lr": 0.01,
        }
        groups[0]["params"] = groups[0]["params"][1:]
        groups.append(own)
        masters.append([masters[0].pop(0)])

    edit(plain, apart)
    assert prints(plain) == prints(tied)
    megaconv.convert(plain, tmp_path / "out", saver="core", tp=2, pp=2)
    for rank, counts in {"mp_rank_00_000": [8, 1, 4], "mp_rank_01_001": [8, 1, 5]}.items():
        (file,) = (tmp_path / "out").glob(f"*/{rank}/model_optim_rng.pt")
        groups = load(file)["optimizer"]["optimizer"]["param_groups"]
        assert [(group["wd_mult"], group["max_lr"], group["default_config"]) for group in groups] == [
            (1.0, 0.01, True), (1.0, 0.05, False), (0.0, 0.01, True),
        ]  # fmt: skip
        assert [len(group["params"]) for group in groups] == counts
        assert [number for group in groups for number in group["params"]] == list(
            range(sum(counts))
        )
    assert prints(tmp_path / "out") == prints(tied)


def test_buckets_of_core_0_6_are_read_with_their_padding(distributed: Path, tied: Path) -> None:
    """Parameters side by side, a bucket a tensor, its end filled up."""
    (file,) = distributed.glob("*/mp_rank_00/distrib_optim.pt")
    state = load(file.with_name("model_optim_rng.pt"))
    stored = torch.load(file)
    (key, entry), *_ = stored[0].items()
    listed = [
        BufferParameter(n, tuple(t.shape))
        for n, t in state["model"].items()
        if isinstance(t, torch.Tensor)
    ]
    new, old = fill(listed), fill(listed, alignment=1)

    def packed(name: str) -> list[torch.Tensor]:
        made = torch.full((old.numel + 24,), float("nan"))
        for parameter in listed:
            count = int(np.prod(parameter.shape))
            start, end = old.offset(parameter.name), new.offset(parameter.name)
            made[start : start + count] = entry[name][end : end + count]
        return [made]

    torch.save(
        {
            "per_bucket_numel": [{key: [old.numel + 24]}],
            "per_bucket_numel_unpadded": [{key: [old.numel]}],
            0: {key: {name: packed(name) for name in ("param", "exp_avg", "exp_avg_sq")}},
        },
        file,
    )
    assert prints(distributed) == prints(tied)


# What can't be trusted is refused, and the weights still convert.

REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], type[CheckpointError], str]] = {
    "a frozen parameter": (
        lambda state: state["optimizer"]["optimizer"]["param_groups"][1]["params"].pop(), TensorMismatch, "frozen",
    ),
    "a parameter without state": (
        lambda state: state["optimizer"]["optimizer"]["state"].pop(0), TensorMismatch, "embedding.word_embeddings.weight",
    ),
    "a master too few": (
        lambda state: state["optimizer"]["fp32_from_fp16_params"][1].pop(), TensorMismatch, "final_layernorm",
    ),
    "a master too many": (
        lambda state: state["optimizer"]["fp32_from_fp16_params"][0].append(torch.zeros(2)), TensorMismatch, "more fp32",
    ),
    "a moment of another shape": (
        lambda state: state["optimizer"]["optimizer"]["state"][1].update(exp_avg=torch.zeros(3)), TensorMismatch, "linear_proj",
    ),
    "another optimizer": (
        lambda state: state["optimizer"]["optimizer"]["state"].update({0: {"exp_avg_sq_row": torch.zeros(2)}}), NotExpressible, "Adam",
    ),
    "different steps": (
        lambda state: state["optimizer"]["optimizer"]["state"][1].update(step=torch.tensor(9.0)), TensorMismatch, "9 times",
    ),
    "a part of a step": (
        lambda state: state["optimizer"]["optimizer"]["state"][1].update(step=torch.tensor(2.5)), CheckpointError, r"a step of 2\.5",
    ),
    "more than Adam's state": (
        lambda state: state["optimizer"]["optimizer"]["state"][0].update(max_exp_avg_sq=torch.zeros(2)), NotExpressible, "max_exp_avg_sq",
    ),
    "a multiplied learning rate": (
        lambda state: state["optimizer"]["optimizer"]["param_groups"][0].update(lr_mult=10.0), NotExpressible, "lr_mult",
    ),
    "Megatron 1.0": (
        lambda state: state.update(optimizer={"optimizer_state_dict": {}, "fp32_from_fp16": [], "loss_scaler": 1}), NotExpressible, "1.0",
    ),
    "nonsense": (lambda state: state.update(optimizer={"optimizer": 3}), CheckpointError, "optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_optimizer_that_does_not_fit_its_model_is_refused_and_named(
    case: str, plain: Path, tmp_path: Path
) -> None:
    change, error, word = REFUSED[case]
    edit(plain, change)
    with pytest.raises(error, match=word):
        megaconv.fingerprint(plain)
    assert megaconv.inspect(plain).header.has_optimizer
    report = megaconv.convert(plain, tmp_path / "out", saver="core", optimizer=False)
    assert report.notices == ("optimizer state was left out: only weights are converted",)


def test_a_master_that_does_not_round_to_its_weight_is_found_while_it_is_read(plain: Path) -> None:
    """Two parameters of one shape in the wrong order: nothing else could tell."""

    def swap(state: dict[str, Any]) -> None:
        masters = state["optimizer"]["fp32_from_fp16_params"][1]
        masters[0], masters[1] = masters[1], masters[0]

    edit(plain, swap)
    with unchanged(plain.parent):
        command = [
            "convert",
            "--load-dir",
            plain,
            "--saver",
            "core",
            "--save-dir",
            plain.parent / "out",
            "--tp",
            2,
        ]
        notice, error = run(*command).err.splitlines()
    assert "generators are left out" in notice
    # Both are wrong, and threads read them at the same time.
    named = error.removeprefix("megaconv: error: ").partition(": ")[0]
    assert named in ("layers.0.input_norm.weight", "layers.0.mlp_norm.weight")
    assert "--no-optimizer" in error
    assert run(*command, "--no-optimizer").status == 0


def test_weights_that_are_not_numbers_have_masters_that_are_none(plain: Path) -> None:
    def spoil(state: dict[str, Any]) -> None:
        state["model"]["decoder.final_layernorm.weight"][3] = float("nan")
        state["optimizer"]["fp32_from_fp16_params"][1][-1][3] = torch.tensor(
            [0x7F800001], dtype=torch.int32
        ).view(torch.float32)[0]

    edit(plain, spoil)
    assert prints(plain)[1]


def test_a_missing_file_of_the_distributed_optimizer_is_named(distributed: Path) -> None:
    (file,) = distributed.glob("*/mp_rank_00/distrib_optim.pt")
    file.unlink()
    with pytest.raises(TensorMismatch, match=r"mp_rank_00.*distrib_optim\.pt"):
        megaconv.fingerprint(distributed)


def test_a_buffer_of_another_length_is_refused(distributed: Path) -> None:
    (file,) = distributed.glob("*/mp_rank_00/distrib_optim.pt")
    stored = torch.load(file)
    for entry in stored[0].values():
        entry["numel_unpadded"] += 64
    torch.save(stored, file)
    with pytest.raises(TensorMismatch, match="buffer of"):
        megaconv.fingerprint(distributed)


def test_a_buffer_of_more_than_adams_state_is_refused(distributed: Path) -> None:
    (file,) = distributed.glob("*/mp_rank_00/distrib_optim.pt")
    buffers = load(file)
    (entry,) = buffers[0].values()
    entry["max_exp_avg_sq"] = entry["exp_avg_sq"]
    torch.save(buffers, file)
    with pytest.raises(NotExpressible, match="max_exp_avg_sq"):
        megaconv.fingerprint(distributed)


def test_a_rank_without_an_optimizer_is_named(tied: Path, tmp_path: Path) -> None:
    megaconv.convert(tied, tmp_path / "two", saver="core", tp=2)
    edit(tmp_path / "two", lambda state: state.pop("optimizer"), "mp_rank_01")
    with pytest.raises(TensorMismatch, match="mp_rank_01"):
        megaconv.fingerprint(tmp_path / "two")


# The command line.


def test_the_commands_tell_of_the_optimizer(tmp_path: Path) -> None:
    source, out = source_of(PLAIN), tmp_path / "out"
    shown = run("inspect", source).out
    assert "mixed precision, step 2" in shown
    assert "8 consumed" in shown
    optimizer = json.loads(run("inspect", source, "--json").out)["optimizer"]
    assert (optimizer["kind"], optimizer["step"]) == ("mixed precision", 2)
    converted = run(
        "convert",
        "--load-dir",
        source,
        "--saver",
        "core",
        "--save-dir",
        out,
        "--tp",
        1,
        "--verify",
        "--use-distributed-optimizer",
    )
    weights, optimizer = prints(source)
    assert (
        f"fingerprint {weights} (verified)\noptimizer   {optimizer} (verified)\n" in converted.out
    )
    assert "--no-load-rng" in converted.err
    assert run("fingerprint", out).out == f"{weights}\n{optimizer} (optimizer)\n"
    assert run("fingerprint", out, "--no-optimizer").out == f"{weights}\n"
    assert json.loads((out / "megaconv.json").read_text())["optimizer_fingerprint"] == optimizer
    assert (
        run("diff", source, out).out
        == "the same: 84 tensors are equal (weight, master, exp_avg, exp_avg_sq)\n"
    )


def test_optimizers_that_differ_are_different_checkpoints(plain: Path, tied: Path) -> None:
    edit(plain, lambda state: state["optimizer"]["optimizer"]["state"][0]["exp_avg"].mul_(2))
    outcome = run("diff", plain, tied)
    assert outcome.status == 4
    assert "embed.weight (exp_avg)" in outcome.out
    assert run("diff", plain, tied, "--no-optimizer").status == 0


def test_an_optimizer_where_none_can_be_is_refused_only_when_it_was_asked_for(
    tmp_path: Path,
) -> None:
    source = source_of(PLAIN)
    with pytest.raises(UsageError, match="--saver hf"):
        megaconv.convert(source, tmp_path / "hf", saver="hf", optimizer=True)
    with pytest.raises(UsageError, match="release"):
        megaconv.convert(source, tmp_path / "release", saver="core", optimizer=True, release=True)
    megaconv.convert(source, tmp_path / "hf", saver="hf")
    with pytest.raises(UsageError, match="holds no optimizer"):
        megaconv.convert(tmp_path / "hf", tmp_path / "core", saver="core", optimizer=True)


def test_constants_have_storages_of_their_own(tmp_path: Path) -> None:
    """Steps that shared one would be counted up once for each parameter."""
    megaconv.convert(source_of(PLAIN), tmp_path / "out", saver="core", tp=1, pp=1)
    (file,) = (tmp_path / "out").glob("*/mp_rank_00/model_optim_rng.pt")
    states = load(file)["optimizer"]["optimizer"]["state"].values()
    assert len({state["step"].data_ptr() for state in states}) == len(states)
    assert {state["step"].item() for state in states} == {2.0}
    assert Constant((), "float32", b"\0" * 4) == Constant((), "float32", b"\0" * 4)
