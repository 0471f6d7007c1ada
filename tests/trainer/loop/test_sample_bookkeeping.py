"""The samples of a run that resumes in the middle of an epoch: none twice, none left out, whatever else has
changed."""

import json
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.indexed_writer import IndexedWriter
from tests.trainer.loop.launches import LLAMA, Running, launch

EXAMPLES = 23
MODEL = LLAMA.replace("--mock-data ", "").replace("--num-layers 4 ", "--num-layers 1 ")
NUMBERS = MODEL.replace("--vocab-size 60", "--tokenizer-type NullTokenizer --vocab-size 59")


def record(rank: int, killed_at: int | None = None) -> None:
    """Writes each sample that is handed to a step: its number, and its tokens. killed_at: a step that a kill interrupts."""
    from megatron_lite.loop import train

    original: Any = train.prefetch

    def recorded(batches: Any, steps: Any) -> Any:
        made = original(batches, steps)
        with open(f"samples-{os.getpid()}-{rank}.jsonl", "w") as file:  # noqa: PTH123
            for step, (consumed, batch) in enumerate(made, 1):
                rows = batch["tokens"].flatten(0, 1)
                numbers = batches.samples_at(consumed, len(rows) * batches.dp_size)
                for number, row in zip(numbers, rows.tolist(), strict=True):
                    print(json.dumps([consumed, number, row]), file=file, flush=True)
                if step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield consumed, batch

    train.prefetch = recorded


def run(
    directory: Path, size: int, command: str, killed_at: int | None = None
) -> tuple[Running, list[Any]]:
    """(the run, all samples that its steps were given, by number)."""
    earlier = set(directory.glob("samples-*.jsonl"))
    running = launch(directory, size, command, partial(record, killed_at=killed_at))
    statuses = running.wait()
    assert (statuses == [0] * size) == (killed_at is None), running.logs()
    files = set(directory.glob("samples-*.jsonl")) - earlier
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return running, sorted(found, key=lambda sample: sample[1])


def write_examples(directory: Path) -> str:
    """Each has a token of its own, 3 to 25; they are packed."""
    directory.mkdir()
    lines = []
    for number in range(EXAMPLES):
        prompt = ["1"] * (number % 5) + [str(number + 3)]
        lines.append(json.dumps({"prompt": " ".join(prompt), "completion": "2"}) + "\n")
    (directory / "examples.jsonl").write_text("".join(lines))
    return f"pretrain {NUMBERS} --finetune-data examples.jsonl"


def write_pairs(directory: Path) -> str:
    directory.mkdir()
    lines = [
        {"prompt": f"{number + 3}", "chosen": "1 2", "rejected": "2"} for number in range(EXAMPLES)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(directory, 1, f"pretrain {NUMBERS} --mock-data --train-iters 2 --save base")
    return (
        "finetune --load base --finetune-data pairs.jsonl --dpo --seq-length 16 --global-batch-size 4 --log-interval 1 "
        "--tokenizer-type NullTokenizer --distributed-timeout-minutes 1 --fp32 --make-vocab-size-divisible-by 4"
    )


def write_corpus(directory: Path) -> str:
    directory.mkdir()
    random = np.random.default_rng(0)
    with IndexedWriter(directory / "corpus_text_document", np.dtype("uint16")) as writer:  # type: ignore[arg-type]
        for length in random.integers(5, 60, 40):
            writer.add(random.integers(0, 59, length), [int(length)])
    return f"pretrain {NUMBERS} --data-path corpus_text_document --split 100,0,0"


def examples_of(rows: list[list[int]]) -> Counter[int]:
    """Example -> in how many samples it is."""
    return Counter(token for row in rows for token in np.unique(row).tolist() if token > 2)


@pytest.mark.parametrize(
    ("write", "size", "batch", "flags"),
    [
        (write_examples, 2, 8, "--micro-batch-size 2"),
        pytest.param(write_examples, 1, 2, "", marks=pytest.mark.slow),
        pytest.param(write_examples, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(write_pairs, 1, 4, "", marks=pytest.mark.slow),
        pytest.param(write_pairs, 2, 6, "", marks=pytest.mark.slow),
        pytest.param(write_pairs, 1, 2, "--micro-batch-size 2", marks=pytest.mark.slow),
    ],
)
def test_every_example_is_learned_once_an_epoch_over_a_kill_and_a_resume(
    write: Any, size: int, batch: int, flags: str, tmp_path: Path
) -> None:
    """The run goes on with another batch, at another layout; its last step may be filled up from a further epoch."""
    command = write(tmp_path / "run")
    _, whole = run(tmp_path / "run", 1, f"{command} --train-iters 20")
    uninterrupted = [row for _, _, row in whole]
    counts = [examples_of(uninterrupted[: number + 1]) for number in range(len(whole))]
    needed = next(n for n, count in enumerate(counts, 1) if sum(count.values()) == 3 * EXAMPLES)
    assert set(counts[needed - 1].values()) == {3}

    command += " --epochs 3 --save ckpt"
    _, before = run(tmp_path / "run", 1, f"{command} --save-interval 2", killed_at=4)
    _, after = run(
        tmp_path / "run", size, f"{command} --resume --global-batch-size {batch} {flags}"
    )
    first = after[0][1]
    assert 0 < first < EXAMPLES
    # The kill lost the steps after the checkpoint.
    kept = [sample for sample in before if sample[1] < first]
    numbers = [number for _, number, _ in (*kept, *after)]
    assert numbers == list(range(len(numbers)))
    assert needed <= len(numbers) < needed + batch
    assert [row for _, _, row in (*kept, *after)] == uninterrupted[: len(numbers)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "flags"),
    [(1, ""), (2, "--micro-batch-size 2"), (1, "--global-batch-size 2 --train-iters 16")],
)
def test_samples_of_a_corpus_go_on_where_the_checkpoint_was(
    size: int, flags: str, tmp_path: Path
) -> None:
    command = f"{write_corpus(tmp_path / 'run')} --train-iters 12"
    _, whole = run(tmp_path / "run", 1, command)
    _, before = run(tmp_path / "run", 1, f"{command} --save ckpt --save-interval 3", killed_at=8)
    _, after = run(tmp_path / "run", size, f"{command} --save ckpt --resume {flags}")
    _, first_after, _ = after[0]
    kept = [(step, number, row) for step, number, row in before if number < first_after]
    assert len(kept) == 24
    found = [(number, row) for _, number, row in (*kept, *after)]
    expected = [(number, row) for _, number, row in whole]
    assert [number for number, _ in found] == list(range(len(found)))
    common = min(len(found), len(expected))
    assert found[:common] == expected[:common]


def test_evaluations_go_on_though_they_had_a_larger_batch(tmp_path: Path) -> None:
    command = f"{write_corpus(tmp_path / 'run').replace('--split 100,0,0', '--split 60,40,0')} --save ckpt"
    command = f"{command} --eval-interval 1".replace("--eval-iters 0", "--eval-iters 1")
    run(tmp_path / "run", 1, f"{command} --train-iters 6 --global-batch-size 8")
    again, _ = run(tmp_path / "run", 1, f"{command} --train-iters 8 --global-batch-size 2 --resume")
    assert again.log(0).count("validation loss") == 2
