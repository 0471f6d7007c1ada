"""`megatron-lite calibrate`: runs samples through a model, and writes the statistics of the inputs of its matrices."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from formats.lazy_numpy import Floats
from formats.wording import counted
from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.plan import default_workers
from megaconv.errors import NotExpressible, UsageError
from megaconv.model.ir import OpenedSource
from megaconv.options.values import adapter_choices
from megaconv.terminal import show
from megaconv.values.calibration import AWQ_SCALE, INPUT_AMAX, calibration_bytes
from megatron_lite.data.finetuning.chat import read_template
from megatron_lite.inference.calibration.awq import scales, search_of
from megatron_lite.inference.calibration.recording import (
    CachedAmax,
    Inputs,
    Matrix,
    Watcher,
    matrices,
    watch,
)
from megatron_lite.inference.calibration.samples import Sample, read_samples, require_known
from megatron_lite.inference.calibration.statistics import hugging_face_matrices, merged
from megatron_lite.inference.measuring import output_file
from megatron_lite.inference.opening import OpenedEngine, open_engine, run_on_ranks
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.cache import Cache
from megatron_lite.models.mixers.declaration import PerRow
from megatron_lite.processes import launch
from megatron_lite.processes.failure import all_or_none
from megatron_lite.settings.parallel import Parallel


def main(given: argparse.Namespace) -> None:
    """Run the command on every rank. Raises UsageError."""
    if given.awq and given.tp > 1:
        raise UsageError("--awq: the search needs whole matrices; leave out --tp, or use --pp")
    if given.slots < 1:
        raise UsageError(f"--slots {given.slots} must be 1 or more")
    output = output_file(given)

    def work(parallel: Parallel, place: launch.Place) -> None:
        opened = open_engine(
            given, parallel, place, adapter_choices(given.merged), most=given.seq_length
        )
        _calibrate(given, opened, place, output)

    run_on_ranks(given, work)


def _calibrate(
    given: argparse.Namespace, opened: OpenedEngine, place: launch.Place, output: Path
) -> None:
    _refuse_states(opened)
    samples = all_or_none(lambda: _samples(given, opened, opened.length))
    batches = _batches(samples, given.slots)
    found = list(matrices(opened.engine))
    measured = _measure(opened, found, batches, awq=given.awq)
    if place.rank:
        return
    start = opened.start
    workers = default_workers(writing=False)
    source = OpenedSource(start.header, start.tensors)
    fingerprint = fingerprint_source(source, workers, only=frozenset(start.tensors)).weights
    tokens = sum(map(len, samples))
    how = {"samples": str(len(samples)), "tokens": str(tokens), "data": " ".join(given.data)}
    _write(output, calibration_bytes(fingerprint, measured, how))
    count = sum(name.endswith(INPUT_AMAX) for name in measured)
    show(
        f"{output}: {counted(count, 'matrix', 'matrices')}, {counted(len(samples), 'sample')}, {counted(tokens, 'token')}"
    )
    show(f"weights     {fingerprint}")


def _refuse_states(opened: OpenedEngine) -> None:
    """Raise NotExpressible for a model whose layers keep states."""
    layers = range(opened.config.layer_count)
    parts = [part for layer in layers for part in opened.engine.cache_of(layer)]
    if any(isinstance(part, PerRow) for part in parts):
        raise NotExpressible(
            f"{opened.config.family}: layers that keep states can't be calibrated; convert with a --quantize that needs no calibration"
        )


def _samples(given: argparse.Namespace, opened: OpenedEngine, length: int) -> list[Sample]:
    """The samples of --data. Raises UsageError, CorruptCheckpoint."""
    template = read_template(given.chat_template)
    found = read_samples(given.data, opened.tokenizer, given.samples, length, template)
    return require_known(found, opened.config.vocab)


def _batches(samples: Sequence[Sample], rows: int) -> list[torch.Tensor]:
    """Batches of at most `rows` samples of one length each: padding would count as input."""
    by_length: dict[int, list[Sample]] = {}
    for sample in samples:
        by_length.setdefault(len(sample), []).append(sample)
    return [
        torch.stack([torch.from_numpy(sample) for sample in group[first : first + rows]])
        for group in by_length.values()
        for first in range(0, len(group), rows)
    ]


def _measure(
    opened: OpenedEngine, found: list[Matrix], batches: list[torch.Tensor], *, awq: bool
) -> dict[str, Floats]:
    """The statistics by the names of a calibration. Collective."""
    inputs, cached = Inputs(), CachedAmax()
    _run(opened, found, batches, inputs, cached)
    natives = hugging_face_matrices(opened.config)
    statistics = merged(opened.config, found, inputs, cached)
    measured = statistics.named(natives)
    if awq:
        search = search_of(found, natives, statistics)
        _run(opened, found, batches, search, CachedAmax())
        weights = {matrix.name: matrix.module.get_parameter("weight") for matrix in found}
        for name, scale in scales(search, weights).items():
            measured[f"{name}.{AWQ_SCALE}"] = scale
    return measured


class _Nobody(Watcher):
    """Sees inputs and forgets them."""

    def see(self, name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
        pass


def _run(
    opened: OpenedEngine,
    found: list[Matrix],
    batches: list[torch.Tensor],
    watcher: Watcher,
    cache: CachedAmax,
) -> None:
    """Compute this replica's share of the batches. All replicas make the same number of passes: they may share experts."""
    grid = opened.engine.grid
    for first in range(0, len(batches), grid.dp):
        own = first + grid.dp_rank
        is_counted = own < len(batches)
        watch(found, watcher if is_counted else _Nobody())
        tokens = batches[own if is_counted else first].to(grid.device)
        kept: Cache = cache if is_counted else CachedAmax()
        positions = torch.arange(tokens.shape[1], device=grid.device).unsqueeze(0)
        with torch.inference_mode():
            opened.engine.last_stage(Microbatch(tokens, tokens, positions=positions), kept)


def _write(output: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all. Raises UsageError if it can't be written."""
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(output)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UsageError(f"{output}: can't be written: {error.strerror}") from error
