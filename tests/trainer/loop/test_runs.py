"""Runs from start to end: resumed, killed, at other layouts, in both formats; what they leave behind."""

import random
import time
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import LLAMA, MIXTRAL, TIED, launch, metrics, train


def losses_by_step(directory: Path) -> dict[float, float]:
    """The last line of an iteration counts."""
    return {line["iteration"]: line["loss"] for line in metrics(directory) if "loss" in line}


def files(checkpoint: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_a_run_in_bf16_goes_on_in_fp16_with_its_own_loss_scale(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --save ckpt --resume"
    train(tmp_path, 1, f"{command} --train-iters 2 --exit-interval 1 --bf16")
    changed = train(tmp_path, 1, f"{command} --train-iters 2 --fp16 --initial-loss-scale 1024")
    assert "changed since the checkpoint: precision bf16 -> fp16" in changed.log(0)
    assert "loss scale 1024" in changed.log(0)


@pytest.mark.slow
def test_the_same_run_twice_and_an_asynchronous_one_write_the_same_bytes(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --train-iters 4 --save ckpt --save-interval 2 --tensor-model-parallel-size 2 --use-distributed-optimizer"
    for name, words in (("once", ""), ("twice", ""), ("async", "--async-save")):
        train(tmp_path / name, 2, f"{command} {words}")
    once, twice, background = (
        files(tmp_path / name / "ckpt") for name in ("once", "twice", "async")
    )
    assert once == twice
    assert set(background) == set(once)
    assert {name for name in once if once[name] != background[name]} == {  # args tell that the save was asynchronous
        "iter_0000002/common.pt", "iter_0000004/common.pt",
    }  # fmt: skip
    assert not [
        path for path in (tmp_path / "once" / "ckpt").iterdir() if path.name.startswith(".")
    ]


def kill_and_resume(directory: Path, size: int, command: str, seconds: float) -> None:
    """Start, kill all ranks after so long, and start again until the run is through."""
    running = launch(directory, size, command)
    time.sleep(seconds)
    running.kill()
    running.wait()
    train(directory, size, command)


COMMAND = f"pretrain {LLAMA} --train-iters 8 --save ckpt --save-interval 1 --keep-last 2 --resume"


def test_a_run_that_is_killed_and_started_again_gives_the_bits_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    command = f"{COMMAND} --pipeline-model-parallel-size 2 --async-save --bf16"
    train(tmp_path / "whole", 2, command)
    kill_and_resume(tmp_path / "killed", 2, command, 1.5 + random.random() * 2)
    assert files(tmp_path / "killed" / "ckpt") == files(tmp_path / "whole" / "ckpt")
    assert sorted(path.name for path in (tmp_path / "whole" / "ckpt").iterdir()) == [
        "hf", "iter_0000007", "iter_0000008", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_iterations_that_a_killed_run_has_left_are_removed_by_one_that_has_no_step_to_make(
    tmp_path: Path,
) -> None:
    """As if it had been killed between its last save and the removal of an older one."""
    train(tmp_path, 1, COMMAND.replace("--keep-last 2 ", ""))
    train(tmp_path, 1, COMMAND)
    kept = sorted(path.name for path in (tmp_path / "ckpt").iterdir() if path.is_dir())
    assert kept == ["hf", "iter_0000007", "iter_0000008"]


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(50))
def test_a_run_may_be_killed_at_any_moment(
    attempt: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    whole = tmp_path_factory.getbasetemp() / "whole-run"
    command = f"{COMMAND} --tensor-model-parallel-size 2 --use-distributed-optimizer --async-save"
    if not whole.is_dir():
        train(whole, 4, command)
    kill_and_resume(tmp_path, 4, command, random.Random(attempt).random() * 6)
    assert files(tmp_path / "ckpt") == files(whole / "ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "--ckpt-format torch --optimizer sgd",
        "--ckpt-format torch --bf16 --async-save",
        "--ckpt-format torch --fp16 --initial-loss-scale 1e9",
        "--ckpt-format torch_dist --bf16 --optimizer sgd",
    ],
)
def test_a_shared_optimizer_comes_back_with_every_bit(how: str, tmp_path: Path) -> None:
    """fp16: the loss scale is still falling when the run stops, and goes on to."""
    words = f"--hidden-dropout 0.1 --attention-dropout 0.1 --use-distributed-optimizer {how}"
    command = f"pretrain {LLAMA} --train-iters 4 --save ckpt --resume {words}"
    train(tmp_path / "whole", 2, command)
    train(tmp_path / "parts", 2, f"{command} --exit-interval 2")
    train(tmp_path / "parts", 2, command)
    assert losses_by_step(tmp_path / "parts") == losses_by_step(tmp_path / "whole")
    prints = [megaconv.fingerprint(tmp_path / name / "ckpt") for name in ("whole", "parts")]
    assert (prints[0].weights, prints[0].optimizer) == (prints[1].weights, prints[1].optimizer)
    assert prints[0].optimizer is not None


@pytest.mark.parametrize("form", ["torch_dist", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_delayed_scales_of_fp8_go_on_where_a_run_stopped(form: str, tmp_path: Path) -> None:
    """The layers of both stages are compared, also at another number of stages with the same whole matrices."""
    words = f"--bf16 --fp8-format hybrid --fp8-amax-history-len 3 --ckpt-format {form}"
    command = f"pretrain {LLAMA} --train-iters 4 --save ckpt --resume {words}"
    train(tmp_path / "whole", 2, f"{command} --pp 2")
    train(tmp_path / "parts", 2, f"{command} --pp 2 --exit-interval 2")
    train(tmp_path / "parts", 2, f"{command} --pp 2 --exit-interval 3")
    train(tmp_path / "parts", 1, command)
    assert losses_by_step(tmp_path / "parts") == losses_by_step(tmp_path / "whole")
    assert (
        len({megaconv.fingerprint(tmp_path / name / "ckpt").weights for name in ("whole", "parts")})
        == 1
    )


LAYOUTS = [
    (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --exit-interval 2"),
    (2, "--use-distributed-optimizer --exit-interval 4 --ckpt-format torch"),
    (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2 --exit-interval 6"),
    (1, "--make-vocab-size-divisible-by 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [pytest.param(LLAMA, marks=pytest.mark.slow, id="untied"), pytest.param(TIED, id="tied")],
)
def test_a_run_goes_on_at_any_other_layout(model: str, tmp_path: Path) -> None:
    """Four runs of two steps each, and one of eight, have the same losses."""
    command = f"pretrain {model} --train-iters 8 --resume --save ckpt"
    train(tmp_path / "one", 1, command)
    for size, words in LAYOUTS:
        train(tmp_path / "moved", size, f"{command} {words}")
    one, moved = losses_by_step(tmp_path / "one"), losses_by_step(tmp_path / "moved")
    assert sorted(one) == sorted(moved) == list(range(1, 9))
    assert [moved[step] for step in moved] == pytest.approx([one[step] for step in one], rel=1e-5)
    diff = megaconv.diff(tmp_path / "one" / "ckpt", tmp_path / "moved" / "ckpt")
    assert max((item.max_abs or 0.0) for item in diff.differences) < 1e-4


def assert_goes_on_at_layouts(model: str, layouts: list[tuple[int, str]], place: Path) -> None:
    """Eight steps of one process in `one`, and in `moved` as many by runs of so many processes, one after another."""
    command = f"pretrain {model} --train-iters 8 --resume --save ckpt"
    train(place / "one", 1, command)
    for size, words in layouts:
        train(place / "moved", size, f"{command} {words}")
    one, moved = losses_by_step(place / "one"), losses_by_step(place / "moved")
    assert sorted(one) == sorted(moved) == list(range(1, 9))
    assert [moved[step] for step in moved] == pytest.approx([one[step] for step in one], rel=1e-5)
    diff = megaconv.diff(place / "one" / "ckpt", place / "moved" / "ckpt")
    assert max((item.max_abs or 0.0) for item in diff.differences) < 1e-4


CONTEXT_LAYOUTS = [
    (4, "--cp 2 --tp 2 --sequence-parallel --use-distributed-optimizer --exit-interval 2"),
    (
        2,
        "--cp 2 --cp-comm-type a2a --use-distributed-optimizer --ckpt-format torch --exit-interval 4",
    ),
    (
        4,
        "--cp 2 --pp 2 --cp-comm-type all_gather --recompute-granularity selective --exit-interval 6",
    ),
    (1, ""),
]


@pytest.mark.slow
def test_a_run_whose_sequences_are_shared_goes_on_at_any_other_layout(tmp_path: Path) -> None:
    assert_goes_on_at_layouts(LLAMA, CONTEXT_LAYOUTS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--cp 4", "--cp 2 --tp 2 --sequence-parallel", "--cp 2 --pp 2", "--cp 2"]
)
def test_a_killed_run_whose_sequences_are_shared_gives_the_bits_of_one_that_was_not(
    words: str, tmp_path: Path
) -> None:
    command = f"{COMMAND} {words} --use-distributed-optimizer --async-save --bf16"
    train(tmp_path / "whole", 4, command)
    kill_and_resume(tmp_path / "killed", 4, command, 1.5 + random.random() * 2)
    assert files(tmp_path / "killed" / "ckpt") == files(tmp_path / "whole" / "ckpt")


EXPERT_LAYOUTS = [
    (4, "--tp 2 --ep 2 --sequence-parallel --use-distributed-optimizer --exit-interval 2"),
    (4, "--pp 2 --ep 2 --use-distributed-optimizer --exit-interval 4"),
    (2, "--etp 2 --exit-interval 6"),
    (1, ""),
]
"""The first with experts in two parts each, as tensor ranks are two; the third with parts of experts on data-parallel ranks."""


@pytest.mark.slow
def test_a_mixture_of_experts_goes_on_at_any_other_layout_and_is_exported(tmp_path: Path) -> None:
    assert_goes_on_at_layouts(MIXTRAL, EXPERT_LAYOUTS, tmp_path)
    megaconv.convert(tmp_path / "moved" / "ckpt", tmp_path / "hf", saver="hf")
    prints = [megaconv.fingerprint(tmp_path / name) for name in ("hf", "moved/ckpt")]
    assert prints[0].weights == prints[1].weights


@pytest.mark.parametrize(
    ("etp", "ranks"),
    [
        (1, {"mp_rank_00_000", "mp_rank_01_001"}),
        pytest.param(
            2,
            {f"mp_rank_{tp:02}_{ep:03}" for tp in (0, 1) for ep in (0, 1)},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_a_mixture_that_is_stopped_goes_on_with_the_same_bits(
    tmp_path: Path, etp: int, ranks: set[str]
) -> None:
    """The whole run is saved in one format, the parts in the other: a file for each rank that holds the first copy of experts."""
    words = f"--tp 2 --ep 2 --etp {etp} --sequence-parallel --use-distributed-optimizer --bf16"
    command = f"pretrain {MIXTRAL} --train-iters 4 --resume --save ckpt {words}"
    train(tmp_path / "whole", 4, command)
    train(tmp_path / "parts", 4, f"{command} --ckpt-format torch --exit-interval 2")
    train(tmp_path / "parts", 4, f"{command} --ckpt-format torch")
    assert losses_by_step(tmp_path / "parts") == losses_by_step(tmp_path / "whole")
    prints = [megaconv.fingerprint(tmp_path / name / "ckpt") for name in ("whole", "parts")]
    assert (prints[0].weights, prints[0].optimizer) == (prints[1].weights, prints[1].optimizer)
    assert prints[0].optimizer is not None
    assert {path.name for path in (tmp_path / "parts" / "ckpt" / "iter_0000004").iterdir()} == ranks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--tp 2 --etp 1 --sequence-parallel",
            "etp x ep = 1 x 1 = 1, too few for the parts of tp = 2 ranks; take --ep 2 or more",
        ),
        ("--etp 2", "etp = 2 has to divide tp = 1"),
    ],
)
def test_rank_files_that_have_no_room_for_all_parts_are_refused(
    tmp_path: Path, words: str, message: str
) -> None:
    running = launch(
        tmp_path, 2, f"pretrain {MIXTRAL} --train-iters 1 --save ckpt --ckpt-format torch {words}"
    )
    assert running.wait() == [2, 2]
    assert message in running.logs()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--bf16",
        "--cp 2 --async-save",
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --fp16",
        "--tp 2 --sequence-parallel --bf16",
        "--optimizer muon --bf16",
        "--num-experts 4 --moe-ffn-hidden-size 24 --ep 2 --bf16",
        "--num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0]*2+[1]*2 --qk-layernorm --pp 2 --ep 2 --bf16",
        "--num-experts 4 --moe-ffn-hidden-size 24 --tp 2 --ep 2 --etp 1 --sequence-parallel --bf16",
    ],
)
def test_a_shared_optimizer_is_the_same_in_both_formats(words: str, tmp_path: Path) -> None:
    """Rank files get it from all ranks that have a part of it; blocks are written by each for itself."""
    prints = set()
    for form in ("torch_dist", "torch"):
        command = (
            f"pretrain {LLAMA} --train-iters 2 --save ckpt --use-distributed-optimizer {words}"
        )
        train(tmp_path / form, 4, f"{command} --ckpt-format {form}")
        found = megaconv.fingerprint(tmp_path / form / "ckpt")
        assert found.optimizer is not None
        prints.add((found.weights, found.optimizer))
    assert len(prints) == 1


@pytest.mark.slow
def test_both_formats_hold_the_same_model(tmp_path: Path) -> None:
    command = f"pretrain {TIED} --train-iters 2 --save ckpt --bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    prints = set()
    for name, words in (
        ("dist", ""),
        ("torch", "--ckpt-format torch"),
        ("local", "--ckpt-format torch --transformer-impl local"),
        ("virtual", "--ckpt-format torch --num-virtual-stages-per-pipeline-rank 2"),
    ):
        train(tmp_path / name, 4, f"{command} {words}")
        found_prints = megaconv.fingerprint(tmp_path / name / "ckpt")
        prints.add((found_prints.weights, found_prints.optimizer))
        found = megaconv.inspect(tmp_path / name / "ckpt").to_json()
        assert (
            found["layout"]["tp"],
            found["layout"]["pp"],
            found["iteration"],
            found["optimizer"]["step"],
        ) == (2, 2, 2, 2)
    assert len(prints) == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_run_goes_on_with_the_same_bits_whatever_its_ranks_shard(
    form: str, tmp_path: Path
) -> None:
    """Each rank has one microbatch, so that gradients have one order of addition."""
    command = (
        f"pretrain {LLAMA} --global-batch-size 2 --bf16 --save ckpt --resume --ckpt-format {form}"
    )
    strategy = "--data-parallel-sharding-strategy"
    train(tmp_path / "one", 2, f"{command} --train-iters 4 {strategy} optim")
    parts = [(2, "optim_grads_params"), (3, "optim_grads"), (4, "optim_grads_params")]
    for steps, word in parts:
        words = f"--train-iters 4 --exit-interval {steps}" if steps < 4 else "--train-iters 4"
        train(tmp_path / "mixed", 2, f"{command} {words} {strategy} {word}")
    one, mixed = (files(tmp_path / name / "ckpt" / "iter_0000004") for name in ("one", "mixed"))
    assert one.keys() == mixed.keys()
    states = {name for name in one if name.endswith(".distcp")}
    assert {name: one[name] for name in states} == {name: mixed[name] for name in states}
    assert losses_by_step(tmp_path / "one") == losses_by_step(tmp_path / "mixed")
