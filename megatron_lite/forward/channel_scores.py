"""Measures the part of channels in what a model computes. Channels of the smallest part can be left out of it.

a channel of an MLP           the norm of what it adds to the MLP's output over all tokens: that of its activations x that of its
                              column in the last matrix
a channel of hidden states    its share in the inputs of a sublayer, by root mean square, added up over all sublayers
                              (the activations of norms of Minitron, arXiv:2407.14679)

An expert sees its own tokens, and the router's weights are a part of its activations.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from formats.errors import CorruptCheckpoint
from megaconv.engine.kept_channels import WIDTHS, is_hidden, mlp_of
from megaconv.families import family
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
    """The scores of all channels."""

    scores: Mapping[str, Tensor]
    """`hidden`, or the canonical name of an MLP, such as `layers.3.mlp` or `layers.3.mlp.experts.7` -> float64 [channels]."""
    tokens: int


def measure(engine: Engine, passes: Sequence[Microbatch], fields: Collection[str]) -> ChannelScores:
    """Compute all layers of a model in one process. Raises CorruptCheckpoint for values that are not finite.

    fields: of the sizes whose channels are measured, such as `hidden` and `mlp.ffn`.
    """
    counted = Counted()
    watched = list(_watched(engine, counted, fields))
    tokens = counted.run_all(engine, passes)
    of_hidden = [each for each in watched if each.place == HIDDEN]
    with torch.inference_mode():
        scores = {HIDDEN: _of_hidden(of_hidden)} if of_hidden else {}
        scores |= {each.place: each.contributions() for each in watched if each.place != HIDDEN}
    for place, of_place in scores.items():
        _require_finite(place, of_place)
    return ChannelScores(scores, tokens)


class _Watch(Product):
    """Stands in place of a matrix's product, and adds up the squares of the inputs that count."""

    def __init__(
        self, name: str, place: str, matrix: nn.Module, counts: Callable[[], Tensor]
    ) -> None:
        """name: canonical. place: `hidden` for a matrix that reads hidden states, or the MLP whose last matrix this is.

        counts: returns bool [rows], the rows that count of the input.
        """
        self.name, self.place = name, place
        self.squares: Tensor | None = None
        """float64 [channels] on the CPU; None if no row was seen."""
        self._counts = counts
        self._weight: Tensor = matrix.get_parameter("weight")
        self._product: Product = getattr(matrix, "product")  # noqa: B009
        setattr(matrix, "product", self)  # noqa: B010

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])[self._counts().to(x.device)]
        if len(rows):
            squares = rows.float().square().sum(0).double().cpu()
            self.squares = squares if self.squares is None else self.squares + squares
        return self._product.linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def contributions(self) -> Tensor:
        """Return float64 [channels]: the norms of what the channels add to the product. Reads the matrix once.

        Of an expert that no token chooses, the norms of the columns alone.
        """
        columns = _column_squares(self._product, self._weight)
        return columns.sqrt() if self.squares is None else (columns * self.squares).sqrt()


def _column_squares(product: Product, weight: Tensor) -> Tensor:
    """Return float64 [in]: the sum of the squares of each column, on the CPU."""
    blocks: Iterable[Tensor] = [weight]
    if isinstance(product, StreamedProduct):
        blocks = (block for _, block in product.blocks())
    squares = [block.float().square().sum(0).double().cpu() for block in blocks]
    return torch.stack(squares).sum(0)


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
    """Watch all matrices that read hidden states or the channels of an MLP. fields: see measure."""
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
        field = HIDDEN if is_hidden(columns, engine.config) else WIDTHS.get(columns)
        if field in fields:
            place = HIDDEN if field == HIDDEN else mlp_of(name)
            assert place is not None
            counts = rows_of.get(path.rpartition(".")[0], counted.rows)
            yield _Watch(name, place, matrix, counts)


def _experts(network: nn.Module, counted: Counted) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Watch all mixtures. Yield (the module of an expert, the rows of it that count) for all experts."""
    for path, module in network.named_modules():
        if isinstance(module, Mixture):
            dispatch = _WatchedDispatch(module, counted)
            experts: Experts = module.experts
            for number in range(len(experts.local_experts)):
                yield f"{path}.experts.local_experts.{number}", partial(dispatch.rows_of, number)


def _of_hidden(watched: Sequence[_Watch]) -> Tensor:
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
            f"{name} computes NaN or infinite values, so channels can't be ranked; `megaconv inspect --stats` shows the tensors "
            "that have some"
        )
