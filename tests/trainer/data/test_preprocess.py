"""`megatron_lite preprocess`: Megatron's files byte for byte, from every kind of input, with any number of workers, or nothing."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_lite.data import text_files, text_pipeline
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.preprocess import main
from megatron_lite.data.tokenizer import NullTokenizer
from tests.trainer.data.vocabularies import TEXTS, gpt2_files

RECORDS: list[dict[str, Any]] = [
    *(
        {"text": text, "title": f"title {number}", "number": number}
        for number, text in enumerate(TEXTS)
    ),
    {"text": "", "title": "no tokens"},
    {"text": ["one sentence.", "", "another sentence."], "title": ["a list"]},
    {"text": [], "title": ""},
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
NUMBERS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "99")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    vocab, merges = gpt2_files(tmp_path_factory.mktemp("tokenizers") / "gpt2")
    return [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        str(vocab),
        "--merge-file",
        str(merges),
    ]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text(LINES, encoding="utf-8")
    return path


def run(*arguments: object) -> int:
    return main([*map(str, arguments), *(() if "--workers" in arguments else ("--workers", "1"))])


def files(prefix: Path, name: str = "text_document") -> tuple[bytes, bytes]:
    bin_file, idx_file = (
        Path(f"{prefix}_{name}.{suffix}").read_bytes() for suffix in ("bin", "idx")
    )
    return bin_file, idx_file


def sequences(prefix: Path, name: str = "text_document") -> list[list[int]]:
    data = IndexedDataset(f"{prefix}_{name}")
    return [data.get(number).tolist() for number in range(len(data))]


# What is written.


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eod", [False, True], ids=["", "eod"])
def test_the_files_are_those_of_megatrons_builder(
    text: Path, tmp_path: Path, gpt2: list[str], eod: bool
) -> None:
    """Megatron-LM's tools/preprocess_data.py in ten lines, with the builder and the tokenizer's library of the real one."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(gpt2[3], gpt2[5])
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = tokenizer.token_to_id("<|endoftext|>")
    for key in ("text", "title"):
        dtype = DType.optimal_dtype(tokenizer.get_vocab_size())
        builder = IndexedDatasetBuilder(str(tmp_path / f"theirs_{key}_document.bin"), dtype=dtype)
        for record in RECORDS:
            parts = record[key] if isinstance(record[key], list) else [record[key]]
            found = [ids for ids in (tokenizer.encode(part).ids for part in parts) if ids]
            if found and eod:
                found[-1].append(end)
            builder.add_document(
                [token for ids in found for token in ids], [len(ids) for ids in found]
            )
        builder.finalize(str(tmp_path / f"theirs_{key}_document.idx"))
    flags = ["--append-eod"] if eod else []
    assert (
        run(
            "--input",
            text,
            "--output-prefix",
            tmp_path / "ours",
            "--json-keys",
            "text",
            "title",
            *flags,
            *gpt2,
        )
        == 0
    )
    for name in ("text_document", "title_document"):
        assert files(tmp_path / "ours", name) == files(tmp_path / "theirs", name)


def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path,
    gpt2: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "many.jsonl").write_text(LINES * 120, encoding="utf-8")
    monkeypatch.setattr(text_files, "BATCH_RECORDS", 50)
    for workers in (1, 2):
        prefix = tmp_path / str(workers)
        assert (
            run(
                "--input",
                tmp_path / "many.jsonl",
                "--output-prefix",
                prefix,
                "--workers",
                workers,
                *gpt2,
            )
            == 0
        )
    assert files(tmp_path / "1") == files(tmp_path / "2")
    assert len(IndexedDataset(tmp_path / "1_text_document").documents) - 1 == 120 * len(RECORDS)
    assert capsys.readouterr().err == ""


def test_a_small_input_starts_no_worker(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker needs seconds for its imports, and one batch is encoded at once."""
    monkeypatch.delattr(text_pipeline, "ProcessPoolExecutor")
    text.write_text('{"text": "1 2"}\n{"text": "3"}\n')
    prefix = tmp_path / "out"
    assert run("--input", text, "--output-prefix", prefix, "--workers", 8, *NUMBERS) == 0
    assert sequences(prefix) == [[1, 2], [3]]
    monkeypatch.setattr(text_files, "BATCH_RECORDS", 1)
    with pytest.raises(NameError, match="ProcessPoolExecutor"):
        run("--input", text, "--output-prefix", tmp_path / "two", "--workers", 8, *NUMBERS)


def test_one_worker_names_a_bad_line_before_it_reads_further(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("no JSON\n")
    damaged = tmp_path / "text2.jsonl.gz"
    damaged.write_bytes(gzip.compress(b"1 2")[:-9])
    prefix = tmp_path / "out"
    assert run("--input", text, damaged, "--output-prefix", prefix, "--workers", 1, *NUMBERS) == 3
    assert f"{text}:1: is not JSON" in capsys.readouterr().err


def test_every_kind_of_input_gives_the_same_bytes(
    text: Path, tmp_path: Path, gpt2: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LINES.encode()
    rows = [
        {"text": record["text"] if isinstance(record["text"], list) else [record["text"]]}
        for record in RECORDS
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=5
    )
    (tmp_path / "x.gz").write_bytes(gzip.compress(plain[:100]) + gzip.compress(plain[100:]))
    (tmp_path / "x.zst").write_bytes(
        zstandard.compress(plain[:100]) + zstandard.compress(plain[100:])
    )
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00size"  # of pzstd, before each frame
    (tmp_path / "x.pzstd").write_bytes(skipped + zstandard.compress(plain) + skipped)
    (tmp_path / "x.crlf").write_bytes(plain.replace(b"\n", b"\r\n").rstrip() + b"\n\n  \n")
    (tmp_path / "x.open").write_bytes(plain.rstrip())
    first, second = LINES.splitlines(keepends=True)[:4], LINES.splitlines(keepends=True)[4:]
    (tmp_path / "part-1").write_text("".join(first), encoding="utf-8")
    (tmp_path / "part-2").write_text("".join(second), encoding="utf-8")
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 37)
    inputs: list[Sequence[object]] = [
        [text], *([tmp_path / f"x.{kind}"] for kind in ("parquet", "gz", "zst", "pzstd", "crlf", "open")),
        [tmp_path / "part-*"], [tmp_path / "part-1", tmp_path / "part-2"],
    ]  # fmt: skip
    written = set()
    for number, words in enumerate(inputs):
        assert run("--input", *words, "--output-prefix", tmp_path / f"out{number}", *gpt2) == 0
        written.add(files(tmp_path / f"out{number}"))
    assert len(written) == 1


def test_a_plain_text_is_one_document_and_a_directory_all_files_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    books = tmp_path / "books"
    (books / "b").mkdir(parents=True)
    (books / ".hidden").mkdir()
    (books / "a.txt").write_text("1 2")
    (books / "b" / "c.md.gz").write_bytes(gzip.compress(b"3 4 5"))
    (books / "d.TEXT").write_text("6")
    (books / ".hidden" / "x.txt").write_text("99")
    (books / ".x.txt").write_text("99")
    (books / "b" / "again").symlink_to(books)
    flags = ("--append-eod", *NUMBERS, "--output-prefix", tmp_path / "out")
    assert run("--input", books, *flags) == 0
    assert sequences(tmp_path / "out") == [[1, 2, 99], [3, 4, 5, 99], [6, 99]]
    assert "3 documents, 9 tokens" in capsys.readouterr().out


def test_records_stay_records_though_their_file_is_called_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text('\n{"text": "1 2"}\n{"text": "3"}\n')
    (tmp_path / "y.txt").write_text('{"text": "4"}')
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b'{"text": "5"}\n'))
    assert run("--input", tmp_path, "--output-prefix", tmp_path / "out", *NUMBERS) == 0
    assert sequences(tmp_path / "out") == [[1, 2], [3], [4], [5]]


@pytest.mark.oracle
def test_a_tokenizer_without_an_end_is_refused_with_a_remedy(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    flags = ("--tokenizer-model", tmp_path, "--output-prefix", tmp_path / "out", "--append-eod")
    refused(
        capsys, 2, "name one as eos_token in its tokenizer_config.json", "--input", text, *flags
    )


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"1 2")
    (tmp_path / "b.txt").write_bytes(mark + b'{"text": "3"}\r\n{"text": "4"}\r\n')
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(mark + b"5"))
    assert run("--input", tmp_path, "--output-prefix", tmp_path / "out", *NUMBERS) == 0
    assert sequences(tmp_path / "out") == [[1, 2], [3], [4], [5]]


def test_standard_input(text: Path, tmp_path: Path, gpt2: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_lite",
        "preprocess",
        "--input",
        "-",
        "--workers",
        "2",
        "--output-prefix",
    ]
    for name, data in (("plain", text.read_bytes()), ("gzip", gzip.compress(text.read_bytes()))):
        done = subprocess.run(
            [*command, tmp_path / name, *gpt2],
            input=data,
            capture_output=True,
            check=True,
            env=ENVIRONMENT,
        )
        assert done.stderr == b""
        assert done.stdout.decode().startswith(
            f"{tmp_path / name}_text_document: {len(RECORDS)} documents, "
        )
    assert files(tmp_path / "plain") == files(tmp_path / "gzip")


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}


def test_sentences_are_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk  # slow to import

    data = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    data.mkdir(parents=True)
    for name, content in (
        ("collocations.tab", ""),
        ("sent_starters.txt", ""),
        ("abbrev_types.txt", "7\n"),
        ("ortho_context.tab", ""),
    ):
        (data / name).write_text(content)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "1 2. 3 7. 4\n\n5! 6"}) + "\n")
    monkeypatch.setattr(NullTokenizer, "tokenize", lambda self, text: list(text.encode()))
    flags = (
        "--input",
        tmp_path / "x.jsonl",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "300",
        "--split-sentences",
    )
    assert run(*flags, "--output-prefix", tmp_path / "a") == 0
    assert [bytes(ids).decode() for ids in sequences(tmp_path / "a", "text_sentence")] == [
        "1 2.",
        "3 7. 4\n\n5!",
        "6",
    ]
    assert run(*flags, "--output-prefix", tmp_path / "b", "--keep-newlines") == 0
    kept = [bytes(ids).decode() for ids in sequences(tmp_path / "b", "text_sentence")]
    assert kept == ["1 2. ", "3 7. 4\n\n5! ", "6"]


def test_lines_are_sentences_without_nltk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "1 2. 3\n\n 7 \r\n4\n"}) + "\n")
    flags = ("--input", tmp_path / "x.jsonl", *NUMBERS, "--json-key", "text")
    assert run(*flags, "--output-prefix", tmp_path / "a", "--presplit-sentences") == 3
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "1 2 3\n\n 7 \r\n4\n"}) + "\n")
    assert run(*flags, "--output-prefix", tmp_path / "a", "--presplit-sentences") == 0
    assert sequences(tmp_path / "a", "text_sentence") == [[1, 2, 3], [7], [4]]


# What is wrong.


def refused(
    capsys: pytest.CaptureFixture[str], status: int, words: str, *arguments: object
) -> None:
    assert run(*arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megatron-lite: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_the_files_of_a_tokenizer_tell_its_type(
    tmp_path: Path, text: Path, gpt2: list[str]
) -> None:
    vocab = Path(gpt2[3])
    words = ("--input", text, "--output-prefix")
    assert run(*words, tmp_path / "a", *gpt2) == 0
    assert run(*words, tmp_path / "b", *gpt2[2:]) == 0
    assert run(*words, tmp_path / "c", "--tokenizer-model", vocab.parent) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(tmp_path / "c")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"body": "1"}', "has no 'text', only 'body'"),
        ('{"text": 5}', "its 'text' is neither text nor a list of texts"),
        ('{"text": ["1", null]}', "its 'text' is neither text nor a list of texts"),
        ('{"text": "one"}', "its 'text' can't be tokenized"),
        ('{"text": "3 100"}', "its 'text' has token 100, the vocabulary 100"),
        ('{"text": "-3"}', "its 'text' has token -3"),
        ("\udcff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
    ids=lambda value: value[:30],
)
def test_a_bad_line_is_reported_with_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'{"text": "1"}\n\n' + line.encode(errors="surrogateescape") + b'\n{"text": "2"}\n'
    )
    arguments = ("--input", path, "--output-prefix", tmp_path / "out", *NUMBERS)
    refused(capsys, 3, f"{path}:3: {words}", *arguments)
    assert [each.name for each in tmp_path.iterdir()] == ["x.jsonl"]
    assert run(*arguments, "--skip-bad-lines") == 0
    assert f"warning: {path}:3: " in capsys.readouterr().err
    assert sequences(tmp_path / "out") == [[1], [2]]


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_damaged_file_is_named(
    text: Path,
    tmp_path: Path,
    gpt2: list[str],
    capsys: pytest.CaptureFixture[str],
    kind: str,
    how: str,
) -> None:
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(
            pyarrow.table({"text": TEXTS * 50}), path, compression="zstd", write_page_checksum=True
        )
        data = path.read_bytes()
    else:
        data = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}[
            kind
        ](text.read_bytes())
    place = 200  # within the first page of parquet
    path.write_bytes(data[:-3] if how == "cut" else data[:place] + bytes(8) + data[place + 8 :])
    refused(capsys, 3, str(path), "--input", path, "--output-prefix", tmp_path / "out", *gpt2)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--input", "nowhere.jsonl", *NUMBERS], 2, "nowhere.jsonl: there is no such file"),
        (["--input", "no*.jsonl", *NUMBERS], 2, "matches it as a pattern"),
        (["--input", "-", "-", *NUMBERS], 2, "once"),
        (["--input", __file__, "--tokenizer-type", "Null"], 2, "--tokenizer-type Null"),
        (["--input", __file__], 2, "--tokenizer-model is missing"),
        (["--input", "x", *NUMBERS, "--workers", "0"], 2, "--workers 0"),
        (["--input", "x", *NUMBERS, "--tokens"], 2, "--tokens"),
        (["--input", __file__, *NUMBERS, "--split-sentences", "--lang", "klingon"], 2, "klingon"),
        (
            ["--input", __file__, *NUMBERS, "--split-sentences", "--presplit-sentences"],
            2,
            "give one",
        ),
    ],
    ids=str,
)
def test_wrong_usage_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    refused(capsys, status, words, *arguments, "--output-prefix", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (b"", [], "there are no records"),
        (b"\n  \n", [], "there are no records"),
        (b'{"text": []}\n{"text": []}\n', [], "x.jsonl: none of 2 documents has a token of 'text'"),
        (
            b'{"text": "1", "title": []}\n',
            ["--json-keys", "text", "title"],
            "none of 1 document has a token of 'title'",
        ),
        (b"{\n[]\n", ["--skip-bad-lines"], "none of 2 records can be read; records are"),
        (b"once upon a time\n", ["--skip-bad-lines"], "plain text is read from .txt, .text, .md"),
    ],
    ids=["empty", "blank lines", "no tokens", "one key without", "all bad", "plain text"],
)
def test_an_empty_result_is_an_error_and_writes_nothing(
    content: bytes, flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    assert (
        run("--input", tmp_path / "x.jsonl", "--output-prefix", tmp_path / "out", *NUMBERS, *flags)
        == 3
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, 2, "there are no files in this directory"),
        ({"README.md": b"1", "a.jsonl": b"{}"}, 2, "has plain text ("),
        ({"a.txt": b"1\xff"}, 3, "a.txt: is not text in UTF-8: byte 1 of it"),
        ({"a.txt": b"one"}, 3, "a.txt:1: its 'text' can't be tokenized"),
    ],
    ids=["nothing", "a mixture", "not UTF-8", "not numbers"],
)
def test_a_directory_that_cannot_be_read_is_reported(
    files: dict[str, bytes],
    status: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_bytes(content)
    refused(
        capsys,
        status,
        words,
        "--input",
        tmp_path / "texts",
        "--output-prefix",
        tmp_path / "out",
        *NUMBERS,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_pipe_in_a_directory_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("1")
    os.mkfifo(tmp_path / "texts" / "b.txt")
    flags = ("--output-prefix", tmp_path / "out", *NUMBERS)
    refused(capsys, 2, "b.txt is no regular file", "--input", tmp_path / "texts", *flags)


def test_a_missing_column_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["1"]}), tmp_path / "x.parquet")
    flags = ("--input", tmp_path / "x.parquet", "--output-prefix", tmp_path / "out", *NUMBERS)
    refused(capsys, 3, "has no column text; there are body", *flags)


def test_an_existing_dataset_is_replaced_only_when_asked(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text('{"text": "1 2"}\n')
    flags = ("--input", text, "--output-prefix", tmp_path / "out", *NUMBERS)
    assert run(*flags) == 0
    capsys.readouterr()
    text.write_text('{"text": "3"}\n')
    refused(capsys, 2, "already exists", *flags)
    assert sequences(tmp_path / "out") == [[1, 2]]
    assert run(*flags, "--overwrite") == 0
    assert sequences(tmp_path / "out") == [[3]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_dataset_and_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    """After a kill an unfinished hidden file may stay; the next run takes it over."""
    command = [
        sys.executable,
        "-m",
        "megatron_lite",
        "preprocess",
        "--input",
        "-",
        "--workers",
        "2",
        *NUMBERS,
    ]
    process = subprocess.Popen(
        [*command, "--output-prefix", tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(b'{"text": "1 2 3"}\n' * 100_000)
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while len(workers := children(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert out == b""
    if number != signal.SIGKILL:
        assert (process.returncode, err) == (
            130,
            b"megatron-lite: error: interrupted; nothing was left behind\n",
        )
        assert not list(tmp_path.iterdir())
    assert not list(tmp_path.glob("out*"))
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "x.jsonl").write_text('{"text": "4"}\n')
    assert run("--input", tmp_path / "x.jsonl", "--output-prefix", tmp_path / "out", *NUMBERS) == 0
    assert sequences(tmp_path / "out") == [[4]]


def children(process: int) -> list[int]:
    return [
        int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def test_the_example_in_the_repository_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "data" / "prepare.sh"
    environment = ENVIRONMENT | {"PYTHON": sys.executable}
    done = subprocess.run(
        [script, tmp_path / "data"], capture_output=True, text=True, check=True, env=environment
    )
    assert "train: 1,000 samples" in done.stdout


def test_a_directory_that_can_not_be_written_is_named_with_the_file_that_would_appear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, place = tmp_path / "text.jsonl", tmp_path / "file"
    text.write_text('{"text": "1 2 3"}\n')
    place.write_text("no directory")
    words = f"--input {text} --output-prefix {place}/corpus --tokenizer-type NullTokenizer --vocab-size 8"
    assert main(words.split()) == 1
    target = place / "corpus_text_document.bin"
    assert f"megatron-lite: error: {target}: can't be written: " in capsys.readouterr().err
