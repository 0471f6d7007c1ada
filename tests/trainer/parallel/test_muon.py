"""Muon: PyTorch's own on matrices one by one, the same at every layout where parts are gathered, resumed to the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lite.engine import Engine
from megatron_lite.optimizer.muon import MUON
from megatron_lite.optimizer.muon_update import orthogonalized, pieces, scale
from megatron_lite.settings.options import MuonOptions
from tests.trainer.parallel.small import FULL, Case, make_engine, own_batches, train
from tests.trainer.parallel.test_optimizer import save_and_continue
from tests.trainer.parallel.worlds import World

TORCHS: dict[str, Any] = {"coefficients": "simple", "scale_mode": "shape_scaling"}


def muon(model: str, **options: Any) -> Case:
    return Case(model, kind="muon", clip=0.0, muon=MuonOptions(**options))


def matrices(engine: Engine) -> dict[str, torch.Tensor]:
    """Every matrix of the model's description by itself: copies."""
    assert engine.optimizer is not None
    found = {}
    for item in engine.optimizer.ranges():
        whole = item.tensors["master"].view(item.shape)
        if MUON.takes(item.info):
            names = item.info.native.parts
            found |= {
                name: whole[at].clone()
                for name, at in zip(names, pieces(item.info, whole.device), strict=True)
            }
        else:
            found[item.name] = whole.clone()
    return found


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    assert engine.optimizer is not None
    found = {}
    for item in engine.optimizer.ranges():
        whole = item.gradient.view(item.shape)
        if MUON.takes(item.info):
            found |= {
                name: whole[at].clone()
                for name, at in zip(
                    item.info.native.parts, pieces(item.info, whole.device), strict=True
                )
            }
        else:
            found[item.name] = whole.clone()
    return found


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", ["shape_scaling", "spectral"])
def test_a_step_is_pytorchs_own_on_each_matrix_and_adams_on_the_rest(
    nesterov: bool, mode: str
) -> None:
    """PyTorch rounds to bf16 before it divides by the norm, where NVIDIA's rounds afterwards: hence the tolerance."""
    factor = 0.2 if mode == "spectral" else 1.0
    engine = make_engine(
        muon("qwen3", nesterov=nesterov, coefficients="simple", scale_mode=mode, factor=factor)
    )
    copies = {name: tensor.requires_grad_() for name, tensor in matrices(engine).items()}
    layers = {
        name: copy
        for name, copy in copies.items()
        if name.startswith("layers.") and copy.dim() == 2
    }
    assert {name.split(".", 2)[2] for name in layers} >= {
        "attn.q.weight",
        "attn.k.weight",
        "mlp.gate.weight",
        "mlp.up.weight",
    }
    rest = [copy for name, copy in copies.items() if name not in layers]
    theirs = [
        torch.optim.Muon(
            list(layers.values()), lr=2e-4, weight_decay=0.1, nesterov=nesterov,
            adjust_lr_fn="match_rms_adamw" if mode == "spectral" else "original",
        ),
        torch.optim.AdamW([copy for copy in rest if copy.dim() > 1], lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW([copy for copy in rest if copy.dim() == 1], lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0),
    ]  # fmt: skip
    case = muon("qwen3")
    before = {name: copy.detach().clone() for name, copy in copies.items()}
    for number in range(4):
        engine.train_step(own_batches(case, number, engine), lr=2e-4, weight_decay=0.1)
        for name, gradient in gradients(engine).items():
            copies[name].grad = gradient
        for one in theirs:
            one.step()
    for name, tensor in matrices(engine).items():
        ours, other = tensor - before[name], copies[name].detach() - before[name]
        assert (ours - other).abs().max() < 1e-5
        assert torch.nn.functional.cosine_similarity(ours.flatten(), other.flatten(), dim=0) > 0.999


def test_singular_values_become_alike() -> None:
    """The quintic coefficients in fp32: within 30% of 1, whatever they were."""
    for shape in ((24, 40), (40, 24)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 1e-3
        made = orthogonalized(matrix, MuonOptions(precision="highest"))
        found = torch.linalg.svdvals(made)
        assert made.shape == matrix.shape
        assert 0.7 < found.min() <= found.max() < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert (
            torch.nn.functional.cosine_similarity(made.flatten(), (u @ v).flatten(), dim=0) > 0.99
        )


def test_scales_are_megatrons() -> None:
    assert [scale(64, 16, mode) for mode in ("spectral", "shape_scaling", "unit_rms_norm")] == [
        8,
        2,
        2,
    ]
    assert [scale(16, 64, mode) for mode in ("spectral", "shape_scaling", "unit_rms_norm")] == [
        8,
        1,
        0.5,
    ]


LAYOUTS = [
    muon("qwen3", precision="highest", tp_mode="duplicated"),
    muon("gpt2", precision="highest", tp_mode="duplicated"),
]


MIXTURES = ("mixtral", "deepseek_v3", "llama")


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_gathered_parts_train_as_one_process_does(case: Case, world: World) -> None:
    case = replace(case, tp=2, dp=2, sequence_parallel=True, steps=5)
    (expected,) = world.run(1, train, case.alone())
    for found in world.run(4, train, case):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        replace(LAYOUTS[0], dp=2, distributed=True, steps=5),
        *(
            pytest.param(replace(each, distributed=True, steps=8, **layout), marks=pytest.mark.slow)
            for each in (*LAYOUTS, *(muon(model, precision="highest", tp_mode="duplicated") for model in MIXTURES))
            for layout in (
                {"dp": 4}, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"pp": 2, "dp": 2}, {"pp": 2, "vpp": 2, "cp": 2},
                {"dp": 2, "cp": 2, "recompute": FULL},
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_matrices_dealt_out_to_ranks_train_as_one_process_does(case: Case, world: World) -> None:
    (expected,) = world.run(1, train, case.alone())
    for found in world.run(case.world, train, case):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert [report.grad_norm for report in found.reports] == pytest.approx(
            [report.grad_norm for report in expected.reports], rel=1e-4
        )


def state_of(_rank: int, case: Case) -> list[tuple[str, int, int]]:
    """(name, elements that this rank updates, elements) of Muon's matrices."""
    engine = make_engine(case)
    assert engine.optimizer is not None
    ranges = [item for item in engine.optimizer.ranges() if MUON.takes(item.info)]
    engine.grid.close()
    return [(item.name, item.end - item.start, torch.Size(item.shape).numel()) for item in ranges]


def test_each_rank_has_whole_matrices_and_about_as_many_elements(world: World) -> None:
    one, other = world.run(2, state_of, replace(LAYOUTS[0], dp=2, distributed=True))
    assert not {name for name, *_ in one} & {name for name, *_ in other}
    assert all(own == whole for _, own, whole in one + other)
    first, second = (sum(own for _, own, _ in each) for each in (one, other))
    assert abs(first - second) <= max(whole for *_, whole in one + other)


def test_parts_alone_are_another_optimizer(world: World) -> None:
    """Megatron's default, blockwise, also depends on the tensor-parallel size."""
    case = replace(LAYOUTS[0], tp=2, steps=5, muon=MuonOptions(precision="highest"))
    (expected,) = world.run(1, train, case.alone())
    (found, _) = world.run(2, train, case)
    assert found.losses != pytest.approx(expected.losses, rel=1e-5)
    assert found.losses == pytest.approx(expected.losses, rel=0.1)


def test_a_run_goes_on_from_its_state_to_the_same_bits(world: World) -> None:
    case = replace(muon("llama"), tp=2, options=(("dtype", "bfloat16"),))
    for straight, continued in world.run(2, save_and_continue, case):
        assert all(torch.equal(tensor, continued[name]) for name, tensor in straight.items())
