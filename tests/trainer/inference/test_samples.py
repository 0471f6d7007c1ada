"""Many samples in a file: each follows from the seed and its number, and an interrupted run goes on with the same bytes."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli import main
from megatron_lite.inference import generating
from megatron_lite.processes import launch
from tests.trainer.inference.conversations import save
from tests.trainer.loop.launches import PATIENCE_S, train
from tests.trainer.loop.launches import launch as launch_ranks

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save(directory)
    return directory


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)
    monkeypatch.setattr(generating, "BLOCK_TURNS", 2)


def generate(model: Path, output: Path, words: str, seed: int = 1) -> int:
    with pytest.raises(SystemExit) as end:
        main(
            f"generate --load {model} --max-new-tokens 6 --temperature 1 --slots 2 --seed {seed} "
            f"--output {output} {words}".split()
        )
    return int(end.value.code or 0)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_have_megatrons_fields_and_differ(model: Path, tmp_path: Path) -> None:
    assert generate(model, tmp_path / "out", "--unconditional --num-samples 7") == 0
    lines = lines_of(tmp_path / "out")
    assert [line["id"] for line in lines] == list(range(7))
    assert {tuple(line) for line in lines} == {
        ("text", "all_text", "prompt", "finish_reason", "id")
    }
    assert all(line["text"] == line["all_text"] and line["prompt"] == "" for line in lines)
    assert len({line["text"] for line in lines}) > 3


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 7, 8, 11])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    model: Path, tmp_path: Path, cut: int
) -> None:
    words = "--unconditional --num-samples 11"
    assert generate(model, tmp_path / "whole", words) == 0
    whole = (tmp_path / "whole").read_bytes()
    lines = whole.splitlines(keepends=True)
    torn = b"" if cut == 11 else lines[cut][:9]
    (tmp_path / "part").write_bytes(b"".join(lines[:cut]) + torn)
    assert generate(model, tmp_path / "part", f"{words} --resume") == 0
    assert (tmp_path / "part").read_bytes() == whole


def test_a_run_with_other_flags_is_not_continued(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "--unconditional --resume --num-samples"
    assert generate(model, tmp_path / "out", f"{words} 2") == 0
    before = (tmp_path / "out").read_bytes()
    assert generate(model, tmp_path / "out", f"{words} 7", seed=2) == 2
    assert ":1: was written with other flags" in capfd.readouterr().err
    assert generate(model, tmp_path / "out", f"{words} 1") == 2
    assert "has 2 lines, and this run writes 1" in capfd.readouterr().err
    assert (tmp_path / "out").read_bytes() == before


def prompts(path: Path) -> Iterator[str]:
    for text in ("one", "two"):
        yield json.dumps({"prompt": {"text": text, "toxicity": 0.1}}) + "\n"


def test_each_prompt_has_several_samples(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(prompts(tmp_path)))
    words = f"--prompts-file {tmp_path}/prompts.jsonl --samples-per-prompt 3"
    assert generate(model, tmp_path / "out", words) == 0
    lines = lines_of(tmp_path / "out")
    assert [(line["id"], line["prompt"]) for line in lines] == [(0, "one")] * 3 + [(1, "two")] * 3
    assert len({line["text"] for line in lines[:3]}) > 1
    assert generate(model, tmp_path / "out", f"{words} --temperature 0") == 2
    assert "all samples are equal" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_of_two_ranks_that_is_killed_goes_on_without_a_sample_twice_or_lost(
    model: Path, tmp_path: Path
) -> None:
    """Tensor-parallel ranks under a launcher. The file is the one of an unbroken run, byte for byte."""
    count = 40
    words = (
        f"generate --load {model} --tp 2 --unconditional --num-samples {count} --max-new-tokens 12 --temperature 1 "
        "--slots 2 --seed 1 --resume --distributed-timeout-minutes 1 --output"
    )
    train(tmp_path / "whole", 2, f"{words} out.jsonl")
    running = launch_ranks(tmp_path / "part", 2, f"{words} out.jsonl")
    output = tmp_path / "part" / "out.jsonl"
    end = time.monotonic() + PATIENCE_S
    while not output.is_file() or output.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < end, running.logs()
        time.sleep(0.02)
    running.kill()
    running.wait()
    assert 5 <= output.read_bytes().count(b"\n") < count
    train(tmp_path / "part", 2, f"{words} out.jsonl")
    assert output.read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
    assert [line["id"] for line in lines_of(output)] == list(range(count))
