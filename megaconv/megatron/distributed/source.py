"""Opens Megatron's distributed checkpoints (`torch_dist`, `zarr`, `fsdp_dtensor`) as the files of one rank: TP 1, PP 1.

Their keys are global, and global tensors are those of a single rank. Therefore all further steps are the same as for
rank files. The layout of the run that wrote them is in its args, or in the files that other software writes instead
(`run_config.py`).
"""

import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from formats import rank_files, save_marks, torch_dist, torch_zip, zarr_arrays
from formats.chunked import ChunkedTensor
from formats.dcp_metadata import METADATA_NAME
from formats.errors import CorruptCheckpoint
from megaconv.errors import UnknownFormat
from megaconv.megatron.distributed.keys import EXTRA_STATE, has_optimizer, model_tensors, unstack
from megaconv.megatron.distributed.optimizer import DistOptimizer
from megaconv.megatron.distributed.optimizer_buckets import Directory
from megaconv.megatron.distributed.run_config import (
    NEMO,
    RUN_CONFIG,
    TRAIN_STATE,
    describe,
    latest_version,
    nemo_weights,
)
from megaconv.megatron.distributed.verl_files import (
    VERL,
    refuse_optimizer_alone,
    run_of,
    verl_weights,
)
from megaconv.megatron.rank_files.source import RankSource
from megaconv.megatron.states.hybrid_form import is_of_pairs, read_as_gpt, with_gpt_names
from megaconv.megatron.states.origin import require_iteration
from megaconv.megatron.states.ranks import RankId, Ranks, Weights
from megaconv.megatron.states.reward_head import has_reward_head, with_head_as_output
from megaconv.model.beside import TOWER
from megaconv.options import LoadOptions

_log = logging.getLogger("megaconv")


def find_dist(path: Path) -> tuple[Path, str] | None:
    """(directory, `torch_dist`, `zarr` or `fsdp_dtensor`) of a Megatron checkpoint; None for anything else."""
    version = _find_version(path)
    if version is None:
        return None
    backend = torch_dist.read_backend(version)
    if backend is None and torch_dist.is_dcp(version) and not rank_files.is_rank_files(version):
        if (version / torch_dist.COMMON_FILE).is_file():
            missing = version / torch_dist.FORMAT_FILE
            raise CorruptCheckpoint(
                f"{missing}: no such file; Megatron writes it last, so the checkpoint is incomplete",
                code="missing-file",
            )
        return version, "fsdp_dtensor"
    return (version, backend) if backend else None


def _find_version(path: Path) -> Path | None:
    numbered = re.fullmatch(r"iter_\d{7,}|release", path.name) and torch_dist.is_dcp(path)
    if numbered or (path / torch_dist.FORMAT_FILE).is_file():
        return path
    return (
        rank_files.find_version(path)
        or nemo_weights(path)
        or verl_weights(path)
        or latest_version(path)
    )


class DistFiles(NamedTuple):
    """An opened distributed checkpoint."""

    version: Path
    backend: str
    directory: Directory
    tensors: Mapping[str, ChunkedTensor]
    """The tensors by key."""


def open_files(path: Path) -> DistFiles:
    """Open a distributed checkpoint. Raises UnknownFormat, CorruptCheckpoint, UnsafeContent."""
    found = find_dist(path)
    if found is None:
        raise UnknownFormat(f"{path}: holds no distributed Megatron checkpoint")
    refuse_optimizer_alone(found[0])
    return _files_of(*found)


def open_dist(files: DistFiles, options: LoadOptions) -> RankSource:
    """The checkpoint as one rank. Raises CorruptCheckpoint, UnsafeContent, UnsupportedInput."""
    version, _, directory, tensors = files
    state = dict(_common(version, directory))
    _require_one_save(version, directory, state)
    args, writer = state.get("args"), ""
    verl_run = run_of(version)
    if verl_run is not None and options.config is not None:
        args, writer = verl_run.args(), VERL
        state |= verl_run.state()
    elif not isinstance(args, Namespace):
        described = describe(version, complete=options.config is None)
        args, writer = described.args, described.writer
        state.setdefault("iteration", state.get("global_step"))  # NeMo uses Lightning's global_step
        state |= described.state
    if is_of_pairs(args):
        tensors, args = with_gpt_names(tensors), read_as_gpt(args)
    require_iteration(version, _iteration_file(version), state.get("iteration"))
    if not options.metadata_only:
        _warn_of_scales(version, directory)
    rank, number = RankId(0, 0, 0), re.fullmatch(r"iter_(\d+)", version.name)
    inside, beside = model_tensors(tensors)
    is_of_aligner = has_reward_head(inside)
    inside = with_head_as_output(inside, str(version))
    weights: Weights = dict(unstack(inside))
    tower = {name: tensor for name, tensor in beside.items() if name.startswith(TOWER)}
    beside = {name: tensor for name, tensor in beside.items() if name not in tower} | unstack(tower)
    ranks = Ranks(
        1, 1, 1, {rank: state}, {rank: [weights]}, {rank: str(version)}, {rank: version / torch_dist.COMMON_FILE},
        {rank: dict(beside)},
    )  # fmt: skip
    listing = rank_files.RankFiles(version, int(number[1]) if number else None, {})
    stored = has_optimizer(tensors) or has_optimizer(directory.objects())
    if stored and (writer == NEMO or is_of_aligner):
        _log.warning(
            "%s: the optimizer of a NeMo checkpoint is not read; the weights alone are converted",
            version,
        )
        state.pop("optimizer", None)
        stored = False
    optimizer = None
    if verl_run is not None and verl_run.optimizer is not None:
        optimizer = _optimizer_beside(verl_run.optimizer, args)
    elif stored:
        optimizer = _optimizer_of(files._replace(tensors=tensors), args, state)
    return RankSource(listing, ranks, args, optimizer, writer)


def _optimizer_beside(version: Path, args: Namespace) -> DistOptimizer:
    """The optimizer in a directory of its own."""
    files = _files_of(version, "torch_dist")
    return _optimizer_of(files, args, _common(version, files.directory))


def _optimizer_of(files: DistFiles, args: Namespace, state: Mapping[str, Any]) -> DistOptimizer:
    """The optimizer in an opened directory. args: the run's, with its layout. state: everything that isn't sharded."""
    version, _, directory, tensors = files
    flattened = getattr(getattr(directory, "metadata", None), "flattened", {})
    return DistOptimizer(str(version), directory, tensors, state, args, flattened)


def _files_of(version: Path, backend: str) -> DistFiles:
    directory = _open(version, backend)
    return DistFiles(version, backend, directory, directory.tensors())


def _open(version: Path, backend: str) -> Directory:
    if backend in ("torch_dist", "fsdp_dtensor"):
        return torch_dist.open_directory(version)
    if backend == "zarr":
        return zarr_arrays.open_directory(version)
    raise UnknownFormat(
        f"{version / torch_dist.FORMAT_FILE}: names the format {backend!r}; known: torch_dist and zarr"
    )


def _common(version: Path, directory: Directory) -> Mapping[str, Any]:
    """Everything that isn't sharded.

    It is in a file, from core 0.19 on in an object, and for fsdp_dtensor in separate objects.
    """
    file = version / torch_dist.COMMON_FILE
    if file.is_file():
        common = torch_zip.read(file)
    elif torch_dist.COMMON_OBJECT in directory.objects():
        common = directory.read_object(torch_dist.COMMON_OBJECT)
    elif "args" in directory.objects():
        names = ("args", "iteration", "checkpoint_version")
        common = {
            name: directory.read_object(name) for name in names if name in directory.objects()
        }
    elif (version / RUN_CONFIG).is_file():
        common = {}
    else:
        raise CorruptCheckpoint(
            f"{file}: no such file; it holds the args of a Megatron checkpoint", code="missing-file"
        )
    if not isinstance(common, dict):
        raise CorruptCheckpoint(f"{file}: should hold a dictionary, found {type(common).__name__}")
    return common


def _require_one_save(version: Path, directory: Directory, state: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpoint for a file of another save, where files name their save."""
    if isinstance(directory, torch_dist.DistDirectory):
        files = (each.file for each in directory.files.values())
        save_marks.require_one_save(version / torch_dist.COMMON_FILE, state, files)


def _iteration_file(version: Path) -> Path:
    """The file that contains the iteration, for messages."""
    names = (torch_dist.COMMON_FILE, TRAIN_STATE)
    return next(
        (version / name for name in names if (version / name).is_file()), version / METADATA_NAME
    )


def _warn_of_scales(version: Path, directory: Directory) -> None:
    """Warn about FP8 scales, the only useful content of extra states. The first layer's show whether there are any."""
    for name in directory.objects():
        of_first = re.search(rf"{re.escape(EXTRA_STATE)}/shard_0(\.0)*_", name)
        if of_first and sum(getattr(directory.read_object(name), "shape", ())):
            _log.warning("%s: %s holds FP8 scales, which are left out", version, name)
