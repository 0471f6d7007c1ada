"""generation_config.json: the tokens that end a text, and the sampling of requests that state none."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.inference.generation_config import eos_of_generation, sampling_of_generation
from megatron_lite.inference.sampling import PLAIN, Sampling
from tests.trainer.inference.serving import ForkedServing

NAME = "generation_config.json"


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"eos_token_id": "2"}', '{"eos_token_id": [1, null]}', " " * (5 << 20)]
)
def test_a_configuration_of_generation_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises(CorruptCheckpoint, match=str(path)):
        eos_of_generation({path.name: path})


def test_ids_that_end_a_text_are_read_from_the_configuration_of_generation(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [2, 5]}')
    assert eos_of_generation({path.name: path}) == [2, 5]
    assert eos_of_generation({}) == []


def sampling(directory: Path, **settings: Any) -> Sampling:
    path = directory / NAME
    path.write_text(json.dumps(settings))
    return sampling_of_generation({NAME: path})


def test_sampling_is_read_as_far_as_it_is_stated(tmp_path: Path) -> None:
    assert sampling_of_generation({}) == PLAIN
    assert sampling(tmp_path, eos_token_id=2, top_p=None) == PLAIN
    found = sampling(tmp_path, do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0)
    assert found == Sampling(0.6, 20, 0.95)
    assert sampling(tmp_path, repetition_penalty=1.1) == Sampling(repetition_penalty=1.1)
    assert sampling(tmp_path, do_sample=False, temperature=0.6) == PLAIN


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": "0.6"}, "temperature should be a number, found '0.6'"),
        ({"top_k": 2.5}, "top_k should be a whole number, found 2.5"),
        ({"top_p": True}, "top_p should be a number, found True"),
        ({"top_p": 1.5}, "top_p 1.5 must be above 0 and at most 1"),
        ({"min_p": -1}, "min_p -1 must be from 0 to 1"),
    ],
)
def test_impossible_sampling_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        sampling(tmp_path, **settings)


@pytest.mark.oracle
def test_the_server_samples_as_the_model_says_unless_a_request_says_more(
    tmp_path: Path, chat_model: Path
) -> None:
    """A model of one likeliest token answers always the same."""
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    (model / NAME).write_text(json.dumps({"eos_token_id": 0, "top_k": 1, "temperature": 0.5}))
    asked = {"prompt": "Rain?", "max_tokens": 8}

    def texts(serving: ForkedServing, **fields: Any) -> set[str]:
        answers = [serving.ask("/v1/completions", {**asked, **fields})[1] for _ in range(4)]
        return {answer["choices"][0]["text"] for answer in answers}

    serving = ForkedServing(model)
    _, listed = serving.ask("/v1/models")
    assert listed["data"][0]["meta"]["sampling"] == {"temperature": 0.5, "top_k": 1}
    (greedy,) = texts(serving, temperature=0)
    assert texts(serving) == {greedy}
    assert len(texts(serving, top_k=0, temperature=1)) > 1
    assert texts(serving, top_k=0, temperature=1, min_p=1) == {greedy}
    assert serving.end() == (0, "")
    plain = ForkedServing(model, "--sampling-defaults", "openai")
    _, listed = plain.ask("/v1/models")
    assert listed["data"][0]["meta"]["sampling"] == {}
    assert len(texts(plain)) > 1
    assert plain.end() == (0, "")
