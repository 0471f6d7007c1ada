"""serve and evaluate with states: pure Mamba 2, hybrids with experts, and delta nets."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.cli import main
from megatron_lite.processes import launch
from tests.trainer.inference.conversations import decoded, save
from tests.trainer.inference.models import slots_of
from tests.trainer.inference.serving import Serving
from tests.trainer.inference.test_engine_model import MODELS

pytestmark = pytest.mark.oracle
WITH_STATES = (
    *("mamba2", "nemotron_h", "qwen3_next", "granite hybrid"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("bamba", "granite hybrid, experts")),
)
NUMBERS = ("--tokenizer-type", "NullTokenizer")
ROW = [7, 9, 30, 12]


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


def saved(name: str, directory: Path) -> Any:
    kind, settings = MODELS[name]
    return save(directory, kind, **settings)


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


@pytest.mark.parametrize("name", WITH_STATES)
def test_evaluate_measures_what_transformers_computes(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = saved(name, tmp_path / "model")
    likeliest = int(model(torch.tensor([ROW])).logits[0, -1].argmax())
    row = [*ROW, likeliest]
    text = " ".join(map(str, row))
    (tmp_path / "test.wiki").write_text(text + "\n")
    (tmp_path / "test.lambada").write_text(json.dumps({"text": text}) + "\n")
    common = ("evaluate", "--load", tmp_path / "model", "--dtype", "fp32", *NUMBERS)
    for task, file in (("WIKITEXT103", "test.wiki"), ("LAMBADA", "test.lambada")):
        assert run(*common, "--task", task, "--valid-data", tmp_path / file) == 0
    out = capfd.readouterr().out
    loss = -slots_of(model).score([row])[0].log_probs.mean().item()
    found = re.search(r"test.wiki +loss +([\d.]+)\n", out)
    assert found is not None, out
    assert float(found[1]) == pytest.approx(loss, rel=1e-3)
    assert re.search(r"test.lambada +right +1\n", out), out


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATES)
def test_a_server_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    serving = Serving(tmp_path, "--slots", "3", "--served-model-name", "tiny", "--dtype", "fp32")
    try:
        prompts = [ROW, [8], [*range(20, 50)]]
        body = {"model": "tiny", "prompt": prompts, "max_tokens": 8, "temperature": 0}
        status, found = serving.ask("/v1/completions", body)
        assert status == 200, found
        for choice, prompt in zip(found["choices"], prompts, strict=True):
            given = torch.tensor([prompt])
            whole = model.generate(given, max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert choice["text"] == decoded(tmp_path, whole[0, len(prompt) :])
    finally:
        assert serving.end() == (0, "")
