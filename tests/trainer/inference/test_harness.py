"""Tasks of lm-eval give with our model what they give with lm-eval's own `hf` model on the same weights."""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra `evaluate`)")

from megatron_lite.inference.evaluation import harness
from megatron_lite.inference.opening import open_model
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel
from tests.trainer.inference.conversations import save
from tests.trainer.loop.launches import launch as launch_ranks

pytestmark = pytest.mark.oracle

IMPORTING_S = 600.0
"""lm-eval and what it brings take long to import on a busy machine."""

CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""
ANSWER = """
task: answer
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}} "
doc_to_target: "{{text}}"
generation_kwargs: {until: ["q", "\\n\\n"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    records = [
        {
            "question": f"What is {number}?",
            "choices": ["a thing", "b", "quite another thing"],
            "text": f"text {number} " * 9,
        }
        for number in range(4)
    ]
    (directory / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, text in {"choice": CHOICE, "rolling": ROLLING, "answer": ANSWER}.items():
        (directory / f"{name}.yaml").write_text(text.replace("DATA", str(directory / "data.jsonl")))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save(directory)
    return directory


def flags(model: Path) -> Namespace:
    return Namespace(
        load=str(model), dtype="fp32", slots=3, max_length=None, tokenizer_type=None, tokenizer_model=None, vocab_file=None,
        merge_file=None, tp=1, pp=1, ep=1, distributed_backend="gloo", distributed_timeout_minutes=1.0,
        training=None,
        adapter=[], stream_weights=False, quantize=None, draft_tokens=0,
    )  # fmt: skip


def test_every_answer_is_that_of_lm_evals_own_model(
    model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    place = launch.start(Parallel())
    ours = harness.HarnessModel(open_model(flags(model), Parallel(), place))
    theirs = HFLM(str(model), dtype="float32", device="cpu", batch_size=2, max_length=96)
    found: list[Any] = [
        simple_evaluate(
            model=each, tasks=["choice", "rolling", "answer"], task_manager=TaskManager(include_path=str(tasks)),
            bootstrap_iters=0, log_samples=True,
        )
        for each in (ours, theirs)
    ]  # fmt: skip
    for task in ("choice", "rolling", "answer"):
        mine, expected = ([sample["resps"] for sample in each["samples"][task]] for each in found)
        assert flattened(mine) == [
            pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
            for value in flattened(expected)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2", "--tp 1"])
def test_every_layout_measures_what_lm_evals_own_model_does(
    layout: str, model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes run. At TP 1 they share the rows."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    words = f"evaluate --load {model} --lm-eval choice rolling answer --include-path {tasks} --output out.json {layout}"
    running = launch_ranks(tmp_path / "run", 2, words, offline)
    assert running.wait(IMPORTING_S) == [0, 0], running.logs()
    found = json.loads((tmp_path / "run" / "out.json").read_text())["results"]
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    theirs = HFLM(str(model), dtype="float32", device="cpu", batch_size=2, max_length=96)
    expected = simple_evaluate(
        model=theirs, tasks=["choice", "rolling", "answer"], task_manager=TaskManager(include_path=str(tasks)), bootstrap_iters=0
    )["results"]  # fmt: skip
    assert set(found) == set(expected)
    for task, measures in expected.items():
        numbers = {name: value for name, value in measures.items() if isinstance(value, float)}
        assert numbers
        assert {name: found[task][name] for name in numbers} == pytest.approx(numbers, rel=1e-4)


def offline(rank: int) -> None:
    os.environ["HF_DATASETS_OFFLINE"] = "1"


def flattened(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for inner in value for item in flattened(inner)]
    return [value]


def test_the_command_prints_a_table(
    model: Path,
    tasks: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_lite.inference.commands import evaluate

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(launch, "leave", pytest.fail)
    words = f"--load {model} --lm-eval choice --include-path {tasks} --output {tmp_path}/out.json --limit 2"
    assert evaluate.main(words.split()) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert 0 <= results["choice"]["acc,none"] <= 1
    assert "choice" in capfd.readouterr().out


def test_an_ignored_setting_is_refused() -> None:
    with pytest.raises(harness.UsageError, match="num_beams"):
        harness._Settings({"until": [], "num_beams": 3})
