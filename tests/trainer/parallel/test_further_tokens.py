"""Layers that predict further tokens, where embedding and head are one table: they use it three times, on the last stage a copy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megaconv import convert
from megaconv import open as open_checkpoint
from tests.families.test_families import weights_of, write_model
from tests.families.test_hybrid_mtp import MTP_OF_HYBRID
from tests.megatron.test_optimizer import assert_one_step
from tests.megatron_oracle import for_this_release, installed_minor
from tests.optimizer_models import load
from tests.optimizer_oracle import step as go_on
from tests.runs import run as megaconv
from tests.trainer.loop.launches import DEEPSEEK, LLAMA, launch, metrics
from tests.trainer.loop.launches import train as launch_and_wait
from tests.trainer.parallel.core_oracle import train_with_core
from tests.trainer.parallel.small import FULL, Case, train
from tests.trainer.parallel.test_megatron import LR
from tests.trainer.parallel.test_megatron import train as steps_of
from tests.trainer.parallel.worlds import World

TIED = DEEPSEEK.replace("--untie-embeddings-and-output-weights ", "")
MODEL, HYBRID = "further tokens, tied", "hybrid, further tokens"


@pytest.mark.oracle
def test_a_step_is_that_of_megatron_core(tmp_path: Path) -> None:
    """Its own model from our file: the loss, and the norm of all gradients, those of the table among them."""
    unpadded = f"{TIED} --make-vocab-size-divisible-by 1 --init-method-std 0.2"
    launch_and_wait(
        tmp_path,
        1,
        f"pretrain {unpadded} --train-iters 2 --exit-interval 1 --save ckpt --ckpt-format torch --transformer-impl local",
    )
    convert(
        tmp_path / "ckpt", tmp_path / "core", saver="core", transformer_impl="local", options=for_this_release()
    )  # fmt: skip
    tokens = torch.randint(60, (1, 4, 2, 33), generator=torch.Generator().manual_seed(8))
    ((expected,),) = train_with_core([tmp_path / "core"], tokens, LR, tmp_path)
    (report,) = steps_of(tmp_path / "ckpt", tokens)
    assert (report.loss, report.grad_norm) == pytest.approx(expected, rel=1e-6)


@pytest.mark.oracle
@pytest.mark.skipif(
    installed_minor() < 19, reason="hybrids with MTP layers are of core 0.17 and later"
)
def test_a_step_of_a_hybrid_is_that_of_megatron_core(tmp_path: Path) -> None:
    """The loss, and the norm of all gradients, those of the layer of attention and experts among them."""
    hf = write_model(tmp_path / "hf", "nemotron_h", **MTP_OF_HYBRID, moe_latent_size=8)
    # Larger weights would make more of the last bits.
    gentle = {name: 0.3 * weight.float() for name, weight in weights_of(hf).items()}
    save_file(gentle, hf / "model.safetensors", metadata={"format": "pt"})
    convert(
        hf, tmp_path / "ckpt", saver="core", dtype="fp32", transformer_impl="local",
        make_vocab_size_divisible_by=1, options={"release": "0.19"},
    )  # fmt: skip
    tokens = torch.randint(19, (1, 4, 2, 17), generator=torch.Generator().manual_seed(8))
    ((expected,),) = train_with_core([tmp_path / "ckpt"], tokens, LR, tmp_path)
    (report,) = steps_of(tmp_path / "ckpt", tokens)
    assert (report.loss, report.grad_norm) == pytest.approx(expected, rel=1e-5)
    assert report.others["mtp_1_loss"] > 0


@pytest.mark.parametrize(
    "case",
    [
        Case(MODEL, pp=2, steps=3),
        Case("mimo", tp=2, pp=2, steps=3),
        Case(HYBRID, pp=2, ep=2, dp=2, steps=2),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(MODEL, pp=2, dp=2, distributed=True, masked=False), Case(MODEL, tp=2, pp=2, sequence_parallel=True),
                Case(MODEL, pp=2, vpp=2, cp=2), Case(MODEL, tp=2, sequence_parallel=True, recompute=FULL),
                Case(MODEL, pp=4, clip=0.1), Case(MODEL, cp=2, dp=2, distributed=True),
                Case(HYBRID, tp=2, pp=2, sequence_parallel=True), Case(HYBRID, cp=2, recompute=FULL, distributed=True),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_every_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    (expected,) = world.run(1, train, case.alone())
    for found in world.run(case.world, train, case):
        for one, other in zip(found.reports, expected.reports, strict=True):
            assert (one.loss, *one.others.values()) == pytest.approx(
                (other.loss, *other.others.values()), rel=1e-5
            )
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


@pytest.mark.slow
def test_a_run_of_two_stages_goes_on_to_the_same_bits_and_is_converted(tmp_path: Path) -> None:
    flags = f"pretrain {TIED} --train-iters 2 --pipeline-model-parallel-size 2 --save ckpt"
    launch_and_wait(tmp_path / "straight", 2, flags)
    for more in ("--exit-interval 1", "--resume"):
        launch_and_wait(tmp_path / "stopped", 2, f"{flags} {more}")
    straight, stopped = (metrics(tmp_path / name) for name in ("straight", "stopped"))
    assert [line["mtp_1_loss"] for line in straight] == [line["mtp_1_loss"] for line in stopped]
    assert (
        megaconv("diff", tmp_path / "straight" / "ckpt", tmp_path / "stopped" / "ckpt").status == 0
    )
    whole = ("--saver", "core", "--tp", "2", "--pp", "1")
    assert megaconv("convert", tmp_path / "stopped" / "ckpt", tmp_path / "one", *whole).status == 0
    assert megaconv("diff", tmp_path / "stopped" / "ckpt", tmp_path / "one").status == 0


STAGES = f"pretrain {TIED} --bf16 --pipeline-model-parallel-size 2 --save ckpt"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", ["", pytest.param("--use-distributed-optimizer", marks=pytest.mark.slow)]
)
def test_rank_files_of_several_stages_hold_what_the_format_without_stages_does(
    more: str, tmp_path: Path
) -> None:
    """Weights and optimizer; a run goes on from them at another layout as from that, and megaconv makes the one of the other."""
    ranks = 4 if more else 2
    for name, form in (("ranks", "torch"), ("dist", "torch_dist")):
        launch_and_wait(
            tmp_path / name, ranks, f"{STAGES} {more} --train-iters 2 --ckpt-format {form}"
        )
        launch_and_wait(
            tmp_path / f"{name} on",
            1,
            f"pretrain {TIED} --bf16 --train-iters 3 --load {tmp_path / name / 'ckpt'} --save ckpt",
        )
    for ending in ("", " on"):
        assert (
            megaconv(
                "diff", tmp_path / f"ranks{ending}" / "ckpt", tmp_path / f"dist{ending}" / "ckpt"
            ).status
            == 0
        )
    two_stages = (
        "--saver",
        "core",
        "--ckpt-format",
        "torch",
        "--pp",
        "2",
        "--transformer-impl",
        "transformer_engine",
    )
    for name in ("ranks", "dist"):
        assert (
            megaconv(
                "convert", tmp_path / name / "ckpt", tmp_path / f"{name} out", *two_stages
            ).status
            == 0
        )
        assert megaconv("diff", tmp_path / f"{name} out", tmp_path / "ranks" / "ckpt").status == 0
    last = "mp_rank_00_001/model_optim_rng.pt"
    ours, theirs = (
        load(next(path.glob(f"*/{last}")))
        for path in (tmp_path / "ranks" / "ckpt", tmp_path / "ranks out")
    )
    assert list(ours["model"]) == list(theirs["model"])
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert torch.equal(ours["model"][name], theirs["model"][name])
    assert numbers(ours) == numbers(theirs)


def numbers(state: Any) -> list[list[int]]:
    """The numbers of the parameters of the optimizer, group by group."""
    return [group["params"] for group in state["optimizer"]["optimizer"]["param_groups"]]


@pytest.mark.slow
@pytest.mark.oracle
def test_megatrons_own_optimizers_go_on_from_rank_files_of_several_stages(tmp_path: Path) -> None:
    launch_and_wait(
        tmp_path, 2, f"{STAGES} --train-iters 2 --ckpt-format torch --transformer-impl local"
    )
    go_on([(tmp_path / "ckpt", tmp_path / "to")], tmp_path)
    assert_one_step(
        open_checkpoint(tmp_path / "ckpt"), open_checkpoint(tmp_path / "to"), "tied, further tokens"
    )


def test_a_model_whose_checkpoints_have_no_such_layers_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    running = launch(tmp_path, 1, f"pretrain {LLAMA} --mtp-num-layers 1 --train-iters 2")
    assert running.wait() == [2]
    assert "would be a llama that predicts further tokens" in running.log(0)
    assert "Traceback" not in running.log(0)
