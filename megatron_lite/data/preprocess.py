"""`megatron_lite preprocess`: converts text to Megatron's indexed files.

The flags are those of Megatron-LM's tools/preprocess_data.py.
"""

import argparse
import os
import signal
import sys
import time
from typing import Any

from formats.wording import counted
from megaconv.errors import CheckpointError, Interrupted, UsageError
from megaconv.local_paths import local_path, local_word
from megaconv.terminal import in_words
from megatron_lite.settings.flag_parser import FlagParser

EXAMPLES = """examples:
  megatron-lite preprocess --input corpus.jsonl --output-prefix corpus --append-eod \\
      --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --workers 8
  megatron-lite preprocess --input 'data/*.jsonl.zst' extra.parquet --output-prefix corpus --json-keys text title \\
      --tokenizer-model Llama-2-7b --append-eod
  megatron-lite preprocess --input books/ --output-prefix books --append-eod --tokenizer-model Llama-2-7b
  zcat corpus.jsonl.gz | megatron-lite preprocess --input - --output-prefix corpus \\
      --tokenizer-model tokenizer.model

writes PREFIX_KEY_document.bin and .idx for every key; --data-path wants PREFIX_KEY_document."""


def make_parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="megatron-lite preprocess", epilog=EXAMPLES, allow_abbrev=False,
        description="Turn text into Megatron's indexed files. Flags are Megatron-LM's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument_group("text").add_argument
    add(
        "--input",
        type=local_word,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, parquet, plain text (.txt, .text, .md), also .gz, .zst; directories, patterns; - for standard input",
    )
    add(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields (or columns) with text; each becomes a separate dataset (text)",
    )
    add(
        "--split-sentences",
        action="store_true",
        help="one sequence a sentence, for BERT and T5 (needs nltk)",
    )
    add(
        "--presplit-sentences",
        action="store_true",
        help="one sequence a line of the text: its lines are its sentences (needs no nltk)",
    )
    add("--lang", default="english", help="language of the sentences (english)")
    add("--keep-newlines", action="store_true", help="white space behind a sentence stays")
    add(
        "--skip-bad-lines",
        action="store_true",
        help="leave out, and report, lines that can't be read; else they end the run",
    )
    add = parser.add_argument_group("tokens").add_argument
    add(
        "--tokenizer-type",
        metavar="TYPE",
        help=f"{_types()} (the type of the given files: of --tokenizer-model DIR, HuggingFaceTokenizer)",
    )
    add(
        "--tokenizer-model",
        metavar="PATH",
        help="sentencepiece model, or Hugging Face directory or Hub id",
    )
    add(
        "--vocab-file",
        type=local_path,
        metavar="PATH",
        help="vocab.json of GPT-2, vocab.txt of BERT",
    )
    add("--merge-file", type=local_path, metavar="PATH", help="merges.txt of GPT-2")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="of the NullTokenizer, whose text is numbers already",
    )
    add(
        "--append-eod",
        action="store_true",
        help="end each document with the tokenizer's end of document",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--output-prefix",
        required=True,
        type=local_word,
        metavar="PREFIX",
        help="path without _KEY_document.bin",
    )
    add(
        "--workers",
        type=int,
        default=_processors(),
        metavar="N",
        help="processes (all processors); the output is the same for any number",
    )
    add("--overwrite", action="store_true", help="replace datasets that exist")
    # Megatron-LM's flags, accepted without effect.
    for flag in ("--log-interval", "--dataset-impl"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    return parser


def _types() -> str:
    from megatron_lite.data.tokenizer import TYPES

    return ", ".join(TYPES)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status: 0 done, 1 failed, 2 wrong usage, 3 bad input, 5 no space, 130 interrupted."""
    handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _run(make_parser().parse_args(arguments))
    except CheckpointError as error:
        return _report(str(error), error.exit_status)
    except OSError as error:
        return _report(in_words(error), 1)
    except (KeyboardInterrupt, Interrupted):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends Python silently
        return _report("interrupted; nothing was left behind", 130)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


def _interrupt(signum: int, frame: Any) -> None:
    raise Interrupted


def _report(message: str, status: int) -> int:
    print(f"megatron-lite: error: {message}", file=sys.stderr)
    return status


def _run(given: argparse.Namespace) -> None:
    from megatron_lite.data.encoding import EncodingOptions
    from megatron_lite.data.text_pipeline import PreprocessOptions, preprocess
    from megatron_lite.data.tokenizer import TokenizerOptions, type_of_files

    if given.workers < 1:
        raise UsageError(f"--workers {given.workers}: expected 1 or more")
    if given.split_sentences and given.presplit_sentences:
        raise UsageError(
            "--split-sentences looks for sentences, --presplit-sentences takes lines as sentences; give one"
        )
    found = type_of_files(given.tokenizer_model, given.vocab_file, given.merge_file)
    kind = given.tokenizer_type or found
    if kind is None:
        raise UsageError(
            "--tokenizer-model is missing; it names the model's directory, whose tokenizer is used, or a sentencepiece model "
            "(or give --vocab-file, or --tokenizer-type NullTokenizer --vocab-size N for text of token ids)"
        )
    tokenizer = TokenizerOptions(
        kind,
        given.tokenizer_model,
        given.vocab_file,
        given.merge_file,
        given.vocab_size,
    )
    encoding = EncodingOptions(
        tokenizer, tuple(dict.fromkeys(given.json_keys)), given.append_eod,
        given.split_sentences, given.lang, given.keep_newlines, given.presplit_sentences,
    )  # fmt: skip
    options = PreprocessOptions(
        tuple(given.input),
        given.output_prefix,
        encoding,
        given.workers,
        given.skip_bad_lines,
        given.overwrite,
    )
    meter = Meter()
    written = preprocess(options, meter.advance, meter.warn)
    meter.end()
    for each in written:
        print(
            f"{each.prefix}: {counted(each.documents, 'document')}, {counted(each.tokens, 'token')} of {each.dtype}"
        )


class Meter:
    """Shows documents and text per second on one line of stderr if it is a terminal; prints warnings always."""

    def __init__(self) -> None:
        self._start = self._shown = time.monotonic()
        self._documents = self._size = 0
        self._visible = sys.stderr.isatty()

    def advance(self, documents: int, size: int) -> None:
        self._documents += documents
        self._size += size
        now = time.monotonic()
        if self._visible and now - self._shown > 0.2:
            self._shown = now
            seconds = now - self._start
            speed = f"{self._documents / seconds:,.0f} documents/s, {self._size / seconds / 1e6:,.1f} MB/s"
            print(
                f"\r\x1b[K{self._documents:,} documents, {speed}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def warn(self, message: str) -> None:
        self.end()
        print(f"megatron-lite: warning: {message}: left out", file=sys.stderr)

    def end(self) -> None:
        if self._visible:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
