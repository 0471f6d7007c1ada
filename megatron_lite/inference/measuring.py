"""The common parts of commands that measure a model: one process, samples in passes, and an output."""

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from megaconv.commands.forward_pass import MAX_MEMORY
from megaconv.errors import UsageError
from megaconv.options.values import byte_size
from megatron_lite.data.finetuning.chat import read_template
from megatron_lite.forward.rows import batches, rows_together
from megatron_lite.inference.calibration.samples import read_samples, require_known
from megatron_lite.inference.generating import require_other_file
from megatron_lite.inference.opening import OpenedEngine, open_engine, run_on_ranks
from megatron_lite.models.batch import Microbatch
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel


def measured(
    command: str, given: argparse.Namespace, measure: Callable[[OpenedEngine], None]
) -> None:
    """Open the model and measure it, in one process. Raises UsageError."""

    def work(parallel: Parallel, place: launch.Place) -> None:
        if place.world > 1:
            raise UsageError(f"{command} computes in one process; start it without torchrun")
        measure(open_engine(given, parallel, place, most=given.seq_length))

    run_on_ranks(given, work)


def output_file(given: argparse.Namespace) -> Path:
    """Return the path of --output. Raises UsageError, before anything is measured, if no file can be written there."""
    output = Path(given.output)
    if output.is_dir():
        raise UsageError(f"--output {output}: is a directory; name a file")
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no directory {output.parent}")
    is_device = output.exists() and not output.is_file()
    if not os.access(output if is_device else output.parent, os.W_OK):
        raise UsageError(f"--output {output}: can't be written; choose another file")
    for path in given.data:
        require_other_file(given.output, "--data", path)
    return output


def read_passes(given: argparse.Namespace, opened: OpenedEngine, kept: int) -> list[Microbatch]:
    """Return the samples in passes that fit into memory. kept: further hidden states of each token that are in memory."""
    config = opened.config
    template = read_template(given.chat_template)
    samples = require_known(
        read_samples(given.data, opened.tokenizer, given.samples, opened.length, template),
        config.vocab,
    )
    rows = [tuple(sample.tolist()) for sample in samples]
    limit = byte_size(given.max_memory or MAX_MEMORY, "--max-memory ")
    longest = max(map(len, rows))
    itemsize = opened.engine.dtype.itemsize
    together = rows_together(config, longest, itemsize, limit, kept)
    return [each.to(opened.engine.grid.device) for each in batches(config, rows, together)]


def pruning(place: str, inside_whole: bool, option: str) -> str:
    """Return the command that makes a smaller model. inside_whole: whether the language model of a multimodal model was measured."""
    part = " --text-only" if inside_whole else ""
    return f"megaconv convert {shlex.quote(place)} pruned --saver hf{part} {option}"
