"""/v1/embeddings from outside: the official client, plain requests, and vectors beside answers."""

import base64
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import megaconv
from megatron_lite.data.embedding_form import EmbeddingForm, form_files
from tests.trainer.inference.serving import KEY, ForkedServing
from tests.trainer.inference.test_adapters import write_adapter
from tests.trainer.vectors import LENGTH, by_transformers, save

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `serve`)")

pytestmark = pytest.mark.oracle
TEXTS = ("w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11")
ROUTE = "/v1/embeddings"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save(tmp_path_factory.mktemp("model"), "qwen3")
    form = EmbeddingForm("mean", {"query": "w50 ", "document": ""})
    for name, content in form_files(form, 32, LENGTH).items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def serving(model: Path) -> Iterator[ForkedServing]:
    running = ForkedServing(model, "--slots", "2", "--dtype", "fp32", "--served-model-name", "tiny")
    yield running
    assert running.end() == (0, "")


def vectors(answer: Any) -> NDArray[np.float32]:
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


def test_the_official_client_gets_the_vectors_of_transformers(
    serving: ForkedServing, model: Path
) -> None:
    openai = pytest.importorskip("openai", reason="the client openai is not installed")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
    expected = by_transformers(model, TEXTS, "mean").numpy()
    found = client.embeddings.create(model="tiny", input=list(TEXTS))
    assert np.allclose([each.embedding for each in found.data], expected, atol=1e-5)
    assert [each.index for each in found.data] == [0, 1, 2]
    assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("tiny", 17, 17)
    one = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
    assert np.allclose(one.data[0].embedding, expected[0], atol=1e-5)
    asked = client.embeddings.create(
        model="tiny", input=TEXTS[1], extra_body={"prompt_name": "query"}
    )
    of_query = by_transformers(model, ["w50 w4"], "mean").numpy()
    assert np.allclose(asked.data[0].embedding, of_query[0], atol=1e-5)
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.embeddings.create(model="other", input="w1")


def test_tokens_dimensions_and_base64(serving: ForkedServing, model: Path) -> None:
    expected = by_transformers(model, TEXTS[:1], "mean")
    status, found = serving.ask(ROUTE, {"input": [1, 5, 6, 7, 2]})
    assert status == 200
    assert np.allclose(vectors(found), expected.numpy(), atol=1e-5)
    body = {"input": [[1, 5, 6, 7, 2]], "dimensions": 8, "encoding_format": "base64", "user": "me"}
    status, found = serving.ask(ROUTE, body)
    read = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
    shortened = torch.nn.functional.normalize(expected[:, :8], dim=1)
    assert (status, read.shape) == (200, (8,))
    assert np.allclose(read, shortened.numpy()[0], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input should be a text, a list of texts, of token ids, or of lists of token ids; it is missing"),
        ({"input": []}, "input should be a text"),
        ({"input": [3.5]}, "a text should be a text or token ids, found 3.5"),
        ({"input": [[]]}, "a text should be a text or token ids, found []"),
        ({"input": [1, 999]}, "a text has a token outside the model's vocabulary of 64"),
        ({"input": "w1 " * 70}, "a text has 72 tokens; the model takes up to 64"),
        ({"input": ["w1"] * 2049}, "input has 2049 texts, and may have 2048"),
        ({"input": "w1", "dimensions": 33}, "dimensions should be a whole number from 1 to 32"),
        ({"input": "w1", "encoding_format": "int8"}, "encoding_format should be float or base64, found 'int8'"),
        ({"input": "w1", "prompt_name": "other"}, "prompt_name 'other' is not known; the model has 'query', 'document'"),
        ({"input": "w1", "prompt_name": ["query"]}, "prompt_name ['query'] is not known"),
        ({"input": "w1", "temperature": 1}, "unknown field 'temperature'"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(
    body: dict[str, Any], message: str, serving: ForkedServing
) -> None:
    status, answer = serving.ask(ROUTE, body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_a_text_that_is_too_long_is_refused_by_the_name_of_its_field(
    serving: ForkedServing,
) -> None:
    status, answer = serving.ask(ROUTE, {"input": "w1 " * 70})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert answer["error"]["code"] == "context_length_exceeded"


def test_vectors_and_answers_do_not_disturb_each_other(serving: ForkedServing, model: Path) -> None:
    words = {"prompt": "w1 w2", "max_tokens": 40, "temperature": 0, "model": "tiny"}
    _, alone = serving.ask("/v1/completions", words)
    many = [f"w{number % 60} w{number // 60}" for number in range(300)]
    expected = by_transformers(model, many, "mean").numpy()

    def ask(number: int) -> Any:
        if number % 2:
            return serving.ask("/v1/completions", words)[1]["choices"]
        return serving.ask(ROUTE, {"input": many})[1]

    with ThreadPoolExecutor(6) as pool:
        for number, found in enumerate(pool.map(ask, range(12))):
            if number % 2:
                assert found == alone["choices"]
            else:
                assert np.allclose(vectors(found), expected, atol=1e-5)
    _, text = serving.ask("/metrics")
    assert f'requests_total{{route="{ROUTE}",status="200"}}' in text


def test_an_adapter_has_its_own_pooling_and_prompts(tmp_path: Path) -> None:
    """Its files lie in hf/ of its run. The model has none, so that its vectors are those of last tokens."""
    base, run = save(tmp_path / "base"), tmp_path / "run"
    run.mkdir()
    write_adapter(base, run / "iter_0000001", 2, 4.0, ("q_proj", "v_proj"))
    form = EmbeddingForm("mean", {"query": "w50 "})
    for name, content in form_files(form, 32, LENGTH).items():
        path = run / "hf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    megaconv.merge(base, str(run / "iter_0000001"), tmp_path / "merged")
    flags = ("--dtype", "fp32", "--adapter", f"tuned={run / 'iter_0000001'}", "--served-model-name", "tiny")  # fmt: skip
    running = ForkedServing(base, *flags)
    for model, words in (("tuned", {"prompt_name": "query"}), ("tiny", {})):
        _, found = running.ask(ROUTE, {"input": TEXTS[0], "model": model, **words})
        if model == "tuned":
            expected = by_transformers(tmp_path / "merged", [f"w50 {TEXTS[0]}"], "mean")
        else:
            expected = by_transformers(base, TEXTS[:1], "last")
        assert np.allclose(vectors(found), expected.numpy(), atol=1e-5)
    status, answer = running.ask(ROUTE, {"input": "w1", "model": "tiny", "prompt_name": "query"})
    assert (status, answer["error"]["param"]) == (400, "prompt_name")
    assert running.end() == (0, "")


def test_a_model_without_a_head_is_served_for_its_vectors(model: Path, tmp_path: Path) -> None:
    import transformers

    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    transformers.AutoModel.from_pretrained(model).save_pretrained(bare)
    running = ForkedServing(bare, "--dtype", "fp32")
    status, answer = running.ask(ROUTE, {"input": list(TEXTS)})
    assert status == 200
    assert np.allclose(vectors(answer), by_transformers(model, TEXTS, "mean").numpy(), atol=1e-5)
    status, errors = running.end()
    assert status == 0
    assert "the model is a Qwen3Model without a head for words" in errors


def test_a_model_of_other_modules_is_refused_and_answers_texts(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Dense"}]))
    running = ForkedServing(tmp_path, "--dtype", "fp32")
    status, answer = running.ask(ROUTE, {"input": "w1"})
    assert status == 400
    assert "the model has a module Dense, which isn't computed" in answer["error"]["message"]
    status, _ = running.ask("/v1/completions", {"prompt": "w1", "max_tokens": 2})
    assert status == 200
    assert running.end() == (0, "")
