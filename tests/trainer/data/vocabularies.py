"""Small tokenizers of every kind, trained on a few sentences in which everything odd occurs."""

import io
import json
from pathlib import Path

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't!",
    "  two  spaces, a\ttab,\n\na new line\r\nand a trailing space ",
    "Ünïcödé: naïve café, 北京市, 日本語, Ελλάδα, Москва, 🎉👩‍👩‍👧 e\u0301 ﬁne",
    "numbers 1234567890, 3.14159, 0x7f, C++17, foo_bar(baz[1])",
    "a",
    " ",
    "\u2581already <unk> marked <s> </s> [SEP] [CLS] [mask] <|endoftext|> in the text",
    "It's we'll THEY'VE I'm CAN'T",
    "\u200b\u00a0\x01\x7f control and no-break",
]


def gpt2_files(directory: Path) -> tuple[Path, Path]:
    """vocab.json and merges.txt; the directory is one that transformers reads too."""
    from tokenizers import ByteLevelBPETokenizer

    directory.mkdir()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        TEXTS, vocab_size=350, min_frequency=1, special_tokens=["<|endoftext|>"]
    )
    tokenizer.save_model(str(directory))
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return directory / "vocab.json", directory / "merges.txt"


def bert_vocabulary(directory: Path) -> Path:
    """vocab.txt; the directory is one that transformers reads too."""
    directory.mkdir()
    letters = sorted(
        {
            letter
            for text in TEXTS
            for letter in text.lower()
            if letter.isprintable() and letter != " "
        }
    )
    words = ["the", "fox", "dog", "quick", "cafe", "##s", "##ing", "lazy", "number", "do", "##esn"]
    special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries = dict.fromkeys([*special, *words, *letters, *("##" + letter for letter in letters)])
    (directory / "vocab.txt").write_text(
        "".join(f"{entry}\n" for entry in entries), encoding="utf-8"
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return directory / "vocab.txt"


def sentencepiece_model(path: Path, *, pad: int = -1) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_writer=model, vocab_size=420, model_type="bpe", byte_fallback=True,
        pad_id=pad, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path
