"""From flags to a model in use: the checkpoint, its tokenizer, the ranks, the room for rows; and how a command ends."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megaconv.errors import CheckpointError, NotExpressible, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.restore import Start, open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.tokenizer import TYPES, Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.prompts import stop_ids
from megatron_lite.loop import launch
from megatron_lite.loop.failure import all_or_none, report
from megatron_lite.loop.inputs import make_tokenizer
from megatron_lite.loop.node import once_a_node
from megatron_lite.parallel.grid import Grid, make_grid
from megatron_lite.settings.architecture import OF_THEIR_OWN
from megatron_lite.settings.config import Parallel, Settings
from megatron_lite.settings.learning import Data
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import LONGEST_UNASKED, check_sizes

DTYPES = ("bf16", "fp16", "fp32")
_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists all flags")


def make_parser(command: str, description: str, examples: str) -> Parser:
    """With the flags that say which model, where."""
    parser = Parser(
        prog=f"megatron-lite {command}", description=description, epilog=f"examples:\n{examples}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument_group("model").add_argument
    add("--load", required=True, metavar="PATH", help="any checkpoint that megaconv reads, or a Hub id")
    add("--dtype", choices=DTYPES, help="to compute in (the checkpoint's)")
    add(
        "--slots",
        type=int,
        default=8,
        metavar="N",
        help="rows that each data-parallel rank generates at the same time (8)",
    )
    add(
        "--max-length",
        type=int,
        metavar="N",
        help=f"tokens of a row, prompt and answer (the model's positions, at most {LONGEST_UNASKED})",
    )
    add("--tokenizer-type", choices=TYPES, metavar="TYPE", help="kind of tokenizer: " + ", ".join(TYPES))
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file or directory (the checkpoint's)")
    add("--vocab-file", metavar="PATH", help="vocabulary of a GPT-2 or BERT tokenizer")
    add("--merge-file", metavar="PATH", help="merges of a GPT-2 tokenizer")
    add = parser.add_argument_group("parallelism (torchrun or srun starts tp x pp processes)").add_argument
    add(
        "--tensor-model-parallel-size",
        "--tp",
        dest="tp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share matrices",
    )
    add(
        "--pipeline-model-parallel-size",
        "--pp",
        dest="pp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the layers",
    )
    add(
        "--expert-model-parallel-size",
        "--ep",
        dest="ep",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share experts",
    )
    add("--distributed-backend", choices=("nccl", "gloo"), help="nccl with a GPU for every process, else gloo")
    add(
        "--distributed-timeout-minutes",
        type=float,
        default=10.0,
        metavar="X",
        help="give up on a silent rank after (10)",
    )
    return parser


@dataclass(frozen=True)
class Opened:
    """What a command works with, on rank 0."""

    model: EngineModel
    config: ModelConfig
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    """Tokens at which the model means to end."""
    path: str
    store: Any
    """In which ranks tell who failed first (loop/failure.py); None in a single process."""

    @property
    def name(self) -> str:
        """What a client calls the model."""
        return Path(self.path.rstrip("/")).name or self.path


def run(given: argparse.Namespace, use: Callable[[Opened], None], *, lasting: bool = False) -> None:
    """Every rank opens its part, rank 0 calls use, the others compute with it. Ends the process where that fails.

    lasting: rank 0 alone decides when signals end it; launchers and terminals send them to all.
    """
    parallel = Parallel(
        tensor_model_parallel_size=given.tp, pipeline_model_parallel_size=given.pp, expert_model_parallel_size=given.ep,
        distributed_backend=given.distributed_backend, distributed_timeout_minutes=given.distributed_timeout_minutes,
    )  # fmt: skip
    place: launch.Place | None = None
    try:
        place = launch.start(parallel)
        opened = open_model(given, parallel, place)
        if place.rank:
            for number in (signal.SIGTERM, signal.SIGINT) if lasting else ():
                signal.signal(number, signal.SIG_IGN)
            opened.model.follow()
        else:
            use(opened)
            opened.model.close()
        launch.end(place)
    except KeyboardInterrupt:
        launch.leave(130)
    except BrokenPipeError:  # whoever read the output has seen enough
        launch.leave(0)
    except Exception as error:
        launch.leave(report(error, f"rank {launch.rank()}", place.store if place else None))


def open_model(given: argparse.Namespace, parallel: Parallel, place: launch.Place) -> Opened:
    """Collective. Raises CheckpointError."""
    if given.slots < 1:
        raise UsageError(f"--slots {given.slots} has to be 1 or more")
    start = once_a_node(lambda: open_weights(given.load), place.node)
    tokenizer = all_or_none(lambda: _tokenizer(given, start))
    config, dtype = start.config, start.config.dtype
    if config.family in OF_THEIR_OWN:
        raise NotExpressible(f"{given.load}: is a {config.family}, which predicts no next token; give a decoder")
    if given.dtype:
        dtype = _TORCH[given.dtype]
    length = given.max_length or min(config.max_positions, LONGEST_UNASKED)
    config = changed(config, {"dtype": dtype})
    engine = make_engine(config, parallel, place, length)
    load_weights(engine, {key.name: tensor for key, tensor in start.tensors.items()})
    stops = all_or_none(lambda: stop_ids(config, tokenizer, start.files))
    return Opened(EngineModel(engine, given.slots, length), config, tokenizer, stops, given.load, place.store)


def make_engine(config: ModelConfig, parallel: Parallel, place: launch.Place, length: int) -> Engine:
    """A model for use alone; zeros until weights are loaded. length: of the longest row."""
    pp = parallel.pipeline_model_parallel_size
    layout = Layout(
        parallel.tensor_model_parallel_size, pp, 1, parallel.expert_model_parallel_size,
        stage_layers=split_layers(config.layer_count, pp, 1, LayerSplit()),
    )  # fmt: skip
    options = ModelOptions(dtype=config.dtype or "float32", trains=False)
    dp = check_sizes(config, layout, place.world, options, length, 1)
    grid: Grid = make_grid(layout, dp, place.device, experts=config.experts.count > 0)
    return Engine(config, grid, options, None)


def _tokenizer(given: argparse.Namespace, start: Start) -> Tokenizer:
    data = Data(
        tokenizer_type=given.tokenizer_type, tokenizer_model=given.tokenizer_model,
        vocab_file=given.vocab_file, merge_file=given.merge_file,
    )  # fmt: skip
    return make_tokenizer(Settings(data=data), start)


def command(parser: Parser, words: list[str], main: Callable[[argparse.Namespace], None]) -> int:
    """The exit status. main is called on every rank."""
    from megatron_lite.loop.slurm import adopt

    first = os.environ.get("RANK", "0") == "0"
    try:
        adopt()
        if {"-h", "--help"} & set(words) and not first:
            return 0
        main(parser.parse_args(words))
    except CheckpointError as error:
        if first:
            print(f"megatron_lite: error: {error}", file=sys.stderr)
        return error.exit_status
    return 0
