"""The opened rank files of a Megatron `torch` checkpoint: states and weights by rank, and the sizes of the grid."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from formats import torch_zip
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.rank_files import RankFiles, read
from formats.tensor import LazyTensor
from megaconv.errors import UnknownFormat
from megaconv.megatron.states.early_gpt2 import with_later_names
from megaconv.megatron.states.legacy_names import MODEL, flatten, holds_model
from megaconv.megatron.states.names import EXTRA_STATE, NOT_PARAMETERS
from megaconv.megatron.states.origin import require_one_save, require_own_directories
from megaconv.megatron.states.releases import older_name
from megaconv.megatron.states.whole_names import split_multimodal

_log = logging.getLogger("megaconv")

Weights = dict[str, LazyTensor]
_TAIL = (
    "decoder.final_layernorm",
    "decoder.final_norm",
    "output_layer",
    f"{MODEL}.encoder.final_norm",
    f"{MODEL}.output_layer",
)
"""Prefixes of tensors on the last stage."""
_STACKS = ("encoder.layers.", "decoder.layers.")
"""Prefixes of layers in core's T5. A legacy model with a decoder always has an encoder too."""


class RankId(NamedTuple):
    """The tensor, pipeline and expert rank of a file."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Ranks:
    """All rank files of one iteration.

    The grid may have holes: if expert tensor parallelism is smaller than tensor parallelism, Megatron writes files only
    for some pairs of tensor and expert rank.
    """

    tp: int
    pp: int
    ep: int
    states: Mapping[RankId, Mapping[str, Any]]
    weights: Mapping[RankId, list[Weights]]
    """One dictionary of weights per virtual stage."""
    files: Mapping[RankId, str]
    """File names for messages."""
    paths: Mapping[RankId, Path]
    """The files that were opened."""
    beside: Mapping[RankId, Weights] = field(default_factory=dict)
    """The tensors beside the language model in files of a multimodal model."""

    def of(self, tp_rank: int, pp_rank: int) -> list[RankId]:
        """The files of one tensor and pipeline rank, by expert rank."""
        return [
            RankId(tp_rank, pp_rank, ep)
            for ep in range(self.ep)
            if (tp_rank, pp_rank, ep) in self.states
        ]

    def stored_names(self) -> list[str]:
        """The names in the files of the first tensor rank, as the files have them."""
        first = [self.states[rank] for stage in range(self.pp) for rank in self.of(0, stage)[:1]]
        models = [state[key] for state in first for key in _model_keys(state)]
        return [name for model in models for name in model]

    def dense(self, tp_rank: int, pp_rank: int) -> list[Weights]:
        """The weights of the first of these files, which has all tensors except the experts of other expert ranks."""
        return self.weights[self.of(tp_rank, pp_rank)[0]]


def read_ranks(listing: RankFiles, *, metadata_only: bool = False) -> Ranks:
    """Open every rank file.

    Raises CorruptCheckpoint for a grid with missing ranks, or for files of another save or rank.

    metadata_only: read only the files of tensor rank 0 (and expert rank 0, if directories have all three numbers). The
    other files have the same names and shapes.
    """
    read = {
        numbers: _first_alike(numbers) if metadata_only else numbers for numbers in listing.files
    }
    read = {
        numbers: source if source in listing.files else numbers for numbers, source in read.items()
    }
    opened = {
        numbers: _read_state(listing.files[numbers]) for numbers in sorted(set(read.values()))
    }
    require_one_save(opened, listing.files, listing.directory)
    require_own_directories(opened, listing.files)
    split = {numbers: _split(state, listing.files[numbers]) for numbers, state in opened.items()}
    chunks = {numbers: weights for numbers, (weights, _) in split.items()}
    tp, pp, ep = _grid(listing, chunks)
    ids = {_rank_id(numbers, pp): numbers for numbers in read}
    ranks = Ranks(
        tp,
        pp,
        ep,
        {rank: opened[read[numbers]] for rank, numbers in ids.items()},
        {rank: chunks[read[numbers]] for rank, numbers in ids.items()},
        {
            rank: f"{listing.files[n].parent.name}/{listing.files[n].name}"
            for rank, n in ids.items()
        },
        {rank: listing.files[read[n]] for rank, n in ids.items()},
        {rank: split[read[n]][1] for rank, n in ids.items()},
    )
    _require_stacks(ranks)
    _require_complete(ranks, listing.directory)
    _require_stated_sizes(ranks, listing.directory)
    return ranks


def ranks_of_models(
    models: Mapping[RankId, Mapping[str, Any]], files: Mapping[RankId, Path], directory: Path
) -> Ranks:
    """The ranks of files that hold only parameters, by name. Raises CorruptCheckpoint for a grid with missing ranks."""
    weights = {
        rank: [dict(_parameters(model.items(), files[rank]))] for rank, model in models.items()
    }
    tp, pp = (1 + max(rank[axis] for rank in models) for axis in (0, 1))
    ranks = Ranks(
        tp,
        pp,
        1,
        {rank: {} for rank in models},
        weights,
        {rank: str(file) for rank, file in files.items()},
        files,
    )
    _require_complete(ranks, directory)
    return ranks


def _first_alike(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (0, numbers[1], 0) if len(numbers) == 3 else (0, *numbers[1:])


def _rank_id(numbers: tuple[int, ...], pp: int) -> RankId:
    """The rank of a directory's numbers: (tp), (tp, pp) or (tp, ep) depending on the contents, (tp, pp, ep)."""
    if len(numbers) == 2:
        return RankId(numbers[0], numbers[1], 0) if pp > 1 else RankId(numbers[0], 0, numbers[1])
    return RankId(*numbers, *(0,) * (3 - len(numbers)))


def _require_stacks(ranks: Ranks) -> None:
    """Check the sizes of an encoder with its own stages, which core 0.9 to 0.13 stores. Raises UnknownFormat.

    Core can give an encoder fewer tensor ranks, but not the encoder of a T5, which shares its embedding with the
    decoder.
    """
    first = min(ranks.states)
    args = ranks.states[first].get("args")

    def size(word: str) -> int:
        found = getattr(args, f"{word}_model_parallel_size", None)
        return found if type(found) is int else 0

    own = size("encoder_pipeline")
    others = size("pipeline")
    tp = size("encoder_tensor")
    if own and 0 < tp < ranks.tp:
        raise UnknownFormat(
            f"{ranks.files[first]}: its encoder has tensor parallel size {tp}, its decoder {ranks.tp}; models whose encoder and "
            "decoder share their embedding have one size, and no others are supported"
        )
    if own and own + others != ranks.pp:
        raise CorruptCheckpoint(
            f"{ranks.files[first]}: its args have {own} pipeline stages of an encoder and {others} of a decoder, there are rank "
            f"directories for {ranks.pp} in all; is one missing?"
        )


def _require_complete(ranks: Ranks, directory: Path) -> None:
    sizes = f"tp={ranks.tp}, pp={ranks.pp}"
    if ranks.ep > 1:
        sizes += f", ep={ranks.ep}"
    most = max(ranks.tp, ranks.pp, ranks.ep)
    # This check comes before any loop up to `most`: a directory's name may contain any number.
    if most > len(ranks.states):
        raise CorruptCheckpoint(
            f"{directory}: there is a rank directory of rank {most - 1}, "
            f"but there are {len(ranks.states)} in all; the checkpoint has {sizes}"
        )
    for pp_rank in range(ranks.pp):
        held = [rank for rank in ranks.states if rank.pp == pp_rank]
        tp_ranks = {rank.tp for rank in held}
        ep_ranks = {rank.ep for rank in held}
        missing = [f"tensor rank {tp}" for tp in range(ranks.tp) if tp not in tp_ranks]
        missing += [f"expert rank {ep}" for ep in range(ranks.ep) if ep not in ep_ranks]
        if missing:
            raise CorruptCheckpoint(
                f"{directory}: there is no rank directory for {missing[0]}, "
                f"pipeline rank {pp_rank}; the checkpoint has {sizes}. Is the copy complete?",
                code="missing-file",
            )


def _require_stated_sizes(ranks: Ranks, directory: Path) -> None:
    """Raises CorruptCheckpoint if args have more ranks than there are directories: the others were not copied.

    The files that are there would look like a smaller model.
    """
    first = min(ranks.states)
    args = ranks.states[first].get("args")
    for size, found in (("tensor", ranks.tp), ("pipeline", ranks.pp), ("expert", ranks.ep)):
        name = f"{size}_model_parallel_size"
        stated = getattr(args, name, None)
        if type(stated) is int and stated > found:
            raise CorruptCheckpoint(
                f"{directory}: the args of {ranks.files[first]} have {name} = {stated}, "
                f"there are rank directories for {found}; copy the missing ones",
                code="missing-file",
            )


def _grid(
    listing: RankFiles, weights: Mapping[tuple[int, ...], list[Weights]]
) -> tuple[int, int, int]:
    """(tp, pp, ep). If a directory has two numbers, the second is the expert rank if rank 0 holds the end of the model.

    A model of two stacks has no experts. Its encoder may have its own stages, with an unused head.
    """
    sizes = [1 + max(column) for column in zip(*listing.files, strict=True)]
    if len(sizes) == 3:
        tp, pp, ep = sizes
        return tp, pp, ep
    if len(sizes) == 1:
        return sizes[0], 1, 1
    tp, second = sizes
    # The first of several pipeline stages has no final norm and no head. If the first rank has them, the second number
    # is therefore the expert rank. This doesn't hold for a model of two stacks, whose encoder ends on an earlier stage.
    first_rank = min(weights, key=lambda numbers: numbers[::-1])
    last_chunk = weights[first_rank][-1]
    ends_the_model = any(name.startswith(_TAIL) for name in last_chunk)
    if ends_the_model and not _has_two_stacks(weights):
        return tp, 1, second
    return tp, second, 1


def _has_two_stacks(weights: Mapping[tuple[int, ...], list[Weights]]) -> bool:
    """True for a model of an encoder and a decoder, in core's or in legacy names."""
    names = set[str]()
    for chunks in weights.values():
        for chunk in chunks:
            names.update(chunk)

    def has(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in names)

    return has(f"{MODEL}.decoder.") or all(has(stack) for stack in _STACKS)


def _read_state(path: Path) -> Mapping[str, Any]:
    state = torch_zip.read(path)
    if not isinstance(state, dict) or not ("model" in state or "model0" in state):
        raise CorruptCheckpoint(
            f"{path}: holds no model; a rank file is a dictionary with the key model (or model0, model1 ...)"
        )
    return with_later_names(state, str(path))


def _split(state: Mapping[str, Any], path: Path) -> tuple[list[Weights], Weights]:
    """(the language model's parameters of each virtual stage, the other parameters, which are on the first stage)."""
    chunks = _chunks(state, path)
    if is_legacy(state):
        return chunks, {}
    inside: list[Weights] = []
    outside: Weights = {}
    for chunk in chunks:
        language_model, others = split_multimodal(chunk)
        inside.append(language_model)
        outside |= others
    return inside, outside


def _chunks(state: Mapping[str, Any], path: Path) -> list[Weights]:
    """The parameters of each virtual stage. Names of legacy models are flattened."""
    chunks = []
    for key in _model_keys(state):
        model = state[key]
        if not isinstance(model, dict):
            raise CorruptCheckpoint(
                f"{path}: {key} should be a dictionary of tensors, found {type(model).__name__}"
            )
        chunk: Weights = {}
        for name, tensor in _parameters(
            flatten(model) if is_legacy(state) else model.items(), path
        ):
            if name in chunk:
                raise CorruptCheckpoint(
                    f"{path}: {key} has two tensors {name}, one of them under an older name"
                )
            chunk[name] = tensor
        chunks.append(chunk)
    return chunks


def _model_keys(state: Mapping[str, Any]) -> list[str]:
    if "model" in state:
        return ["model"]
    return sorted(
        (key for key in state if re.fullmatch(r"model\d{1,6}", str(key))),
        key=lambda key: int(key[5:]),
    )


def is_legacy(state: Mapping[str, Any]) -> bool:
    """True if a rank file is of one of Megatron's models from before core."""
    return any(
        isinstance(state[key], dict) and holds_model(state[key]) for key in _model_keys(state)
    )


def holds_legacy(version: Path) -> bool:
    """True if the first rank file of an iteration is a legacy model's.

    False for a damaged file, which opening it will report.
    """
    try:
        return is_legacy(_read_state(next(iter(read(version).files.values()))))
    except (CheckpointError, StopIteration):
        return False


def _parameters(model: Iterable[tuple[str, Any]], path: Path) -> Iterator[tuple[str, LazyTensor]]:
    for name, value in model:
        if not isinstance(name, str):
            raise CorruptCheckpoint(f"{path}: {name!r} is not the name of a parameter")
        bare = older_name(name.removeprefix("module."))
        if bare.endswith(EXTRA_STATE):
            if sum(getattr(value, "shape", ())):
                _log.warning("%s: %s holds FP8 scales, which are left out", path, bare)
        elif not bare.endswith(NOT_PARAMETERS):
            if not hasattr(value, "read_into"):
                raise CorruptCheckpoint(f"{path}: {name} should be a tensor, found {value!r:.60}")
            yield bare, value
