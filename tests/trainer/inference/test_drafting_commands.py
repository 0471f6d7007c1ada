"""`--draft-tokens` of generate and serve: the same answers, what they report, and where the flag is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli import main
from megatron_lite.processes import launch
from tests.trainer.inference.conversations import save
from tests.trainer.inference.serving import ForkedServing
from tests.trainer.loop.launches import DEEPSEEK, train

NUMBERS = ("--tokenizer-type", "NullTokenizer")
PROMPTS = ("5 9 11", "7", "1 2 3 4 5 6")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepseek")
    train(directory, 1, f"pretrain {DEEPSEEK} --train-iters 2 --save ckpt")
    return directory / "ckpt"


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(launch, "leave", sys.exit)
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


def test_generate_writes_the_same_answers_and_counts_drafts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    common = ("generate", "--load", checkpoint, *NUMBERS, *PROMPTS, "--max-new-tokens", 8)
    for sampling in ((), ("--temperature", 0.9, "--log-probs", 1)):
        plain, drafted = tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"
        assert run(monkeypatch, *common, *sampling, "--output", plain) == 0
        assert "drafts" not in capfd.readouterr().err
        assert run(monkeypatch, *common, *sampling, "--output", drafted, "--draft-tokens", 2) == 0
        assert "tokens accepted" in capfd.readouterr().err
        lines = [
            [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
            for path in (plain, drafted)
        ]
        assert lines[0] == lines[1]
        assert len(lines[0]) == len(PROMPTS)


def test_generate_stops_at_a_word_within_a_step(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for drafts in (0, 3):
        output = tmp_path / f"{drafts}.jsonl"
        words = ("generate", "--load", checkpoint, *NUMBERS, PROMPTS[0], "--max-new-tokens", 12, "--draft-tokens", drafts)  # fmt: skip
        assert run(monkeypatch, *words, "--output", output) == 0
        text = json.loads(output.read_text())["text"]
        stopped = tmp_path / f"{drafts}-stopped.jsonl"
        stop = text.split()[3]
        assert run(monkeypatch, *words, "--output", stopped, "--stop", stop) == 0
        found.append((text, json.loads(stopped.read_text())))
    assert found[0] == found[1]


def predicted(usage: dict[str, Any]) -> tuple[int, int]:
    """Numbers of (accepted, rejected) drafts, as OpenAI's clients read them."""
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_the_server_counts_drafts(checkpoint: Path) -> None:
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    answers = []
    for flags in ((), ("--draft-tokens", "2")):
        serving = ForkedServing(checkpoint, *NUMBERS, *flags)
        body = {"prompt": list(PROMPTS), "max_tokens": 8, "temperature": 0.8, "seed": 3, "n": 2}
        _, said = serving.ask("/v1/completions", body)
        answers.append([choice["text"] for choice in said["choices"]])
        assert said["usage"]["completion_tokens"] == 6 * 8
        has_counts = "draft_tokens_total" in serving.ask("/metrics")[1]
        assert has_counts == bool(flags)
        if flags:
            assert serving.metric("draft_tokens_accepted_total") >= 0
            assert serving.metric("draft_tokens_accepted_total") <= serving.metric("draft_tokens_total")  # fmt: skip
            assert serving.metric("generated_tokens_total") == 6 * 8
            accepted, rejected = predicted(said["usage"])
            assert accepted == serving.metric("draft_tokens_accepted_total")
            assert accepted + rejected == serving.metric("draft_tokens_total") > 0
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            _, events = serving.ask("/v1/completions", streamed)
            *_, last, _ = [line for line in events.splitlines() if line]
            assert predicted(json.loads(last.removeprefix("data: "))["usage"]) == (
                accepted,
                rejected,
            )
        else:
            assert "completion_tokens_details" not in said["usage"]
        assert serving.end()[0] == 0
    assert answers[0] == answers[1]


@pytest.mark.oracle
def test_models_and_flags_that_can_not_draft_are_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    save(tmp_path / "llama")
    for load, flags, message in (
        (tmp_path / "llama", ("--draft-tokens", 1), "llama has no MTP layers"),
        (checkpoint, ("--draft-tokens", -1, *NUMBERS), "must be 0 or more"),
        (checkpoint, ("--draft-tokens", 1, "--stream-weights", *NUMBERS), "excludes --stream-weights"),
    ):  # fmt: skip
        assert run(monkeypatch, "generate", "--load", load, *flags, "5") == 2
        assert message in capfd.readouterr().err
