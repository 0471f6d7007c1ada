"""Checks that a rank file belongs to its place: the iteration and the rank in the file must be those of its directory.

    iteration                       of every rank file and common.pt: the same in all, and the number of iter_0000005/
    args.consumed_train_samples     the same in all files of one save
    args.seed, args.lr and others   the same in all files of one run
    megatron_lite.data              a hash of the training data: the same in all files of one run of megatron_lite
    args.rank, args.world_size      the rank that wrote the file; with the sizes in args they give the file's directory

Ranks are numbered over tensor parallel ranks first, then context, expert and data parallel ranks, and pipeline stages
last. With use_tp_pp_dp_mapping, stages come before data parallel ranks. The stages of an encoder (core 0.9 to 0.13)
come before those of the decoder. Up to core 0.9 the ranks of experts count the context parallel ranks too. Tools that
write all files from one process store the same rank in all of them. Source: parallel_state.py of Megatron core 0.4 to
0.19, mpu/initialize.py before it.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from formats.errors import CorruptCheckpoint
from formats.rank_files import TRACKER, iteration_directory, rank_directory
from megaconv.model.ceilings import ITERATION
from megaconv.model.layout import Layout

Numbers = tuple[int, ...]
"""The numbers of a rank directory: tensor rank, then pipeline and expert rank if there are several."""
_States = Mapping[Numbers, Mapping[str, Any]]
_Files = Mapping[Numbers, Path]

TRAINER = "megatron_lite"
"""The key of megatron_lite's own values in its checkpoints."""
OF_ONE_RUN = (
    "seed", "lr", "min_lr", "weight_decay", "global_batch_size", "train_iters", "lr_warmup_iters", "lr_decay_iters",
    "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "hidden_dropout", "attention_dropout",
)  # fmt: skip
"""Arguments that all ranks of a run get from its command line. Files of two runs often differ in one of them."""
_OF_A_RUN = ("rng_state", "torch_rng_state", "optimizer", "opt_param_scheduler", "lr_scheduler")
"""Keys of files that a run saved. Tools, which save every rank's file from one process, write none of them."""


def rank_of(tp_rank: int, pp_rank: int, ep_rank: int, layout: Layout, *, experts: bool) -> int:
    """The rank that writes this file in a run of tp * pp * ep ranks."""
    etp = layout.etp if experts else layout.tp
    return pp_rank * layout.tp * layout.ep + etp * ep_rank + tp_rank % etp


def require_iteration(version: Path, file: Path, iteration: object) -> None:
    """Raises CorruptCheckpoint unless a file's iteration is the one in its directory's name.

    A directory with any other name (`release`, a copy) gives no iteration, nor does a file without a number.
    """
    named = re.fullmatch(r"iter_(\d{7,18})", version.name)
    if named is None or not _is_iteration(iteration) or int(named[1]) == iteration:
        return
    # Megatron has no iteration 0. Files of a `release` say 0.
    name, tracked = (iteration_directory(iteration), iteration) if iteration else ("release",) * 2
    raise CorruptCheckpoint(
        f"{file}: is of iteration {iteration}, its directory {version.name} of iteration {int(named[1])}. If the directory was "
        f"renamed, name it {name} again and write {tracked} into {TRACKER}; else copy the whole checkpoint again",
        code="mixed-iterations",
    )


def require_one_save(states: _States, files: _Files, version: Path) -> None:
    """Raises CorruptCheckpoint for files of several saves or runs, or of another iteration than `version`.

    For several saves, the error names two of the files.
    """
    iterations = _iterations(states)
    _require_same("iteration", iterations, files, version)
    _require_same("consumed_train_samples", _samples(states), files, version)
    for name in OF_ONE_RUN:
        _require_same(
            f"args.{name}", _argument(name, states), files, version, "they are from two runs"
        )
    _require_same(f"{TRAINER}.data", _data(states), files, version, "they are from two runs")
    for numbers, iteration in sorted(iterations.items()):
        require_iteration(version, files[numbers], iteration)


def _require_same(
    what: str,
    values: Mapping[Numbers, int | float | str],
    files: _Files,
    version: Path,
    cause: str = "they are from two saves, or a save was interrupted",
) -> None:
    if len(set(values.values())) < 2:
        return
    first = min(values)
    other = min(numbers for numbers in values if values[numbers] != values[first])
    raise CorruptCheckpoint(
        f"{version}: {_name(files[first])} has {what} {values[first]}, {_name(files[other])} {values[other]}: {cause}. "
        "Copy all files of one save",
        code="mixed-iterations",
    )


def require_own_directories(states: _States, files: _Files) -> None:
    """Raises CorruptCheckpoint for a rank file in another rank's directory.

    files: all files, including those that weren't read.
    """
    writers = {
        numbers: writer
        for numbers, state in states.items()
        if (writer := _writer(state)) is not None
    }
    of_one_process = len({writer.rank for writer in writers.values()}) == 1
    if of_one_process and not any(key in state for state in states.values() for key in _OF_A_RUN):
        return
    sizes = tuple(1 + max(column) for column in zip(*files, strict=True))
    for numbers, writer in sorted(writers.items()):
        own = writer.directories()
        if writer.sizes == sizes and numbers not in own:
            raise CorruptCheckpoint(
                f"{files[numbers]}: its args are of rank {writer.rank} of {writer.world}, whose file belongs in "
                f"{writer.name(own[0])}. Files were exchanged or overwritten: copy the whole checkpoint again",
                code="misplaced-rank-file",
            )


class _Writer(NamedTuple):
    """The rank that wrote a file, and the layout of its run."""

    rank: int
    world: int
    tp: int
    cp: int
    ep: int
    etp: int
    encoder: int
    """Number of the encoder's stages, which come before those of the decoder."""
    decoder: int
    stages_first: bool
    """True if stages are counted before data parallel ranks (use_tp_pp_dp_mapping)."""

    @property
    def pp(self) -> int:
        return self.encoder + self.decoder

    @property
    def sizes(self) -> Numbers:
        """The sizes of the grid, in the order of a directory's numbers."""
        return self._numbers(self.tp, self.pp, self.ep)

    def directories(self) -> list[Numbers]:
        """The directories that this rank may write, by the rules of all releases."""
        stage_ranks = self.world // self.pp
        pp_rank, in_stage = divmod(self.rank, stage_ranks)
        if self.stages_first:
            pp_rank, in_stage = self._stage_first(), self.rank
        # Expert ranks since core 0.10, then up to core 0.9, where they count the context parallel ranks too.
        rules = (self.etp, self.tp * self.cp)
        found = [
            self._numbers(self.rank % self.tp, pp_rank, in_stage // step % self.ep)
            for step in rules
        ]
        return list(dict.fromkeys(found))

    def _stage_first(self) -> int:
        step = self.tp * self.cp
        of_encoder = self.world // self.pp * self.encoder
        if self.rank < of_encoder:
            return self.rank // step % self.encoder
        return self.encoder + (self.rank - of_encoder) // step % self.decoder

    def _numbers(self, tp: int, pp: int, ep: int) -> Numbers:
        return (tp, *((pp,) if self.pp > 1 else ()), *((ep,) if self.ep > 1 else ()))

    def name(self, numbers: Numbers) -> str:
        tp_rank, *others = numbers
        pp_rank = others.pop(0) if self.pp > 1 else 0
        ep_rank = others.pop(0) if self.ep > 1 else 0
        return rank_directory(tp_rank, pp_rank, ep_rank, self.pp, self.ep)


def _writer(state: Mapping[str, Any]) -> _Writer | None:
    """The writer of a file; None if args don't contain its rank and a layout that fits it."""
    args = state.get("args")
    rank, world = getattr(args, "rank", None), getattr(args, "world_size", None)
    if (
        not isinstance(args, Namespace)
        or type(rank) is not int
        or type(world) is not int
        or not 0 <= rank < world
    ):
        return None
    tp = _size(args, "tensor_model_parallel_size", "model_parallel_size")
    cp, ep = _size(args, "context_parallel_size"), _size(args, "expert_model_parallel_size")
    etp = (
        _size(args, "expert_tensor_parallel_size")
        if getattr(args, "expert_tensor_parallel_size", None)
        else tp
    )
    encoder = _size(args, "encoder_pipeline_model_parallel_size", default=0)
    decoder = _size(args, "pipeline_model_parallel_size")
    if world % (tp * cp * (encoder + decoder)):
        return None
    stages_first = getattr(args, "use_tp_pp_dp_mapping", False) is True
    return _Writer(rank, world, tp, cp, ep, etp, encoder, decoder, stages_first)


def _size(args: Namespace, *names: str, default: int = 1) -> int:
    values = (getattr(args, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), default)


def _iterations(states: _States) -> dict[Numbers, int]:
    found = {numbers: state.get("iteration") for numbers, state in states.items()}
    return {numbers: value for numbers, value in found.items() if _is_iteration(value)}


def _is_iteration(value: object) -> TypeGuard[int]:
    """True for an integer that can be an iteration. Larger numbers are refused where they are read."""
    return type(value) is int and 0 <= value <= ITERATION


def _samples(states: _States) -> dict[Numbers, int]:
    found = _argument("consumed_train_samples", states)
    return {numbers: value for numbers, value in found.items() if type(value) is int}


def _data(states: _States) -> dict[Numbers, str]:
    """The hash of the training data in each file that has it."""
    found = {numbers: state.get(TRAINER) for numbers, state in states.items()}
    hashes = {
        numbers: value.get("data") for numbers, value in found.items() if isinstance(value, dict)
    }
    return {numbers: value for numbers, value in hashes.items() if isinstance(value, str)}


def _argument(name: str, states: _States) -> dict[Numbers, int | float]:
    """The argument in each file that has it."""
    found = {numbers: getattr(state.get("args"), name, None) for numbers, state in states.items()}
    return {
        numbers: value
        for numbers, value in found.items()
        if isinstance(value, (int, float)) and value == value  # a NaN differs from itself
    }


def _name(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"
