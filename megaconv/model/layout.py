"""The layout of a model: the layers of each rank, by arithmetic on sizes with the same results as Megatron core."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from formats.wording import counted
from megaconv.errors import LayoutError
from megaconv.model.ceilings import LAYERS, RANKS


class Chunk(NamedTuple):
    """A range of layers that one pipeline rank holds: one of its `vpp` virtual stages."""

    pp_rank: int
    vpp_rank: int
    first_layer: int
    layers: int
    is_first: bool
    """True if the chunk holds the embedding."""
    is_last: bool
    """True if the chunk holds the final norm and the head."""
    encoder: range | None = None
    """Encoder layers of this chunk, if the encoder has its own pipeline stages. None otherwise: the chunk
    with is_first holds all encoder layers."""
    ends_encoder: bool = False
    """True for the last of the encoder's own stages."""
    starts_decoder: bool = False
    """True for the first stage after the encoder's own stages."""

    @classmethod
    def of_whole_model(cls, layers: int) -> "Chunk":
        """The only chunk of a model that is not sharded."""
        return cls(
            pp_rank=0,
            vpp_rank=0,
            first_layer=0,
            layers=layers,
            is_first=True,
            is_last=True,
        )

    @property
    def embeds(self) -> bool:
        """True if the chunk holds an embedding. If encoder and decoder are on separate stages, the decoder has a copy
        of it."""
        return self.is_first or self.starts_decoder


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, and the layers of each virtual stage.

    stage_layers: the number of layers of each stage, in model order. Stage s is on pipeline rank s % pp, as its virtual
    stage s // pp. The embedding is on the first stage, the head on the last.
    encoder_stage_layers: the number of encoder layers of each of the encoder's own stages, which come first and hold no
    decoder layers. The decoder has the other stages. It is empty if there is no encoder, or if the encoder is on the
    same single stage as the whole decoder.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    stage_layers: tuple[int, ...] = ()
    encoder_stage_layers: tuple[int, ...] = ()

    @property
    def split_rank(self) -> int:
        """The first pipeline rank of the decoder if the encoder has its own stages, else 0."""
        return len(self.encoder_stage_layers)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all chunks in model order."""
        first, stages = 0, self.pp * self.vpp
        for stage, layers in enumerate(self.stage_layers):
            chunk = Chunk(
                pp_rank=stage % self.pp,
                vpp_rank=stage // self.pp,
                first_layer=first,
                layers=layers,
                is_first=stage == 0,
                is_last=stage == stages - 1,
            )
            yield self._with_encoder(chunk) if self.encoder_stage_layers else chunk
            first += layers

    def _with_encoder(self, chunk: Chunk) -> Chunk:
        rank = chunk.pp_rank
        start = sum(self.encoder_stage_layers[:rank])
        stop = sum(self.encoder_stage_layers[: rank + 1])
        return chunk._replace(
            encoder=range(start, stop),
            ends_encoder=rank == self.split_rank - 1,
            starts_decoder=rank == self.split_rank,
        )

    def __str__(self) -> str:
        shown = {
            name: size for name, size in self.sizes().items() if size > 1 or name in ("tp", "pp")
        }
        sizes = ", ".join(f"{name.upper()} {size}" for name, size in shown.items())
        decoder = "+".join(map(str, self.stage_layers[self.split_rank :]))
        if self.encoder_stage_layers:
            encoder = "+".join(map(str, self.encoder_stage_layers))
            return f"{sizes} (encoder {encoder}, decoder {decoder})"
        if len(set(self.stage_layers)) > 1:
            return f"{sizes} (layers {decoder})"
        return sizes

    def sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "etp": self.etp}


@dataclass(frozen=True)
class LayerSplit:
    """A way to divide layers over pipeline stages. At most one of Megatron's ways may be given."""

    layers: tuple[int, ...] | None = None
    """Layers per stage, one number for each of the pp * vpp stages."""
    first: int | None = None
    last: int | None = None
    """Layers on the first or last pipeline rank. The other ranks share the rest evenly."""
    account_for_embedding: bool = False
    account_for_loss: bool = False
    """Count the embedding or the head as one layer."""
    pattern: str | None = None
    """Megatron's pipeline_model_parallel_layout string, such as `Et*3|(tt|)*2,tL`."""
    split_rank: int | None = None
    """Number of encoder stages of a model with an encoder and a decoder. The encoder has the first stages."""

    def stages(self) -> int | None:
        """Number of listed stages; None if only a rule is given."""
        if self.layers is not None:
            return len(self.layers)
        return len(parse_pattern(self.pattern)) if self.pattern is not None else None


def divide(total: int, parts: int, what: str, over: str, another: str = "") -> int:
    """total / parts. Raises LayoutError, which names the dimension, its value and the number of ranks.

    another: a second remedy for the message.
    """
    if parts < 1 or total % parts:
        raise LayoutError(
            f"{what} = {total} can't be divided over {over} = {parts}; choose a size that divides {total}{another}",
            code="layout-indivisible",
        )
    return total // parts


def split_layers(layers: int, pp: int, vpp: int, split: LayerSplit) -> tuple[int, ...]:
    """Layers of each of the pp * vpp stages, in model order. Raises LayoutError if they don't add up."""
    for name, size in (("pipeline", pp), ("virtual pipeline", vpp)):
        if not 1 <= size <= RANKS:
            raise LayoutError(
                f"{name} parallel size is {size}; it has to be 1 or more, and at most {RANKS:,}"
            )
    if vpp > 1 and pp == 1:
        raise LayoutError("virtual pipeline stages need a pipeline parallel size of 2 or more")
    by_ends = split.first is not None or split.last is not None
    ways = (
        bool(split.layers),
        bool(split.pattern),
        by_ends,
        split.account_for_embedding or split.account_for_loss,
    )
    if sum(ways) > 1:
        raise LayoutError(
            "give one layer split: a list of layers, first/last layers, a layout string, or the account-for options"
        )
    if split.layers is not None:
        return _explicit(layers, pp, vpp, split.layers)
    if split.pattern is not None:
        return _explicit(layers, pp, vpp, parse_pattern(split.pattern))
    if by_ends:
        return _first_last(layers, pp, vpp, split.first, split.last)
    return _even(layers, pp * vpp, split)


_UNEVEN = (
    ", or give the first stage another number of layers: --decoder-first-pipeline-num-layers N"
)


def _even(layers: int, stages: int, split: LayerSplit) -> tuple[int, ...]:
    counted = layers + split.account_for_embedding + split.account_for_loss
    what = (
        "layers" if counted == layers else f"layers (with embedding and loss counted, {layers} +)"
    )
    remedy = _UNEVEN if counted > stages else ""  # no stage can have fewer than one
    found = [divide(counted, stages, what, "pp x vpp", remedy)] * stages
    # The embedding and the loss each take the place of one layer on their stage.
    found[0] -= split.account_for_embedding
    found[-1] -= split.account_for_loss
    return tuple(found)


def layout_for(layout: Layout, layers: int) -> Layout:
    """The layout for another number of layers: its stages, of equal sizes, or one stage if they can't be equal."""
    if sum(layout.stage_layers) == layers:
        return layout
    one_stage = replace(layout, pp=1, vpp=1, stage_layers=(layers,), encoder_stage_layers=())
    if layout.encoder_stage_layers:
        return one_stage
    try:
        stages = split_layers(layers, layout.pp, layout.vpp, LayerSplit())
    except LayoutError:
        return one_stage
    return replace(layout, stage_layers=stages)


def split_stacks(
    encoder: int, decoder: int, pp: int, split_rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(encoder_stage_layers, stage_layers) of a Layout in which the first split_rank stages are the encoder's. Raises
    LayoutError."""
    if not 0 < split_rank < pp:
        raise LayoutError(
            f"pipeline split rank = {split_rank} with pp = {pp}: the encoder has the stages before it, the decoder the others; "
            "expected 1 or more, and less than pp"
        )
    stages = pp - split_rank
    ours = divide(
        encoder, split_rank, "layers of the encoder", "pipeline stages before the split rank"
    )
    theirs = divide(
        decoder, stages, "layers of the decoder", "pipeline stages from the split rank on"
    )
    return (ours,) * split_rank, (0,) * split_rank + (theirs,) * stages


def _explicit(layers: int, pp: int, vpp: int, stages: tuple[int, ...]) -> tuple[int, ...]:
    if len(stages) != pp * vpp:
        remedy = "choose sizes with this product, or another split"
        if len(stages) % vpp == 0:
            remedy = f"give --pp {len(stages) // vpp}, or another split"
        raise LayoutError(
            f"the layer split has {counted(len(stages), 'stage')}, but pp x vpp = {pp} x {vpp} = {pp * vpp}; {remedy}"
        )
    if sum(stages) != layers or min(stages) < 0:
        raise LayoutError(
            f"the layer split {','.join(map(str, stages))} places {counted(sum(stages), 'layer')}, but the model has {layers}"
        )
    return stages


def _first_last(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    others = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if others < 0 or rest < 0 or (others == 0 and rest):
        raise LayoutError(
            f"first and last stages of {first} and {last} layers leave {rest} of {layers} layers for {others} other ranks"
        )
    middle = 0
    if others:
        middle = divide(
            rest, others, "layers between first and last stage", "remaining pipeline ranks"
        )
    ranks = [middle] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    # Stage s is on rank s % pp, so the numbers of the ranks repeat once per virtual stage.
    per_chunk = [
        divide(count, vpp, f"layers of pipeline rank {rank}", "vpp")
        for rank, count in enumerate(ranks)
    ]
    return tuple(per_chunk * vpp)


def uneven_splits(layers: int, pp: int, vpp: int) -> list[str]:
    """Options of `megaconv convert` that divide the layers nearly evenly if pp x vpp doesn't divide their number.

    The list is empty if there are fewer layers than stages.
    """
    each, more = divmod(layers, pp * vpp)
    if pp < 2 or not each:
        return []
    found = []
    last = _last_by_rule(layers, pp, vpp)
    if last is not None:
        found.append(f"--decoder-last-pipeline-num-layers {last}")
    listed = [each + 1] * more + [each] * (pp * vpp - more)
    found.append(f"--layer-split {','.join(map(str, listed))}")
    return found


def _last_by_rule(layers: int, pp: int, vpp: int) -> int | None:
    """The largest number of layers on the last rank by which Megatron's rule fits; None if it doesn't fit.

    The last rank has no more layers than the others, because it also has the head.
    """
    fitting = None
    for last in range(vpp, layers // pp + 1, vpp):
        others, odd = divmod(layers - last, pp - 1)
        if not odd and others % vpp == 0:
            fitting = last
    return fitting


def parse_pattern(pattern: str) -> tuple[int, ...]:
    """Layers per stage of a pipeline_model_parallel_layout string (megatron-core 0.13 and newer).

    `|` separates stages. `E` is the embedding, `t` a decoder layer, `m` an MTP layer, `L` the head. `x*3` and `(xy)*3`
    repeat. Commas have no meaning. Raises LayoutError.
    """
    text = re.sub(r"\(([^()]*)\)\*(\d+)", _repeated, pattern[:_LONGEST_PATTERN].replace(",", ""))
    text = re.sub(r"([^*()\d])\*(\d+)", _repeated, text[:_LONGEST_PATTERN])
    if not re.fullmatch(r"E[t|]*m*L", text):
        raise LayoutError(
            f"layout string {pattern!r:.200}: expected E, then decoder layers t in stages separated by |, then m for "
            f"each MTP layer, then L; got {text!r:.200}"
        )
    return tuple(stage.count("t") for stage in text.split("|"))


_LONGEST_PATTERN = 2 * (LAYERS + RANKS)
"""Maximum length of a layout string, as given and expanded: every layer and every stage is one character. A longer
string is truncated here and then refused."""


def _repeated(match: re.Match[str]) -> str:
    return match[1] * min(int(match[2][:9]), _LONGEST_PATTERN // max(1, len(match[1])))


def split_arguments(layout: Layout) -> dict[str, Any]:
    """The Megatron arguments that lead to this layout's stage_layers. Stages of a separate encoder are left out."""
    stages, layers = layout.stage_layers[layout.split_rank :], sum(layout.stage_layers)
    arguments: dict[str, Any] = {
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None,
        "num_layers_per_virtual_pipeline_stage": None,
    }
    if len(set(stages)) == 1:
        arguments["num_layers_per_virtual_pipeline_stage"] = stages[0] if layout.vpp > 1 else None
        return arguments
    if layout.vpp == 1 and 0 not in stages:
        # Megatron requires a layer on each end and in the middle.
        for first, last in ((stages[0], None), (None, stages[-1]), (stages[0], stages[-1])):
            try:
                same = _first_last(layers, layout.pp, 1, first, last) == stages
            except LayoutError:
                continue
            if same:
                return arguments | {
                    "decoder_first_pipeline_num_layers": first,
                    "decoder_last_pipeline_num_layers": last,
                }
    words = ["t" * count for count in stages]
    return arguments | {"pipeline_model_parallel_layout": "E" + "|".join(words) + "L"}


def padded_vocab(vocab: int, divisor: int, tp: int) -> int:
    """Number of embedding rows in Megatron: the next multiple of divisor * tp."""
    multiple = divisor * tp
    return -(-vocab // multiple) * multiple
