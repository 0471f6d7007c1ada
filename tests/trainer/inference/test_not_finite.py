"""A model that is broken at one token: whoever meets it gets an error, and everyone else what they would have got."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.cli import main
from megatron_lite.inference.batching import RunningBatch, generate
from megatron_lite.inference.beams import BeamSettings
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.processes import launch
from tests.trainer.inference.conversations import save
from tests.trainer.inference.serving import ForkedServing, Serving, opened

pytestmark = pytest.mark.oracle

BROKEN = "Z"
GOOD = ["one", "a longer prompt"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    where = tmp_path_factory.mktemp("broken")
    model = save(where)
    with torch.no_grad():
        model.model.embed_tokens.weight[
            AutoTokenizer.from_pretrained(where)(BROKEN).input_ids[0]
        ] = torch.nan
    model.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def model(directory: Path) -> Opened:
    return opened(directory)


def request(model: Opened, text: str, **settings: Any) -> Request:
    return Request(tuple(model.tokenizer.tokenize(text)), 6, Sampling(0), **settings)


@pytest.mark.parametrize("beams", [None, BeamSettings(2)])
def test_others_in_the_batch_and_later_ones_in_the_same_slot_get_their_answers(
    model: Opened, beams: BeamSettings | None
) -> None:
    wanted = [request(model, text, beams=beams) for text in GOOD]
    alone = [generate(model.model, [each])[0] for each in wanted]
    broken = [
        request(model, f"{BROKEN}{'x' * 20}", beams=beams),
        request(model, f"x{BROKEN}", beams=beams),
    ]
    together = generate(model.model, [broken[0], wanted[0], broken[1]])
    assert [answer.end for answer in together] == ["error", alone[0].end, "error"]
    assert together[1] == alone[0]
    # The short request takes the slot of the broken long one, beside a longer request.
    assert generate(model.model, wanted) == alone


def test_a_prompt_that_is_broken_in_its_first_part_is_not_read_to_its_end(model: Opened) -> None:
    batch = RunningBatch(model.model, prompt_tokens=4)
    batch.add(request(model, BROKEN + "x" * 40))
    assert [step.end for step in batch.turn()] == ["error"]
    assert not batch.busy


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


@pytest.mark.parametrize("flags", [(), ("--beams", 2), ("--temperature", 0.9)])
def test_generate_writes_the_error_and_the_other_answers(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: Any,
) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)
    out = tmp_path / "answers.jsonl"
    assert (
        run(
            "generate",
            "--load",
            directory,
            GOOD[0],
            BROKEN,
            GOOD[1],
            "--max-new-tokens",
            6,
            "--output",
            out,
            *flags,
        )
        == 1
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert ["error" in line for line in lines] == [False, True, False]
    assert "NaN or infinite" in capfd.readouterr().err


def test_score_and_evaluate_say_it(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)
    rows, out = tmp_path / "lambada.jsonl", tmp_path / "scores.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("one two", f"{BROKEN} x y"))
    )
    assert run("score", "--load", directory, "--input", rows, "--output", out) == 1
    assert ["error" in json.loads(line) for line in out.read_text().splitlines()] == [False, True]
    assert run("evaluate", "--load", directory, "--task", "LAMBADA", "--valid-data", rows) == 1
    assert capfd.readouterr().err.count("NaN or infinite") == 2


@pytest.fixture(scope="module")
def serving(directory: Path) -> Iterator[Serving]:
    found = ForkedServing(directory)
    yield found
    assert found.end()[0] == 0


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": BROKEN, "max_tokens": 3}),
        ("/v1/completions", {"prompt": BROKEN, "max_tokens": 3, "stream": True}),
        # The good row would sooner or later draw the broken token, and end with an error too.
        ("/v1/completions", {"prompt": [GOOD[0], BROKEN], "max_tokens": 3, "temperature": 0}),
        ("/v1/completions", {"prompt": f"{BROKEN}a", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": BROKEN}]}),
        ("/api", {"prompts": [f"{BROKEN}a"], "tokens_to_generate": 3}),
        ("/api", {"prompts": [BROKEN], "tokens_to_generate": 3, "beam_width": 2}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_server_answers_it_with_500_and_the_next_request_as_ever(
    serving: Serving, model: Opened, route: str, body: Any
) -> None:
    before = serving.metric("requests_without_answer_total")
    status, found = serving.ask(route, body, method="PUT" if route == "/api" else None)
    assert (status, found["error"]["code"]) == (500, "not_finite")
    assert "NaN or infinite" in found["error"]["message"]
    assert serving.metric("requests_without_answer_total") == before + 1
    assert serving.ask("/health") == (
        200,
        {"status": "degraded", "requests_without_answer": before + 1},
    )
    status, found = serving.ask(
        "/v1/completions", {"prompt": GOOD[0], "max_tokens": 6, "temperature": 0}
    )
    (alone,) = generate(model.model, [request(model, GOOD[0], stop_ids=model.stop_ids)])
    assert status == 200
    assert found["choices"][0]["text"] == model.tokenizer.detokenize(
        [t for t in alone.tokens if t not in model.stop_ids]
    )
    assert serving.metric("requests_running") == 0
