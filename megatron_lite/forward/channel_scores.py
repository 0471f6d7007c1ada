"""Measures the part of channels and heads in what a model computes. Those of the smallest part can be left out of it.

a channel of an MLP           the norm of what it adds to the MLP's output over all tokens: that of its activations x that of its
                              column in the last matrix
a head of a mixer             the norm of what it adds to the mixer's output over all tokens
a channel of hidden states    its share in the inputs of a sublayer, by root mean square, added up over all sublayers
                              (the activations of norms of Minitron, arXiv:2407.14679)

An expert sees its own tokens, and the router's weights are a part of its activations.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from formats.errors import CorruptCheckpoint
from megaconv.engine.kept_places import HEADS, is_hidden, place_of
from megaconv.families import family
from megaconv.model.described import value_of
from megaconv.model.table import canonical_axes
from megaconv.options.kept_channels import HIDDEN
from megatron_lite.engine import Engine
from megatron_lite.forward.counted_passes import Counted, CountedDispatch
from megatron_lite.forward.matrices import StreamedProduct
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.moe.dispatch import Compute
from megatron_lite.models.moe.experts import Experts, Mixture
from megatron_lite.products.product import Product


@dataclass(frozen=True)
class ChannelScores:
    """The scores of all channels and heads."""

    scores: Mapping[str, Tensor]
    """`hidden`, or the canonical name of an MLP or a mixer, such as `layers.3.mlp` or `layers.3.attn` -> float64 [channels]."""
    tokens: int


def measure(engine: Engine, passes: Sequence[Microbatch], fields: Collection[str]) -> ChannelScores:
    """Compute all layers of a model in one process. Raises CorruptCheckpoint for values that are not finite.

    fields: of the sizes whose channels and heads are measured, such as `hidden` and `attention.heads`.
    """
    counted = Counted()
    watched = list(_watched(engine, counted, fields))
    tokens = counted.run_all(engine, passes)
    of_hidden = [each for each in watched if isinstance(each, _Channels) and each.place == HIDDEN]
    with torch.inference_mode():
        scores = {HIDDEN: _of_hidden(of_hidden)} if of_hidden else {}
        scores |= {each.place: each.norms() for each in watched if each.place != HIDDEN}
    for place, of_place in scores.items():
        _require_finite(place, of_place)
    return ChannelScores(scores, tokens)


class _Watch(Product):
    """Stands in place of a matrix's product, and sees the inputs that count."""

    def __init__(
        self, name: str, place: str, matrix: nn.Module, counts: Callable[[], Tensor]
    ) -> None:
        """name: canonical. place: `hidden` for a matrix that reads hidden states, or the MLP or mixer whose last matrix this is.

        counts: returns bool [rows], the rows that count of the input.
        """
        self.name, self.place = name, place
        self._counts = counts
        self._weight: Tensor = matrix.get_parameter("weight")
        self._product: Product = getattr(matrix, "product")  # noqa: B009
        setattr(matrix, "product", self)  # noqa: B010

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])[self._counts().to(x.device)]
        if len(rows):
            self.see(rows.float())
        return self._product.linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    @abstractmethod
    def see(self, rows: Tensor) -> None:
        """See the rows that count of an input, float32 [rows, channels]."""

    @abstractmethod
    def norms(self) -> Tensor:
        """Return float64 [channels] or [heads]: the norms of what these add to the product. Reads the matrix once at most."""

    def blocks(self) -> Iterable[Tensor]:
        """Return the matrix as blocks of rows, float32 [rows, channels]. Reads it once."""
        if isinstance(self._product, StreamedProduct):
            return (block.float() for _, block in self._product.blocks())
        return [self._weight.float()]


class _Channels(_Watch):
    squares: Tensor | None = None
    """float64 [channels] on the CPU: the sum of the squares of all inputs; None if no row was seen."""

    def see(self, rows: Tensor) -> None:
        squares = rows.square().sum(0).double().cpu()
        self.squares = squares if self.squares is None else self.squares + squares

    def norms(self) -> Tensor:
        """See _Watch. If no token chooses an expert, return the norms of its columns alone."""
        of_blocks = [block.square().sum(0).double().cpu() for block in self.blocks()]
        columns = torch.stack(of_blocks).sum(0)
        return columns.sqrt() if self.squares is None else (columns * self.squares).sqrt()


class _Heads(_Watch):
    def __init__(
        self,
        name: str,
        place: str,
        matrix: nn.Module,
        counts: Callable[[], Tensor],
        heads: int,
    ) -> None:
        super().__init__(name, place, matrix, counts)
        self._squares = torch.zeros(heads, dtype=torch.float64)

    def see(self, rows: Tensor) -> None:
        """Add the squares of what each head adds to the output. Reads the matrix once, and needs no output of each head."""
        heads = len(self._squares)
        of_heads = rows.reshape(len(rows), heads, -1).transpose(0, 1)
        products = of_heads.transpose(1, 2) @ of_heads
        for block in self.blocks():
            weight = block.reshape(len(block), heads, -1).transpose(0, 1)
            self._squares += ((weight @ products) * weight).sum((1, 2)).double().cpu()

    def norms(self) -> Tensor:
        return self._squares.clamp(min=0).sqrt()


class _WatchedDispatch(CountedDispatch):
    """Notes which rows of experts count."""

    counting: Sequence[Tensor] = ()
    """bool [rows] of each expert, while the mixture computes."""

    def compute(self, compute: Compute, rows: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
        self.counting = torch.split(scales.flatten().ne(0), counts)
        return compute(rows, scales, counts)

    def rows_of(self, expert: int) -> Tensor:
        """Return bool [rows]: those of an expert that count."""
        return self.counting[expert]


def _watched(engine: Engine, counted: Counted, fields: Collection[str]) -> Iterator[_Watch]:
    """Watch all matrices that read hidden states, the channels of an MLP or the heads of a mixer. fields: see measure."""
    (network,) = engine.chunks
    axes = canonical_axes(family(engine.config.family).rows, engine.config)
    rows_of = dict(_experts(network, counted))
    for info in engine.infos[0]:
        path, _, parameter = info.name.rpartition(".")
        matrix = network.get_submodule(path)
        name = next(iter(info.native.parts))
        if parameter != "weight" or not hasattr(matrix, "product"):
            continue
        columns = axes[name][-1]
        counts = rows_of.get(path.rpartition(".")[0], counted.rows)
        place, field = HIDDEN, HIDDEN
        if not is_hidden(columns, engine.config):
            place, field = place_of(name, columns) or ("", "")
        if field in HEADS and field in fields:
            yield _Heads(name, place, matrix, counts, value_of(engine.config, field))
        elif field in fields:
            yield _Channels(name, place, matrix, counts)


def _experts(network: nn.Module, counted: Counted) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Watch all mixtures. Yield (the module of an expert, the rows of it that count) for all experts."""
    for path, module in network.named_modules():
        if isinstance(module, Mixture):
            dispatch = _WatchedDispatch(module, counted)
            experts: Experts = module.experts
            for number in range(len(experts.local_experts)):
                yield f"{path}.experts.local_experts.{number}", partial(dispatch.rows_of, number)


def _of_hidden(watched: Sequence[_Channels]) -> Tensor:
    """Return float64 [channels]: the sum of shares over all sublayers. Raises CorruptCheckpoint."""
    sublayers: dict[str, list[Tensor]] = {}
    for each in watched:
        sublayer = ".".join(each.name.split(".")[:3])
        if each.squares is not None:
            sublayers.setdefault(sublayer, []).append(each.squares)
    shares: list[Tensor] = []
    for sublayer, squares in sublayers.items():
        roots = torch.stack(squares).sum(0).sqrt()
        _require_finite(sublayer, roots)
        shares.append(roots / roots.sum().clamp(min=torch.finfo(roots.dtype).tiny))
    return torch.stack(shares).sum(0)


def _require_finite(name: str, scores: Tensor) -> None:
    if not scores.isfinite().all():
        raise CorruptCheckpoint(
            f"{name} computes NaN or infinite values, so its parts can't be ranked; `megaconv inspect --stats` shows the tensors "
            "that have some"
        )
