"""Objectives that train the next token alone: MTP layers keep their values, and all else is as in a model without them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from formats.tensor import LazyTensor, read_tensor
from megaconv.checkpoint import open_checkpoint
from megaconv.model.fields import changed
from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.engine import Engine
from megatron_lite.models.criterion import OWN_LOSS, Criterion
from megatron_lite.objectives.image_feeder import needs_encoder
from megatron_lite.objectives.pair_loss import PairLoss, Preference
from megatron_lite.settings.options import LoRA, QkClip
from tests.runs import run as megaconv
from tests.trainer.loop import test_distillation_runs, test_preference_runs
from tests.trainer.loop.launches import DEEPSEEK
from tests.trainer.loop.launches import train as launch_and_wait
from tests.trainer.objectives import test_policy_runs
from tests.trainer.parallel.small import (
    MODELS,
    Case,
    Trained,
    make_engine,
    own_batches,
    weights_of,
)
from tests.trainer.parallel.worlds import World

SIMPO = PairLoss(Preference(beta=2.0, loss="simpo"))
MTP = "mtp."
ADAPTERS = LoRA(4, 8)


def steps_of(engine: Engine, case: Case) -> Trained:
    reports = [
        engine.train_step(own_batches(case, number, engine), lr=1e-2, weight_decay=0.1)
        for number in range(case.steps)
    ]
    engine.finish()
    return Trained(reports, weights_of(engine))


def train(_rank: int, case: Case) -> tuple[dict[str, torch.Tensor], Trained]:
    """Return the weights before and after the steps."""
    engine = make_engine(case, criterion=SIMPO)
    if case.options:
        init_adapters(engine, seed=7)
    with engine.whole_parameters():
        before = weights_of(engine)
    trained = steps_of(engine, case)
    with engine.whole_parameters():
        trained = replace(trained, weights=weights_of(engine))
    engine.grid.close()
    return before, trained


CASES = [
    Case("mimo", steps=4),
    Case("further tokens", steps=4),
    Case("further tokens, tied", steps=4, kind="muon"),
    Case("hybrid, further tokens", steps=4),
    Case("further tokens", steps=3, qk_clip=QkClip(threshold=0.01)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_else_is_as_in_a_model_without_them(case: Case) -> None:
    before, (trained) = train(0, case)
    config = changed(MODELS[case.model], {"mtp_layers": 0})
    alone = steps_of(make_engine(case, config=config, criterion=SIMPO), case)
    assert trained.losses == alone.losses
    for one, other in zip(trained.reports, alone.reports, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
    resting = [name for name in trained.weights if name.startswith(MTP)]
    assert resting
    for name in resting:
        assert torch.equal(trained.weights[name], before[name]), name
    assert trained.weights.keys() - alone.weights.keys() == set(resting)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(trained.weights[name], weight, rtol=1e-5, atol=1e-7, msg=name)


def test_the_loss_of_next_tokens_trains_them() -> None:
    case = Case("mimo", steps=1)
    engine = make_engine(case, criterion=OWN_LOSS)
    before = weights_of(engine)
    after = steps_of(engine, case).weights
    assert all(
        not torch.equal(before[name], after[name])
        for name in after
        if name.startswith(MTP) and after[name].dim() > 1
    )


QUICK = [
    Case("further tokens, tied", pp=2, dp=2, distributed=True, steps=3),
    Case("mimo", tp=2, sequence_parallel=True, dp=2, distributed=True, zero=3, steps=3),
]
FURTHER = [
    Case("further tokens", pp=2, vpp=2, cp=2, steps=3),
    Case("hybrid, further tokens", pp=2, ep=2, dp=2, steps=3),
    Case("mimo", tp=2, pp=2, steps=3, options=(("lora", ADAPTERS),)),
    Case("further tokens", cp=2, dp=2, distributed=True, zero=2, steps=3),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    assert_as_alone(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_every_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    assert_as_alone(case, world)


def assert_as_alone(case: Case, world: World) -> None:
    ((_, expected),) = world.run(1, train, case.alone())
    rests = 0
    for before, found in world.run(case.world, train, case):
        for one, other in zip(found.reports, expected.reports, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        for name, weight in found.weights.items():
            if name.startswith(MTP):
                rests += 1
                assert torch.equal(weight, before[name]), name
    assert rests


def reads_images(_rank: int, case: Case, criterion: Criterion) -> tuple[int, bool]:
    """(pipeline rank, whether it would load an encoder of images)."""
    engine = make_engine(case, criterion=criterion)
    found = engine.grid.pp_rank, needs_encoder(engine, 0)
    engine.grid.close()
    return found


@pytest.mark.parametrize(("criterion", "on_last"), [(SIMPO, False), (OWN_LOSS, True)])
def test_the_last_stage_needs_images_only_for_layers_that_are_trained(
    criterion: Criterion, on_last: bool, world: World
) -> None:
    found = world.run(2, reads_images, Case("further tokens", pp=2), criterion)
    assert sorted(found) == [(0, True), (1, on_last)]


SMALL = f"{DEEPSEEK} --make-vocab-size-divisible-by 1"
TRAINS = SMALL.replace("--mock-data ", "")
RUNS = {
    "pairs": "--finetune-data pairs.jsonl --dpo",
    "rated answers": "--finetune-data pairs.jsonl --kto",
    "a teacher": "--finetune-data prompts.jsonl --teacher-load t",
    "completions for a teacher": "--finetune-data prompts.jsonl --teacher-load t --distill-on-policy --max-completion-length 4",
    "rewards": "--finetune-data prompts.jsonl --grpo --reward rewards.py:sevens --num-generations 4 --max-completion-length 4 --beta 0.1",
}  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        RUNS["pairs"],
        *(pytest.param(RUNS[name], marks=pytest.mark.slow, id=name) for name in RUNS if name != "pairs"),
    ],
)  # fmt: skip
def test_a_run_says_so_and_its_file_has_the_layers_of_its_start(words: str, tmp_path: Path) -> None:
    test_policy_runs.write_task(tmp_path)
    if "teacher" in words:
        test_distillation_runs.write_prompts(tmp_path)
        launch_and_wait(tmp_path, 1, f"pretrain {SMALL} --train-iters 2 --seed 3 --save t")
    test_preference_runs.write_pairs(tmp_path)
    launch_and_wait(tmp_path, 1, f"pretrain {SMALL} --train-iters 2 --save a")
    command = f"pretrain {TRAINS} {words} --load a --finetune --train-iters 3"
    log = launch_and_wait(tmp_path, 1, f"{command} --save b").log(0)
    assert (
        "MTP layers keep their values, without gradients and optimizer state: this objective trains the next token alone"
        in log
    )
    for more in ("--exit-interval 2", "--resume"):
        launch_and_wait(tmp_path, 1, f"{command} --save c {more}")
    assert megaconv("diff", tmp_path / "b", tmp_path / "c").status == 0
    for place in ("a", "b"):
        arguments = ("convert", tmp_path / place, tmp_path / f"{place}-hf", "--saver", "hf")
        assert megaconv(*arguments).status == 0
    before, after = (weights(tmp_path / f"{place}-hf") for place in ("a", "b"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # The last layer predicts further tokens. It has copies of the embedding and the head, which are trained.
    numbers = {
        name.split(".")[2] for name in changed if not name.endswith(COPIES) and ".layers." in name
    }
    assert numbers == {"0", "1", "2", "3"}
    assert any(".layers.4." in name for name in before)


SAVED = [
    ("torch_dist", "", ""),
    ("torch", "--bf16 --use-distributed-optimizer", "--tp 2 --sequence-parallel"),
    ("torch_dist", "--bf16 --use-distributed-optimizer", "--pp 2"),
    ("torch", "", "--pp 2"),
    ("torch_dist", "--bf16 --data-parallel-sharding-strategy optim_grads_params", ""),
    ("torch_dist", "--optimizer muon", ""),
]  # fmt: skip


@pytest.mark.parametrize(("ckpt_format", "precision", "layout"), SAVED)
def test_checkpoints_have_optimizer_state_of_resting_layers_which_is_zero(
    ckpt_format: str, precision: str, layout: str, tmp_path: Path
) -> None:
    """A run on all layers goes on from there, and so does another layout."""
    test_preference_runs.write_pairs(tmp_path)
    small, trains = (f"{words} {precision}" for words in (SMALL, TRAINS))
    launch_and_wait(tmp_path, 1, f"pretrain {small} --train-iters 2 --save a")
    written = f"--ckpt-format {ckpt_format} {layout}"
    command = f"pretrain {trains} {RUNS['pairs']} --load a --finetune --train-iters 2 {written}"
    log = launch_and_wait(tmp_path, 2, f"{command} --save b --global-batch-size 4").log(0)
    assert ("bfloat16" in log) == ("--bf16" in precision)
    found, start = (open_checkpoint(tmp_path / name) for name in ("b", "a"))
    assert found.slots.keys() == start.slots.keys()
    resting = [key for key in found.slots if key.name.startswith(MTP)]
    assert {"exp_avg", "master"} & {key.slot for key in resting}
    for key in resting:
        state = as_tensor(found.slots[key])
        expected = found.load(key.name) if key.slot == "master" else torch.zeros(1)
        assert torch.equal(state, expected.float().expand_as(state)), key
    # Another layout of one rank.
    again = command.replace(layout, "").replace("--train-iters 2", "--train-iters 3")
    log = launch_and_wait(tmp_path, 1, f"{again} --save b --resume --global-batch-size 4").log(0)
    assert "continuing after step 2" in log
    assert "their optimizer state in the checkpoint isn't kept" in log
    further = f"pretrain {small} --load b --train-iters 4 --save c"
    log = launch_and_wait(tmp_path, 1, further).log(0)
    assert "continuing after step 3" in log
    after = open_checkpoint(tmp_path / "c")
    assert all(as_tensor(after.slots[key]).any() for key in resting if key.slot == "exp_avg")


def as_tensor(stored: LazyTensor) -> torch.Tensor:
    """A tensor of optimizer state, which is float32."""
    values = torch.from_numpy(read_tensor(stored).reshape(-1)).view(torch.float32)
    return values.reshape(tuple(stored.shape))


@pytest.mark.parametrize("model", ["mimo", "further tokens, tied", "hybrid, further tokens"])
@pytest.mark.parametrize("lora", [False, True])
def test_resting_layers_have_no_gradients(*, lora: bool, model: str, world: World) -> None:
    """MTP layers have no adapters either."""
    del world
    options = (("lora", ADAPTERS),) if lora else ()
    case = Case(model, steps=1, options=options)
    engine = make_engine(case, criterion=SIMPO)
    config = changed(MODELS[case.model], {"mtp_layers": 0})
    alone = make_engine(case, config=config, criterion=SIMPO)
    assert not [
        info.name for infos in engine.trained for info in infos if info.name.startswith(MTP)
    ]
    assert not [info.name for (infos,) in [engine.trained] for info in infos if info.rests]
    counts = [
        sum(owned.elements for owned in each.optimizer.ranges())
        for each in (engine, alone)
        if each.optimizer
    ]
    assert counts[0] == counts[1]


COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found
