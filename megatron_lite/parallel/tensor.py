"""Tensor parallelism: matrices sharded by columns or rows, and an embedding sharded by vocabulary.

Activations are [sequence, batch, width]. With sequence parallelism, each tensor rank holds 1/tp of the sequence between
a row-sharded matrix and the next column-sharded matrix. A reduce-scatter then replaces the all-reduce after the
row-sharded matrix. The column-sharded matrix gathers its input, and gathers it again in the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.parallel import comm
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.products.product import PLAIN, Product
from megatron_lite.products.wide import wide


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share each matrix, and this rank among them."""

    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence: bool = False
    """True with sequence parallelism."""

    def own_part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the first axis with sequence parallelism, else all of x."""
        return x.chunk(self.size)[self.rank] if self.sequence else x


class _ColumnLinear(torch.autograd.Function):
    """x W'. The gradient of x is summed over the ranks while the gradient of W is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sequence: bool,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.sequence = sequence
        ctx.has_bias = bias is not None
        ctx.product = product
        ctx.gradient_sum = product.gradient_sum(weight)
        return product.forward(comm.gathered(x, group) if sequence else x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        later = comm.overlapping()
        whole = x
        if ctx.sequence:
            whole = x.new_empty(grad.shape[0], *x.shape[1:])
            gathering = comm.all_gather(whole, x.contiguous(), ctx.group, later=later)
        dx = ctx.product.of_input(grad, weight)
        if ctx.sequence:
            comm.wait(gathering)
            part = torch.empty_like(x)
            summing = comm.reduce_scatter(part, dx, ctx.group, later=later)
        else:
            part, summing = dx, comm.all_reduce(dx, ctx.group, later=later)
        _, trained, biased, *_ = ctx.needs_input_grad
        product, total = ctx.product, ctx.gradient_sum
        dw = product.weight_gradient(grad, whole, weight, total) if trained else None
        db = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias and biased else None
        comm.wait(summing)
        return part, dw, db, None, None, None


class _RowLinear(torch.autograd.Function):
    """x W', summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, sequence: bool, product: Product
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence, ctx.product = group, sequence, product
        ctx.gradient_sum = product.gradient_sum(weight)
        y = product.forward(x, weight)
        if sequence:
            return comm.scattered(y, group)
        comm.all_reduce(y, group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence:
            grad = comm.gathered(grad, ctx.group)
        product, trained = ctx.product, ctx.needs_input_grad[1]
        dw = product.weight_gradient(grad, x, weight, ctx.gradient_sum) if trained else None
        return product.of_input(grad, weight), dw, None, None, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorGroup, product: Product = PLAIN
) -> Tensor:
    """x [sequence (/ tp), batch, in], weight [out / tp, in] -> [sequence, batch, out / tp]."""
    if ranks.group is None:
        return product.linear(x, weight, bias)
    y: Tensor = _ColumnLinear.apply(x, weight, bias, ranks.group, ranks.sequence, product)  # type: ignore[no-untyped-call]
    return y


class _JoinedColumns(torch.autograd.Function):
    """The whole output of a column-sharded matrix; under sequence parallelism for this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        assert ranks.group is not None
        parts = comm.gathered(x.unsqueeze(0), ranks.group)
        whole = parts.permute(1, 2, 0, 3).flatten(2)
        # A view of the own tokens would keep the memory of all tokens.
        return ranks.own_part(whole).clone() if ranks.sequence else whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ranks = ctx.ranks
        whole = comm.gathered(grad, ranks.group) if ranks.sequence else grad
        return whole.chunk(ranks.size, -1)[ranks.rank].contiguous(), None


def joined_columns(x: Tensor, ranks: TensorGroup) -> Tensor:
    """x [sequence, batch, width / tp] -> [sequence (/ tp), batch, width]."""
    if ranks.group is None:
        return x
    whole: Tensor = _JoinedColumns.apply(x, ranks)  # type: ignore[no-untyped-call]
    return whole


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorGroup, product: Product = PLAIN
) -> Tensor:
    """x [sequence, batch, in / tp], weight [out, in / tp], bias [out] -> [sequence (/ tp), batch, out]."""
    if ranks.group is None:
        return product.linear(x, weight, bias)
    y: Tensor = _RowLinear.apply(x, weight, ranks.group, ranks.sequence, product)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


Made = Callable[[Tensor], Tensor]


class NormOptions(NamedTuple):
    """The options that all norms of a model share."""

    epsilon: float
    centers: bool
    """True for LayerNorm, False for RMSNorm."""
    zero_centered: bool = False
    """True if a norm multiplies with its weight + 1."""
    with_weight: bool = True
    with_bias: bool = True
    """True if a LayerNorm has biases."""

    def parameters(self, width: int) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """Return an uninitialized weight and bias; None for what the norm doesn't have."""
        has_bias = self.with_weight and self.with_bias and self.centers
        weight = nn.Parameter(torch.empty(width)) if self.with_weight else None
        return weight, nn.Parameter(torch.empty(width)) if has_bias else None

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalize the last axis of x, then multiply with the weight and add the bias."""
        if self.zero_centered and weight is not None:
            weight = weight + 1
        if self.centers:
            return F.layer_norm(x, (x.shape[-1],), weight, bias, self.epsilon)
        return rms_normalize(x, weight, self.epsilon)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis."""

    def __init__(self, width: int, options: NormOptions, kind: Kind = Kind.OF_TOKENS) -> None:
        super().__init__()
        self.options = options
        self.kinds = dict.fromkeys(("weight", "bias"), kind)
        self.weight, self.bias = options.parameters(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.options.apply(x, self.weight, self.bias)


FEW_ROWS = 16
"""Up to this number of rows PyTorch's norm is faster on a CPU, because it is one call. _RMSNorm is faster for more rows."""


def rms_normalize(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMSNorm."""
    # The choice must not depend on grad mode: activation recomputation has to give the same bits.
    few = x.numel() <= FEW_ROWS * x.shape[-1]
    if x.is_cuda or few or weight is None or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """RMSNorm for a CPU, where PyTorch's norm keeps two fp32 copies of x for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        precise = wide(x)
        norm = torch.linalg.vector_norm(precise, dim=-1, keepdim=True)
        inverse = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(epsilon))
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (precise * inverse).mul_(weight).to(x.dtype)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        rows = wide(x.reshape(-1, width))
        grads = wide(grad.reshape(-1, width))
        factors = wide(weight)
        each_inverse = inverse.view(-1)
        products = grads * rows
        dweight = torch.mv(products.t(), each_inverse)
        along = torch.mv(products, factors)
        along.mul_(each_inverse.pow(3)).div_(width)
        dx = grads * factors
        dx.mul_(each_inverse.unsqueeze(-1))
        dx.addcmul_(rows, along.unsqueeze(-1), value=-1)
        return dx.view_as(x).to(x.dtype), dweight.to(weight.dtype), None


class Matrix(nn.Module):
    """A module with a matrix, which may have an adapter and products of its own."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.adapter: nn.Module | None = None
        self.product: Product = PLAIN

    def adapted(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y, the output for x, as the adapter changes it."""
        if self.adapter is None:
            return y
        changed: Tensor = self.adapter(x, y, self)
        return changed


class NormColumnLinear(Matrix):
    """A norm followed by a column-sharded matrix. Parameters are named as in Transformer Engine's fused layer."""

    kinds: ClassVar = {
        "layer_norm_weight": Kind.OF_TOKENS, "layer_norm_bias": Kind.OF_TOKENS, "weight": Kind.SHARDED, "bias": Kind.SHARDED,
    }  # fmt: skip

    def __init__(
        self,
        width: int,
        out: int,
        norm: NormOptions,
        ranks: TensorGroup,
        *,
        bias: bool,
        keep: "Keep",
    ) -> None:
        """out: this rank's rows."""
        super().__init__()
        self.norm, self.ranks, self.keep = norm, ranks, keep
        self.layer_norm_weight, self.layer_norm_bias = norm.parameters(width)
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        def norm(x: Tensor) -> Tensor:
            return self.norm.apply(x, self.layer_norm_weight, self.layer_norm_bias)

        def use(normed: Tensor) -> Tensor:
            y = column_linear(normed, self.weight, self.bias, self.ranks, self.product)
            return self.adapted(y, normed)

        return self.keep(norm, x, use)


class ColumnLinear(Matrix):
    """A column-sharded matrix without a norm."""

    kinds: ClassVar = {"weight": Kind.SHARDED, "bias": Kind.SHARDED}

    def __init__(self, width: int, out: int, ranks: TensorGroup, *, bias: bool = False) -> None:
        """out: this rank's rows."""
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = column_linear(x, self.weight, self.bias, self.ranks, self.product)
        return self.adapted(y, x)


class RowLinear(Matrix):
    """A row-sharded matrix. Its bias is added once, after the sum over the ranks; a norm of the sum may follow."""

    kinds: ClassVar = {"weight": Kind.SHARDED, "bias": Kind.OF_TOKENS}

    def __init__(
        self,
        width: int,
        out: int,
        ranks: TensorGroup,
        *,
        bias: bool,
        norm_after: NormOptions | None = None,
    ) -> None:
        """width: this rank's columns."""
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.post_layernorm = None if norm_after is None else Norm(out, norm_after)

    def forward(self, x: Tensor) -> Tensor:
        product = row_linear(x, self.weight, self.bias, self.ranks, self.product)
        y = self.adapted(product, x)
        return y if self.post_layernorm is None else self.post_layernorm(y)


Keep = Callable[[Made, Tensor, Made], Tensor]
"""keep(make, x, use) -> use(make(x)). It decides whether make(x) is kept for the backward pass or computed again."""


class VocabEmbedding(nn.Module):
    """A table whose rows are sharded over the ranks."""

    kinds: ClassVar = {"weight": Kind.VOCABULARY}
    heads_share: ClassVar = True
    """True if a tied head uses this table."""

    def __init__(self, rows: int, width: int, ranks: TensorGroup) -> None:
        """rows: of this rank."""
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [sequence, batch] -> [sequence (/ tp), batch, width]."""
        if self.ranks.group is None:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.ranks.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return comm.sum_over(found, self.ranks.group, scatter=self.ranks.sequence)
