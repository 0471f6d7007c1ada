"""`embed MODEL --input FILE`: vectors of texts from the command line, and what it refuses."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

import megaconv
from megatron_lite.cli import main
from megatron_lite.data.embedding_form import EmbeddingForm, form_files
from megatron_lite.inference import embedding_texts
from megatron_lite.processes import launch
from tests.trainer.inference.test_adapters import write_adapter
from tests.trainer.loop.launches import train
from tests.trainer.vectors import LENGTH, MODELS, by_transformers, save

pytestmark = pytest.mark.oracle
TEXTS = ("w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13")
PROMPTS = {"query": "w50 w51 ", "document": "w40 "}


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


def write(directory: Path, name: str = "llama", form: EmbeddingForm | None = None) -> Path:
    """A model with sentence-transformers' files."""
    save(directory, name)
    write_files(directory, form or EmbeddingForm("mean", PROMPTS))
    return directory


def write_files(directory: Path, form: EmbeddingForm) -> None:
    for name, content in form_files(form, 32, LENGTH).items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


def write_texts(directory: Path, texts: Sequence[str] = TEXTS) -> Path:
    path = directory / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["embed", *map(str, words)])
    return int(end.value.code or 0)


def embedded(directory: Path, model: Path, *words: object) -> NDArray[Any]:
    """The array that the command writes of TEXTS."""
    target = directory / "vectors.npy"
    assert run(model, "--input", write_texts(directory), "--output", target, *words) == 0
    found: NDArray[Any] = np.load(target)
    return found


def require_close(found: NDArray[Any], expected: Tensor) -> None:
    assert found.dtype == np.float32
    assert found.shape == tuple(expected.shape)
    assert np.allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_vectors_of_a_file_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    directory = write(tmp_path / "model", name)
    require_close(embedded(tmp_path, directory), by_transformers(directory, TEXTS, "mean"))
    last = embedded(tmp_path, directory, "--pooling", "last")
    require_close(last, by_transformers(directory, TEXTS, "last"))


def test_json_lines_keep_the_order_and_count_tokens(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_texts, "ROWS", 3)
    records = [json.dumps(text if number % 2 else {"text": text}) for number, text in enumerate(TEXTS)]  # fmt: skip
    (tmp_path / "texts.jsonl").write_text("\ufeff" + "\r\n\r\n".join(records))
    assert run("--load", model, "--input", tmp_path / "texts.jsonl") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["tokens"] for line in lines] == [5, 3, 9, 4]
    found = np.array([line["embedding"] for line in lines], np.float32)
    require_close(found, by_transformers(model, TEXTS, "mean"))


@pytest.mark.parametrize(
    ("words", "before"),
    [
        ((), ""),
        (("--prompt", "query"), "w50 w51 "),
        (("--prompt", "document"), "w40 "),
        (("--prompt-text", "w7 "), "w7 "),
    ],
)
def test_a_prompt_precedes_each_text(
    words: tuple[str, ...], before: str, model: Path, tmp_path: Path
) -> None:
    expected = by_transformers(model, [before + text for text in TEXTS], "mean")
    require_close(embedded(tmp_path, model, *words), expected)


def test_the_default_prompt_of_a_model_precedes_texts(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = write(tmp_path / "model", form=EmbeddingForm("last", PROMPTS, "document"))
    expected = by_transformers(model, [f"w40 {text}" for text in TEXTS], "last")
    require_close(embedded(tmp_path, model), expected)
    plain = embedded(tmp_path, model, "--prompt-text", "")
    require_close(plain, by_transformers(model, TEXTS, "last"))


def test_an_adapter_has_its_own_prompts_and_pooling(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    write_adapter(model, adapter, 2, 4.0, ("q_proj", "v_proj"))
    write_files(adapter, EmbeddingForm("last", {"query": "w30 "}, "query"))
    (adapter / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    megaconv.merge(model, str(adapter), tmp_path / "merged")
    expected = by_transformers(
        tmp_path / "merged", [f"w30 {text}" for text in TEXTS], "last", length=7
    )
    require_close(embedded(tmp_path, model, "--adapter", adapter), expected)


def test_the_first_numbers_have_length_1_again(model: Path, tmp_path: Path) -> None:
    whole = by_transformers(model, TEXTS, "mean")
    expected = torch.nn.functional.normalize(whole[:, :8], dim=1)
    require_close(embedded(tmp_path, model, "--dimensions", 8), expected)


def test_long_texts_are_shortened_with_one_warning(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = embedded(tmp_path, model, "--max-length", 4, "--pooling", "last")
    [line] = capfd.readouterr().err.splitlines()
    path = tmp_path / "texts.txt"
    assert line == f"megatron-lite: warning: {path}: 2 of 4 texts are longer than 4 tokens and are shortened"  # fmt: skip
    require_close(found, by_transformers(model, TEXTS, "last", length=4))


def test_the_longest_text_is_that_of_the_files_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = write(tmp_path / "model")
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    shortened = by_transformers(model, TEXTS, "mean", length=6)
    require_close(embedded(tmp_path, model), shortened)
    require_close(
        embedded(tmp_path, model, "--max-length", 9), by_transformers(model, TEXTS, "mean")
    )
    (model / "sentence_bert_config.json").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 6}))
    require_close(embedded(tmp_path, model), shortened)


def test_vectors_are_those_of_sentence_transformers(model: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers", reason="it is not installed")
    theirs = package.SentenceTransformer(str(model), device="cpu")
    long = [*TEXTS, "w1 w2 " * 50]
    write_texts(tmp_path, long)
    target = tmp_path / "vectors.npy"
    for words, asked in (((), {}), (("--prompt", "query"), {"prompt_name": "query"})):
        assert run(model, "--input", tmp_path / "texts.txt", "--output", target, *words) == 0
        require_close(np.load(target), torch.tensor(theirs.encode(long, **asked)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", "other"), "has no such prompt, it has 'query', 'document'; --prompt-text gives the text itself"),
        (("--prompt", "query", "--prompt-text", "w1"), "--prompt-text: not allowed with argument --prompt"),
        (("--dimensions", 33), "--dimensions 33 must be from 1 to 32, the model's"),
        (("--dimensions", 0), "--dimensions 0 must be from 1 to 32"),
        (("--max-length", 0), "--max-length 0 must be 1 or more"),
        (("--max-length", 1), "--max-length 1: the tokenizer adds more tokens to each text; give a larger number"),
        (("--pooling", "cls"), "argument --pooling: invalid choice: 'cls'"),
        (("--output", "nowhere/vectors.npy"), "nowhere/vectors.npy: can't be written: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused(
    words: tuple[object, ...], message: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert run(model, "--input", write_texts(tmp_path), *words) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '"w1"\nw2\n', "a.jsonl:2: is not JSON: "),
        ("a.jsonl", '"w1"\n\n{"prompt": "w2"}\n', 'a.jsonl:3: expected {"text": ...} or a text in quotes, found {"prompt": "w2"}'),
        ("a.jsonl", '"w1"\n"\\ud800"\n', "a.jsonl:2: it has half of a surrogate pair"),
        ("a.txt", "w1\n\nw2\n", "a.txt:2: is an empty line; each line should be a text"),
        ("a.txt", "", "a.txt: holds no texts"),
        ("a.jsonl", "\n", "a.jsonl: holds no texts"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("output", ["vectors.npy", "vectors.jsonl"])
def test_wrong_input_leaves_the_output_as_it_was(
    name: str, content: str, message: str, output: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    (tmp_path / name).write_text(content)
    (tmp_path / output).write_text("before")
    assert run(model, "--input", tmp_path / name, "--output", tmp_path / output) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]
    assert (tmp_path / output).read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, output])


def test_the_input_is_not_replaced(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_texts(tmp_path)
    assert run(model, "--input", path, "--output", path) == 2
    assert "is the file of --input too; choose another file" in capfd.readouterr().err


def test_vectors_of_damaged_weights_are_no_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    file = write(tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][8] = float("nan")  # of w4
    save_file(tensors, file, {"format": "pt"})
    texts = write_texts(tmp_path)
    assert run(tmp_path / "model", "--input", texts) == 1
    captured = capfd.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [sorted(line) for line in lines] == [["embedding", "tokens"], ["error", "tokens"], *[["embedding", "tokens"]] * 2]  # fmt: skip
    assert "a vector has NaN or infinity" in captured.err
    target = tmp_path / "vectors.npy"
    target.write_text("before")
    assert run(tmp_path / "model", "--input", texts, "--output", target) == 1
    assert target.read_text() == "before"
    assert not list(tmp_path.glob(".vectors*"))


def test_a_model_without_a_head_makes_vectors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """sentence-transformers stores embedding models so: their class is Qwen3Model."""
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", "qwen3")
    model = write_headless(tmp_path / "whole", tmp_path / "bare")
    capfd.readouterr()
    found = embedded(tmp_path, model, "--prompt", "query")
    assert capfd.readouterr().err == ""
    texts = [f"w50 w51 {text}" for text in TEXTS]
    require_close(found, by_transformers(model, texts, "mean"))
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["score", str(model), "--input", str(write_rows(tmp_path))])
    assert end.value.code in (0, None)
    assert "is a Qwen3Model without a head for words" in capfd.readouterr().err


def test_passages_are_embedded_by_a_model_without_a_head(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", "qwen3")
    model = write_headless(tmp_path / "whole", tmp_path / "bare")
    records = [{"id": number, "title": "", "text": text} for number, text in enumerate(TEXTS)]
    passages = tmp_path / "passages.jsonl"
    passages.write_text("".join(json.dumps(record) + "\n" for record in records))
    index = tmp_path / "index"
    words = ("--evidence-data-path", passages, "--seq-length", LENGTH, "--output", index)
    assert run("--load", model, *words) == 0
    found = np.load(index / "embeddings.00000.npy").astype(np.float32)
    expected = by_transformers(model, [f"w40 {text}" for text in TEXTS], "mean")
    assert np.allclose(found, expected.numpy(), atol=1e-3)  # an index has float16


def write_headless(whole: Path, target: Path) -> Path:
    """A copy of a model as transformers' class without a head saves it."""
    import transformers

    shutil.copytree(whole, target)
    transformers.AutoModel.from_pretrained(whole).save_pretrained(target)
    return target


def write_rows(directory: Path) -> Path:
    path = directory / "rows.jsonl"
    path.write_text('{"tokens": [1, 5, 6, 2]}\n')
    return path


def test_a_reward_model_is_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers

    (tmp_path / "model").mkdir()
    model = save(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(model, num_labels=1)
    transformers.LlamaForSequenceClassification(config).save_pretrained(model)
    assert run(model, "--input", write_texts(tmp_path)) != 0
    assert "the model has a head of scores" in capfd.readouterr().err


def test_help_is_that_of_texts_or_of_passages(capsys: pytest.CaptureFixture[str]) -> None:
    helps = {}
    for words in (("model", "--help"), ("--input", "a.txt", "--help"), ("--help",)):
        assert run(*words) == 0
        helps[words] = "--evidence-data-path" in capsys.readouterr().out
    assert list(helps.values()) == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2", ""])
def test_two_ranks_write_the_vectors_of_transformers(
    layout: str, model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "vectors.npy"
    train(tmp_path, 2, f"embed {model} {layout} --input {write_texts(tmp_path)} --output {target}")
    require_close(np.load(target), by_transformers(model, TEXTS, "mean"))
