"""`megatron-lite retro build | show`: the chunk database and the neighbours for Retro."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.local_paths import local_path
from megatron_lite.data.corpora import SPLITS
from megatron_lite.data.tokenizer import BERT_TYPES
from megatron_lite.retrieval.array_files import FORMATS
from megatron_lite.retrieval.commands.parsing import (
    add_count,
    add_tokenizer,
    parser_of,
    run_command,
)
from megatron_lite.retrieval.embedders import NAMES, EmbedderOptions, open_embedder
from megatron_lite.retrieval.retro.build import BuildRequest, build, tasks_of
from megatron_lite.retrieval.retro.plan import MOST_TOKENS, IndexPlan
from megatron_lite.retrieval.retro.project import open_project
from megatron_lite.retrieval.retro.project_settings import ProjectSettings
from megatron_lite.retrieval.retro.show import (
    sample,
    sample_lines,
    summary,
    summary_lines,
)
from megatron_lite.retrieval.team import Team, run_as_team
from megatron_lite.settings.flag_parser import FlagParser

EXAMPLES = """  megatron-lite retro build --retro-project-dir P --retro-gpt-data-path 0.7 a_text_document 0.3 b_text_document \\
      --retro-gpt-seq-length 2048 --retro-gpt-train-samples 100000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR \\
      --retro-embedder hf:bert-large --retro-index-str IVF4096_HNSW32,Flat
  torchrun --nproc-per-node 8 -m megatron_lite retro build ...
  megatron-lite retro show P --sample 0"""


def parser() -> FlagParser:
    """Return the parser of both commands."""
    made = parser_of("retro", "Build or show a Retro project directory.", EXAMPLES)
    actions = made.add_subparsers(dest="action", required=True, metavar="build|show")
    _add_build(
        actions.add_parser(
            "build", help="build the database, the index and the neighbours", allow_abbrev=False
        )
    )
    _add_show(
        actions.add_parser("show", help="show a project or a sample of it", allow_abbrev=False)
    )
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return run_command(lambda: _run(words))


def _run(words: list[str]) -> None:
    given = parser().parse_args(words)
    if given.action == "show":
        _show(given)
    else:
        request = _request(given)
        run_as_team(lambda team: _build(request, given, team))


def _build(request: BuildRequest, given: argparse.Namespace, team: Team) -> None:
    def open_it() -> Any:
        options = EmbedderOptions(
            given.retro_bert_batch_size,
            given.retro_bert_max_chunk_length,
            request.directory / "embedder",
            given.retro_bert_vocab_file,
            given.retro_bert_tokenizer_type == "BertWordPieceLowerCase",
        )
        return open_embedder(given.retro_embedder, options)

    # A Megatron BERT is converted by the first process; the others read the result.
    first = open_it() if team.rank == 0 else None
    team.wait()
    build(request, first or open_it(), team)


def _request(given: argparse.Namespace) -> BuildRequest:
    settings = ProjectSettings(
        seq_length=given.retro_gpt_seq_length,
        chunk_length=given.retro_gpt_chunk_length,
        data_path=tuple(given.retro_gpt_data_path),
        split=given.retro_gpt_split,
        seed=given.retro_gpt_seed,
        block_size=given.retro_block_size,
        global_batch_size=given.retro_gpt_global_batch_size,
        train_samples=given.retro_gpt_train_samples,
        eval_interval=given.retro_gpt_eval_interval,
        eval_iters=given.retro_gpt_eval_iters,
        tokenizer=_tokenizer(given),
        bert=_bert(given),
        own={"format": given.retro_project_format},
    )
    index = IndexPlan(
        given.retro_index_str,
        given.retro_index_ntrain,
        given.retro_index_train_load_fraction,
        given.retro_index_add_load_fraction,
        given.retro_query_nprobe,
        given.retro_query_ef_search,
        given.retro_query_num_neighbors_query,
        given.retro_query_num_neighbors_save,
    )
    return BuildRequest(
        given.retro_project_dir,
        settings,
        index,
        given.retro_doc_block_size,
        tasks_of(given.retro_tasks),
        given.retro_task_validate,
        given.retro_bert_max_chunk_length,
    )


def _tokenizer(given: argparse.Namespace) -> dict[str, Any]:
    if given.tokenizer_type is None:
        raise UsageError(
            "--tokenizer-type is missing: the datasets' tokenizer, which makes texts of chunks"
        )
    paths = ("tokenizer_model", "vocab_file", "merge_file")
    absolute = {key: _absolute(getattr(given, key)) for key in paths}
    return {"tokenizer_type": given.tokenizer_type, **absolute, "vocab_size": given.vocab_size}


def _bert(given: argparse.Namespace) -> dict[str, Any]:
    """Megatron's words for the embedder's tokenizer, which its config.json has."""
    vocabulary = _absolute(given.retro_bert_vocab_file)
    return {"tokenizer_type": given.retro_bert_tokenizer_type, "vocab_file": vocabulary}


def _absolute(path: Any) -> str | None:
    """Return an absolute path; a name on the Hub stays as it is."""
    if path is None or not Path(path).exists():
        return None if path is None else str(path)
    return str(Path(path).absolute())


def _add_build(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("project").add_argument
    add(
        "--retro-project-dir",
        type=local_path,
        required=True,
        metavar="DIR",
        help="the project; an ended build goes on",
    )
    add(
        "--retro-project-format",
        choices=FORMATS,
        default="numpy",
        help="format of the arrays: `megatron` for megatron-core (numpy)",
    )
    add(
        "--retro-tasks",
        default="build",
        metavar="TASKS",
        help="build, or some of db-build,index-train,index-add,query-neighbors",
    )
    add(
        "--retro-task-validate",
        type=float,
        metavar="X",
        help="compute this fraction of the blocks again and compare",
    )
    add_count(add, "--retro-block-size", 100_000, "chunks of each file")
    add_count(add, "--retro-doc-block-size", 100_000, "documents of each file of the database")
    add = made.add_argument_group("samples").add_argument
    add(
        "--retro-gpt-data-path",
        nargs="+",
        required=True,
        metavar="WORD",
        help="prefix, or weights and prefixes: 0.7 a 0.3 b",
    )
    add_count(add, "--retro-gpt-seq-length", None, "tokens of a sample", required=True)
    add_count(add, "--retro-gpt-chunk-length", 64, "tokens of a chunk")
    add(
        "--retro-gpt-split",
        default="969,30,1",
        metavar="A,B,C",
        help="shares for training, validation and test (969,30,1)",
    )
    add(
        "--retro-gpt-seed", type=int, default=1234, metavar="N", help="of the samples' order (1234)"
    )
    add_count(add, "--retro-gpt-train-samples", None, "samples of the training run", required=True)
    add_count(add, "--retro-gpt-global-batch-size", 1, "samples of a step")
    add_count(add, "--retro-gpt-eval-interval", 1000, "steps between evaluations")
    add(
        "--retro-gpt-eval-iters",
        type=int,
        default=100,
        metavar="N",
        help="batches of an evaluation (100)",
    )
    add_tokenizer(made.add_argument_group("tokenizer of the datasets").add_argument, "retro-gpt-")
    _add_search(made)


def _add_search(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("embedder").add_argument
    add("--retro-embedder", default="hash", metavar="NAME", help=f"{NAMES} (hash)")
    add(
        "--retro-bert-vocab-file",
        type=local_path,
        metavar="FILE",
        help="vocabulary of a Megatron BERT",
    )
    add(
        "--retro-bert-tokenizer-type",
        choices=BERT_TYPES,
        default=BERT_TYPES[0],
        help=f"of a Megatron BERT ({BERT_TYPES[0]})",
    )
    add_count(add, "--retro-bert-batch-size", 128, "texts that are embedded at once")
    add_count(add, "--retro-bert-max-chunk-length", MOST_TOKENS, "the most tokens of a text")
    add = made.add_argument_group("index and search").add_argument
    add(
        "--retro-index-str",
        default="Flat",
        metavar="STRING",
        help="FAISS' string, such as IVF4096_HNSW32,Flat (Flat)",
    )
    add_count(
        add,
        "--retro-index-ntrain",
        None,
        "chunks that train the index (as many as the ratios allow, at most 1,000,000)",
    )
    add(
        "--retro-index-train-load-fraction",
        type=float,
        default=1.0,
        metavar="X",
        help="of them, the part that is used (1)",
    )
    add(
        "--retro-index-add-load-fraction",
        type=float,
        default=1.0,
        metavar="X",
        help="part of the chunks that is added (1)",
    )
    add_count(add, "--retro-query-nprobe", 65536, "lists of an IVF that are searched")
    add_count(add, "--retro-query-ef-search", 256, "candidates in an HNSW graph")
    add_count(add, "--retro-query-num-neighbors-query", 200, "neighbours that are searched")
    add_count(
        add,
        "--retro-query-num-neighbors-save",
        20,
        "neighbours that are stored, without the sample's own documents",
    )


def _add_show(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "project", type=local_path, metavar="DIR", help="the project, ours or Megatron's"
    )
    add = made.add_argument
    add("--sample", type=int, metavar="I", help="show this sample with its neighbours")
    add("--split", choices=SPLITS, default="train", help="of the sample (train)")
    add_count(add, "--retro-num-neighbors", 2, "neighbours of each chunk")
    add_count(
        add, "--retro-num-retrieved-chunks", 2, "chunks of each neighbour, with what follows it"
    )
    add(
        "--retro-megatron-neighbors",
        action="store_true",
        help="continue past the end of a document, as Megatron does",
    )
    add("--json", action="store_true", help="print JSON")
    add_tokenizer(made.add_argument_group("tokenizer (the project's)").add_argument)


def _show(given: argparse.Namespace) -> None:
    project = open_project(given.project)
    if given.tokenizer_type is not None:
        settings = replace(project.settings, tokenizer=_tokenizer(given))
        project = replace(project, settings=settings)
    if given.sample is None:
        found = summary(project)
        lines = summary_lines(found)
    else:
        found = sample(
            project,
            given.split,
            given.sample,
            given.retro_num_neighbors,
            given.retro_num_retrieved_chunks,
            megatron=given.retro_megatron_neighbors,
        )
        lines = sample_lines(found)
    if given.json:
        json.dump(found, sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        for line in lines:
            print(line)
