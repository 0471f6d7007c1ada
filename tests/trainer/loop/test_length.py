"""The steps and the samples of a run are Megatron-LM's, also at the end of an epoch, behind a stop and at another layout."""

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import UsageError
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.state import Progress
from megatron_lite.loop.length import check_length, remaining_steps, sample_counts, samples_left_out
from megatron_lite.settings.batch_size import batch_size
from megatron_lite.settings.config import Settings, Training
from megatron_lite.settings.sizes import Sizes
from tests.trainer.data.corpus import write_corpus
from tests.trainer.loop.launches import LLAMA, launch, metrics, train
from tests.trainer.loop.test_sample_bookkeeping import NUMBERS, run

FRESH = Progress()
SEQ = 16


def run_of(**training: Any) -> tuple[Settings, Sizes]:
    asked = Training(**{"eval_interval": 2, "eval_iters": 3} | training)
    sizes = Sizes(
        layout=Layout(), dp=1, batch=batch_size(asked, 1, SEQ), micro_batch=1, seq=SEQ, cp=1, decoder_seq=0
    )  # fmt: skip
    return replace(Settings(), training=asked), sizes


@pytest.mark.parametrize(
    ("training", "sizes", "counts"),
    [
        ({"train_iters": 5, "global_batch_size": 4}, [4] * 5, [20, 36, 12]),
        ({"train_samples": 20, "global_batch_size": 4}, [4] * 5, [20, 36, 12]),
        ({"train_samples": 23, "global_batch_size": 4}, [4] * 5, [23, 36, 12]),
        (
            {"train_samples": 31, "global_batch_size": 8, "rampup_batch_size": (4, 4, 8)},
            [4, 4, 8, 8],
            [31, 72, 24],
        ),
        ({"train_samples": 17, "step_batch_size_schedule": "0:4 128:8"}, [4, 4, 8, 8], [24, 72, 24]),
        ({"train_samples": 13, "step_batch_size_schedule": "0:12 1000:4"}, [12, 12], [24, 24, 12]),
    ],
)  # fmt: skip
def test_steps_and_samples_are_megatrons(
    training: dict[str, Any], sizes: list[int], counts: list[int]
) -> None:
    """Megatron's `update_train_iters` and `get_train_valid_test_num_samples`. A last step that passes the end of
    --train-samples gets samples, which Megatron's loader may lack."""
    settings, worked_out = run_of(**training)
    steps = list(remaining_steps(settings, worked_out, FRESH))
    assert [size for _, size in steps] == sizes
    assert sample_counts(settings, worked_out, FRESH) == counts
    consumed, size = steps[1]
    later = Progress(iteration=2, consumed_samples=consumed + size)
    assert list(remaining_steps(settings, worked_out, later)) == steps[2:]
    assert sample_counts(settings, worked_out, later)[0] == counts[0]


def test_samples_that_fill_no_step_are_counted() -> None:
    assert samples_left_out(*run_of(train_samples=23, global_batch_size=4), FRESH) == 3
    assert samples_left_out(*run_of(train_samples=24, global_batch_size=4), FRESH) == 0
    with pytest.raises(UsageError, match="3 are fewer than the 4 sequences of a step"):
        check_length(*run_of(train_samples=3, global_batch_size=4))


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_one_epoch_has_the_samples_of_megatrons_dataset(tmp_path: Path) -> None:
    """With one sample more than an epoch, Megatron shuffles two epochs."""
    from tests.trainer.data.test_sample_order import megatron, window

    (tmp_path / "run").mkdir()
    corpus = write_corpus(tmp_path / "corpus", [33, 20, 48, 61, 7, 40, 35], seed=3)
    epoch = (33 + 20 + 48 + 61 + 7 + 40 + 35 - 1) // SEQ
    steps = epoch // 3
    command = f"{NUMBERS} --data-path {corpus} --split 100,0,0 --global-batch-size 3"
    command = command.replace("--vocab-size 59", "--vocab-size 1000")
    _, found = run(tmp_path / "run", 1, f"pretrain {command} --train-iters {steps}")
    dataset, *_ = megatron(
        (3 * steps, 0, 0), data_path=[str(corpus)], seq_length=SEQ, split="100,0,0"
    )
    assert len(dataset) == epoch
    rows = [row for _, _, row in found]
    assert rows == [window(dataset, number)[:-1].tolist() for number in range(3 * steps)]


EVALUATING = LLAMA.replace("--global-batch-size 4 ", "").replace("--lr-warmup-iters 1 ", "")
EVALUATING = EVALUATING.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 2")
SCHEDULED = (
    f"pretrain {EVALUATING} --save ckpt --lr-warmup-samples 6 --lr-decay-samples 30 "
    "--train-samples 40 --step-batch-size-schedule 0:4,128:8,384:4"
)


def figures(directory: Path, kind: str) -> list[tuple[float, float]]:
    return [(line["iteration"], line[kind]) for line in metrics(directory) if kind in line]


@pytest.mark.parametrize(
    ("before", "steps", "after", "flags"),
    [
        (1, 2, 2, "--pp 2"),
        pytest.param(1, 1, 2, "", marks=pytest.mark.slow),
        pytest.param(2, 3, 4, "--tp 2", marks=pytest.mark.slow),
        pytest.param(4, 4, 1, "", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_within_its_schedule_at_another_layout(
    before: int, steps: int, after: int, flags: str, tmp_path: Path
) -> None:
    """Also with the same evaluations: --exit-interval ends a run behind an evaluation that is due."""
    train(tmp_path / "straight", 1, SCHEDULED)
    train(tmp_path / "stopped", before, f"{SCHEDULED} --exit-interval {steps}")
    train(tmp_path / "stopped", after, f"{SCHEDULED} {flags} --resume")
    for kind in ("loss", "validation_loss", "learning_rate"):
        expected = figures(tmp_path / "straight", kind)
        found = figures(tmp_path / "stopped", kind)
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in expected], rel=1e-5
        )


def terminate_in_second_step(_rank: int) -> None:
    from megatron_lite.loop import train as loop
    from megatron_lite.loop.stop import Stop

    original: Any = loop.prefetch
    hear, heard = Stop.heard, threading.Event()

    def listened(stop: Stop, number: int) -> None:
        hear(stop, number)
        heard.set()

    def interrupted(batches: Any, steps: Any) -> Any:
        for number, made in enumerate(original(batches, steps), 1):
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
                assert heard.wait(30)
            yield made

    loop.prefetch = interrupted
    Stop.heard = listened  # type: ignore[method-assign]


def test_evaluations_keep_their_samples_though_a_signal_skipped_one(tmp_path: Path) -> None:
    train(tmp_path / "straight", 1, SCHEDULED)
    running = launch(tmp_path / "stopped", 1, SCHEDULED, terminate_in_second_step)
    assert running.wait() == [0]
    assert "step      2 | validation left out, as the run has to end" in running.log(0)
    assert figures(tmp_path / "stopped", "validation_loss") == []
    train(tmp_path / "stopped", 1, f"{SCHEDULED} --resume")
    expected = figures(tmp_path / "straight", "validation_loss")
    assert expected[0][0] == 2
    assert figures(tmp_path / "stopped", "validation_loss") == expected[1:]


def test_the_last_step_of_a_shrinking_schedule_has_all_its_samples(tmp_path: Path) -> None:
    examples = "\n".join(f'{{"prompt": "{number}", "completion": "2"}}' for number in range(3, 20))
    tmp_path.joinpath("examples.jsonl").write_text(examples)
    model = NUMBERS.replace("--global-batch-size 4 ", "").replace("--lr-warmup-iters 1 ", "")
    schedule = "--train-samples 13 --step-batch-size-schedule 0:12,1000:4"
    train(tmp_path, 1, f"pretrain {model} --finetune-data examples.jsonl {schedule}")
    assert [line["consumed_samples"] for line in metrics(tmp_path)] == [12, 24]
