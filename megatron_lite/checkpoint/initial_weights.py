"""Initial weights: random numbers that depend on the seed and on a tensor's name, but not on the layout.

    matrices                       N(0, std); onto the residual stream N(0, std / sqrt(n)), n = 2 layers
    layers of one part             n = layers: a hybrid's layer is a mixer or an MLP, with one such matrix
    lambdas of DiffLlama           N(0, 0.1)
    numbers of xIELU               alpha_p, alpha_n: softplus of them is 0.8 and 0.3; beta 0.5, eps -1e-6
    norms, D, stored factors       1, or 0 where a norm multiplies with its weight + 1; biases 0
    A_log                          the logarithm of U(1, 16)
    dt_bias                        of Mamba 2 and Kimi delta attention: softplus of it is log-uniform from 0.001 to 0.1;
                                   of delta nets: 1
    short convolutions             U(-1 / sqrt(width), 1 / sqrt(width)), also their biases

Source: mamba_mixer.py and gated_delta_net.py of megatron-core 0.16.1, torch's Conv1d, transformers' XIELUActivation and
DiffLlamaConfig.
"""

import math
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.table import canonical_shapes
from megatron_lite.models.mixers.state_parameters import CONVOLUTION
from megatron_lite.models.rng import mix

Floats = NDArray[np.float32]
Draw = Callable[[Tensor, torch.Generator], Tensor]
"""(empty float32 [rows, cols], generator) -> the tensor with random numbers."""

_CONVOLUTION_BIAS = re.compile(r"\.mamba\.conv\.\w+\.bias$")
_CONVOLUTION = re.compile(r"\.(mamba|linear|kda)\.conv\.\w+\.weight$|\.short_conv\.conv\.weight$")
_ONTO_RESIDUAL = re.compile(r"\.(o|down|out)\.weight$")
_TIME_STEPS = 0.001, 0.1
_LEAST_TIME_STEP = 1e-4
_DECAYS = 1.0, 16.0
_LAMBDA_STD = 0.1
_XIELU = {
    "alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3)), "beta": 0.5, "eps": -1e-6,
}  # fmt: skip


def initial_weights(config: ModelConfig, std: float, seed: int) -> dict[str, LazyTensor]:
    """Return the initial tensors by canonical name."""
    shapes = canonical_shapes(family(config.family).rows, config)
    return {
        name: _initial(name, shape, config, std, mix(seed, *name.encode()))
        for name, shape in shapes.items()
    }


def _initial(name: str, shape: Shape, config: ModelConfig, std: float, seed: int) -> LazyTensor:
    """Return the initial value of one tensor."""
    value = _constant(name, config)
    if value is not None:
        return ConstantTensor(shape, value)
    return RandomTensor(shape, seed, _distribution(name, shape, config, std))


def _constant(name: str, config: ModelConfig) -> float | None:
    """Return the value of all elements, or None for random elements."""
    _, is_of_activation, number = name.rpartition(".mlp.act.")
    if is_of_activation:
        return _XIELU[number]
    if name.endswith((".mamba.D", ".linear.dt_bias", ".linear.out_norm.weight", "scale")):
        return 1.0
    if name.endswith((".mamba.dt_bias", ".kda.dt_bias")) or _CONVOLUTION_BIAS.search(name):
        return None
    if name.endswith("bias"):
        return 0.0
    if "norm" in name:
        return 0.0 if config.norm.zero_centered else 1.0
    return None


def _distribution(name: str, shape: Shape, config: ModelConfig, std: float) -> Draw:
    """Return the distribution of a tensor with random elements."""
    if name.endswith(".A_log"):
        return _log_of_decays
    if name.endswith(".dt_bias"):
        return _inverse_of_time_steps
    if ".attn.lambda_" in name:
        return normal(_LAMBDA_STD)
    if _CONVOLUTION.search(name):
        return uniform(1 / math.sqrt(shape[-1]))
    if _CONVOLUTION_BIAS.search(name):
        return uniform(1 / math.sqrt(CONVOLUTION))
    if _ONTO_RESIDUAL.search(name):
        return normal(std / math.sqrt(_onto_residual(config)))
    return normal(std)


def _onto_residual(config: ModelConfig) -> int:
    """Return the matrices onto the residual stream: two in each layer with a mixer and an MLP, else one."""
    single = all("none" in (kind.mixer, kind.mlp) for kind in config.layers)
    return config.layer_count if single else 2 * config.layer_count


def normal(std: float) -> Draw:
    """Return the distribution N(0, std)."""
    return lambda empty, generator: empty.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Draw:
    """Return the distribution U(-bound, bound)."""
    return lambda empty, generator: empty.uniform_(-bound, bound, generator=generator)


def _log_of_decays(empty: Tensor, generator: torch.Generator) -> Tensor:
    return empty.uniform_(*_DECAYS, generator=generator).log_()


def _inverse_of_time_steps(empty: Tensor, generator: torch.Generator) -> Tensor:
    """Return x with softplus(x) = a time step."""
    first, last = map(math.log, _TIME_STEPS)
    steps = empty.uniform_(first, last, generator=generator).exp_().clamp_(min=_LEAST_TIME_STEP)
    return steps + torch.log(-torch.expm1(-steps))


@dataclass(frozen=True)
class ConstantTensor:
    """A lazy tensor with one value."""

    shape: Shape
    value: float
    dtype: str = "float32"

    def read_into(self, box: Box, out: Bytes) -> None:
        """Write the rectangle's numbers into `out`, float32 bytes."""
        out.view(np.float32).fill(self.value)


@dataclass(frozen=True)
class RandomTensor:
    """A lazy tensor of random numbers. Each block of rows has its own seed, so any rectangle can be generated alone."""

    shape: Shape
    seed: int
    draw: Draw
    dtype: str = "float32"
    block: int = 256
    """Rows of one block."""

    def read_into(self, box: Box, out: Bytes) -> None:
        """Write the rectangle's numbers into `out`, float32 bytes. Blocks are drawn by as many threads as torch has."""
        found = out.view(np.float32)
        first_block, last_block = box.row0 // self.block, (box.row1 - 1) // self.block
        blocks = range(first_block, last_block + 1)
        threads = min(len(blocks), torch.get_num_threads())
        if threads <= 1:
            for index in blocks:
                self._write(index, box, found)
            return
        with ThreadPoolExecutor(threads) as pool:
            deque(pool.map(lambda index: self._write(index, box, found), blocks), maxlen=0)

    def _write(self, index: int, box: Box, found: Floats) -> None:
        """Write the part of a block that lies in the rectangle. found: the rectangle's numbers."""
        drawn = self._block(index)
        begin = index * self.block
        here, end = max(begin, box.row0), min(begin + len(drawn), box.row1)
        rows = drawn[here - begin : end - begin, box.col0 : box.col1]
        found[here - box.row0 : end - box.row0] = rows

    def _block(self, index: int) -> Floats:
        """Draw a whole block: float32 [rows of the block, all columns]."""
        rows, cols = matrix_shape(self.shape)
        begin = index * self.block
        count = min(self.block, rows - begin)
        generator = torch.Generator().manual_seed(mix(self.seed, index))
        drawn: Floats = self.draw(torch.empty(count, cols), generator).numpy()
        return drawn
