"""The tokenizer that lies beside a checkpoint's weights, whichever of its files are there.

`tokenizer.json` says everything. SentencePiece's `tokenizer.model` divides a text by itself; which further tokens are special, and how
chats are written, says `tokenizer_config.json`, which transformers reads. `vocab.json` and `merges.txt` don't say how a text is divided
into words: transformers knows that of the class that one of the configurations names, and without these they are GPT-2's.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_small
from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer, TokenizerOptions, build_tokenizer

CONFIG = "tokenizer_config.json"
REMEDY = "--tokenizer-model gives another one; --tokenizer-type NullTokenizer is for data of token ids"
_PROBE = "Hello world"
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""A line of tiktoken's files: a token in base64 and its rank."""


def tokenizer_beside(files: Mapping[str, Path]) -> Tokenizer | None:
    """files: those beside the weights, by name. None where none of them is a tokenizer's.

    Raises UsageError for one that can't be read here, or whose package is missing; CorruptCheckpoint for a broken one.
    """
    if "tokenizer.json" in files:
        return HuggingFaceTokenizer(str(files["tokenizer.json"].parent))
    if "tokenizer.model" in files:
        return _sentencepiece(files["tokenizer.model"], configured=CONFIG in files)
    if "vocab.json" in files and "merges.txt" in files:
        return _byte_level(files["vocab.json"], files["merges.txt"], configured=CONFIG in files)
    if "tekken.json" in files:
        raise UsageError(f"{files['tekken.json']}: Mistral's Tekken tokenizer can't be read; {REMEDY}")
    return None


def _sentencepiece(path: Path, *, configured: bool) -> Tokenizer:
    if _TIKTOKEN.match(read_small(path, SIDECAR_BYTES)):
        raise UsageError(
            f"{path}: is a tokenizer of tiktoken (Llama 3's, by Meta), which can't be read; the model's Hugging Face "
            f"directory has it as tokenizer.json: {REMEDY}"
        )
    own = build_tokenizer(TokenizerOptions("Llama2Tokenizer", str(path)))
    if not configured:
        return own
    theirs = HuggingFaceTokenizer(str(path.parent))
    # transformers reads some of these files as another kind of tokenizer, without a word: then SentencePiece is right.
    return theirs if theirs.tokenize(_PROBE) == own.tokenize(_PROBE) else own


def _byte_level(vocab: Path, merges: Path, *, configured: bool) -> Tokenizer:
    if configured or (vocab.parent / "config.json").is_file():
        try:
            return HuggingFaceTokenizer(str(vocab.parent))
        except CorruptCheckpoint:  # of a model whose class has no such files: a run that was given them
            if configured:
                raise
    return build_tokenizer(TokenizerOptions("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges))
