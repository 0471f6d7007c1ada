"""`data score` and `data select`: scores of functions, classifiers and a service; figures against numpy; resumed runs."""

import gzip
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.recipes.command import main
from megatron_lite.data.recipes.scorers import Classifier, ScorerOptions

TEXTS = [
    "fine words",
    "bad bad words",
    "",
    "bad",
    "   ",
    "more fine words here",
    "words",
    "bad words",
]
CALLS: list[list[str]] = []
FUNCTION = "tests.trainer.data.test_scores:share_of_bad_words"


def share_of_bad_words(texts: Sequence[str]) -> list[dict[str, float]]:
    """The scorer of these tests."""
    CALLS.append(list(texts))
    return [{"toxicity": text.split().count("bad") / len(text.split())} for text in texts]


def write(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def score(source: Path, output: Path, *words: object, scorer: str = FUNCTION) -> int:
    given = ["--input", source, "--output", output, "--scorer", scorer, "--batch-size", 3, *words]
    return main(["score", *map(str, given)])


def test_each_text_gets_the_scores_of_a_function(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl")
    report = tmp_path / "report.json"
    assert score(source, tmp_path / "out", "--report", report) == 0
    found = read(tmp_path / "out")
    assert [line["text"] for line in found] == TEXTS
    assert [line["score"] and line["score"]["toxicity"] for line in found] == [
        0.0, 2 / 3, None, 1.0, None, 0.0, 0.0, 0.5,
    ]  # fmt: skip
    assert json.loads(report.read_text()) == {
        "texts": 8, "without_score": 2, "resumed": 0, "means": {"toxicity": pytest.approx((2 / 3 + 1.5) / 6)},
    }  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 6, 7, 8])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, cut: int) -> None:
    source = write(tmp_path / "in.jsonl")
    assert score(source, tmp_path / "whole", "--report", tmp_path / "whole.json") == 0
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    torn = b"" if cut == 8 else lines[cut][:5]
    (tmp_path / "part").write_bytes(b"".join(lines[:cut]) + torn)
    CALLS.clear()
    assert score(source, tmp_path / "part", "--resume", "--report", tmp_path / "part.json") == 0
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()
    scored_again = sum(map(len, CALLS))
    assert scored_again == sum(
        bool(text.strip()) for text in TEXTS[cut // 3 * 3 if cut < 8 else 6 :]
    )
    expected = json.loads((tmp_path / "whole.json").read_text())
    found = json.loads((tmp_path / "part.json").read_text())
    assert found == expected | {"resumed": cut, "means": pytest.approx(expected["means"])}


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        ("nothing", "give transformers:MODEL"),
        ("no_such_module:f", "can't be imported"),
        ("tests.trainer.data.test_scores:absent", "can't be imported"),
        ("tests.trainer.data.test_scores:raises", "raised ValueError: no idea"),
        ("tests.trainer.data.test_scores:too_few", "returned 1 scores for 2 texts"),
        ("tests.trainer.data.test_scores:no_number", "in.jsonl:1: --scorer returned 'much' as toxicity"),
        ("transformers:nowhere/at-all", "can't be read"),
        ("perspective", "set $PERSPECTIVE_API_KEY"),
    ],
)  # fmt: skip
def test_a_bad_scorer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scorer: str, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("PERSPECTIVE_API_KEY", raising=False)
    # huggingface_hub read the environment variable at import, so set its constant.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = write(tmp_path / "in.jsonl")
    assert score(source, tmp_path / "out", scorer=scorer) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_an_output_stays_until_a_line_replaces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl")
    assert score(source, tmp_path / "out") == 0
    before = (tmp_path / "out").read_bytes()
    assert score(source, tmp_path / "out", "--overwrite", "--text-key", "body") != 0
    assert "has no text in 'body'" in capsys.readouterr().err
    raises = "tests.trainer.data.test_scores:raises"
    assert score(source, tmp_path / "out", "--overwrite", scorer=raises) != 0
    assert (tmp_path / "out").read_bytes() == before
    shorter = write(tmp_path / "shorter.jsonl", TEXTS[:2])
    assert score(shorter, tmp_path / "out", "--overwrite") == 0
    assert len(read(tmp_path / "out")) == 2


def test_a_compressed_output_of_scores_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl.gz") == 2
    assert "lines are written uncompressed" in capsys.readouterr().err


def too_few(texts: Sequence[str]) -> list[dict[str, float]]:
    return [{"toxicity": 0.0}]


def raises(texts: Sequence[str]) -> list[dict[str, float]]:
    raise ValueError("no idea")


def no_number(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"toxicity": "much"} for _ in texts]


def test_an_output_of_another_input_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(write(tmp_path / "in.jsonl"), tmp_path / "out") == 0
    before = (tmp_path / "out").read_bytes()
    other = write(tmp_path / "other.jsonl", ["x", *TEXTS[1:]])
    assert score(other, tmp_path / "out", "--resume") == 2
    assert ":1: is not the input's record" in capsys.readouterr().err
    assert score(other, tmp_path / "out") != 0
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "out").read_bytes() == before


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier of BERT with two labels."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("classifier")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fine", "bad", "words", "more", "here"]
    (place / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(place / "vocab.txt")).save_pretrained(place)
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        initializer_range=1.0, id2label={0: "fine", 1: "toxic"}, label2id={"fine": 0, "toxic": 1},
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(place)
    return place


@pytest.mark.oracle
def test_a_classifier_gives_what_the_pipeline_of_transformers_gives(
    tmp_path: Path, classifier: Path
) -> None:
    import transformers

    pipeline = transformers.pipeline("text-classification", str(classifier), top_k=None)
    source = write(tmp_path / "in.jsonl")
    assert score(source, tmp_path / "out", scorer=f"transformers:{classifier}") == 0
    for line in read(tmp_path / "out"):
        if line["score"] is not None:
            expected = {each["label"]: each["score"] for each in pipeline([line["text"]])[0]}
            assert line["score"] == pytest.approx(expected, abs=1e-5)
    words = ("--activation", "sigmoid")
    assert score(source, tmp_path / "one", *words, scorer=f"transformers:{classifier}#toxic") == 0
    expected = pipeline(["fine words"], function_to_apply="sigmoid")[0]
    toxic = next(each["score"] for each in expected if each["label"] == "toxic")
    assert read(tmp_path / "one")[0]["score"] == {"toxic": pytest.approx(toxic, abs=1e-5)}


@pytest.mark.oracle
def test_the_highest_window_of_a_long_text_counts(tmp_path: Path, classifier: Path) -> None:
    parts = ["fine " * 6, "bad " * 6, "more words " * 3]
    source = write(tmp_path / "in.jsonl", [*parts, "".join(parts)])
    words = ("--max-tokens", 8)
    assert score(source, tmp_path / "out", *words, scorer=f"transformers:{classifier}") == 0
    *windows, whole = [line["score"] for line in read(tmp_path / "out")]
    highest = {label: max(window[label] for window in windows) for label in ("fine", "toxic")}
    assert whole == pytest.approx(highest, abs=1e-6)


@pytest.mark.oracle
def test_a_long_text_takes_the_memory_of_a_batch(classifier: Path) -> None:
    scorer = Classifier(str(classifier), None, ScorerOptions(batch_size=3, max_tokens=8))
    computed: list[int] = []
    scorer._model.register_forward_pre_hook(
        lambda model, words, named: computed.append(len(named["input_ids"])), with_kwargs=True
    )
    (found,) = scorer.scores(["fine " * 50 + "bad"])
    assert computed == [3, 3, 3]
    assert found == scorer.scores(["fine " * 50 + "bad", ""])[0]


WRONG_REQUEST = -400
"""Status 400 that isn't about the text."""


@contextmanager
def service(statuses: list[int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A stub of Perspective: (address, received requests). statuses: of the first answers, then 200.

    400 refuses the text.
    """
    received: list[dict[str, Any]] = []
    errors = {
        400: {"error": {"code": 400, "details": [{"errorType": "LANGUAGE_DETECTION_FAILED"}]}},
        WRONG_REQUEST: {"error": {"code": 400, "message": "API key not valid."}},
    }

    class Stub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(body | {"key": self.headers["X-Goog-Api-Key"]})
            status = statuses.pop(0) if statuses else 200
            value = {"summaryScore": {"value": len(body["comment"]["text"]) / 100}}
            answer = json.dumps(
                {"attributeScores": {"TOXICITY": value}, **errors.get(status, {})}
            ).encode()
            self.send_response(400 if status == WRONG_REQUEST else status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *given: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/analyze", received
    finally:
        server.shutdown()
        server.server_close()


def test_perspective_is_asked_once_for_each_text_and_again_when_it_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", "secret")
    source = write(tmp_path / "in.jsonl", ["abc", "", "défg", "refused"])
    with service([200, 429, 200, 400]) as (url, received):
        words = ("--perspective-url", url, "--requests-per-second", 200)
        assert score(source, tmp_path / "out", *words, scorer="perspective") == 0
    scores = [line["score"] for line in read(tmp_path / "out")]
    assert scores == [{"toxicity": 0.03}, None, {"toxicity": 0.04}, None]
    assert [body["comment"]["text"] for body in received] == ["abc", "défg", "défg", "refused"]
    assert received[0]["key"] == "secret"
    assert received[0]["requestedAttributes"] == {"TOXICITY": {}}


def test_a_wrong_key_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perspective answers with status 400, as it does for a text that it refuses."""
    monkeypatch.setenv("PERSPECTIVE_API_KEY", "wrong")
    source = write(tmp_path / "in.jsonl", ["abc", "def"])
    with service([WRONG_REQUEST]) as (url, _):
        words = ("--perspective-url", url, "--requests-per-second", 200)
        assert score(source, tmp_path / "out", *words, scorer="perspective") == 1
    assert "status 400: API key not valid.; --resume continues" in capsys.readouterr().err


def scored(path: Path, scores: Sequence[float | None]) -> Path:
    lines = [
        json.dumps({"n": n, "score": None if value is None else {"toxicity": value}})
        for n, value in enumerate(scores)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_the_lowest_half_of_all_records_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures and choice are those of a short numpy computation."""
    scores = [0.9, 0.2, None, 0.2, 0.6, 0.1, None, 0.2, 0.7]
    source = scored(tmp_path / "in.jsonl", scores)
    words = ["select", "--input", str(source), "--output", str(tmp_path / "out")]
    assert main([*words, "--report", str(tmp_path / "report.json")]) == 0
    known = [(number, value) for number, value in enumerate(scores) if value is not None]
    values = np.array([value for _, value in known])
    order = np.argsort(values, kind="stable")[: len(scores) // 2]
    expected = [known[place][0] for place in order]
    assert sorted(expected) == [line["n"] for line in read(tmp_path / "out")] == [1, 3, 5, 7]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["records"], report["without_score"]) == (9, 2)
    for name, group in {
        "all": values, "above 0.5": values[values > 0.5], "chosen": values[order],
    }.items():  # fmt: skip
        assert report[name]["mean"] == pytest.approx(group.mean())
        assert report[name]["standard_deviation"] == pytest.approx(group.std())
        assert report[name]["share"] == pytest.approx(len(group) / 7)
    assert "± 0.043301" in capsys.readouterr().out

    packed = tmp_path / "out.jsonl.gz"
    assert main([*words[:-1], str(packed)]) == 0
    assert gzip.decompress(packed.read_bytes()) == (tmp_path / "out").read_bytes()

    assert main([*words, "--overwrite", "--shuffle", "--seed", "3"]) == 0
    shuffled = [line["n"] for line in read(tmp_path / "out")]
    assert sorted(shuffled) == [1, 3, 5, 7] != shuffled


@pytest.mark.parametrize(
    ("lines", "words", "said"),
    [
        ('{"score": {"toxicity": "x"}}\n', "", ":1: score.toxicity should be a number"),
        ('{"score": 1}\n', "", ":1: has no score.toxicity"),
        ('{"score": null}\n', "", "no record has a score"),
        ("{\n", "", ":1: is not JSON"),
        ('{"score": {"toxicity": 1}}\n', "--lowest 2", "--lowest 2.0"),
    ],
)
def test_bad_scores_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: str, said: str
) -> None:
    (tmp_path / "in.jsonl").write_text(lines)
    given = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    assert main(["select", *given, *words.split()]) != 0
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
