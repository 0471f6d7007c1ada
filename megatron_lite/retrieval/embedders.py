"""Opens an embedder by its name.

hash, hash:WIDTH      words by a hash; no model
hf:DIR                an encoder of transformers, mean of its states
st:DIR                a model of sentence-transformers
DIR                   either of the two, or any BERT that megaconv reads
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import bert_config
from megatron_lite.retrieval.embedder import TextEmbedder
from megatron_lite.retrieval.encoder_embedder import EncoderEmbedder
from megatron_lite.retrieval.hash_embedder import WIDTH, HashEmbedder
from megatron_lite.retrieval.sentence_embedder import SentenceEmbedder

NAMES = "hash, hash:WIDTH, hf:DIR (transformers), st:DIR (sentence-transformers), or a directory"


TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True)
class EmbedderOptions:
    """The flags of an embedder."""

    batch: int
    """Texts at once."""
    most_tokens: int
    """Tokens of a row, with its special tokens."""
    converted: Path
    """A directory for the Hugging Face form of a Megatron BERT, which is written once."""
    vocab_file: Path | None = None
    """The vocabulary of a Megatron BERT."""
    lower_case: bool = True
    """True if its tokenizer makes lower case."""


def open_embedder(name: str, options: EmbedderOptions) -> TextEmbedder:
    """Open an embedder by its name.

    Raises UsageError for an unknown name or a missing package, CorruptCheckpoint for a broken model.
    """
    kind, _, value = name.partition(":")
    if kind == "hash":
        return HashEmbedder(_width(name, value))
    is_named = kind in ("hf", "st") and bool(value)
    directory = _directory(value if is_named else name, name)
    if kind == "st" or (not is_named and (directory / "modules.json").is_file()):
        return SentenceEmbedder(name, directory, options.batch)
    if not is_named and not (directory / "config.json").is_file():
        directory = _in_hugging_faces_form(directory, options)
    return EncoderEmbedder(name, directory, options.batch, options.most_tokens)


def _width(name: str, value: str) -> int:
    if not value and ":" not in name:
        return WIDTH
    if not value.isdecimal():
        raise UsageError(f"{name}: write hash:WIDTH, such as hash:64")
    return int(value)


def _directory(word: str, name: str) -> Path:
    directory = Path(word)
    if not directory.is_dir():
        raise UsageError(f"embedder {name!r}: there is no directory {word}; give {NAMES}")
    return directory


def _in_hugging_faces_form(checkpoint: Path, options: EmbedderOptions) -> Path:
    """Return the directory of a Megatron BERT in Hugging Face's form, converted once. Raises UsageError without a tokenizer."""
    from megaconv.api import convert

    made = options.converted
    if not (made / "config.json").is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        # The head before the vocabulary, whose activation may differ, takes no part in embeddings.
        convert(checkpoint, made, saver="hf", allow_lossy=("activation",))
    if any((made / name).is_file() for name in TOKENIZER_FILES):
        return made
    if options.vocab_file is None:
        raise UsageError(
            f"{checkpoint}: has no tokenizer; give its vocabulary by --retro-bert-vocab-file"
        )
    if not options.vocab_file.is_file():
        raise UsageError(f"{options.vocab_file}: no such file; a BERT's vocab.txt was expected")
    content = json.dumps(bert_config(lower=options.lower_case))
    (made / "tokenizer_config.json").write_text(content, encoding="utf-8")
    shutil.copy(options.vocab_file, made / "vocab.txt")
    return made
