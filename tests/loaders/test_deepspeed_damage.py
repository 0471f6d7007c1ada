"""Files of DeepSpeed's that were exchanged or copied over one another are refused, with --dtype fp32 and without."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaconv import convert, fingerprint
from megaconv.errors import CheckpointError
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run, unchanged
from tests.trust.torch_containers import members, stored

STAGES = {1: "zero1-llama-dp2", 2: "zero2-llama-tied-groups-dp2", 3: "zero3-llama-dp2"}
RANKS = (
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
)
UNIVERSAL = {2: "universal-zero2-llama-tied-groups-dp2", 3: "universal-zero3-llama-dp2"}
GATE, UP = (f"model.layers.1.mlp.{which}_proj.weight" for which in ("gate", "up"))

DTYPES = pytest.mark.parametrize("dtype", [None, "fp32"])


def step_of(stage: int, tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / f"deepspeed-{STAGES[stage]}" / "checkpoint", tmp_path / "in")
    return tmp_path / "in" / "global_step3"


def exchange(first: Path, second: Path) -> None:
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)


def copy_over(first: Path, second: Path) -> None:
    second.write_bytes(first.read_bytes())


DAMAGES = pytest.mark.parametrize("damage", [exchange, copy_over])


def refold(file: Path, folder: str) -> None:
    """The archive as if it had been saved under another name."""
    entries = [
        (f"{folder}/{name.partition('/')[2]}", data) for name, data in members(file.read_bytes())
    ]
    file.write_bytes(stored(entries))


def without_mappings(file: Path) -> None:
    """Remove the mappings, as in files of DeepSpeed before it had universal checkpoints."""
    entries = members(file.read_bytes())
    file.write_bytes(
        stored(
            [
                (name, data.replace(b"param_slice_mappings", b"param_slice_mappingX"))
                for name, data in entries
            ]
        )
    )


def assert_nothing_is_converted(path: Path, tmp_path: Path, dtype: str | None, *words: str) -> None:
    """Into neither format, and for the reason that the words give. Weights for hf are the module's own unless a dtype is given."""
    for saver in ("core", "hf") if dtype else ("core",):
        with unchanged(tmp_path), pytest.raises(CheckpointError) as refusal:
            convert(
                path,
                tmp_path / "out",
                saver=saver,
                dtype=dtype,
                options={"weight_decay": "megatron"},
            )
        assert refusal.value.exit_status == 3
        assert all(word in str(refusal.value) for word in words), refusal.value


@DTYPES
@DAMAGES
@pytest.mark.parametrize("stage", STAGES)
def test_a_file_that_another_rank_saved_is_refused(
    stage: int, damage: Callable[[Path, Path], None], dtype: str | None, tmp_path: Path
) -> None:
    """The folder in its archive is called as the file was when it was saved."""
    step = step_of(stage, tmp_path)
    damage(*(step / name for name in RANKS))
    assert_nothing_is_converted(
        step, tmp_path, dtype, "was saved as bf16_zero_pp_rank_", "the file of another rank"
    )


@DTYPES
@DAMAGES
@pytest.mark.parametrize("stage", [1, 2])
def test_the_slices_that_a_file_lists_are_those_of_its_rank(
    stage: int, damage: Callable[[Path, Path], None], dtype: str | None, tmp_path: Path
) -> None:
    step = step_of(stage, tmp_path)
    damage(*(step / name for name in RANKS))
    for name in RANKS:
        refold(step / name, "archive")
    assert_nothing_is_converted(
        step, tmp_path, dtype, "param_slice_mappings", "another rank's file"
    )


def test_slices_of_another_order_are_not_compared_and_weights_are(tmp_path: Path) -> None:
    """With round_robin_gradients, DeepSpeed lists slices in the order of the module, but stores them in another
    order."""
    step = step_of(2, tmp_path)
    exchange(*(step / name for name in RANKS))
    for name in RANKS:
        refold(step / name, "archive")
    state = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)
    state["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    torch.save(state, step / "mp_rank_00_model_states.pt")
    assert_nothing_is_converted(step, tmp_path, None, "does not round to the weight")


@DTYPES
@DAMAGES
@pytest.mark.parametrize("stage", [1, 2])
def test_masters_are_compared_with_the_weights_before_they_are_cast(
    stage: int, damage: Callable[[Path, Path], None], dtype: str | None, tmp_path: Path
) -> None:
    """Files of an old DeepSpeed, which say nothing of their rank."""
    step = step_of(stage, tmp_path)
    damage(*(step / name for name in RANKS))
    for name in RANKS:
        refold(step / name, "archive")
        without_mappings(step / name)
    assert_nothing_is_converted(
        step, tmp_path, dtype, "does not round to the weight", "another rank"
    )


@DTYPES
def test_two_ranks_of_stage_3_do_not_hold_the_same_elements(
    dtype: str | None, tmp_path: Path
) -> None:
    step = step_of(3, tmp_path)
    copy_over(*(step / name for name in RANKS))
    for name in RANKS:
        refold(step / name, "archive")
    assert_nothing_is_converted(step, tmp_path, dtype, *RANKS, "the same fp32 parameters")


@DTYPES
@DAMAGES
@pytest.mark.parametrize("stage", UNIVERSAL)
def test_two_parameters_of_a_universal_checkpoint_are_not_taken_for_each_other(
    stage: int, damage: Callable[[Path, Path], None], dtype: str | None, tmp_path: Path
) -> None:
    shutil.copytree(FIXTURES / UNIVERSAL[stage], tmp_path / "in")
    folder = tmp_path / "in" / "global_step3_universal" / "zero"
    damage(folder / GATE / "fp32.pt", folder / UP / "fp32.pt")
    words = (
        ("does not round to the weight",)
        if stage == 2
        else ("_proj.weight/fp32.pt", "optimizer_state.pt")
    )
    assert_nothing_is_converted(tmp_path / "in", tmp_path, dtype, *words)


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_moments_of_two_parameters_of_stage_3_are_not_taken_for_each_other(
    slot: str, tmp_path: Path
) -> None:
    """A universal checkpoint of stage 3 has the first rank's vectors besides."""
    shutil.copytree(FIXTURES / UNIVERSAL[3], tmp_path / "in")
    folder = tmp_path / "in" / "global_step3_universal" / "zero"
    exchange(folder / GATE / f"{slot}.pt", folder / UP / f"{slot}.pt")
    assert_refused(run("fingerprint", tmp_path / "in"), 3, f"{slot}.pt", "optimizer_state.pt")


def test_one_moment_of_a_parameter_is_not_taken_for_the_other(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / UNIVERSAL[2], tmp_path / "in")
    folder = tmp_path / "in" / "global_step3_universal" / "zero" / GATE
    exchange(folder / "exp_avg.pt", folder / "exp_avg_sq.pt")
    assert_refused(
        run("fingerprint", tmp_path / "in"), 3, f"{GATE}/exp_avg.pt", "was saved as exp_avg_sq"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_files_that_say_nothing_of_their_rank_are_read(stage: int, tmp_path: Path) -> None:
    step = step_of(stage, tmp_path)
    expected = run("fingerprint", step).out
    for name in RANKS:
        refold(step / name, "archive")
        without_mappings(step / name)
    outcome = run("fingerprint", step)
    assert (outcome.status, outcome.out) == (0, expected), outcome


def test_without_the_optimizer_the_modules_weights_are_converted(tmp_path: Path) -> None:
    """The advice that the message gives."""
    shutil.copytree(FIXTURES / UNIVERSAL[2], tmp_path / "in")
    folder = tmp_path / "in" / "global_step3_universal" / "zero"
    exchange(folder / GATE / "fp32.pt", folder / UP / "fp32.pt")
    command = (
        "convert",
        "--load-dir",
        tmp_path / "in",
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
    )
    outcome = run(*command)
    assert outcome.status == 3
    assert "--no-optimizer without --dtype fp32" in outcome.err
    assert run(*command, "--no-optimizer").status == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_without_the_optimizers_files_the_modules_weights_are_converted(
    stage: int, tmp_path: Path
) -> None:
    """The advice that the message about slices gives."""
    step = step_of(stage, tmp_path)
    expected = fingerprint(step, optimizer=False)
    for name in RANKS:
        (step / name).unlink()
    assert fingerprint(step).weights == expected.weights


def test_an_fp32_module_is_compared_with_its_masters(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / UNIVERSAL[2], tmp_path / "in")
    step = tmp_path / "in" / "global_step3_universal"
    state = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)
    for name in state["module"]:
        owner = state["shared_params"].get(name, name)
        state["module"][name] = torch.load(step / "zero" / owner / "fp32.pt")["param"]
    torch.save(state, step / "mp_rank_00_model_states.pt")
    assert run("fingerprint", tmp_path / "in").status == 0
    exchange(step / "zero" / GATE / "fp32.pt", step / "zero" / UP / "fp32.pt")
    assert_refused(run("fingerprint", tmp_path / "in"), 3, "is not the weight", GATE)


def test_an_optimizer_of_16_bits_goes_along_in_fp32(tmp_path: Path) -> None:
    """bf16_master_weights_and_grads keeps the optimizer in 16 bits."""
    shutil.copytree(FIXTURES / UNIVERSAL[2], tmp_path / "in")
    for file in (tmp_path / "in").glob("*/zero/*/*.pt"):
        held = torch.load(file)
        if file.name != "step.pt":
            torch.save(held | {"param": held["param"].bfloat16()}, file)
    outcome = run(
        "convert", "--load-dir", tmp_path / "in", "--saver", "core", "--save-dir", tmp_path / "out"
    )
    assert outcome.status == 0, outcome
    (file,) = (tmp_path / "out").rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)["optimizer"]["optimizer"]["state"]
    assert {tensor.dtype for held in state.values() for tensor in held.values()} == {torch.float32}


@DTYPES
@pytest.mark.parametrize("rank", [0, 1])
def test_model_states_of_another_step_are_refused(
    rank: int, dtype: str | None, tmp_path: Path
) -> None:
    """Under stage 3 they hold no weights, but the counters from which the run continues."""
    step = step_of(3, tmp_path)
    file = step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["global_steps"], state["global_samples"] = 2, 4
    torch.save(state, file)
    assert_nothing_is_converted(step, tmp_path, dtype, "global_steps", "are of two steps")
