"""Converts values of a checkpoint that are not its tensors to the types that the writer of torch files accepts."""

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from formats.pickle_records import TorchDtype
from formats.pickle_writer import Constant


def plain(value: Any) -> Any:
    """Convert values to the types that the writer of torch files accepts: small tensors with their bytes, dtypes by name."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return Constant(tuple(value.shape), dtype_name(value.dtype), content)
    if isinstance(value, torch.dtype):
        return TorchDtype(dtype_name(value))
    if isinstance(value, Namespace):
        return Namespace(**plain(vars(value)))
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
