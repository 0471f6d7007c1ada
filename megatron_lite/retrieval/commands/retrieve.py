"""`megatron-lite retrieve`: finds passages for questions, and measures whether they contain the answers."""

import argparse

from megaconv.errors import UsageError
from megaconv.json_text import json_text
from megaconv.local_paths import local_path
from megatron_lite.retrieval.answers import matcher
from megatron_lite.retrieval.block_data import BlockData
from megatron_lite.retrieval.commands.opening import (
    add_embedder,
    add_passages,
    embedder_of,
    evidence_of,
    source_of,
)
from megatron_lite.retrieval.commands.parsing import add_count, parser_of, run_command
from megatron_lite.retrieval.embedder import Embedder
from megatron_lite.retrieval.faiss_index import faiss_module
from megatron_lite.retrieval.hits import Hits, hits_of
from megatron_lite.retrieval.questions import read_questions
from megatron_lite.retrieval.team import Team
from megatron_lite.retrieval.vector_files import Meta, Shards, VectorFiles
from megatron_lite.retrieval.vector_search import FLAT, find
from megatron_lite.settings.flag_parser import FlagParser

TOP_K = (1, 5, 20, 100)
LENGTH = 256
EXAMPLES = """  megatron-lite retrieve --index index --qa-data nq-dev.qa.csv --top-k 20 100 --output hits.jsonl
  megatron-lite retrieve --load ict --block-data wiki_embeds.pkl --evidence-data-path psgs_w100.tsv \\
      --qa-data nq-dev.qa.csv --output hits.jsonl"""


def parser() -> FlagParser:
    """Return the parser of the command."""
    made = parser_of(
        "retrieve", "Find passages for questions, and count those with an answer.", EXAMPLES
    )
    add = made.add_argument_group("search").add_argument
    add("--index", type=local_path, metavar="DIR", help="vectors of `megatron-lite embed`")
    add(
        "--block-data",
        type=local_path,
        metavar="FILE",
        help="or Megatron's BlockData, a pickle; nothing in it is executed",
    )
    add(
        "--faiss-index",
        default=FLAT,
        metavar="STRING",
        help="FAISS' index string; Flat is exact, and needs the memory of a shard (Flat)",
    )
    add_count(add, "--nprobe", 64, "lists of an IVF that are searched")
    add_count(add, "--ef-search", 256, "candidates in an HNSW graph")
    add = made.add_argument_group("questions").add_argument
    add(
        "--qa-data",
        type=local_path,
        required=True,
        metavar="FILE",
        help="question, tab, list of answers; or JSON",
    )
    add(
        "--top-k",
        type=int,
        nargs="+",
        default=TOP_K,
        metavar="K",
        help="passages of which one must have an answer (1 5 20 100)",
    )
    add(
        "--match",
        choices=("string", "regex"),
        default="string",
        help="how answers are found (string)",
    )
    add(
        "--output",
        type=local_path,
        required=True,
        metavar="FILE",
        help="hits of each question, as JSON lines",
    )
    add(
        "--metrics-file",
        type=local_path,
        metavar="FILE",
        help="append the accuracies as a JSON object",
    )
    add_passages(made)
    add_embedder(made)
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return run_command(lambda: _run(words))


def _run(words: list[str]) -> None:
    given = parser().parse_args(words)
    _check(given)
    faiss_module()
    contains = matcher(given.match)
    questions = read_questions(given.qa_data)
    meta = None if given.index is None else VectorFiles(given.index).meta()
    stored: Shards = (
        BlockData(given.block_data) if given.index is None else VectorFiles(given.index)
    )
    length = given.seq_length or (LENGTH if meta is None else meta.seq_length)
    source = source_of(given) or (meta.source if meta is not None else {})
    if not source:
        raise UsageError(
            "--block-data needs --evidence-data-path, which has the texts of its passages"
        )
    evidence = evidence_of(source, given, length)
    if meta is not None and evidence.identity() != meta.evidence:
        raise UsageError(
            f"{given.index}: was made of other passages than {' '.join(source.values())}"
        )
    embedder = _embedder(given, meta, length)
    queries = embedder.queries([question.text for question in questions])
    found = find(
        stored, queries, max(given.top_k), given.faiss_index, given.nprobe, given.ef_search
    )
    hits = hits_of(questions, found)
    hits.judge(evidence.rows(), contains)
    hits.write(given.output)
    _report(given, hits)


def _check(given: argparse.Namespace) -> None:
    """Raise UsageError for flags that contradict each other, before any work."""
    if (given.index is None) == (given.block_data is None):
        raise UsageError("give --index or --block-data")
    if min(given.top_k) < 1:
        raise UsageError(f"--top-k {min(given.top_k)}: a number of at least 1 was expected")
    if not given.output.absolute().parent.is_dir():
        raise UsageError(f"--output {given.output}: its directory doesn't exist; create it first")


def _embedder(given: argparse.Namespace, meta: Meta | None, length: int) -> Embedder:
    """Return the embedder of the questions: the one that made the index. Raises UsageError for another one."""
    place = given.output.with_name(f"{given.output.name}-embedder")
    if given.index is not None:
        place = given.index / "embedder"
    name = None if meta is None else meta.embedder
    found = embedder_of(given, name, length, place, Team(0, 1))
    if meta is not None and found.fingerprint != meta.fingerprint:
        raise UsageError(
            f"{given.index}: was made by {meta.embedder} with other weights than {found.name}; take the same model"
        )
    return found


def _report(given: argparse.Namespace, hits: Hits) -> None:
    """Print the accuracies, and append them to the metrics file."""
    accuracies = {f"top{count}_acc": hits.accuracy(count) for count in sorted(set(given.top_k))}
    for name, value in accuracies.items():
        print(f"{name} {value:.4f}")
    if given.metrics_file is not None:
        content = {"questions": len(hits.rows), **accuracies}
        with given.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json_text(content) + "\n")
