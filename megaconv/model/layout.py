"""Which rank holds what: pure arithmetic on sizes, as Megatron core does it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megaconv.errors import LayoutError
from megaconv.model.ceilings import LAYERS, RANKS


class Chunk(NamedTuple):
    """A run of layers that one pipeline rank holds: one of its `vpp` virtual stages."""

    pp_rank: int
    vpp_rank: int
    first_layer: int
    layers: int
    is_first: bool
    """Holds the embedding."""
    is_last: bool
    """Holds the final norm and the head."""
    encoder: range | None = None
    """Which layers of an encoder that has stages of its own, none on its decoder's. None: it has not, and all lie with is_first."""
    ends_encoder: bool = False
    starts_decoder: bool = False
    """Whether it is the last of the encoder's own stages, or the first after them."""

    @property
    def embeds(self) -> bool:
        """Whether it holds an embedding: a decoder separate from its encoder has one again."""
        return self.is_first or self.starts_decoder


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and the layers of each virtual stage.

    stage_layers counts layers stage by stage in the order of the model: stage s lives on pipeline rank s % pp as its
    virtual stage s // pp. The embedding sits on the first stage, the head on the last.
    encoder_stage_layers counts those of an encoder where it has the first stages to itself, which then have no others; a decoder
    has the rest. Empty where an encoder lies with its whole decoder on a single stage, or there is none.
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
        """The first pipeline rank of a decoder whose encoder has the ranks before; 0 where it has none to itself."""
        return len(self.encoder_stage_layers)

    def chunks(self) -> Iterator[Chunk]:
        """All chunks in the order of the model."""
        first, stages = 0, self.pp * self.vpp
        for stage, layers in enumerate(self.stage_layers):
            chunk = Chunk(stage % self.pp, stage // self.pp, first, layers, stage == 0, stage == stages - 1)
            yield self._with_encoder(chunk) if self.encoder_stage_layers else chunk
            first += layers

    def _with_encoder(self, chunk: Chunk) -> Chunk:
        rank, split = chunk.pp_rank, self.split_rank
        start, stop = sum(self.encoder_stage_layers[:rank]), sum(self.encoder_stage_layers[: rank + 1])
        return chunk._replace(encoder=range(start, stop), ends_encoder=rank == split - 1, starts_decoder=rank == split)

    def __str__(self) -> str:
        sizes = [f"{name.upper()} {size}" for name, size in self.sizes().items() if size > 1 or name in ("tp", "pp")]
        layers = "+".join(map(str, self.stage_layers[self.split_rank :]))
        if self.encoder_stage_layers:
            return f"{', '.join(sizes)} (encoder {'+'.join(map(str, self.encoder_stage_layers))}, decoder {layers})"
        uneven = len(set(self.stage_layers)) > 1
        return ", ".join(sizes) + (f" (layers {layers})" if uneven else "")

    def sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "etp": self.etp}


@dataclass(frozen=True)
class LayerSplit:
    """How layers are shared out over pipeline stages, in any of Megatron's ways. At most one of them."""

    layers: tuple[int, ...] | None = None
    """Layers per stage, one number for each of the pp * vpp stages."""
    first: int | None = None
    last: int | None = None
    """Layers on the first / last pipeline rank; the rest is shared out evenly."""
    account_for_embedding: bool = False
    account_for_loss: bool = False
    """Count the embedding / the head as a layer when sharing out."""
    pattern: str | None = None
    """Megatron's pipeline_model_parallel_layout string, such as `Et*3|(tt|)*2,tL`."""
    split_rank: int | None = None
    """Of a model with an encoder and a decoder: how many stages, the first ones, are the encoder's."""

    def stages(self) -> int | None:
        """How many stages are listed; None where only a rule is given."""
        if self.layers is not None:
            return len(self.layers)
        return len(parse_pattern(self.pattern)) if self.pattern is not None else None


def divide(total: int, parts: int, what: str, over: str) -> int:
    """total / parts. Raises LayoutError naming the dimension, its value and the rank count."""
    if parts < 1 or total % parts:
        raise LayoutError(
            f"{what} = {total} can't be divided over {over} = {parts}; choose a size that divides {total}",
            code="layout-indivisible",
        )
    return total // parts


def split_layers(layers: int, pp: int, vpp: int, split: LayerSplit) -> tuple[int, ...]:
    """Layers of each of the pp * vpp stages in model order. Raises LayoutError when they don't add up."""
    for name, size in (("pipeline", pp), ("virtual pipeline", vpp)):
        if not 1 <= size <= RANKS:
            raise LayoutError(f"{name} parallel size is {size}; it has to be 1 or more, and at most {RANKS:,}")
    if vpp > 1 and pp == 1:
        raise LayoutError("virtual pipeline stages need a pipeline parallel size of 2 or more")
    ways = [
        split.layers,
        split.pattern,
        split.first is not None or split.last is not None,
        split.account_for_embedding or split.account_for_loss,
    ]
    if sum(bool(way) for way in ways) > 1:
        raise LayoutError(
            "give one layer split: a list of layers, first/last layers, a layout string, or the account-for options"
        )
    if split.layers is not None:
        return _explicit(layers, pp, vpp, split.layers)
    if split.pattern is not None:
        stages = parse_pattern(split.pattern)
        return _explicit(layers, pp, vpp, stages)
    if split.first is not None or split.last is not None:
        return _first_last(layers, pp, vpp, split.first, split.last)
    counted = layers + split.account_for_embedding + split.account_for_loss
    each = divide(
        counted,
        pp * vpp,
        "layers" if counted == layers else f"layers (with embedding and loss counted, {layers} +)",
        "pp x vpp",
    )
    stages_list = [each] * (pp * vpp)
    stages_list[0] -= split.account_for_embedding
    stages_list[-1] -= split.account_for_loss
    return tuple(stages_list)


def split_stacks(encoder: int, decoder: int, pp: int, split_rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(encoder_stage_layers, stage_layers) of a Layout whose first split_rank stages are the encoder's. Raises LayoutError."""
    if not 0 < split_rank < pp:
        raise LayoutError(
            f"pipeline split rank = {split_rank} with pp = {pp}: the encoder has the stages before it, the decoder the others, "
            "so that it has to be 1 or more, and less than pp"
        )
    stages = pp - split_rank
    ours = divide(encoder, split_rank, "layers of the encoder", "pipeline stages before the split rank")
    theirs = divide(decoder, stages, "layers of the decoder", "pipeline stages from the split rank on")
    return (ours,) * split_rank, (0,) * split_rank + (theirs,) * stages


def _explicit(layers: int, pp: int, vpp: int, stages: tuple[int, ...]) -> tuple[int, ...]:
    if len(stages) != pp * vpp:
        raise LayoutError(
            f"the layer split has {len(stages)} stages, but pp x vpp = {pp} x {vpp} = {pp * vpp}; choose sizes of as many"
        )
    if sum(stages) != layers or min(stages) < 0:
        raise LayoutError(
            f"the layer split {','.join(map(str, stages))} places {sum(stages)} layers, but the model has {layers}"
        )
    return stages


def _first_last(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> tuple[int, ...]:
    others = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if others < 0 or rest < 0 or (others == 0 and rest):
        raise LayoutError(
            f"first and last stages of {first} and {last} layers leave {rest} of {layers} layers for {others} other ranks"
        )
    middle = divide(rest, others, "layers between first and last stage", "remaining pipeline ranks") if others else 0
    ranks = [middle] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    per_chunk = [divide(count, vpp, f"layers of pipeline rank {rank}", "vpp") for rank, count in enumerate(ranks)]
    return tuple(per_chunk * vpp)


def uneven_splits(layers: int, pp: int, vpp: int) -> list[str]:
    """Options of `megaconv convert` that share out layers which pp x vpp doesn't divide, with splits that are nearly even.

    Empty where there are fewer layers than stages.
    """
    each, more = divmod(layers, pp * vpp)
    if pp < 2 or not each:
        return []
    # Where Megatron has a rule that fits, with as many layers on the last rank, which has the head too, as on others, or fewer.
    fitting = [
        last
        for last in range(vpp, layers // pp + 1, vpp)
        if (layers - last) % (pp - 1) == 0 and (layers - last) // (pp - 1) % vpp == 0
    ]
    rule = [f"--decoder-last-pipeline-num-layers {fitting[-1]}"] if fitting else []
    listed = [each + 1] * more + [each] * (pp * vpp - more)
    return [*rule, f"--layer-split {','.join(map(str, listed))}"]


def parse_pattern(pattern: str) -> tuple[int, ...]:
    """Layers per stage of a pipeline_model_parallel_layout string (megatron-core 0.13 and newer).

    `|` separates stages, `E` is the embedding, `t` a decoder layer, `m` an MTP layer, `L` the head; `x*3`
    and `(xy)*3` repeat; commas are for the eye. Raises LayoutError.
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
"""Of a layout string, written out or not: every layer and every stage is one character. A longer one isn't whole then, and refused."""


def _repeated(match: re.Match[str]) -> str:
    return match[1] * min(int(match[2][:9]), _LONGEST_PATTERN // max(1, len(match[1])))


def split_arguments(layout: Layout) -> dict[str, Any]:
    """The Megatron arguments that lead to this layout's stage_layers, those of a decoder with stages of its own."""
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
    if layout.vpp == 1 and 0 not in stages:  # Megatron wants a layer on each end and in the middle
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
    """Rows that Megatron gives the embedding: the next multiple of divisor * tp."""
    multiple = divisor * tp
    return -(-vocab // multiple) * multiple
