"""Flags that `embed` and `retrieve` share: the embedder, the passages and their tokenizer."""

import argparse
from importlib import import_module
from pathlib import Path

from megaconv.errors import UsageError
from megaconv.extras import require_torch
from megaconv.local_paths import local_path
from megatron_lite.data.tokenizer import Tokenizer, TokenizerOptions, build_tokenizer
from megatron_lite.retrieval.commands.parsing import add_count, add_tokenizer
from megatron_lite.retrieval.embedder import Embedder, OneTower
from megatron_lite.retrieval.embedders import NAMES, EmbedderOptions, open_embedder
from megatron_lite.retrieval.evidence import Evidence, open_blocks, open_evidence
from megatron_lite.retrieval.team import Team
from megatron_lite.settings.flag_parser import FlagParser

LOAD = "load:"
"""Before the path of --load, in meta.json."""
SOURCES = ("evidence_data_path", "data_path", "titles_data_path")


def add_embedder(parser: FlagParser) -> None:
    """Add the flags of the embedder."""
    parser.set_defaults(training=None)
    add = parser.add_argument_group("embedder").add_argument
    add(
        "--load",
        metavar="PATH",
        help="a biencoder, trained by `pretrain --model-type biencoder` or by Megatron, or an embedding model, such as one of "
        "`finetune --embedding`",
    )
    add("--embedder", metavar="NAME", help=NAMES)
    add_count(add, "--seq-length", None, "tokens of a passage with its title (256)")
    add_count(add, "--indexer-batch-size", 128, "texts at once")
    add(
        "--distributed-backend",
        choices=("nccl", "gloo"),
        help="nccl with a GPU for every process, else gloo",
    )
    add_tokenizer(parser.add_argument_group("tokenizer (the model's)").add_argument)


def add_passages(parser: FlagParser) -> None:
    """Add the flags of the passages."""
    add = parser.add_argument_group("passages").add_argument
    add(
        "--evidence-data-path",
        type=local_path,
        metavar="FILE",
        help="DPR's psgs_w100.tsv, or JSON lines of id, title, text",
    )
    add("--data-path", metavar="PREFIX", help="or the blocks of an indexed dataset of sentences")
    add("--titles-data-path", metavar="PREFIX", help="and its titles")
    add("--use-one-sent-docs", action="store_true", help="documents of one sentence are blocks too")


def embedder_of(
    given: argparse.Namespace, name: str | None, length: int, place: Path, team: Team
) -> Embedder:
    """Open the embedder of the flags, or the named one. Collective. Raises UsageError.

    place: a directory for a converted model, which the first process writes.
    """
    if given.load and given.embedder:
        raise UsageError(
            "--load and --embedder exclude each other; --load names a biencoder or an embedding model"
        )
    word = f"{LOAD}{given.load}" if given.load else given.embedder or name
    if word is None:
        raise UsageError(
            f"--load (a biencoder or an embedding model) or --embedder is missing; --embedder takes {NAMES}"
        )
    if word.startswith(LOAD):
        return _loaded(given, word, length, team)
    options = EmbedderOptions(given.indexer_batch_size, length, place, given.vocab_file)
    first = open_embedder(word, options) if team.rank == 0 else None
    team.wait()
    return OneTower(first or open_embedder(word, options))


def _loaded(given: argparse.Namespace, word: str, length: int, team: Team) -> Embedder:
    require_torch("--load", "train,data")
    opening = import_module("megatron_lite.inference.text_vectors")
    found: Embedder = opening.open_loaded(given, word.removeprefix(LOAD), word, length, team.place)
    return found


def source_of(given: argparse.Namespace) -> dict[str, str]:
    """Return the flags that name the passages, with absolute paths. Raises UsageError unless there is one kind."""
    found = {name: getattr(given, name) for name in SOURCES if getattr(given, name) is not None}
    if not found:
        return {}
    kinds = (["evidence_data_path"], ["data_path", "titles_data_path"])
    if sorted(found) not in kinds:
        raise UsageError("give either --evidence-data-path, or --data-path with --titles-data-path")
    source = {name: str(Path(path).absolute()) for name, path in found.items()}
    return source | ({"use_one_sent_docs": "yes"} if given.use_one_sent_docs else {})


def evidence_of(source: dict[str, str], given: argparse.Namespace, length: int) -> Evidence:
    """Return the passages that the flags name. length: tokens of a block. Raises UsageError, CorruptCheckpoint."""
    if "evidence_data_path" in source:
        return open_evidence(Path(source["evidence_data_path"]))
    return open_blocks(
        source["data_path"],
        source["titles_data_path"],
        _tokenizer(given),
        length,
        one_sentence="use_one_sent_docs" in source,
    )


def _tokenizer(given: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer of an indexed dataset."""
    if given.tokenizer_type is None and given.vocab_file is None:
        raise UsageError(
            "--data-path: --tokenizer-type and --vocab-file name the tokenizer of the dataset"
        )
    kind = given.tokenizer_type or "BertWordPieceLowerCase"
    options = TokenizerOptions(
        kind, given.tokenizer_model, given.vocab_file, given.merge_file, given.vocab_size
    )
    return build_tokenizer(options)
