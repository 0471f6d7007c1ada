"""`data split`, `data urls` and `data tokenizer`: parts, reasons and tokenizers."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.recipes.command import main
from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer

WORDS = "the sea is wide and the wind over the old town is strong today again".split()  # noqa: SIM905


def run(recipe: str, *words: object) -> int:
    return main([recipe, *map(str, words)])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def corpus(path: Path, count: int) -> Path:
    texts = [" ".join(WORDS[n % 7 : n % 7 + 5]) + f" {n % 10}" for n in range(count)]
    path.write_text(
        "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(texts))
    )
    return path


def test_each_document_is_in_one_part(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in.jsonl", 2000)
    words = ("--input", source, "--report", tmp_path / "report.json", "--output")
    assert run("split", *words, tmp_path / "out") == 0
    parts = {name: read(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "test", "valid")}
    numbers = sorted(line["n"] for lines in parts.values() for line in lines)
    assert numbers == list(range(2000))
    assert 60 < len(parts["test"]) < 140
    assert 5 < len(parts["valid"]) < 40
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parts"] == {name: len(lines) for name, lines in parts.items()}
    assert run("split", *words, tmp_path / "again") == 0
    assert run("split", *words, tmp_path / "other", "--seed", 1, "--test-fraction", 0.05) == 0
    test = (tmp_path / "out" / "test.jsonl").read_bytes()
    assert (tmp_path / "again" / "test.jsonl").read_bytes() == test
    assert (tmp_path / "other" / "test.jsonl").read_bytes() != test
    assert not (tmp_path / "other" / "valid.jsonl").exists()


def test_a_report_replaces_a_report_and_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, report = corpus(tmp_path / "in.jsonl", 30), tmp_path / "report.json"
    before = source.read_bytes()
    words = ("split", "--input", source, "--output", tmp_path / "out", "--overwrite", "--report")
    assert run(*words, source) == 2
    assert "in.jsonl: exists and is no report" in capsys.readouterr().err
    assert source.read_bytes() == before
    assert run(*words, report) == run(*words, report) == 0


def test_the_output_may_be_a_link_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    source = corpus(tmp_path / "in.jsonl", 30)
    assert run("split", "--input", source, "--output", tmp_path / "out", "--overwrite") == 0
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "train.jsonl").exists()
    assert not list(tmp_path.glob(".*"))


def test_half_a_surrogate_pair_beside_the_text_stays(tmp_path: Path) -> None:
    line = '{"text": "the sea", "title": "\\ud800 \\u00e9"}\n'
    (tmp_path / "in.jsonl").write_text(line)
    words = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out")
    assert run("split", *words, "--test-fraction", 0.01) == 0
    assert (tmp_path / "out" / "train.jsonl").read_text() == line


def test_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The start of a file is read twice, so that a pipe would lose it."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    words = ("--input", tmp_path / "pipe.jsonl", "--output", tmp_path / "out")
    assert run("split", *words) == 2
    assert "pipe.jsonl: can be read once only" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_fractions_of_one_or_more_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = corpus(tmp_path / "in.jsonl", 3)
    words = ("--input", source, "--output", tmp_path / "out", "--test-fraction")
    assert run("split", *words, 0.6, 0.4) == 2
    assert "--test-fraction" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("split",),
        ("tokenizer", "--type", "bpe", "--vocab-size", 300),
        ("tokenizer", "--type", "unigram", "--vocab-size", 13),
    ],
    ids=["split", "bpe", "unigram"],
)
def test_overwrite_keeps_a_directory_that_holds_the_input_or_other_files(
    words: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output takes the place of a whole directory."""
    corpus, place = tmp_path / "corpus", tmp_path / "place"
    corpus.mkdir()
    place.mkdir()
    (corpus / "a.jsonl").write_text('{"text": "the sea is wide"}\n' * 5)
    (place / "notes").write_text("mine")
    command = [*words, "--input", corpus / "a.jsonl", "--overwrite", "--output"]
    for directory in (corpus, tmp_path):
        assert run(*command, directory) == 2
        assert f"lies in the output {directory}" in capsys.readouterr().err
    assert run(*command, place) == 2
    assert "notes: is no file that `data` writes" in capsys.readouterr().err
    assert (corpus / "a.jsonl").exists()
    assert (place / "notes").read_text() == "mine"
    (place / "notes").unlink()
    for _ in range(2):
        assert run(*command, place) == 0


def test_urls_are_removed_for_the_first_reason_that_holds(tmp_path: Path) -> None:
    urls = {
        "https://example.org/page": None,
        "https://www.unwanted.co.uk/a.pdf": "domain",
        "https://example.org/a.PDF?x=1": "ending",
        "http://x": "short",
        "ftp://example.org/": "malformed",
        "https://": "short",
        "https://a.org/7z.ai": "ending",
        "https://ai.org/page": None,
        "https://example.ai": None,
        "https://example.org/b.pdf#page=2": "ending",
        "https://www.UNWANTED.org/": "domain",
    }
    lines = "\n".join([*urls, "https://example.org/page", ""])
    (tmp_path / "urls.txt").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "domains.txt").write_text("Unwanted\n", encoding="utf-8-sig")
    domains: tuple[object, ...] = ("--domains", tmp_path / "domains.txt")
    try:
        import tldextract  # noqa: F401
    except ImportError:
        domains, urls["https://www.unwanted.co.uk/a.pdf"] = (), "ending"
        urls["https://www.UNWANTED.org/"] = None
    words = ("--input", tmp_path / "urls.txt", "--output", tmp_path / "kept.txt", *domains)
    assert run("urls", *words) == 0
    kept = [url for url, reason in urls.items() if reason is None]
    assert (tmp_path / "kept.txt").read_text().splitlines() == kept
    removed = [
        tuple(line.split("\t")) for line in (tmp_path / "kept.txt-removed").read_text().splitlines()
    ]
    expected = [(reason, url) for url, reason in urls.items() if reason is not None]
    assert removed == [*expected, ("duplicate", "https://example.org/page")]
    assert run("urls", *words) != 0  # the output exists


def test_a_domain_with_its_suffix_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tldextract", reason="the extra data-recipes")
    (tmp_path / "urls.txt").write_text("https://example.org/page\n")
    (tmp_path / "domains.txt").write_text("10.0.0.1\nco\nexample.org\n")
    words = ("--input", tmp_path / "urls.txt", "--output", tmp_path / "kept.txt")
    assert run("urls", *words, "--domains", tmp_path / "domains.txt") == 2
    assert "example.org: give the name without its suffix, example" in capsys.readouterr().err


def test_endings_may_have_capitals_and_the_name_gives_the_compression(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("https://example.org/page\nhttps://example.org/a.pdf\n")
    (tmp_path / "endings.txt").write_text(".PDF\n")
    words = ("--input", tmp_path / "urls.txt", "--output", tmp_path / "kept.txt.gz")
    assert run("urls", *words, "--endings", tmp_path / "endings.txt") == 0
    kept = gzip.decompress((tmp_path / "kept.txt.gz").read_bytes())
    assert kept == b"https://example.org/page\n"


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_a_trained_tokenizer_is_loaded_here_and_by_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    source = corpus(tmp_path / "in.jsonl", 300)
    size = {"bpe": 300, "wordpiece": 60, "unigram": 30}[kind]
    for name in ("one", "two"):
        words = (
            "--input",
            source,
            "--type",
            kind,
            "--vocab-size",
            size,
            "--output",
            tmp_path / name,
        )
        assert run("tokenizer", *words) == 0
    one, two = tmp_path / "one", tmp_path / "two"
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    options = {
        "bpe": TokenizerOptions(
            "GPT2BPETokenizer", vocab_file=one / "vocab.json", merge_file=one / "merges.txt"
        ),
        "wordpiece": TokenizerOptions("BertWordPieceLowerCase", vocab_file=one / "vocab.txt"),
        "unigram": TokenizerOptions("SentencePieceTokenizer", str(one / "tokenizer.model")),
    }[kind]
    ours, theirs = build_tokenizer(options), AutoTokenizer.from_pretrained(one)
    text = "the sea is wide 7"
    ids = ours.tokenize(text)
    assert ours.detokenize(ids) == text
    for each in (text, "unknown: é"):
        assert theirs(each, add_special_tokens=False).input_ids == ours.tokenize(each)
    assert ours.eod is not None
    assert len(ids) < len(text)


def test_a_vocabulary_that_is_too_large_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentencepiece")
    source = corpus(tmp_path / "in.jsonl", 20)
    words = (
        "--input",
        source,
        "--type",
        "unigram",
        "--vocab-size",
        5000,
        "--output",
        tmp_path / "out",
    )
    assert run("tokenizer", *words) == 2
    assert "--vocab-size 5000: sentencepiece says" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
