"""Parameter groups with settings of their own go along where the output can distinguish them, and are refused elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from tests.conftest import FIXTURES
from tests.optimizer_models import load, write_trained_llama
from tests.put_together import rank_files

MIXTURE = FIXTURES / "core-te-mixtral-optim-ep2" / "checkpoint"

Groups = list[dict[str, Any]]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_trained_llama(tmp_path / "plain")


def edit(
    checkpoint: Path, change: Callable[[Groups], object], pattern: str = "**/model_optim_rng.pt"
) -> None:
    """change: of all parameter groups in every file, with those of experts behind the others."""
    for file in checkpoint.glob(pattern):
        state = load(file)
        optimizers = (
            state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]
        )
        change(
            [
                group
                for optimizer in optimizers
                for group in optimizer.get("optimizer", optimizer)["param_groups"]
            ]
        )
        torch.save(state, file)


def halve(optimizer: dict[str, Any]) -> None:
    """The first group becomes two, of which one learns at another rate; with its masters, where they stand with it."""
    groups, masters = optimizer["optimizer"]["param_groups"], optimizer.get("fp32_from_fp16_params")
    groups.append({**groups[0], "max_lr": 0.5})
    if masters:
        half = len(masters[0]) // 2
        groups[0]["params"], groups[-1]["params"] = (
            groups[0]["params"][:half],
            groups[0]["params"][half:],
        )
        masters.append(masters[0][half:])
        del masters[0][half:]


@pytest.mark.parametrize(
    "options",
    [
        {"transformer_impl": "local"},
        {"transformer_impl": "local", "use_distributed_optimizer": True},
        {"transformer_impl": "local", "ckpt_format": "torch_dist"},
    ],
    ids=["by parameter", "in buffers", "distributed"],
)
def test_two_rates_in_one_kind_of_groups_are_refused_by_name_in_every_form(
    options: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    """None of these forms records the learning rate of each parameter."""
    megaconv.convert(plain, tmp_path / "made", saver="core", **options)
    (file,) = [*tmp_path.glob("made/**/model_optim_rng.pt"), *tmp_path.glob("made/**/common.pt")]
    state = load(file)
    halve(state["optimizer"])
    torch.save(state, file)
    with pytest.raises(
        NotExpressible, match=r"with weight decay.* differ in max_lr 0\.01 and 0\.5.*--no-optimizer"
    ):
        megaconv.fingerprint(tmp_path / "made")
    assert megaconv.convert(
        tmp_path / "made", tmp_path / "out", saver="core", optimizer=False
    ).notices


def test_ranks_that_disagree_about_a_rate_are_refused(plain: Path, tmp_path: Path) -> None:
    megaconv.convert(plain, tmp_path / "made", saver="core", tp=2)
    edit(
        tmp_path / "made",
        lambda groups: groups[0].update(max_lr=0.5),
        "*/mp_rank_01/model_optim_rng.pt",
    )
    with pytest.raises(NotExpressible, match=r"differ in max_lr 0\.01 and 0\.5"):
        megaconv.fingerprint(tmp_path / "made")


def rates(checkpoint: Path) -> set[tuple[bool, float, float]]:
    """(whether of experts, factor on weight decay, rate) of every group."""
    return {
        (group["is_expert_parallel"], group["wd_mult"], group["max_lr"])
        for state in rank_files(checkpoint).values()
        for optimizer in state["optimizer"]
        for group in optimizer["optimizer"]["param_groups"]
    }


@pytest.mark.parametrize("distributed", [False, True])
def test_experts_that_learn_at_another_rate_keep_it(distributed: bool, tmp_path: Path) -> None:
    """With expert parallelism they have a separate optimizer, whose groups are marked."""
    source = tmp_path / "source"
    megaconv.convert(
        MIXTURE, source, saver="core", tp=1, ep=4, etp=1, use_distributed_optimizer=distributed
    )
    usual = {(experts, factor, rate) for experts, factor, rate in rates(source) if not experts}
    edit(source, lambda groups: [g.update(max_lr=0.5) for g in groups if g["is_expert_parallel"]])
    options = {"tp": 2, "ep": 2, "etp": 1, "use_distributed_optimizer": distributed}
    megaconv.convert(source, tmp_path / "out", saver="core", **options)
    assert rates(tmp_path / "out") == rates(source) == usual | {(True, 1.0, 0.5)}
    megaconv.convert(source, tmp_path / "dist", saver="core", ckpt_format="torch_dist")
    megaconv.convert(
        tmp_path / "dist", tmp_path / "back", saver="core", ckpt_format="torch", **options
    )
    assert rates(tmp_path / "back") == rates(source)


def test_without_expert_parallelism_there_is_no_place_for_such_a_rate(tmp_path: Path) -> None:
    source = tmp_path / "source"
    megaconv.convert(MIXTURE, source, saver="core", tp=1, ep=4, etp=1)
    edit(source, lambda groups: [g.update(max_lr=0.5) for g in groups if g["is_expert_parallel"]])
    with pytest.raises(
        NotExpressible, match=r"one optimizer for experts and all others \(ep 1\).*differ in max_lr"
    ):
        megaconv.convert(source, tmp_path / "out", saver="core", ep=1, etp=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "groups", "word"),
    [
        (
            {"decoupled_lr": None},
            {"default_config": False, "max_lr": 0.5},
            r"separate learning rate \(max_lr 0\.5\)",
        ),
        ({"apply_wd_to_qk_layernorm": True}, {}, "apply_wd_to_qk_layernorm"),
        ({"no_weight_decay_cond_type": "qwen3_next"}, {}, "no_weight_decay_cond_type"),
    ],
)
def test_groups_with_unknown_parameters_are_refused(
    args: dict[str, Any], groups: dict[str, Any], word: str, plain: Path, tmp_path: Path
) -> None:
    """Megatron core 0.16 lets a run set a rate for any parameters by their names."""
    megaconv.convert(
        plain,
        tmp_path / "made",
        saver="core",
        transformer_impl="local",
        use_distributed_optimizer=True,
    )
    (file,) = tmp_path.glob("made/**/model_optim_rng.pt")
    state = load(file)
    vars(state["args"]).update(args)
    state["optimizer"]["optimizer"]["param_groups"][0].update(groups)
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=word):
        megaconv.fingerprint(tmp_path / "made")


@pytest.mark.parametrize("distributed", [False, True])
def test_settings_that_are_tensors_are_the_numbers_in_them(
    distributed: bool, plain: Path, tmp_path: Path
) -> None:
    """An optimizer whose step is captured into a CUDA graph has such settings."""
    made, kept = (
        tmp_path / "made",
        {"lr": 0.25, "weight_decay": 0.5, "betas": (0.75, 0.5), "step": 3},
    )
    megaconv.convert(
        plain, made, saver="core", transformer_impl="local", use_distributed_optimizer=distributed
    )
    as_tensors = {
        "lr": torch.tensor(0.25),
        "weight_decay": torch.tensor([0.5]),
        "betas": (torch.tensor(0.75), torch.tensor(0.5)),
        "step": torch.tensor(3, dtype=torch.int32),
    }
    edit(made, lambda groups: groups[0].update(as_tensors))
    megaconv.convert(made, tmp_path / "out", saver="core", tp=2)
    for state in rank_files(tmp_path / "out").values():
        group = next(
            group
            for group in state["optimizer"]["optimizer"]["param_groups"]
            if group["wd_mult"] == 1
        )
        assert {name: group[name] for name in kept} == kept


def test_a_setting_that_training_needs_and_that_is_no_number_is_refused(plain: Path) -> None:
    edit(plain, lambda groups: groups[0].update(lr=torch.zeros(2)))
    with pytest.raises(CheckpointError, match="lr of a parameter group"):
        megaconv.fingerprint(plain)
