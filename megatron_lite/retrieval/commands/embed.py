"""`megatron-lite embed`: the vectors of all passages, for `retrieve`."""

import argparse

from megaconv.errors import UsageError
from megaconv.local_paths import local_path
from megatron_lite.retrieval.commands.model_flags import parse_with_model_flags
from megatron_lite.retrieval.commands.opening import (
    add_embedder,
    add_passages,
    embedder_of,
    evidence_of,
    source_of,
)
from megatron_lite.retrieval.commands.parsing import add_count, parser_of, run_command
from megatron_lite.retrieval.embedding import embed_all
from megatron_lite.retrieval.team import Team, run_as_team
from megatron_lite.retrieval.vector_files import Meta, VectorFiles, shard_rows
from megatron_lite.settings.flag_parser import FlagParser

LENGTH = 256
EXAMPLES = """  torchrun --nproc-per-node 8 -m megatron_lite embed --load ict --evidence-data-path psgs_w100.tsv --output index
  megatron-lite embed --embedder st:all-MiniLM-L6-v2 --evidence-data-path passages.jsonl --output index
  megatron-lite embed --load ict --data-path wiki_text_sentence --titles-data-path wiki_title_sentence --output index"""


def parser() -> FlagParser:
    """Return the parser of the command."""
    made = parser_of(
        "embed",
        "Embed passages. An ended run goes on with the missing shards. `megatron-lite embed MODEL --help` lists the flags for the vectors "
        "of texts.",
        EXAMPLES,
    )
    add_passages(made)
    add_embedder(made)
    add = made.add_argument_group("output").add_argument
    add("--output", type=local_path, required=True, metavar="DIR", help="directory for the vectors")
    add_count(add, "--shard-rows", None, "passages of each file (100,000, at most 1 GiB)")
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return run_command(lambda: _run(words))


def _run(words: list[str]) -> None:
    given = parse_with_model_flags(parser(), words)
    source = source_of(given)
    if not source:
        raise UsageError("--evidence-data-path is missing (or --data-path with --titles-data-path)")
    run_as_team(lambda team: _embed(given, source, team), given.distributed_backend)


def _embed(given: argparse.Namespace, source: dict[str, str], team: Team) -> None:
    length = given.seq_length or LENGTH
    evidence = evidence_of(source, given, length)
    place = given.output / "embedder"
    embedder = embedder_of(given, None, length, place, team)
    meta = Meta(
        embedder=embedder.name,
        fingerprint=embedder.fingerprint,
        width=embedder.width,
        seq_length=length,
        evidence=evidence.identity(),
        shard_rows=given.shard_rows or shard_rows(embedder.width),
        source=source,
    )
    count = embed_all(evidence, embedder, VectorFiles(given.output), meta, team)
    team.say(f"{given.output}: {count:,} passages, {embedder.width} numbers each")
