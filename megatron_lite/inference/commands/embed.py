"""Flags of `megatron-lite embed MODEL --input FILE`. Without a model and an input, `embed` makes an index of passages."""

from megaconv.local_paths import local_word
from megatron_lite.inference.flags import Parser, command, make_parser
from megatron_lite.retrieval.commands.embed import main as embed_passages
from megatron_lite.settings.embedding import POOLINGS

EXAMPLES = """  megatron-lite embed Qwen3-Embedding-0.6B --input texts.jsonl --output vectors.npy --prompt query
  torchrun --nproc-per-node 2 -m megatron_lite embed ckpt --tp 2 --input texts.txt --pooling mean --dimensions 256"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser(
        "embed", "Vectors of texts, each of length 1.", EXAMPLES, has_rows=False, has_length=False
    )
    made.set_defaults(generates=False)
    _add_texts(made)
    _add_vectors(made)
    return made


def _add_texts(parser: Parser) -> None:
    """Add the flags of the texts and of their output."""
    add = parser.add_argument_group("texts").add_argument
    add(
        "--input", required=True, type=local_word, metavar="FILE",
        help='FILE.jsonl: JSON lines of {"text": ...} or of texts in quotes; another name: one text a line',
    )  # fmt: skip
    add(
        "--output", default="-", type=local_word, metavar="FILE",
        help="in the same order: FILE.npy, float32 [texts, numbers], or JSON lines (standard output)",
    )  # fmt: skip
    add(
        "--max-length", type=int, metavar="N",
        help="the most tokens of a text; longer texts are shortened (that of sentence-transformers' files, else the model's positions)",
    )  # fmt: skip


def _add_vectors(parser: Parser) -> None:
    """Add the flags of what precedes texts, and of what is made of their tokens."""
    group = parser.add_argument_group("vectors")
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", metavar="NAME",
        help="put a prompt of the model before each text, such as query or document (the model's default prompt, if it has one)",
    )  # fmt: skip
    prompts.add_argument(
        "--prompt-text", metavar="TEXT", help="or put this text before each text; '' for none"
    )
    group.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="tokens that make a vector (those of sentence-transformers' files, else last)",
    )
    group.add_argument(
        "--dimensions",
        type=int,
        metavar="N",
        help="keep the first N numbers of each vector, with length 1 again (all)",
    )


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    if not _embeds_texts(words):
        return embed_passages(words)
    return command(parser(), words, "megatron_lite.inference.embedding_texts")


def _embeds_texts(words: list[str]) -> bool:
    """Return whether the words are about texts: those about passages have neither --input nor a model as the first word."""
    flags = {word.partition("=")[0] for word in words}
    if flags & {"--evidence-data-path", "--data-path"}:
        return "--input" in flags
    names_model = bool(words) and not words[0].startswith("-")
    return names_model or "--input" in flags
