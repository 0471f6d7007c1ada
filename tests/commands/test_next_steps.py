"""Inputs of users that are no checkpoint: one line says what the input is and what to do, with exit status 3."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megaconv.next_steps import DIRECTORIES, FILES, REMAINS
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run, unchanged

CORE = FIXTURES / "core-llama-tp2pp2"
HTML = b"<!DOCTYPE html>\n<html><title>Log in</title></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def touch(*names: str) -> Callable[[Path], Path]:
    """An input of empty files; a name that ends with / is a directory."""

    def make(path: Path) -> Path:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).mkdir() if name.endswith("/") else (path / name).touch()
        return path

    return make


def a_file(name: str, content: bytes = b"") -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.mkdir()
        (path / name).write_bytes(content)
        return path / name

    return make


def empty_version(path: Path) -> Path:
    (path / "release").mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("release")
    return path


def two_runs(path: Path) -> Path:
    shutil.copytree(CORE / "checkpoint", path / "a")
    shutil.copytree(CORE / "checkpoint", path / "b")
    return path


def below_two(path: Path) -> Path:
    shutil.copytree(CORE / "checkpoint", path / "runs" / "first")
    return path


def beside_logits(path: Path) -> Path:
    shutil.copytree(CORE / "checkpoint", path / "checkpoint")
    (path / "logits.safetensors").touch()
    return path


def one_rank(path: Path) -> Path:
    return next(shutil.copytree(CORE / "checkpoint", path).rglob("mp_rank_00_000"))


def a_file_beside_weights(path: Path) -> Path:
    path.mkdir()
    (path / "statistics.safetensors").touch()
    (path / "notes.jsonl").write_text("{}")
    return path / "notes.jsonl"


def rank_file(path: Path) -> Path:
    return one_rank(path) / "model_optim_rng.pt"


def test_an_error_about_many_checkpoints_below_lists_some_and_counts_the_rest(
    tmp_path: Path,
) -> None:
    for number in range(6):
        shutil.copytree(CORE / "checkpoint", tmp_path / f"run{number}")
    outcome = run("fingerprint", tmp_path)
    assert_refused(outcome, 3, "`run0/`", "`run4/` and more")
    assert "run5" not in outcome.err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir() or path, ["is an empty directory"]),
        (empty_version, ["/release: is an empty directory, which", "is the copy complete?"]),
        (
            touch("adapter_config.json", "adapter_model.safetensors"),
            ["is an adapter", "megaconv merge BASE "],
        ),
        (
            touch("iter_0000005/adapter_config.json"),
            ["is a run that trains an adapter", "megaconv merge BASE RUN", "--adapter RUN"],
        ),
        (
            touch("sparse.json", "patches.safetensors"),
            ["is a sparse update for an engine (sparse.json)", "`megaconv delta OLD NEW"],
        ),
        (
            touch("config.json", "model-Q4_K_M.gguf"),
            ["model-Q4_K_M.gguf", "Hugging Face directory"],
        ),
        (a_file("model-Q4_K_M.gguf", b"GGUF"), ["is not a valid GGUF file"]),
        (a_file("model.gguf", b"none"), ["is called a GGUF file"]),
        (touch("llama.nemo"), ["holds a NeMo 1 archive", "give that file"]),
        (
            touch("model_weights/metadata.json"),
            ["is a NeMo 1 checkpoint", "model_weights/", "--config"],
        ),
        (touch("model_weights/", "model_config.yaml"), ["is a NeMo 1 checkpoint (model_weights)"]),
        (
            touch("context/model.yaml", "weights/__0_0.distcp"),
            ["context/model.yaml of NeMo 2", "no weights/.metadata"],
        ),
        (
            touch("run_config.yaml", "__0_0.distcp"),
            ["run_config.yaml of Megatron-Bridge", "no .metadata"],
        ),
        (touch("zero_to_fp32.py", "global_step3/"), ["DeepSpeed", "`latest`"]),
        (one_rank, ["mp_rank_00_000: is one rank", "all ranks: "]),
        (rank_file, ["model_optim_rng.pt: is one file of a checkpoint", "give the directory"]),
        (below_two, ["`runs/first/` below is one"]),
        (beside_logits, ["`checkpoint/` below is one"]),
        (two_runs, ["`a/`, `b/`"]),
        (touch("model.safetensors"), ["model.safetensors", "no config.json", "--config ORIGINAL"]),
        (touch("model-00001-of-00002.safetensors"), ["model.safetensors.index.json"]),
        (touch("consolidated.00.pth"), ["consolidated.00.pth", "no params.json"]),
        (touch("__0_0.distcp"), ["__0_0.distcp", "no .metadata"]),
        (
            a_file("model.safetensors", LFS),
            ["model.safetensors: is a Git LFS pointer", "git lfs pull"],
        ),
        (a_file("model.safetensors", HTML), ["model.safetensors: is an HTML page", "token"]),
        (a_file("model.gguf", LFS), ["model.gguf: is a Git LFS pointer"]),
        (a_file("model.nemo", HTML), ["model.nemo: is an HTML page"]),
        (a_file("llama.tar.gz"), ["is an archive; unpack it"]),
        (a_file("llama.json", b"{}"), ["a configuration of any name is taken by --loader config"]),
        (
            a_file("notes.txt", b"hello"),
            ["notes.txt: is a file, where the directory of a checkpoint should be"],
        ),
        (
            a_file_beside_weights,
            ["notes.jsonl: is a file; its directory has weights (statistics.safetensors)"],
        ),
        (touch("notes.txt"), ["not a checkpoint of a known format"]),
    ],
)
def test_an_input_that_is_no_checkpoint_is_refused_with_the_next_step(
    make: Callable[[Path], Path], words: list[str], tmp_path: Path
) -> None:
    path = make(tmp_path / "input")
    for command in (
        ["fingerprint", path],
        ["convert", "--load-dir", path, "--saver", "core", "--save-dir", tmp_path / "out"],
    ):
        with unchanged(tmp_path):
            outcome = run(*command)
        assert_refused(outcome, 3, *words)
        assert len(outcome.err.replace(str(tmp_path), "")) < 260, outcome.err


def test_the_directory_that_holds_the_checkpoint_is_named_so_that_it_can_be_given(
    tmp_path: Path,
) -> None:
    shutil.copytree(CORE / "checkpoint", tmp_path / "run" / "checkpoint")
    outcome = run("inspect", tmp_path / "run")
    assert_refused(outcome, 3, "`checkpoint/` below is one")
    assert run("inspect", outcome.err.rpartition("give ")[2].strip()).status == 0


@pytest.mark.parametrize("content", [HTML, LFS], ids=["HTML", "LFS"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"],
)
def test_a_file_that_was_never_really_fetched_is_named(
    name: str, content: bytes, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model")
    if name != "config.json":
        (model / "model.safetensors").unlink()
    (model / name).write_bytes(content)
    assert_refused(run("inspect", model), 3, f"{model / name}: is ", "the file itself")


def test_weights_without_a_configuration_are_read_as_their_message_says(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    (tmp_path / "original").mkdir()
    (model / "config.json").rename(tmp_path / "original" / "config.json")
    outcome = run("fingerprint", model)
    assert_refused(outcome, 3, "no config.json", "--config ORIGINAL")
    assert run("fingerprint", model, "--config", tmp_path / "original").status == 0
    outcome = run(
        "convert", model, tmp_path / "out", "--saver", "core", "--config", tmp_path / "original"
    )
    assert outcome.status == 0
    assert (tmp_path / "out" / "hf" / "config.json").is_file()


def test_an_adapter_is_merged_by_the_command_that_its_message_says() -> None:
    adapter = FIXTURES / "peft-llama-all-linear" / "adapter"
    assert f"`megaconv merge BASE {adapter} --save-dir OUT`" in run("fingerprint", adapter).err


def test_an_input_that_no_loader_reads_has_the_code_unsupported_input(tmp_path: Path) -> None:
    path = touch("adapter_config.json")(tmp_path / "input")
    assert (
        json.loads(run("fingerprint", path, "--json").out)["error"]["code"] == "unsupported-input"
    )


def test_every_next_step_is_short() -> None:
    assert all(len(kind.step) < 240 for kind in (*DIRECTORIES, *REMAINS, *FILES))
