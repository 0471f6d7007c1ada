"""The tokenizer in a checkpoint's directory, from whichever of its files exist.

- `tokenizer.json` is complete.
- `tokenizer.model` (SentencePiece) splits texts. `tokenizer_config.json`, which transformers reads, adds further
  special tokens and the chat template.
- `vocab.json` and `merges.txt` don't define how a text is split into words. transformers takes the rule from the class
  in one of the configurations. Without configurations, GPT-2's rule is used.
- `vocab.txt` of BERT needs `tokenizer_config.json`, which says whether texts become lower case.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_small
from megaconv.errors import UsageError
from megaconv.model.ir import Header
from megatron_lite.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerOptions,
    build_tokenizer,
)

CONFIG = "tokenizer_config.json"
REMEDY = (
    "--tokenizer-model gives another one; --tokenizer-type NullTokenizer is for data of token ids"
)
_PROBE = "Hello world"
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""A line of tiktoken's files: a token in base64 and its rank."""


def tokenizer_of(header: Header) -> Tokenizer | None:
    """Return the tokenizer beside a checkpoint or inside it, as a GGUF file has it; None if there is none.

    Raises as tokenizer_beside.
    """
    if not header.made:
        return tokenizer_beside(header.files)
    with TemporaryDirectory() as directory:  # transformers reads files alone
        made = {name: Path(directory) / name for name in header.made}
        for name, path in made.items():
            path.write_bytes(header.made[name])
        return tokenizer_beside({**header.files, **made})


def tokenizer_beside(files: Mapping[str, Path]) -> Tokenizer | None:
    """Return the tokenizer, or None if there are no files of one. files: the files of the directory by name.

    Raises UsageError for an unsupported tokenizer or a missing package, CorruptCheckpoint for broken files.
    """
    if "tokenizer.json" in files:
        return HuggingFaceTokenizer(str(files["tokenizer.json"].parent))
    if "tokenizer.model" in files:
        return _sentencepiece(files["tokenizer.model"], configured=CONFIG in files)
    if "vocab.json" in files and "merges.txt" in files:
        return _byte_level(files["vocab.json"], files["merges.txt"], configured=CONFIG in files)
    if "vocab.txt" in files and CONFIG in files:
        return HuggingFaceTokenizer(str(files["vocab.txt"].parent))
    if "tekken.json" in files:
        raise UsageError(
            f"{files['tekken.json']}: Mistral's Tekken tokenizer can't be read; {REMEDY}"
        )
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
    # transformers silently reads some of these files as another kind of tokenizer. SentencePiece is then correct.
    return theirs if theirs.tokenize(_PROBE) == own.tokenize(_PROBE) else own


def _byte_level(vocab: Path, merges: Path, *, configured: bool) -> Tokenizer:
    if configured or (vocab.parent / "config.json").is_file():
        try:
            return HuggingFaceTokenizer(str(vocab.parent))
        except CorruptCheckpoint:  # the model's class has no such files; a run was given them
            if configured:
                raise
    return build_tokenizer(
        TokenizerOptions("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    )
