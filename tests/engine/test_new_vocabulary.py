"""`convert --vocab-size` and `--tokenizer`: rows for new tokens, in all formats; and what is refused."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible, UnsupportedInput
from tests import transformers_oracle as oracle
from tests.conftest import FIXTURES
from tests.engine.test_interrupted import KILL
from tests.families.test_inkling import create as create_whole_inkling
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run

ALL = {**oracle.VARIANTS, **oracle.MIXTURES, **oracle.BEYOND_MEGATRON, **oracle.CONVERTED}
QUICK = ("llama", "gpt2", "gemma3_text", "phi", "glm4_moe")
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ALL]
REFUSED = (
    "deepseek_v4",
    "deepseek_v4, all settings",
    "gemma3n_text",
    "gemma4_text, layer inputs",
    "molmo2_text, some layers scaled",
    "qwen4_exp_text",
)
"""Variants with further tables by token."""
MORE = 5
KILL_LATE = KILL.format(
    owner="FileTensor", name="read_into", number=16, journaled="import time; time.sleep(0.5)"
)
"""SIGKILL after the largest tensors are in the journal."""


def with_more_rows(model: Path) -> Any:
    """transformers' model with new rows, each the mean of all others."""
    made = oracle.load(model)
    before = made.config.get_text_config().vocab_size
    made.resize_token_embeddings(before + MORE, mean_resizing=False)
    for module in {made.get_input_embeddings(), made.get_output_embeddings()} - {None}:
        scale = getattr(module, "logit_scale", None)
        if scale is not None:
            # Dory's factors of logits. transformers lengthens those of separate heads alone.
            module.logit_scale = torch.nn.Parameter(
                torch.cat([scale.data[:before], scale.data.new_zeros(MORE)])
            )
        for name in ("weight", "bias", "logit_scale"):
            values = getattr(module, name, None)
            if values is not None:
                values.data[-MORE:] = values.data[:-MORE].double().mean(0).to(values.dtype)
    return made


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_each_family_computes_as_transformers_resized_model(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path / "hf")
    before = megaconv.inspect(tmp_path / "hf").header.config.vocab
    words = {"saver": "hf", "vocab_size": before + MORE, "workers": 1}
    try:
        megaconv.convert(tmp_path / "hf", tmp_path / "out", **words)
    except (NotExpressible, UnsupportedInput):
        assert name in REFUSED
        return
    assert name not in REFUSED
    tokens = torch.cat([torch.randint(7, 120, (1, 10)), torch.tensor([[before, before + 4]])], 1)
    found = oracle.compute(oracle.load(tmp_path / "out"), tokens)
    expected = oracle.compute(with_more_rows(tmp_path / "hf"), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def write_words(directory: Path, count: int) -> Path:
    """A tokenizer of numbered words."""
    words = {f"w{number}": number for number in range(count)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": model}))
    return directory


@pytest.mark.oracle
@pytest.mark.parametrize("tokens", [120, 128, 140])
@pytest.mark.parametrize(("is_whole", "before"), [(False, 125), (True, 127)])
def test_each_token_of_a_new_tokenizer_has_a_logit(
    is_whole: bool, before: int, tokens: int, tmp_path: Path
) -> None:
    """Inkling leaves out the logits of rows that only pad its vocabulary of 131. before: the number of its logits."""
    if is_whole:
        create_whole_inkling(tmp_path / "hf")
    else:
        oracle.create(ALL["inkling_text"], tmp_path / "hf")
    new = write_words(tmp_path / "new", tokens)
    rows, predicted = max(tokens, 131) + 9, max(before, tokens)
    words = {"saver": "hf", "tokenizer": new, "vocab_size": rows}
    megaconv.convert(tmp_path / "hf", tmp_path / "out", **words)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    text = config["text_config"] if is_whole else config
    assert (text["vocab_size"], text["unpadded_vocab_size"]) == (rows, predicted)
    found = megaconv.inspect(tmp_path / "out").header.config
    assert found.vocab - found.head.left_out == predicted


@pytest.mark.oracle
@pytest.mark.parametrize("size", [None, 192, 200, 100])
def test_a_multiple_gives_the_rows_of_transformers(size: int | None, tmp_path: Path) -> None:
    oracle.create(ALL["gemma3_text"], tmp_path / "hf")
    words = {"saver": "hf", "pad_to_multiple_of": 64, "vocab_size": size}
    report = megaconv.convert(tmp_path / "hf", tmp_path / "out", **words)
    expected = oracle.load(tmp_path / "hf")
    before = expected.config.vocab_size
    expected.resize_token_embeddings(size, pad_to_multiple_of=64, mean_resizing=False)
    found = oracle.load(tmp_path / "out")
    rows = found.get_input_embeddings().weight
    assert report.changes.vocab is not None
    assert report.changes.vocab.after == found.config.vocab_size == expected.config.vocab_size
    assert rows.shape == expected.get_input_embeddings().weight.shape
    kept = min(before, len(rows))
    assert torch.equal(rows[:kept], expected.get_input_embeddings().weight[:kept])


def test_a_multiple_that_the_vocabulary_has_changes_nothing(llama: Path, tmp_path: Path) -> None:
    megaconv.convert(llama, tmp_path / "out", saver="hf", pad_to_multiple_of=131)
    assert hashes(tmp_path / "out") == hashes(llama)


def hashes(model: Path) -> dict[str, str]:
    return {str(key): value for key, value in megaconv.fingerprint(model).tensors.items()}


def embedding(model: Path) -> torch.Tensor:
    return load_file(model / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "hf", layers=2)


@pytest.mark.parametrize("size", [140, 131, 100])
@pytest.mark.parametrize(
    "layout", [["--tp", "2"], ["--tp", "4", "--pp", "2", "--ckpt-format", "torch_dist"]]
)
def test_the_vocabulary_changes_between_all_formats(
    layout: list[str], size: int, llama: Path, tmp_path: Path
) -> None:
    resize = ["--vocab-size", size]
    first, second = tmp_path / "core", tmp_path / "back"
    assert run("convert", llama, first, "--saver", "core", *layout, *resize).status == 0
    assert run("convert", llama, tmp_path / "hf", "--saver", "hf", *resize, "--verify").status == 0
    assert hashes(first) == hashes(tmp_path / "hf")
    assert run("convert", llama, tmp_path / "plain", "--saver", "core", *layout).status == 0
    outcome = run("convert", tmp_path / "plain", second, "--saver", "hf", *resize, "--verify")
    assert outcome.status == 0, outcome.err
    assert hashes(second) == hashes(tmp_path / "hf")
    assert json.loads((second / "config.json").read_text())["vocab_size"] == size
    assert embedding(second).shape[0] == size
    assert torch.equal(embedding(second)[:100], embedding(llama)[:100])
    assert run("verify", second).status == 0


def test_a_line_says_what_the_new_rows_are(llama: Path, tmp_path: Path) -> None:
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--dry-run", "--vocab-size"]
    more, zero, fewer = run(*words, 140), run(*words, 132, "--new-rows", "zero"), run(*words, 100)
    assert "embedding and head get 9 new rows (131 to 139): the mean of all old rows" in more.err
    assert "embedding and head get 1 new row (131): zeros" in zero.err
    assert "embedding and head lose the last 31 rows" in fewer.err


def test_an_average_and_chosen_layers_have_a_new_vocabulary(llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", layers=2, seed=3)
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--average", other]
    assert run(*words, "--layers", "1", "--vocab-size", 133).status == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (1, 133)
    rows = (embedding(llama).double() + embedding(other).double()) / 2
    assert torch.equal(embedding(tmp_path / "out")[:131], rows.bfloat16())


def test_changed_weights_are_refused_but_for_those_that_get_rows(
    llama: Path, tmp_path: Path
) -> None:
    megaconv.convert(llama, tmp_path / "hf", saver="hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    words = ["convert", tmp_path / "hf", tmp_path / "out", "--saver", "hf", "--vocab-size", 140]
    outcome = run(*words)
    assert outcome.status == 3
    assert "1 tensor with other values than were written" in outcome.err
    assert not (tmp_path / "out").exists()


def test_optimizer_state_is_refused(tmp_path: Path) -> None:
    trained = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
    words = ["convert", trained, tmp_path / "out", "--saver", "core", "--vocab-size", "500"]
    assert_refused(run(*words, "--optimizer"), 2, "--optimizer", "--vocab-size")


@pytest.mark.parametrize("option", [["--vocab-size", 500], ["--layers", "0"]])
def test_optimizer_state_that_is_left_out_gets_a_line(option: list[Any], tmp_path: Path) -> None:
    trained = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
    outcome = run("convert", trained, tmp_path / "out", "--pp", "1", *option)
    assert outcome.status == 0, outcome.err
    assert "optimizer state was left out" in outcome.err
    assert not megaconv.inspect(tmp_path / "out").header.has_optimizer


def test_a_megatron_checkpoint_keeps_its_format(llama: Path, tmp_path: Path) -> None:
    words = ["--saver", "core", "--tp", "2", "--ckpt-format", "torch_dist"]
    assert run("convert", llama, tmp_path / "core", *words).status == 0
    assert run("convert", tmp_path / "core", tmp_path / "more", "--vocab-size", 140).status == 0
    assert megaconv.inspect(tmp_path / "more").header.source.startswith("core, torch_dist")


def test_the_original_of_fewer_tokens_is_refused(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        run("convert", llama, tmp_path / "core", "--saver", "core", "--vocab-size", 140).status == 0
    )
    back = ["convert", tmp_path / "core", tmp_path / "back", "--saver", "hf", "--config"]
    refused = run(*back, llama)
    assert_refused(refused, 2, f"{llama}: has a vocabulary of 131 tokens", "--true-vocab-size 131")
    assert run(*back, llama, "--true-vocab-size", 131).status == 0
    larger = write_llama(tmp_path / "larger", layers=2, vocab=150)
    assert run(*back, larger, "--overwrite").status == 0
    assert "a vocabulary of 150 tokens, the arguments of the run" in caplog.text


def test_a_killed_run_is_not_continued_with_other_rows(llama: Path, tmp_path: Path) -> None:
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--resume", "--workers", 1]
    rows = ["--vocab-size", 140]
    killed = finish(start(*words, *rows, before=KILL_LATE))
    assert killed.status == -signal.SIGKILL, killed
    outcome = run(*words, *rows, "--new-rows", "zero")
    assert outcome.status == 0, outcome.err
    assert not embedding(tmp_path / "out")[131:].any()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vocab-size", "0"], "'--vocab-size': 0 is not in the range"),
        (["--vocab-size", "140", "--new-rows", "random"], "expected one of mean, pieces, zero"),
        (["--new-rows", "zero"], "has no effect without --vocab-size, --pad-to-multiple-of or"),
        (["--vocab-size", "140", "--new-rows", "pieces"], "needs --tokenizer"),
        (["--vocab-size", "140", "--base", "."], "the original has other tokens than the output"),
        (["--pad-to-multiple-of", "0"], "'--pad-to-multiple-of': 0 is not in the range"),
        (["--pad-to-multiple-of", "268435455", "--vocab-size", "268435456"], "become 536,870,910"),
        (["--pad-to-multiple-of", "64", "--base", "."], "--pad-to-multiple-of and --base"),
        (["--pad-to-multiple-of", "64", "--vocab-size", "2"], "names the token 2; choose 3"),
        (["--vocab-size", "2"], "names the token 2; choose 3 or more"),
        (["--tokenizer", "/no/such"], "--tokenizer /no/such: no such file or directory"),
    ],
)
def test_impossible_options_are_one_line(
    words: list[str], message: str, llama: Path, tmp_path: Path
) -> None:
    assert_refused(run("convert", llama, tmp_path / "out", "--saver", "hf", *words), 2, message)
    assert not (tmp_path / "out").exists()


def test_adapters_and_models_without_a_family_are_refused(llama: Path, tmp_path: Path) -> None:
    case = FIXTURES / "peft-llama-all-linear"
    words = ["--saver", "hf", "--vocab-size", "500", "--adapter", case / "adapter"]
    refused = run("convert", case / "base", tmp_path / "o", *words)
    assert_refused(refused, 2, "--vocab-size and --adapter", "merge the adapter first")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "unheard_of", "architectures": ["X"]}')
    (unknown / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="needs a model of a known family"):
        megaconv.convert(unknown, tmp_path / "o", saver="hf", vocab_size=140)
