"""A stand-in for Transformer Engine on the CPU, so that Megatron core's own wrappers of its layers run without a GPU.

Core's TELinear, TENorm, TEGroupedLinear … inherit from these classes. The classes have the parameters, the empty extra
states and the function of the real layers. They sum over tensor-parallel ranks as the real ones do, and have no backward.
Source: transformer_engine/pytorch/module and attention of Transformer Engine 2.
"""

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

VERSION = "2.13.0"


class _Layer(torch.nn.Module):
    """What core asks of any layer of the engine: its extra state, which is empty without FP8."""

    fp8 = fp8_calibration = False

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass


def _normalized(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, plus: float
) -> torch.Tensor:
    scale = weight + plus
    if bias is None:
        return torch.nn.functional.rms_norm(x, weight.shape, scale, eps)
    return torch.nn.functional.layer_norm(x, weight.shape, scale, bias, eps)


class LayerNorm(_Layer):
    """A norm by itself. zero_centered_gamma: the weight is stored without its 1."""

    has_bias = True

    def __init__(self, normalized_shape: int, eps: float, **settings: Any) -> None:
        super().__init__()
        self.eps, self.plus = eps, float(settings["zero_centered_gamma"])
        dtype = settings["params_dtype"]
        self.weight = torch.nn.Parameter(torch.zeros(normalized_shape, dtype=dtype))
        self.bias = None
        if self.has_bias:
            self.bias = torch.nn.Parameter(torch.zeros(normalized_shape, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalized(x, self.weight, self.bias, self.eps, self.plus)


class RMSNorm(LayerNorm):
    """The norm without a mean and a bias."""

    has_bias = False


class Linear(_Layer):
    """A matrix [out, in], column or row parallel, or whole on each rank."""

    def __init__(self, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__()
        self.parallel_mode, self.tp_size = settings["parallel_mode"], settings["tp_size"]
        self.group, self.use_bias = settings["tp_group"], settings["bias"]
        self.sequence_parallel = settings["sequence_parallel"] and self.tp_size > 1
        self.return_bias = settings["return_bias"]
        self.in_features = in_features // (self.tp_size if self.parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if self.parallel_mode == "column" else 1)
        dtype = settings["params_dtype"]
        shape = (self.out_features, self.in_features)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        if self.use_bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype))

    def forward(self, x: torch.Tensor, is_first_microbatch: Any = None) -> Any:
        if self.parallel_mode == "column" and self.sequence_parallel:
            parts = [torch.empty_like(x) for _ in range(self.tp_size)]
            dist.all_gather(parts, x.contiguous(), group=self.group)
            x = torch.cat(parts)
        found = torch.nn.functional.linear(x, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            dist.all_reduce(found, group=self.group)
            if self.sequence_parallel:
                found = found.chunk(self.tp_size)[dist.get_rank(self.group)]
        if self.return_bias:
            return found, self.bias
        return found + self.bias if self.use_bias else found


class LayerNormLinear(Linear):
    """A norm and the matrix after it."""

    def __init__(self, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(in_features, out_features, **settings)
        self.eps, self.plus = settings["eps"], float(settings["zero_centered_gamma"])
        dtype = settings["params_dtype"]
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))
        self.layer_norm_bias = None
        if settings["normalization"] == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))

    def forward(self, x: torch.Tensor, is_first_microbatch: Any = None) -> Any:
        norm = (self.layer_norm_weight, self.layer_norm_bias)
        return super().forward(_normalized(x, *norm, self.eps, self.plus))


class GroupedLinear(_Layer):
    """The matrices of a rank's experts."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, **settings: Any
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.tp_size = num_gemms, settings["bias"], 1
        self.in_features, self.out_features = in_features, out_features
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}
        for number in range(num_gemms):
            weight = torch.zeros(out_features, in_features, dtype=settings["params_dtype"])
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weight))

    def forward(self, x: torch.Tensor, m_splits: Any, is_first_microbatch: Any = None) -> Any:
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits
        parts = zip(x.split(sizes), self.parameters(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts])


class DotProductAttention(_Layer):
    """Attention. Tokens are [sequence, batch, heads, width], or packed: [tokens, heads, width]."""

    def __init__(self, num_attention_heads: int, kv_channels: Any, **settings: Any) -> None:
        super().__init__()
        self.scale, self.window = settings.get("softmax_scale"), settings.get("window_size")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        qkv_format: str = "sbhd", cu_seqlens_q: Any = None, attn_mask_type: str = "causal",
        core_attention_bias: torch.Tensor | None = None, **packing: Any,
    ) -> torch.Tensor:  # fmt: skip
        is_causal = "causal" in attn_mask_type
        masked = attention_mask if attn_mask_type in ("padding", "arbitrary") else None
        if qkv_format == "sbhd":
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            found = self._attend(q, k, v, is_causal, masked, core_attention_bias)
            return found.permute(2, 0, 1, 3).flatten(2)
        pieces = []
        for first, last in pairwise(cu_seqlens_q.tolist()):
            q, k, v = (x[first:last].transpose(0, 1)[None] for x in (query, key, value))
            pieces.append(self._attend(q, k, v, is_causal, None)[0].transpose(0, 1).flatten(1))
        return torch.cat(pieces)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, masked: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """q, k and v: [batch, heads, sequence, width]. masked: True where a token isn't seen. bias: added to the scores."""
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        scores = q @ k.transpose(-1, -2) * scale
        if bias is not None:
            scores = scores + bias
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        hidden = distance < 0 if is_causal else torch.zeros_like(distance, dtype=torch.bool)
        if is_causal and self.window:
            hidden |= distance > self.window[0]
        if masked is not None:
            hidden = hidden | masked
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


class _SplitAlongDim:
    """The split of a fused tensor, which core calls in place of torch's."""

    @staticmethod
    def apply(tensor: torch.Tensor, dim: int, sizes: Any) -> tuple[torch.Tensor, ...]:
        return torch.split(tensor, sizes, dim)


def get_cpu_offload_context(*given: Any, **settings: Any) -> tuple[Any, ...]:
    """Nothing is offloaded."""
    return nullcontext(), lambda tensor: tensor


PARTS = {
    "common.recipe": (),
    "pytorch": (
        LayerNorm, RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention
    ),
    "pytorch.attention": (_SplitAlongDim,),
    "pytorch.cpu_offload": (get_cpu_offload_context,),
    "pytorch.distributed": (),
    "pytorch.fp8": (),
}  # fmt: skip
"""Module of the package -> what stands in it. All other names are there too, and do nothing."""
