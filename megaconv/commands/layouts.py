"""Lists the layouts in which a model can be trained and stored, the share of each rank, and the memory for training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

from formats.tensor import ITEMSIZE
from megaconv.commands.only_in_files import only_in_files
from megaconv.commands.text_table import Column, heading_line, table_line
from megaconv.commands.units import readable
from megaconv.errors import LayoutError, UsageError
from megaconv.families import family
from megaconv.megatron.rank_files.output_layout import DEFAULT_DIVISOR, choose_layout
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header
from megaconv.model.layout import Layout, padded_vocab
from megaconv.model.memory import bytes_per_parameter
from megaconv.model.rank_share import RankShare, rank_shares
from megaconv.options import SaveOptions

LARGEST_TP = 16
LISTED = ("tp", "pp", "ep", "etp")
"""Names of the sizes that a listed layout has. A run has further ones."""


@dataclass(frozen=True)
class Possible:
    """One layout. Sizes are those of the rank with the largest share."""

    layout: Layout
    world: int
    """GPUs of the run."""
    share: RankShare
    weight_bytes: int
    training_bytes: int
    """Bytes for training with Megatron's distributed optimizer, without activations."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.layout.sizes(),
            "gpus": self.world,
            "parameters": self.share.parameters,
            "expert_parameters": self.share.experts,
            "weight_bytes": self.weight_bytes,
            "training_bytes": self.training_bytes,
        }


@dataclass(frozen=True, repr=False)
class Layouts:
    possible: tuple[Possible, ...]
    refused: tuple[tuple[str, str], ...]
    """(sizes, reason) of a refused layout, one for each reason."""
    memory: int | None
    """Memory of one GPU in bytes, if the user gave it."""
    notices: tuple[str, ...] = ()

    def __repr__(self) -> str:
        fitting = (
            "" if self.memory is None else f", {sum(map(self.fits, self.possible))} fit the memory"
        )
        return f"<Layouts: {len(self.possible)} possible{fitting}, {len(self.refused)} reasons why others are not>"

    def fits(self, one: Possible) -> bool:
        return self.memory is None or one.training_bytes <= self.memory

    def to_json(self) -> dict[str, Any]:
        return {
            "layouts": [
                one.to_json() | ({} if self.memory is None else {"fits": self.fits(one)})
                for one in self.possible
            ],
            "refused": [{"sizes": sizes, "reason": reason} for sizes, reason in self.refused],
            "gpu_memory": self.memory,
            "notices": list(self.notices),
        }

    def lines(self) -> Iterator[str]:
        """Lines for people."""
        yield heading_line(_COLUMNS)
        for one in self.possible:
            layout = one.layout
            sizes = (layout.tp, layout.pp, layout.ep, layout.etp, one.world)
            texts = [
                *map(str, sizes),
                f"{one.share.parameters:,}",
                readable(one.weight_bytes),
                readable(one.training_bytes),
            ]
            too_large = "" if self.fits(one) else "  too large"
            yield table_line(_COLUMNS, texts) + too_large
        yield from self.notes()

    def notes(self) -> Iterator[str]:
        """Yield what is counted, and the reasons why other layouts are not possible."""
        yield from self.notices
        yield "to train: weights, gradients and optimizer state of the fullest rank, without activations"
        for sizes, reason in self.refused:
            yield f"not possible: {sizes}: {reason}"


_COLUMNS = (
    Column("TP", 4),
    Column("PP", 4),
    Column("EP", 4),
    Column("ETP", 4),
    Column("GPUs", 6),
    Column("parameters a rank", 18, gap=2),
    Column("weights", 11, gap=2),
    Column("to train", 11, gap=2),
)


def layouts(
    header: Header,
    gpus: int | None = None,
    memory: int | None = None,
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> Layouts:
    """The layouts of a model.

    TP is a power of two, PP divides the layers, EP is a power of two that divides the experts.

    gpus: GPUs of the run; None: as few as can hold the model once. memory: bytes of one GPU. fixed: the sizes of LISTED
    that every layout should have.
    Raises UsageError if no layout has these sizes or this number of GPUs.
    """
    config = header.config
    if fixed.get("etp", 1) > 1 and not config.experts.count:
        raise UsageError(f"--etp {fixed['etp']}: this model has no experts; leave it out")
    possible, refused = list[Possible](), dict[str, str]()
    sizes = {
        "tp": _powers(LARGEST_TP),
        "pp": _stage_counts(config),
        "ep": _expert_counts(config),
    } | {name: [size] for name, size in fixed.items()}
    for tp, pp, ep in product(sizes["tp"], sizes["pp"], sizes["ep"]):
        etp = fixed.get("etp") or _etp(config, tp, ep)
        try:
            found = _possible(header, tp, pp, ep, etp, gpus)
        except LayoutError as error:
            refused.setdefault(
                str(error).partition(" can't")[0], f"TP {tp}, PP {pp}, EP {ep}: {error}"
            )
            continue
        if found is not None:
            possible.append(found)
    reasons = tuple((text.partition(": ")[0], text.partition(": ")[2]) for text in refused.values())
    if not possible and gpus is None:
        raise UsageError("; ".join(f"{sizes}: {reason}" for sizes, reason in reasons))
    if not possible:
        raise UsageError(
            f"no layout of this model is of {gpus} GPUs; choose a multiple of a TP x PP that divides it"
        )
    return Layouts(tuple(possible), reasons, memory, only_in_files(config))


def _possible(
    header: Header, tp: int, pp: int, ep: int, etp: int | None, gpus: int | None
) -> Possible | None:
    """The layout of these sizes; None if it doesn't divide the GPUs or needs more of them. Raises LayoutError."""
    config = header.config
    layout = choose_layout(config, None, SaveOptions(tp=tp, pp=pp, ep=ep, etp=etp))
    once = pp * max(tp, ep * layout.etp)
    if gpus is not None and (gpus < once or gpus % once):
        return None
    world = gpus or once
    divisor = header.vocab_divisor or DEFAULT_DIVISOR
    shares = rank_shares(
        family(config.family).rows, config, layout, padded_vocab(config.vocab, divisor, tp)
    )
    return max(
        (_sized(config, layout, share, world) for share in shares),
        key=lambda one: one.training_bytes,
    )


def _sized(config: ModelConfig, layout: Layout, share: RankShare, world: int) -> Possible:
    # Experts have their own data-parallel groups: ranks that hold the same experts.
    per_stage = world // layout.pp
    dense = bytes_per_parameter(config.dtype, per_stage // layout.tp, distributed_optimizer=True)
    experts = bytes_per_parameter(
        config.dtype, max(1, per_stage // (layout.ep * layout.etp)), distributed_optimizer=True
    )
    needed = int(share.dense * dense + share.experts * experts)
    return Possible(layout, world, share, share.parameters * ITEMSIZE[config.dtype], needed)


def _etp(config: ModelConfig, tp: int, ep: int) -> int | None:
    """The expert tensor-parallel size: 1 if there are enough expert ranks, as Megatron advises, otherwise tp."""
    if not config.experts.count:
        return None
    return 1 if ep >= tp else tp


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def _stage_counts(config: ModelConfig) -> list[int]:
    if config.encoder.layers:
        return [1]
    return [
        count
        for count in range(1, config.layer_count + 1)
        if config.layer_count % count == 0 and count <= 64
    ]


def _expert_counts(config: ModelConfig) -> list[int]:
    return [
        count for count in _powers(config.experts.count or 1) if not config.experts.count % count
    ]
