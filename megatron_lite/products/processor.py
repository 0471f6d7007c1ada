"""The instructions of this machine's processor that decide which product is quickest."""

import platform
from functools import cache

import torch


def _is_x86(device: str) -> bool:
    return device == "cpu" and platform.machine() in ("x86_64", "AMD64")


@cache
def lacks_bf16(device: str) -> bool:
    """Return whether the processor has no instructions for bf16, so that torch's product converts each number."""
    return _is_x86(device) and not torch.cpu._is_avx512_bf16_supported()


@cache
def has_tiles(device: str) -> bool:
    """Return whether the processor multiplies tiles of matrices in bf16 and int8 (AMX)."""
    return _is_x86(device) and torch.cpu._is_amx_tile_supported()


@cache
def has_int8_sums() -> bool:
    """Return whether the processor multiplies int8 and adds to int32 in one instruction (AVX-512 VNNI)."""
    return _is_x86("cpu") and torch.cpu._is_vnni_supported()
