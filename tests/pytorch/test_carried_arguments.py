"""A chain through PyTorch or DeepSpeed ends with the arguments and the parameter groups that Megatron's run had."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.model.training import OptimizerState, ParamGroup, TrainingState
from megaconv.pytorch.megatron_entry import entry, with_entry
from tests.megatron.test_run_arguments import REAL, changes, of_other_classes, state_of, trained_run
from tests.optimizer_models import load, write_trained_llama

OWN = {"attention_dropout": 0.25, "hidden_dropout": 0.0, "sequence_parallel": False}
"""Dropouts that the model's config.json doesn't have, and the only value of sequence_parallel for one process."""


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("run"), **OWN)


def groups_of(checkpoint: Path) -> list[dict[str, Any]]:
    _, state = state_of(checkpoint)
    groups: list[dict[str, Any]] = state["optimizer"]["optimizer"]["param_groups"]
    return groups


@pytest.mark.parametrize(
    "through",
    [
        ("dcp", "deepspeed", "dcp"),
        *(pytest.param((saver,), marks=pytest.mark.slow) for saver in ("dcp", "deepspeed")),
    ],
)
def test_arguments_and_limits_of_the_learning_rate_return(
    megatron: Path, through: tuple[str, ...], tmp_path: Path
) -> None:
    step = megatron
    for number, saver in enumerate(through):
        megaconv.convert(step, tmp_path / str(number), saver=saver, optimizer=True)
        step = tmp_path / str(number)
    megaconv.convert(
        step, tmp_path / "back", saver="core", transformer_impl="local", optimizer=True, dtype="bf16"
    )  # fmt: skip
    before, _ = state_of(megatron)
    after, _ = state_of(tmp_path / "back")
    # Random-number generators are left out.
    assert changes(before, after) == {"no_save_rng": (None, True)}
    for had, has in zip(groups_of(megatron), groups_of(tmp_path / "back"), strict=True):
        assert {name: has[name] for name in had} == had


@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_a_real_run_keeps_its_arguments(saver: str, tmp_path: Path) -> None:
    before, _ = state_of(REAL["torch"])
    megaconv.convert(REAL["torch"], tmp_path / "out", saver=saver, optimizer=True)
    megaconv.convert(
        tmp_path / "out", tmp_path / "back", saver="core", tp=2, pp=2, transformer_impl=before["transformer_impl"],
        dtype="bf16", optimizer=True,
    )  # fmt: skip
    after, _ = state_of(tmp_path / "back")
    expected = {"no_save_rng", "rank", "local_rank", *of_other_classes(before)}
    assert changes(before, after).keys() <= expected


def test_a_run_of_pytorch_that_went_on_has_no_arguments_of_megatron(
    megatron: Path, tmp_path: Path
) -> None:
    run = TrainingState(7, arguments={"seq_length": 64})
    assert with_entry(TrainingState(7), entry(run)).arguments == {"seq_length": 64}
    assert with_entry(TrainingState(8), entry(run)).arguments == {}


def test_a_group_takes_over_what_all_groups_of_its_kind_share() -> None:
    decayed = [
        ParamGroup(1.0, settings={"lr": 0.1, "max_lr": rate, "min_lr": 0.01}) for rate in (1, 2)
    ]
    plain = ParamGroup(0.0, settings={"lr": 0.1, "max_lr": 5, "bias_correction": True})
    run = TrainingState(7, optimizer=OptimizerState("Megatron's", 7, (*decayed, plain)))
    torchs = OptimizerState(
        "torch's", 7, (ParamGroup(0.0, settings={"lr": 0.3}), ParamGroup(1.0, settings={"lr": 0.3}))
    )
    found = with_entry(TrainingState(7, optimizer=torchs), entry(run)).optimizer
    assert found is not None
    assert [group.settings for group in found.groups] == [
        {"lr": 0.3, "max_lr": 5, "bias_correction": True},
        {"lr": 0.3, "min_lr": 0.01},
    ]


@pytest.mark.parametrize(
    "damage",
    [{"args": [1]}, {"args": {1: 2}}, {"param_groups": 5},
     {"param_groups": [{"settings": {"lr": object()}}]}, {"grad_scaler": {"scale": "1"}}],
)  # fmt: skip
def test_an_entry_of_another_form_is_refused(damage: dict[str, Any]) -> None:
    run = TrainingState(7, optimizer=OptimizerState("Megatron's", 7, (ParamGroup(),)))
    with pytest.raises(ValueError, match=r"arguments of|parameter groups of|loss scale of"):
        with_entry(run, entry(run) | damage)


@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_the_loss_scale_of_fp16_returns(saver: str, tmp_path: Path) -> None:
    source = write_trained_llama(tmp_path / "run", dtype="float16", layers=1)
    (file,) = source.glob("*/mp_rank_00/model_optim_rng.pt")
    state = load(file)
    scaler = {
        "scale": torch.tensor([4096.0]),
        "growth_tracker": 7,
        "hysteresis_tracker": 2,
    }
    state["optimizer"]["grad_scaler"] = scaler
    torch.save(state, file)
    megaconv.convert(source, tmp_path / "out", saver=saver, optimizer=True)
    megaconv.convert(
        tmp_path / "out", tmp_path / "back", saver="core", dtype="fp16", optimizer=True
    )
    (written,) = (tmp_path / "back").glob("*/mp_rank_00/model_optim_rng.pt")
    kept = load(written)["optimizer"]["grad_scaler"]
    found = {name: float(value) for name, value in kept.items()}
    assert found == {"scale": 4096, "growth_tracker": 7, "hysteresis_tracker": 2}
