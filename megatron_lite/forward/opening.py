"""Opens a model whose weights are read when they are used: in one process, without memory for parameters."""

from collections.abc import Mapping

import torch

from formats.tensor import LazyTensor
from megaconv.errors import NotExpressible, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Layout
from megatron_lite.engine import Engine
from megatron_lite.forward.streaming import stream_weights
from megatron_lite.parallel.grid import Grid
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import check_length

LARGEST_BUFFER = 64 << 20
"""Bytes of a block of rows. A product with a larger block is no faster."""


def buffer_bytes(max_memory: int) -> int:
    """Return the bytes of a block of rows for a limit of memory."""
    return min(LARGEST_BUFFER, max_memory // 8)


def open_streamed(
    place: str,
    config: ModelConfig,
    tensors: Mapping[str, LazyTensor],
    dtype: str,
    device: torch.device,
    max_memory: int,
    length: int,
) -> Engine:
    """Return an engine for inference. place: of the checkpoint, for messages. dtype: torch's name, to compute in.

    max_memory: bytes, of which blocks of weights take a part. length: tokens of the longest row.
    Raises NotExpressible for a model that the trainer can't compute, TensorMismatch for other tensors than the model's.
    """
    if config.family == "retro":
        raise NotExpressible(
            f"{place}: a retro computes with retrieved texts; `megatron-lite generate --retro-neighbors` reads them"
        )
    layout = Layout(stage_layers=(config.layer_count,))
    options = ModelOptions(dtype=dtype, trains=False, vocab_divisor=1)
    check_length(config, layout, options, length)
    grid = Grid(layout, dp=1, rank=0, device=device)
    try:
        engine = Engine(changed(config, {"dtype": dtype}), grid, options, None, allocates=False)
    except NotExpressible as error:
        raise NotExpressible(f"{place}: {error}") from error
    stream_weights(engine, tensors, buffer_bytes(max_memory))
    return engine


def torch_dtype(word: str) -> str:
    """Return torch's name of a dtype: fp32 -> float32. Raises UsageError."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    if word not in names:
        raise UsageError(f"--dtype {word}: choose one of {', '.join(names)}")
    return names[word]
