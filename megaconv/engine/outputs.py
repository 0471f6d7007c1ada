"""The place of an output: a directory on a disk, or a prefix of an object store."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from formats.staging import Staging
from formats.stores.addresses import is_store
from formats.stores.waiting import MEMORY_BYTES, Terms, Waiting
from formats.target import Target
from megaconv._version import __version__
from megaconv.engine.open_parts import most_open
from megaconv.engine.parts import PartPlan, in_parts
from megaconv.engine.plan import OutputPlan
from megaconv.engine.ranks import ALONE, Ranks
from megaconv.engine.record import RECORD_NAME
from megaconv.errors import Interrupted, UsageError, is_interruption
from megaconv.model.ir import Key, TensorInfo
from megaconv.options import ConvertOptions
from megaconv.store_inputs import output_prefix, writable_store

_MOST_AHEAD = 3
"""Tensors that are written at the same time, if there are no more threads than that."""


def output_at(save_dir: str | Path, options: ConvertOptions, ranks: Ranks = ALONE) -> Target:
    """The output at a path or a URI. Raises TargetExists if something is there, UsageError for options of the other kind."""
    if not is_store(str(save_dir)):
        _refuse_store_options(options)
        return Staging(Path(save_dir), overwrite=options.overwrite, member=ranks.rank)
    if options.overwrite and not options.replace_objects:
        raise UsageError(
            f"--overwrite: {save_dir}: objects can't be replaced in one step; a run that is killed at its end leaves neither "
            "the old checkpoint nor the new one. Give --yes-replace-objects too, or choose another place"
        )
    prefix = output_prefix(str(save_dir))
    terms = Terms(
        __version__, options.overwrite, options.take_over, options.spool, options.max_spool
    )
    from formats.stores.target import StoreTarget

    store = writable_store(str(save_dir))
    return StoreTarget(
        store, prefix, terms, member=ranks.rank, members=ranks.size, record=RECORD_NAME
    )


def _refuse_store_options(options: ConvertOptions) -> None:
    given = {
        "--take-over": options.take_over,
        "--yes-replace-objects": options.replace_objects,
        "--spool": options.spool is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name}: is for an output in an object store; leave it out")


def remove_failed(staging: Target, save_dir: str | Path, error: BaseException) -> None:
    """Remove what a failed run has written.

    Raises Interrupted with the command that does, if the run was interrupted and something is left in a store.
    """
    if not staging.discard() and isinstance(error, Interrupted):
        raise Interrupted(f"`megaconv clean {save_dir}` removes what is left") from error


def say_complete(save_dir: str | Path, error: BaseException) -> None:
    """Raise an interruption again, with the message that the output is complete. Leaves other errors alone."""
    if is_interruption(error):
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else Interrupted
        raise kind(f"{save_dir} is complete") from None


def parts_of(
    plan: OutputPlan, manifest: Mapping[Key, TensorInfo], options: ConvertOptions, workers: int
) -> tuple[PartPlan, Waiting]:
    """(a plan in parts, the places of the parts that wait).

    As many tensors are written at the same time as leave memory to parts that are being sent.
    """
    memory = max(MEMORY_BYTES, options.max_memory // 4)
    most = max(_MOST_AHEAD, workers)
    found: list[tuple[PartPlan, Waiting]] = []
    for each in in_parts(plan, manifest):
        parts, waiting = _in_memory(each, most, memory)
        if parts.ahead == most and not waiting.is_spooled:
            return parts, waiting
        found.append((parts, waiting))
    return min(found, key=lambda one: (one[1].spool_bytes, -one[0].ahead))


def _in_memory(parts: PartPlan, most: int, memory: int) -> tuple[PartPlan, Waiting]:
    """The plan with so many tensors at the same time that parts wait in memory, if possible. most: the most of them."""
    planned = {ahead: _waiting(parts, ahead, memory) for ahead in range(most, 0, -1)}
    for ahead, waiting in planned.items():
        if waiting.open_bytes <= memory - memory // 4:
            return replace(parts, ahead=ahead), waiting
    if not planned[1].is_spooled:
        return parts, planned[1]
    return replace(parts, ahead=most), planned[most]


def _waiting(parts: PartPlan, ahead: int, memory: int) -> Waiting:
    most = most_open(parts.periods, ahead)
    return Waiting(parts.largest_part, most.nbytes, most.number, memory)
