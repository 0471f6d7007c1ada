"""`megatron_lite data tokenizer`: trains a tokenizer from text. `preprocess` and transformers load its directory.

| type | package | files |
|---|---|---|
| bpe | tokenizers | vocab.json, merges.txt, tokenizer.json: GPT-2's form, with <|endoftext|> |
| wordpiece | tokenizers | vocab.txt, tokenizer.json: BERT's form |
| unigram | sentencepiece | tokenizer.model: T5's form, with <pad>, </s> and <unk> |
"""

import argparse
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.local_paths import local_path
from megatron_lite.data.packages import package
from megatron_lite.data.recipes.documents import Reader, texts_of
from megatron_lite.data.recipes.flags import add_input, reader_of
from megatron_lite.data.recipes.outputs import staged_directory
from megatron_lite.data.tokenizer import BERT_SPECIAL, END_OF_TEXT

DESCRIPTION = "Train a tokenizer from text: BPE, WordPiece or Unigram."
_CHARACTER_COVERAGE = 0.9995
_LETTERS = 1000
"""Characters of a WordPiece vocabulary; others become unknown."""
_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
"""T5's, because transformers expects them of a unigram model."""
_LONGEST_SENTENCE = 1 << 20
"""Bytes; sentencepiece leaves longer lines out."""


@dataclass
class TokenizerReport:
    """The size of the vocabulary and of the text."""

    kind: str
    vocabulary: int
    documents: int

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {"type": self.kind, "vocabulary": self.vocabulary, "documents": self.documents}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        yield f"{self.kind}: {self.vocabulary:,} tokens from {self.documents:,} documents"


class _Texts:
    """The texts of a corpus, read again for each pass."""

    def __init__(self, reader: Reader, files: Sequence[str]) -> None:
        self._reader, self._files = reader, files
        self.count = 0
        """Documents of the last pass."""

    def __iter__(self) -> Iterator[str]:
        self.count = 0
        for text in texts_of(self._reader, self._files):
            self.count += 1
            yield text


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_input(parser)
    add = parser.add_argument_group("tokenizer").add_argument
    add("--type", choices=tuple(_TRAINERS), required=True, help="kind of tokenizer")
    add("--vocab-size", type=int, required=True, metavar="N", help="tokens, special ones included")
    add("--cased", action="store_true", help="wordpiece keeps upper case and accents")
    add(
        "--output",
        type=local_path,
        required=True,
        metavar="DIR",
        help="directory for the tokenizer",
    )
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")
    add("--overwrite", action="store_true", help="replace an existing output")


def run(given: argparse.Namespace) -> TokenizerReport:
    """Train the tokenizer. Raises CorruptCheckpoint, UsageError, TargetExists."""
    if given.vocab_size < 10:
        raise UsageError(f"--vocab-size {given.vocab_size} must be 10 or more")
    if given.cased and given.type != "wordpiece":
        raise UsageError("--cased requires --type wordpiece")
    files, reader = reader_of(given)
    texts = _Texts(reader, files)
    with staged_directory(given.output, files, overwrite=given.overwrite) as directory:
        size = _TRAINERS[given.type](texts, given, directory)
        if not texts.count:
            raise UsageError(f"--input: {', '.join(files)}: there are no documents")
    return TokenizerReport(given.type, size, texts.count)


def _bpe(texts: _Texts, given: argparse.Namespace, directory: Path) -> int:
    tokenizers = package("tokenizers", "data tokenizer")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        iter(texts), vocab_size=given.vocab_size, min_frequency=2, show_progress=False,
        special_tokens=[END_OF_TEXT],
    )  # fmt: skip
    trained.save_model(str(directory))
    trained.save(str(directory / "tokenizer.json"))
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    _write_config(directory, {"tokenizer_class": "GPT2Tokenizer", **ends})
    return int(trained.get_vocab_size())


def _wordpiece(texts: _Texts, given: argparse.Namespace, directory: Path) -> int:
    tokenizers = package("tokenizers", "data tokenizer")
    lowercase = not given.cased
    trained = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    # The package numbers the letters inside of words in random order, which decides between equally frequent pieces.
    letters = [f"##{letter}" for letter in _inner_letters(texts, trained)]
    trained.train_from_iterator(
        iter(texts), vocab_size=given.vocab_size, min_frequency=2, show_progress=False,
        limit_alphabet=_LETTERS, special_tokens=[*BERT_SPECIAL, *letters],
    )  # fmt: skip
    # In a new object, these letters aren't special tokens.
    trained = tokenizers.BertWordPieceTokenizer(trained.get_vocab(), lowercase=lowercase)
    trained.save_model(str(directory))
    trained.save(str(directory / "tokenizer.json"))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(names, BERT_SPECIAL, strict=True))
    fields = {"tokenizer_class": "BertTokenizer", "do_lower_case": not given.cased, **special}
    _write_config(directory, fields)
    return int(trained.get_vocab_size())


def _inner_letters(texts: _Texts, tokenizer: Any) -> list[str]:
    """Return the most frequent characters inside of words, sorted."""
    counts: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal):
            counts.update(word[1:])
    frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[:_LETTERS]
    return sorted(frequent)


def _unigram(texts: _Texts, given: argparse.Namespace, directory: Path) -> int:
    sentencepiece = package("sentencepiece", "data tokenizer --type unigram")
    model = io.BytesIO()
    lines = (line for text in texts for line in text.splitlines() if line.strip())
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, model_type="unigram",
            vocab_size=given.vocab_size, character_coverage=_CHARACTER_COVERAGE,
            max_sentence_length=_LONGEST_SENTENCE, num_threads=1, minloglevel=2,
            **_IDS,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--vocab-size {given.vocab_size}: sentencepiece says: {reason}"
        ) from error
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fields = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, **special}
    _write_config(directory, {**fields, "additional_special_tokens": []})
    return int(given.vocab_size)


_TRAINERS = {"bpe": _bpe, "wordpiece": _wordpiece, "unigram": _unigram}


def _write_config(directory: Path, fields: dict[str, Any]) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
