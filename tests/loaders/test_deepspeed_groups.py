"""DeepSpeed's groups of parameters go along to Megatron where it has such groups, and are refused by name elsewhere."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import NotExpressible
from tests.conftest import FIXTURES
from tests.loaders.test_deepspeed import read, scheduler_of
from tests.optimizer_models import load

ONE, TWO, CUT = "zero1-llama-dp2", "zero2-llama-tied-groups-dp2", "zero3-llama-dp2"
Groups = list[dict[str, Any]]


def copy(case: str, tmp_path: Path) -> Path:
    """The path of one step."""
    shutil.copytree(FIXTURES / f"deepspeed-{case}" / "checkpoint", tmp_path / "in")
    return tmp_path / "in" / "global_step3"


def edit(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """change: what every rank holds of the optimizer. Objects of DeepSpeed's, which nothing here needs, are left out."""
    for rank in (0, 1):
        state = read(step, rank)
        for name in ("loss_scaler", "zero_stage", "param_slice_mappings"):
            state.pop(name, None)
        change(state)
        file = step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, file)


def edit_groups(step: Path, change: Callable[[Groups], object]) -> None:
    edit(step, lambda state: change(groups_in(state)))


def groups_in(state: dict[str, Any]) -> Groups:
    found: Groups = state.get("base_optimizer_state", state.get("optimizer_state_dict"))[
        "param_groups"
    ]
    return found


def edit_config(step: Path, optimizer: dict[str, Any]) -> None:
    for file in step.glob("*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        state["ds_config"]["optimizer"] = optimizer
        torch.save(state, file)


def written(path: Path, tmp_path: Path, **options: Any) -> Groups:
    """The groups of the Megatron checkpoint that is made of a step."""
    megaconv.convert(path, tmp_path / "core", saver="core", **options)
    (file,) = (tmp_path / "core").rglob("model_optim_rng.pt")
    groups: Groups = load(file)["optimizer"]["optimizer"]["param_groups"]
    return groups


def described(groups: Groups) -> list[tuple[float, float, int]]:
    return [(group["wd_mult"], group["weight_decay"], len(group["params"])) for group in groups]


def assert_refused(step: Path, tmp_path: Path, words: str) -> None:
    """Check the refusal for Megatron's formats. Weights are still converted, and fingerprints need no groups."""
    for ckpt_format in ("torch", "torch_dist", "zarr"):
        with pytest.raises(NotExpressible, match=rf"{words}.*; --no-optimizer"):
            megaconv.convert(step, tmp_path / "out", saver="core", ckpt_format=ckpt_format)
    assert not (tmp_path / "out").exists()
    assert megaconv.fingerprint(step).optimizer
    megaconv.convert(step, tmp_path / "hf", saver="hf")
    megaconv.convert(step, tmp_path / "weights", saver="core", optimizer=False)


def test_matrices_that_decay_and_vectors_that_dont_are_megatrons_groups(tmp_path: Path) -> None:
    assert described(written(copy(TWO, tmp_path), tmp_path)) == [(1.0, 0.1, 9), (0.0, 0.0, 5)]


@pytest.mark.parametrize("case", [ONE, CUT])
def test_norms_that_decay_are_named_and_stop_doing_so_only_when_asked_to(
    case: str, tmp_path: Path
) -> None:
    step = copy(case, tmp_path)
    assert_refused(
        step,
        tmp_path,
        r"norm\.weight has weight decay 0\.01 and would have 0 in Megatron.*weight_decay=megatron",
    )
    made = written(step, tmp_path, options={"weight_decay": "megatron"})
    assert {(factor, decay) for factor, decay, _ in described(made)} == {(1.0, 0.01), (0.0, 0.0)}


def test_without_any_decay_groups_are_megatrons(tmp_path: Path) -> None:
    step = copy(ONE, tmp_path)
    edit_groups(step, lambda groups: groups[0].update(weight_decay=0.0))
    assert [decay for _, decay, _ in described(written(step, tmp_path))] == [0.0, 0.0]


def split_stage_3(step: Path, decays: tuple[float, float, float]) -> None:
    """Two groups, of which the first is cut into two vectors: of the embedding, of some layers' tensors, of all others."""
    file = step / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    names = list(state["param_shapes"][0].items())
    vectors = names[:1], names[1:5], names[5:]
    state["param_shapes"] = [dict(vector) for vector in vectors]
    torch.save(state, file)
    lengths = [sum(-(-shape.numel() // 2) for _, shape in vector) for vector in vectors]

    def change(state: dict[str, Any]) -> None:
        inner = state["optimizer_state_dict"]
        held = {
            name: list(inner["state"][0][name].split(lengths)) for name in ("exp_avg", "exp_avg_sq")
        }
        step_count = inner["state"][0]["step"]
        inner["state"] = {
            number: {
                "step": step_count,
                "exp_avg": held["exp_avg"][number].clone(),
                "exp_avg_sq": held["exp_avg_sq"][number].clone(),
            }
            for number in range(3)
        }
        state["fp32_flat_groups"] = [
            vector.clone() for vector in state["fp32_flat_groups"][0].split(lengths)
        ]
        (group,) = inner["param_groups"]
        first, second, third = decays
        if first == second:
            inner["param_groups"] = [
                group | {"params": [0, 1], "weight_decay": first},
                group | {"params": [2], "weight_decay": third},
            ]
        else:
            inner["param_groups"] = [
                group | {"params": [0], "weight_decay": first},
                group | {"params": [1, 2], "weight_decay": second},
            ]

    edit(step, change)


def test_a_group_of_stage_3_that_is_cut_into_several_vectors_stays_one(tmp_path: Path) -> None:
    step = copy(CUT, tmp_path)
    expected = megaconv.fingerprint(step)
    split_stage_3(step, (0.0, 0.0, 0.0))
    assert megaconv.fingerprint(step) == expected
    assert len(written(step, tmp_path)) == 2


def test_the_largest_weight_decay_is_not_that_of_all_matrices(tmp_path: Path) -> None:
    """A run whose embedding doesn't decay."""
    step = copy(CUT, tmp_path)
    split_stage_3(step, (0.0, 0.1, 0.1))
    assert_refused(
        step, tmp_path, r"embed\.weight has weight decay 0 and would have 0\.1 in Megatron"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"amsgrad": True}, "has amsgrad"),
        ({"maximize": True}, "has maximize"),
        ({"decoupled_weight_decay": False}, r"Adam with L2 regularization \(adam_w_mode false\)"),
        ({"max_coeff": 10.0}, "have max_coeff"),
    ],
)
def test_another_adam_is_refused_by_name(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    step = copy(TWO, tmp_path)
    edit_groups(step, lambda groups: [group.update(settings) for group in groups])
    assert_refused(step, tmp_path, words)


def test_state_that_adam_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    step = copy(TWO, tmp_path)

    def change(state: dict[str, Any]) -> None:
        for held in state["base_optimizer_state"]["state"].values():
            held["exp_avg_slow"] = held["exp_avg"].clone()

    edit(step, change)
    assert_refused(step, tmp_path, "has exp_avg_slow besides the moments of Megatron's Adam")


@pytest.mark.parametrize(
    ("params", "refused"),
    [({"adam_w_mode": False}, True), ({"adam_w_mode": True}, False), ({}, False)],
)
def test_deepspeeds_own_adam_says_in_the_runs_configuration_how_it_decays(
    params: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    """DeepSpeed's Adam is AdamW by default."""
    step = copy(TWO, tmp_path)
    edit_groups(step, lambda groups: [group.pop("decoupled_weight_decay") for group in groups])
    edit_config(step, {"type": "Adam", "params": params})
    if refused:
        assert_refused(step, tmp_path, "Adam with L2 regularization")
    else:
        assert described(written(step, tmp_path)) == [(1.0, 0.1, 9), (0.0, 0.0, 5)]


def test_adam_without_any_decay_is_adamw(tmp_path: Path) -> None:
    step = copy(TWO, tmp_path)
    edit_groups(
        step,
        lambda groups: [
            group.update(weight_decay=0.0, decoupled_weight_decay=False) for group in groups
        ],
    )
    assert [decay for _, decay, _ in described(written(step, tmp_path))] == [0.0, 0.0]


def test_rates_of_their_own_are_refused(tmp_path: Path) -> None:
    """Megatron's scheduler sets one for all."""
    step = copy(TWO, tmp_path)
    edit_groups(step, lambda groups: groups[1].update(lr=0.02))
    assert_refused(step, tmp_path, r"their own learning rates \(0\.01, 0\.02\)")


def test_settings_that_are_tensors_are_the_numbers_in_them(tmp_path: Path) -> None:
    step = copy(TWO, tmp_path)

    def change(groups: Groups) -> None:
        for group in groups:
            group["lr"], group["weight_decay"] = (
                torch.tensor(0.25),
                torch.tensor(group["weight_decay"]),
            )

    edit_groups(step, change)
    groups = written(step, tmp_path)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (0.25, pytest.approx(0.1)),
        (0.25, 0.0),
    ]


def test_betas_stay_those_of_a_group(tmp_path: Path) -> None:
    step = copy(TWO, tmp_path)
    edit_groups(step, lambda groups: groups[1].update(betas=(0.5, 0.75)))
    assert [group["betas"] for group in written(step, tmp_path)] == [(0.9, 0.999), (0.5, 0.75)]


def test_betas_that_differ_among_matrices_are_refused(tmp_path: Path) -> None:
    step = copy(CUT, tmp_path)
    split_stage_3(step, (0.0, 0.1, 0.1))
    edit_groups(
        step,
        lambda groups: [
            group.update(weight_decay=0.0, betas=(0.1 * n, 0.5)) for n, group in enumerate(groups)
        ],
    )
    assert_refused(step, tmp_path, r"groups of the optimizer differ in betas \(")


def test_megatrons_scheduler_goes_on_with_the_groups(tmp_path: Path) -> None:
    """Rates that a scheduler of torch's or DeepSpeed's noted in a group aren't those of the run that goes on."""
    step = copy(TWO, tmp_path)
    edit_groups(
        step,
        lambda groups: [group.update(initial_lr=0.7, max_lr=0.7, min_lr=0.6) for group in groups],
    )
    groups = written(step, tmp_path)
    optimizer = torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in groups]
    )
    optimizer.load_state_dict(
        {"state": {}, "param_groups": [group | {"params": [n]} for n, group in enumerate(groups)]}
    )
    scheduler = scheduler_of(optimizer, override=True)
    scheduler.step(10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.09, 0.09])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
