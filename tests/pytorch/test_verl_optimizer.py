"""The optimizer of verl's FSDP runs. verl's own FSDPCheckpointManager saved both fixtures, of a tied Qwen 2 in fp32.

`complete.safetensors` in each has the same state as torch gives it, complete and by name. The marked test lets verl save
further forms, in the Python that VERL_PYTHON names.
"""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import NotExpressible
from tests import verl_oracle
from tests.conftest import FIXTURES
from tests.loaders.test_fsdp import with_adapter
from tests.pytorch.test_optimizer_state import load_all
from tests.runs import assert_refused, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
VERL = os.environ.get("VERL_PYTHON", "")
FLAT, DTENSORS = FIXTURES / "verl-fsdp1-qwen2-dp3", FIXTURES / "verl-fsdp2-qwen2-dp2"
RANKS = 3
MEGATRONS = {"weight_decay": "megatron"}
"""verl decays norms and biases too."""


def assert_complete(actor: Path, expected: Path, target: Path) -> None:
    """The state of all parameters, element by element, as a DCP output that torch reads."""
    megaconv.convert(actor, target, saver="dcp", optimizer=True)
    state = load_all(target)
    found = {
        name.removeprefix("optimizer.state."): tensor
        for name, tensor in state.items()
        if name.startswith("optimizer.state.")
    }
    wanted = load_file(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].reshape(tensor.shape), tensor), name


@pytest.mark.parametrize("run_of", [FLAT, DTENSORS], ids=["FSDP 1", "FSDP 2"])
def test_every_parameter_gets_the_state_that_torch_names_for_it(
    run_of: Path, tmp_path: Path
) -> None:
    assert_complete(run_of / "actor", run_of / "complete.safetensors", tmp_path / "out")


@pytest.mark.parametrize("run_of", [FLAT, DTENSORS], ids=["FSDP 1", "FSDP 2"])
def test_a_run_goes_on_in_other_software_and_layouts(run_of: Path, tmp_path: Path) -> None:
    source = megaconv.fingerprint(run_of / "actor")
    assert source.optimizer is not None
    for saver, options in (("core", {"tp": 2, "pp": 2}), ("dcp", {}), ("deepspeed", {})):
        target = tmp_path / saver
        megaconv.convert(
            run_of / "actor", target, saver=saver, optimizer=True, options=MEGATRONS, **options
        )
        assert megaconv.fingerprint(target) == source


def test_steps_groups_and_samples_are_those_of_the_run(tmp_path: Path) -> None:
    """verl steps the schedule once for all minibatches of a step."""
    actor = copy(tmp_path)
    change(actor, "extra_state", lambda state: state["lr_scheduler"].update(last_epoch=1))
    options = {**MEGATRONS, "global_batch_size": "8"}
    training = megaconv.open(actor, options=options).header.training
    assert (training.iteration, training.consumed_train_samples) == (1, 8)
    assert training.optimizer is not None
    assert training.optimizer.step == verl_oracle.STEPS
    assert training.optimizer.torch is not None
    (group,) = training.optimizer.torch.groups
    wanted = {"lr": 0.005, "initial_lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}
    assert {name: group[name] for name in wanted} == wanted


def test_without_a_schedule_the_updates_are_counted(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    change(actor, "extra_state", lambda state: state.update(lr_scheduler=None))
    assert megaconv.open(actor).header.training.iteration == verl_oracle.STEPS


def test_the_schedule_of_an_earlier_run_with_other_ranks_is_not_read(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    earlier = torch.load(actor / "extra_state_world_size_3_rank_0.pt", weights_only=False)
    earlier["lr_scheduler"]["last_epoch"] = 777
    torch.save(earlier, actor / "extra_state_world_size_2_rank_0.pt")
    assert megaconv.open(actor).header.training.iteration == verl_oracle.STEPS


def test_a_schedule_that_is_impossible_or_damaged_is_refused(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    change(actor, "extra_state", lambda state: state["lr_scheduler"].update(last_epoch=-5))
    refused = run("convert", actor, tmp_path / "out", "--saver", "core", "--option", "weight_decay=megatron")  # fmt: skip
    assert_refused(refused, 3, "rank_0.pt: last_epoch -5 is no number of steps", "--no-optimizer")
    file = actor / "extra_state_world_size_3_rank_0.pt"
    file.write_bytes(file.read_bytes()[:500])
    assert_refused(run("fingerprint", actor), 3, "rank_0.pt", "copy it again", "--no-optimizer")


def test_settings_in_tensors_are_read(tmp_path: Path) -> None:
    """Each rank has a tensor of its own."""
    actor = copy(tmp_path)
    rate = torch.tensor(0.005, dtype=torch.float64)
    betas = tuple(torch.tensor(beta, dtype=torch.float64) for beta in (0.9, 0.999))
    change(actor, "optim", lambda state: state["param_groups"][0].update(lr=rate, betas=betas))
    assert megaconv.fingerprint(actor) == megaconv.fingerprint(FLAT / "actor")


def test_a_highest_rate_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    change(actor, "optim", lambda state: state["param_groups"][0].update(initial_lr=[1]))
    megaconv.convert(actor, tmp_path / "out", saver="deepspeed", optimizer=True)


def test_weight_decay_that_megatron_lacks_is_named(tmp_path: Path) -> None:
    given = ("--saver", "core", "--optimizer")
    refused = run("convert", FLAT / "actor", tmp_path / "out", *given)
    assert_refused(refused, 2, "weight decay 0.1", "--option weight_decay=megatron")


def copy(tmp_path: Path, run_of: Path = FLAT) -> Path:
    return Path(shutil.copytree(run_of / "actor", tmp_path / "actor"))


def change(actor: Path, kind: str, edit: Callable[[Any], object], ranks: int = RANKS) -> None:
    """Edit the dictionaries in the files of the first ranks."""
    for file in sorted(actor.glob(f"{kind}_world_size_*_rank_*.pt"))[:ranks]:
        state = torch.load(file, weights_only=False)
        edit(state)
        torch.save(state, file)


def test_a_missing_rank_of_the_optimizer_is_named(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    (actor / "optim_world_size_3_rank_1.pt").unlink()
    refused = run("convert", actor, tmp_path / "out", "--saver", "dcp")
    assert_refused(
        refused, 3, "optim_world_size_3_rank_1.pt: no such file; 2 of 3 ranks", "--no-optimizer"
    )
    assert not (tmp_path / "out").exists()
    # Outputs that hold no optimizer don't need it.
    megaconv.convert(actor, tmp_path / "hf", saver="hf")


def test_the_optimizer_of_other_ranks_is_refused(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    for file in actor.glob("optim_*.pt"):
        file.unlink()
    for file in (DTENSORS / "actor").glob("optim_*.pt"):
        shutil.copy(file, actor)
    assert_refused(run("fingerprint", actor), 3, "optimizer of 2 ranks and the model of 3")


def later(state: Any) -> None:
    state["state"][0]["step"] += 1


def other_rate(state: Any) -> None:
    state["param_groups"][0]["lr"] = 0.5


def without_a_parameter(state: Any) -> None:
    state["param_groups"][0]["params"].remove(25)


def with_setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state: state["param_groups"][0].update({name: value})


def longer(state: Any) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(1000)


def shorter(state: Any) -> None:
    """The first vector has two elements of padding. If ranks had different lengths, all later elements would shift."""
    state["state"][1]["exp_avg"] = state["state"][1]["exp_avg"][:-1].clone()


def with_step(step: Any) -> Callable[[Any], None]:
    def edit(state: Any) -> None:
        for held in state["state"].values():
            held["step"] = step.clone()

    return edit


def of_an_unknown_number(state: Any) -> None:
    state["state"][99] = state["state"][1]


def of_integers(state: Any) -> None:
    for held in state["state"].values():
        held["exp_avg"] = held["exp_avg"].to(torch.int64)


def of_two_axes(state: Any) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(331, 2)


@pytest.mark.parametrize(
    ("edit", "ranks", "words"),
    [
        (later, 1, ["step of parameter 0: has other values than the copy of another rank"]),
        (other_rate, 1, ["rank_1.pt: has other parameter groups than optim_world_size_3_rank_0"]),
        (
            with_setting("lr", math.nan),
            3,
            ["rank_0.pt: lr of a parameter group is nan, expected a number"],
        ),
        (with_setting("initial_lr", math.nan), 1, ["initial_lr of a parameter group is nan"]),
        (with_setting("eps", None), 3, ["eps of a parameter group is None, expected a number"]),
        (with_setting("betas", (0.9,)), 3, ["betas of a parameter group is (0.9,), expected two"]),
        (with_setting("betas", 0.9), 3, ["betas of a parameter group is 0.9, expected two"]),
        (with_setting("betas", "0.9"), 3, ["betas of a parameter group is '0.9', expected two"]),
        (with_setting("betas", (0.9, math.nan)), 3, ["is (0.9, nan), expected two numbers"]),
        (longer, 3, ["exp_avg of parameter 1 is 3,000 elements, where its model has 1,984"]),
        (shorter, 1, ["exp_avg of parameter 1 is 1,985 elements, where its model has 1,984"]),
        (shorter, 2, ["exp_avg of parameter 1 is 661 and 662 elements on the ranks"]),
        (of_two_axes, 3, ["wrong kind"]),
        (
            of_an_unknown_number,
            1,
            ["rank_0.pt: has state of parameter 99", "in no parameter group"],
        ),
        (of_integers, 3, ["an optimizer's state in int64 is not supported"]),
        (with_step(torch.tensor(math.nan)), 3, ["weight is nan, expected a number of updates"]),
        (with_step(torch.tensor(math.inf)), 3, ["weight is inf, expected a number of updates"]),
        (with_step(torch.tensor(-3)), 3, ["weight is -3, expected a number of updates"]),
        (with_step(torch.tensor(2.5)), 3, ["weight is 2.5, expected a number of updates"]),
    ],
)
def test_state_that_does_not_fit_is_refused(
    edit: Callable[[Any], None], ranks: int, words: list[str], tmp_path: Path
) -> None:
    actor = copy(tmp_path)
    change(actor, "optim", edit, ranks)
    assert_refused(run("fingerprint", actor), 3, *words, "--no-optimizer")


def test_another_number_of_dtensors_is_refused(tmp_path: Path) -> None:
    actor = copy(tmp_path, DTENSORS)
    change(actor, "optim", without_a_parameter)
    refused = run("convert", actor, tmp_path / "out", "--saver", "dcp")
    assert_refused(refused, 3, "its optimizer has 25 parameters, its model 26", "--no-optimizer")


def test_a_dtensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    actor = copy(tmp_path, DTENSORS)
    change(actor, "optim", lambda state: state["state"].update({0: state["state"][1]}))
    assert_refused(run("fingerprint", actor), 3, "exp_avg of parameter 0 is [16, 16]", "[37, 16]")


def without_a_layer(state: Any) -> None:
    del state["state"][2]
    state["param_groups"][0]["params"].remove(2)


def frozen(state: Any) -> None:
    del state["state"][2]


def without_values(state: Any) -> None:
    state["state"][2]["exp_avg"] = None


def in_8_bits(state: Any) -> None:
    for held in state["state"].values():
        del held["exp_avg"], held["exp_avg_sq"]
        held["state1"] = held["state2"] = torch.zeros(8, dtype=torch.uint8)


def flattened(state: Any) -> None:
    state.clear()
    state["state.model.norm.weight.exp_avg"] = torch.zeros(16)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without_a_layer, "2 vectors of FSDP 1, expected 3"),
        (frozen, "doesn't train model.layers.1."),
        (without_values, "isn't that of torch's Adam"),
        (in_8_bits, "isn't that of torch's Adam (state1, state2)"),
        (flattened, "not the state of one torch optimizer"),
    ],
)
def test_state_that_is_no_complete_adam_is_left_out(
    edit: Callable[[Any], None], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor = copy(tmp_path)
    change(actor, "optim", edit)
    outcome = run("convert", actor, tmp_path / "out", "--saver", "dcp")
    assert outcome.status == 0, outcome.err
    assert words in caplog.text
    assert "optimizer state is left out" in caplog.text
    assert megaconv.fingerprint(tmp_path / "out").optimizer is None
    refused = run("convert", actor, tmp_path / "other", "--saver", "dcp", "--optimizer")
    assert_refused(refused, 2, "--optimizer", "holds no optimizer state")


def test_the_optimizer_of_an_adapter_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor = with_adapter(tmp_path / "actor")
    (actor / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8}')
    torch.save({"state": {}, "param_groups": []}, actor / "optim_world_size_1_rank_0.pt")
    assert megaconv.fingerprint(actor).optimizer is None
    assert "parameters besides the model's: base_model.model." in caplog.text


def test_amsgrads_maximum_is_not_dropped_silently(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    change(
        actor, "optim",
        lambda state: [held.update(max_exp_avg_sq=held["exp_avg_sq"]) for held in state["state"].values()],
    )  # fmt: skip
    with pytest.raises(NotExpressible, match="max_exp_avg_sq"):
        megaconv.convert(actor, tmp_path / "out", saver="dcp", optimizer=True)


@pytest.mark.verl
@pytest.mark.skipif(not VERL, reason="VERL_PYTHON names no Python with verl 0.9.1")
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("fsdp", 3), ("fsdp-orig", 3), ("fsdp-hybrid", 4), ("fsdp2", 3), ("fsdp2-hybrid", 4)],
)
def test_what_verl_saves_is_what_torch_names(kind: str, ranks: int, tmp_path: Path) -> None:
    megaconv.convert(FLAT / "actor", tmp_path / "hf", saver="hf")
    verl_oracle.save(VERL, ranks, tmp_path, "fsdp", tmp_path / "hf", tmp_path, kind)
    complete = torch.load(tmp_path / "complete.pt", weights_only=False)
    named = {
        f"{name}.{slot}": tensor.clone()
        for name, state in complete["state"].items()
        for slot, tensor in state.items()
    }
    save_file(named, tmp_path / "complete.safetensors")
    assert_complete(tmp_path / "actor", tmp_path / "complete.safetensors", tmp_path / "out")


@pytest.mark.verl
@pytest.mark.skipif(not VERL, reason="VERL_PYTHON names no Python with verl 0.9.1")
def test_verls_run_with_a_frozen_norm_gives_its_weights_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megaconv.convert(FLAT / "actor", tmp_path / "hf", saver="hf")
    verl_oracle.save(VERL, 2, tmp_path, "fsdp", tmp_path / "hf", tmp_path, "fsdp2-frozen")
    assert megaconv.fingerprint(tmp_path / "actor").optimizer is None
    assert "doesn't train model.norm.weight" in caplog.text
