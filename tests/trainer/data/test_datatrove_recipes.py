"""`data clean`, `data dedup` and `data run`: every document is kept or removed with a reason, at any number of processes."""

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CheckpointError
from megatron_lite.data.recipes.command import main

pytest.importorskip("datatrove", reason="the extra data-recipes")
RANDOM = random.Random(7)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["".join(RANDOM.choice(LETTERS) for _ in range(6)) for _ in range(3000)]


def text(words: int = 120) -> str:
    return " ".join(RANDOM.choice(WORDS) for _ in range(words))


def changed(original: str, share: float) -> str:
    """The text with other words in a share of the places."""
    words = original.split()
    for place in RANDOM.sample(range(len(words)), int(len(words) * share)):
        words[place] = RANDOM.choice(WORDS)
    return " ".join(words)


def write(path: Path, texts: Sequence[str], **fields: Any) -> Path:
    lines = [
        json.dumps({"id": f"{path.stem}{n}", "text": each, **fields})
        for n, each in enumerate(texts)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(recipe: str, *words: object) -> int:
    return main([recipe, *map(str, words)])


def corpus(tmp_path: Path) -> tuple[list[Path], set[str], int]:
    """(files, names of the copies, number of documents). Each copy stands behind its original."""
    originals = [text() for _ in range(60)]
    exact, near = originals[:10], [changed(each, 0.01) for each in originals[20:40]]
    files = [
        write(tmp_path / "a.jsonl", originals),
        write(tmp_path / "b.jsonl", [text() for _ in range(10)] + exact),
        write(tmp_path / "c.jsonl", near),
    ]
    copies = {f"b{n}" for n in range(10, 20)} | {f"c{n}" for n in range(20)}
    return files, copies, 100


def test_copies_are_removed_and_the_first_of_them_stays(tmp_path: Path) -> None:
    files, copies, documents = corpus(tmp_path)
    output, report = tmp_path / "out", tmp_path / "report.json"
    assert run("dedup", "--input", *files, "--output", output, "--report", report) == 0
    removed = {
        line["id"]: line["removed_because"]
        for name in "abc"
        for line in read(tmp_path / "out-removed" / f"{name}.jsonl")
    }
    assert set(removed) == copies
    assert set(removed.values()) == {"duplicate"}
    for file in files:
        assert read(output / file.name) == [line for line in read(file) if line["id"] not in copies]
    found = json.loads(report.read_text())
    assert (found["documents"], found["kept"], found["removed"]) == (
        documents,
        70,
        {"duplicate": 30},
    )
    assert len(found["examples"]["duplicate"]) == 3
    assert not list(tmp_path.glob(".*"))


def test_the_copy_in_a_preferred_file_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    original = text()
    files = [write(tmp_path / f"{name}.jsonl", [original]) for name in ("a", "b", "good")]
    words = ("dedup", "--input", *files, "--output", tmp_path / "out", "--prefer")
    assert run(*map(str, words), "*/good.jsonl", "*/b.jsonl") == 0
    assert [len(read(tmp_path / "out" / file.name)) for file in files] == [0, 0, 1]
    assert run(*map(str, words), "better.jsonl", "--overwrite") == 2
    assert "--prefer better.jsonl: matches no file" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    files, _, _ = corpus(tmp_path)
    for workers in (1, 2, 8):
        output = tmp_path / f"out{workers}"
        assert run("dedup", "--input", *files, "--output", output, "--workers", workers) == 0
        for file in files:
            assert (output / file.name).read_bytes() == (tmp_path / "out1" / file.name).read_bytes()


def die(data: Any, rank: int = 0, world_size: int = 1) -> None:
    """A step that the system kills, as it does if the memory is full."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    """A pool of multiprocessing would wait for ever."""
    from megatron_lite.data.recipes.pipeline import Stage, _execute

    with pytest.raises(CheckpointError, match="a worker process was killed"):
        _execute(Stage([die], 3), 2, tmp_path / "logs")


def test_the_output_may_be_a_link_to_a_directory(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [text(), text()])
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert run("dedup", "--input", source, "--output", tmp_path / "out", "--overwrite") == 0
    assert (tmp_path / "out").is_symlink()
    assert len(read(tmp_path / "disk" / "a.jsonl")) == 2
    assert not list(tmp_path.glob(".*"))


def test_texts_of_other_words_are_no_duplicates(tmp_path: Path) -> None:
    originals = [text() for _ in range(50)]
    file = write(tmp_path / "a.jsonl", [*originals, *(changed(each, 0.3) for each in originals)])
    assert run("dedup", "--input", file, "--output", tmp_path / "out") == 0
    assert len(read(tmp_path / "out" / "a.jsonl")) >= 98


LETTERS_OF_ALL_KINDS = [
    *LETTERS.upper(), *"019.,;_-!?\t\n ", *map(chr, range(0xA0, 0x600, 3)), *map(chr, range(0x300, 0x320)),
    "\u0345", "\u1e9b", "\u212b", "\ufb01", "\u3042", "\uac00", "\u0663", "\U0001d15e", "\U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("ngram", [1, 5])
def test_hashes_of_ngrams_are_datatroves(tmp_path: Path, ngram: int) -> None:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

    from megatron_lite.data.recipes.shingle_words import Words
    from megatron_lite.data.recipes.signatures import Signatures

    config = MinhashConfig(n_grams=ngram)
    theirs = MinhashDedupSignature(str(tmp_path / "theirs"), config=config, language=Words())
    ours = Signatures(str(tmp_path / "ours"), config)
    mixed = ["".join(RANDOM.choices(LETTERS_OF_ALL_KINDS, k=200)) for _ in range(100)]
    for each in ["", "a", "a_b c-d 1,000 3.14", "\u0301a\u0327\u0301 b", text(), *mixed]:
        found, expected = ours.get_shingles(each), theirs.get_shingles(each)
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist(), each


def test_a_bad_line_ends_the_run_and_the_corrected_run_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "a.jsonl", [text() for _ in range(4)])
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"text": "x y"}\n{"text": \n')
    words = ("--input", good, bad, "--output", tmp_path / "out", "--recipe", "openwebtext")
    words = (*words, "--min-tokens", 0, "--language", "any")
    assert run("clean", *words) == 3
    assert "b.jsonl:2" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert run("clean", *words, "--resume", "--skip-bad-lines") == 2
    assert "is of a run with other flags" in capfd.readouterr().err.splitlines()[-1]
    kept = (tmp_path / ".out.partial" / "kept" / "a.jsonl").stat()
    bad.write_text('{"text": "x y"}\n{"text": 0}\n')
    assert bad.stat().st_size == 28
    bad.write_text('{"text": "x"}\n{"text": ""}\n')
    assert run("clean", *words, "--resume") == 2  # another size of b.jsonl
    assert kept.st_size > 0
    assert run("clean", *words, "--skip-bad-lines") == 0
    assert len(read(tmp_path / "out" / "b.jsonl")) == 1


def test_a_run_that_was_killed_between_two_files_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_lite.data.recipes import dedup, pipeline

    files, _, _ = corpus(tmp_path)
    words = ("--input", *files, "--output")
    assert run("dedup", *words, tmp_path / "whole") == 0
    original, calls = pipeline._execute, []
    for stage in range(4):

        def failing(*given: Any, stage: int = stage) -> None:
            calls.append(stage)
            if len(calls) == stage + 1:
                raise KeyboardInterrupt
            original(*given)

        calls.clear()
        monkeypatch.setattr(pipeline, "_execute", failing)
        output = tmp_path / f"part{stage}"
        assert run("dedup", *words, output) == 130
        assert not output.exists()
        monkeypatch.setattr(pipeline, "_execute", original)
        assert run("dedup", *words, output, "--resume") == 0
        for file in files:
            whole = tmp_path / "whole" / file.name
            assert (output / file.name).read_bytes() == whole.read_bytes()
    assert dedup.DUPLICATE == "duplicate"


def test_web_pages_are_repaired_and_short_ones_removed(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl", ["schÃ¶n   und\n\ngut", "kurz", "", "plain & <b>", "x " * 600]
    )
    (tmp_path / "vocab.json").write_text("{}")
    words = ("--input", source, "--output", tmp_path / "out", "--recipe", "openwebtext")
    vocabulary = {letter: number for number, letter in enumerate(byte_letters())}
    (tmp_path / "vocab.json").write_text(
        json.dumps(vocabulary | {"<|endoftext|>": len(vocabulary)})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer: tuple[object, ...] = ("--vocab-file", tmp_path / "vocab.json")
    tokenizer = (*tokenizer, "--merge-file", tmp_path / "merges.txt", "--min-tokens", 10)
    assert run("clean", *words, "--language", "any", "--general-cleaning", *tokenizer) == 0
    kept = [line["text"] for line in read(tmp_path / "out" / "a.jsonl")]
    assert kept == ["schön und gut", "plain & <b>", "x " * 600]
    removed = read(tmp_path / "out-removed" / "a.jsonl")
    assert [(line["text"], line["removed_because"]) for line in removed] == [
        ("kurz", "short"), ("", "empty"),
    ]  # fmt: skip


def byte_letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_articles_of_wikipedia_keep_their_title(tmp_path: Path) -> None:
    source = tmp_path / "wiki_00"
    articles = [("Torus", "Torus\n\nA “torus” … is – round."), ("Empty", " Empty\n")]
    lines = [json.dumps({"id": "1", "title": title, "text": body}) for title, body in articles]
    source.write_text("\n".join(lines) + "\n")
    words = ("--input", source, "--output", tmp_path / "out", "--recipe", "wikipedia")
    assert run("clean", *words) == 0
    (kept,) = read(tmp_path / "out" / "wiki_00.jsonl")
    assert kept == {"id": "1", "title": "Torus", "text": 'Torus\n\nA "torus" ... is - round.'}
    (removed,) = read(tmp_path / "out-removed" / "wiki_00.jsonl")
    assert removed["removed_because"] == "empty"


def test_other_languages_are_removed(tmp_path: Path) -> None:
    pytest.importorskip("lingua")
    english = "This is an ordinary English sentence about the weather and the sea."
    german = "Dies ist ein gewöhnlicher deutscher Satz über das Wetter und das Meer."
    source = write(tmp_path / "a.jsonl", [english, german])
    words = ("--input", source, "--output", tmp_path / "out", "--recipe", "openwebtext")
    assert run("clean", *words, "--min-tokens", 0) == 0
    assert [line["text"] for line in read(tmp_path / "out" / "a.jsonl")] == [english]
    assert read(tmp_path / "out-removed" / "a.jsonl")[0]["removed_because"] == "language"


def test_the_main_text_of_a_page_is_kept(tmp_path: Path) -> None:
    body = "<p>" + "The sea is wide and the wind is strong today. " * 6 + "</p>"
    page = f"<html><body><nav>Home</nav><article><h1>Sea</h1>{body}</article></body></html>"
    source = write(tmp_path / "a.jsonl", [page, "<html></html>"])
    words = ("--input", source, "--output", tmp_path / "out", "--recipe", "html")
    assert run("clean", *words, "--min-tokens", 0, "--language", "any") == 0
    (kept,) = read(tmp_path / "out" / "a.jsonl")
    assert "The sea is wide" in kept["text"]
    assert "<p>" not in kept["text"]
    removed = {"id": "a1", "text": "<html></html>", "removed_because": "no-main-text"}
    assert read(tmp_path / "out-removed" / "a.jsonl") == [removed]


def test_a_file_with_a_pipeline_of_datatrove_is_run(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ["keep this", "drop"])
    (tmp_path / "my_recipe.py").write_text(
        "from datatrove.pipeline.readers import JsonlReader\n"
        "from datatrove.pipeline.filters import LambdaFilter\n"
        "from datatrove.pipeline.writers import JsonlWriter\n"
        f"pipeline = [JsonlReader({str(tmp_path)!r}, glob_pattern={source.name!r}), "
        "LambdaFilter(lambda doc: 'keep' in doc.text), "
        f"JsonlWriter({str(tmp_path / 'out')!r}, compression=None)]\n"
    )
    assert run("run", tmp_path / "my_recipe.py") == 0
    assert [line["text"] for line in read(tmp_path / "out" / "00000.jsonl")] == ["keep this"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\n", "defines none of"),
        ("1 / 0\n", "ZeroDivisionError"),
        (None, "no such Python file"),
    ],
)
def test_a_file_without_a_pipeline_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = tmp_path / "recipe_of_nothing.py"
    if content is not None:
        path.write_text(content)
    assert run("run", path) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


LOCAL_RECIPE = """
import os, signal
from datatrove.executor.local import LocalPipelineExecutor
from pathlib import Path

OUT = Path({out!r})

def of_a_module(data, rank, world_size):
    yield from data
    (OUT / f"done{{rank}}").touch()

def may_die(data, rank, world_size):
    if rank == 1 and not (OUT / "spare").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    yield from ()

steps = [may_die, of_a_module, lambda data, rank, world_size: data]
executor = LocalPipelineExecutor(steps, tasks=3, workers=2, logging_dir={logs!r})
"""


def test_a_killed_process_of_a_pipeline_ends_the_run_and_the_next_run_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """datatrove's own pool would wait for ever. The tasks hold functions without a name."""
    logs = tmp_path / "logs"
    recipe = tmp_path / "recipe_that_dies.py"
    recipe.write_text(LOCAL_RECIPE.format(out=str(tmp_path), logs=str(logs)))
    assert run("run", recipe) == 1
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "error:" in line)
    assert line.endswith(
        "recipe_that_dies.py: a worker process was killed, perhaps for want of memory; give fewer workers, and run it again"
    )
    assert not (tmp_path / "done1").exists()
    (tmp_path / "spare").touch()
    assert run("run", recipe) == 0
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1", "done2"]
    assert len(list((logs / "completions").iterdir())) == 3
    assert (logs / "stats.json").is_file()


STUBS = {
    "sbatch": (
        'script="${@: -1}"\n'
        """last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")\n"""
        "for task in $(seq 0 $last); do\n"
        '    SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_JOB_ID=7 SLURM_JOB_ID=7 SLURM_NODELIST=box bash "$script" >&2\n'
        "done\n"
        "echo Submitted batch job 7\n"
    ),
    "scontrol": "echo box\n",
    "srun": 'while [[ $1 != launch_pickled_pipeline ]]; do shift; done\nexec "$@"\n',
}
"""Programs of Slurm that run a job at once."""


def test_a_file_with_slurms_executor_submits_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in STUBS.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{content}")
        path.chmod(0o755)
    programs = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(programs))
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl", ["of a"])
    write(folder / "b.jsonl", ["of b"])
    (tmp_path / "slurm_recipe.py").write_text(
        "from datatrove.executor.slurm import SlurmPipelineExecutor\n"
        "from datatrove.pipeline.readers import JsonlReader\n"
        "from datatrove.pipeline.writers import JsonlWriter\n"
        f"steps = [JsonlReader({str(folder)!r}), JsonlWriter({str(tmp_path / 'out')!r}, compression=None)]\n"
        "executor = SlurmPipelineExecutor(steps, tasks=2, time='1:00:00', partition='cpu', requeue=False,\n"
        f"    logging_dir={str(tmp_path / 'logs')!r})\n"
    )
    assert run("run", tmp_path / "slurm_recipe.py") == 0
    found = {read(tmp_path / "out" / f"0000{task}.jsonl")[0]["text"] for task in (0, 1)}
    assert found == {"of a", "of b"}


@pytest.mark.slow
def test_a_file_with_rays_executor_runs_its_job(tmp_path: Path) -> None:
    """Ray starts processes of its own on this machine. It is in no extra: pip install ray."""
    ray = pytest.importorskip("ray", reason="Ray's executor needs ray")
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl", ["of a"])
    write(folder / "b.jsonl", ["of b"])
    (tmp_path / "ray_recipe.py").write_text(
        "from datatrove.executor.ray import RayPipelineExecutor\n"
        "from datatrove.pipeline.readers import JsonlReader\n"
        "from datatrove.pipeline.writers import JsonlWriter\n"
        f"steps = [JsonlReader({str(folder)!r}), JsonlWriter({str(tmp_path / 'out')!r}, compression=None)]\n"
        f"executor = RayPipelineExecutor(steps, tasks=2, workers=2, logging_dir={str(tmp_path / 'logs')!r})\n"
    )
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        assert run("run", tmp_path / "ray_recipe.py") == 0
    finally:
        ray.shutdown()
    found = {read(tmp_path / "out" / f"0000{task}.jsonl")[0]["text"] for task in (0, 1)}
    assert found == {"of a", "of b"}
