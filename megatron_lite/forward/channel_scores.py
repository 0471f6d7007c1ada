"""Measures the part of channels in what a model computes. Channels of the smallest part can be left out of it.

a channel of an MLP           the norm of what it adds to the MLP's output over all tokens: that of its activations x that of its
                              column in the last matrix
a channel of hidden states    its share in the inputs of a sublayer, by root mean square, added up over all sublayers
                              (the activations of norms of Minitron, arXiv:2407.14679)

An expert sees its own tokens, and the router's weights are a part of its activations.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from formats.errors import CorruptCheckpoint
from megaconv.engine.kept_channels import WIDTHS, is_hidden, mlp_of
from megaconv.families import family
from megaconv.model.table import canonical_axes
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

    mlps: Mapping[str, Tensor]
    """float64 [channels] by the canonical names of MLPs, such as `layers.3.mlp` or `layers.3.mlp.experts.7`."""
    hidden: Tensor
    """float64 [channels]: of the hidden states."""
    tokens: int


def measure(engine: Engine, passes: Sequence[Microbatch]) -> ChannelScores:
    """Compute all layers of a model in one process. Raises CorruptCheckpoint for values that are not finite."""
    counted = Counted()
    watched = list(_watched(engine, counted))
    tokens = counted.run_all(engine, passes)
    with torch.inference_mode():
        mlps = {each.mlp: each.contributions() for each in watched if each.mlp}
        hidden = _of_hidden([each for each in watched if not each.mlp])
    for name, scores in mlps.items():
        _require_finite(name, scores)
    return ChannelScores(mlps, hidden, tokens)


@dataclass
class _Squares:
    """The sum of the squares of each channel."""

    sums: Tensor | None = None
    """float64 [channels] on the CPU; None if no row was seen."""
    rows: int = 0

    def add(self, rows: Tensor) -> None:
        """rows [rows, channels]."""
        squares = rows.float().square().sum(0).double().cpu()
        self.sums = squares if self.sums is None else self.sums + squares
        self.rows += len(rows)


class _Watch(Product):
    """Stands in place of a matrix's product, and adds up the squares of the inputs that count."""

    def __init__(
        self, name: str, mlp: str | None, matrix: nn.Module, counts: Callable[[], Tensor]
    ) -> None:
        """name: canonical. mlp: the MLP whose last matrix this is; None for a matrix that reads hidden states.

        counts: returns bool [rows], the rows that count of the input.
        """
        self.name, self.mlp = name, mlp
        self.seen = _Squares()
        self._counts = counts
        self._weight: Tensor = matrix.get_parameter("weight")
        self._product: Product = getattr(matrix, "product")  # noqa: B009
        setattr(matrix, "product", self)  # noqa: B010

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        counting = self._counts().to(x.device)
        if len(counting) == len(rows):
            rows = rows[counting]
        if len(rows):
            self.seen.add(rows)
        return self._product.linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def contributions(self) -> Tensor:
        """Return float64 [channels]: the norms of what the channels add to the product. Reads the matrix once.

        Of an expert that no token chooses, the norms of the columns alone.
        """
        columns = _column_squares(self._product, self._weight)
        sums = self.seen.sums
        return columns.sqrt() if sums is None else (columns * sums).sqrt()


def _column_squares(product: Product, weight: Tensor) -> Tensor:
    """Return float64 [in]: the sum of the squares of each column, on the CPU."""
    blocks: Iterable[Tensor] = [weight]
    if isinstance(product, StreamedProduct):
        blocks = (block for _, block in product.blocks())
    squares = [block.float().square().sum(0).double().cpu() for block in blocks]
    return torch.stack(squares).sum(0)


@dataclass
class _RowsOfExperts:
    """The rows of experts that count while a mixture computes."""

    counting: Sequence[Tensor] = field(default_factory=tuple)
    """bool [rows] of each expert."""


class _WatchedDispatch(CountedDispatch):
    """Notes which rows of experts count."""

    def __init__(self, mixture: Mixture, counted: Counted, rows: _RowsOfExperts) -> None:
        super().__init__(mixture, counted)
        self._rows = rows

    def compute(self, compute: Compute, rows: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
        self._rows.counting = torch.split(scales.flatten().ne(0), counts)
        return compute(rows, scales, counts)


def _watched(engine: Engine, counted: Counted) -> Iterator[_Watch]:
    """Watch all matrices that read hidden states or the channels of an MLP."""
    (network,) = engine.chunks
    axes = canonical_axes(family(engine.config.family).rows, engine.config)
    rows_of = dict(_experts(network, counted))

    def of_pass() -> Tensor:
        return counted.tokens.flatten()

    for info in engine.infos[0]:
        path, _, parameter = info.name.rpartition(".")
        matrix = network.get_submodule(path)
        name = next(iter(info.native.parts))
        if parameter != "weight" or not hasattr(matrix, "product"):
            continue
        columns = axes[name][-1]
        reads_mlp = columns in WIDTHS
        if reads_mlp or is_hidden(columns, engine.config):
            counts = rows_of.get(path.rpartition(".")[0], of_pass)
            yield _Watch(name, mlp_of(name) if reads_mlp else None, matrix, counts)


def _experts(network: nn.Module, counted: Counted) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Watch all mixtures. Yield (the module of an expert, the rows of it that count) for all experts."""

    def rows_of(found: _RowsOfExperts, number: int) -> Callable[[], Tensor]:
        return lambda: found.counting[number]

    for path, module in network.named_modules():
        if isinstance(module, Mixture):
            found = _RowsOfExperts()
            _WatchedDispatch(module, counted, found)
            experts: Experts = module.experts
            for number in range(len(experts.local_experts)):
                yield f"{path}.experts.local_experts.{number}", rows_of(found, number)


def _of_hidden(watched: Sequence[_Watch]) -> Tensor:
    """Return float64 [channels]: the sum of shares over all sublayers. Raises CorruptCheckpoint."""
    sublayers: dict[str, list[_Squares]] = {}
    for each in watched:
        sublayer = ".".join(each.name.split(".")[:3])
        if each.seen.sums is not None:
            sublayers.setdefault(sublayer, []).append(each.seen)
    shares: list[Tensor] = []
    for sublayer, seen in sublayers.items():
        sums = torch.stack([each.sums for each in seen if each.sums is not None]).sum(0)
        roots = sums.sqrt()
        _require_finite(sublayer, roots)
        shares.append(roots / roots.sum().clamp(min=torch.finfo(roots.dtype).tiny))
    return torch.stack(shares).sum(0)


def _require_finite(name: str, scores: Tensor) -> None:
    if not scores.isfinite().all():
        raise CorruptCheckpoint(
            f"{name} computes NaN or infinite values, so channels can't be ranked; `megaconv inspect --stats` shows the tensors "
            "that have some"
        )
