"""Megatron checkpoints with an optimizer, read by torch.load, torch's DCP and a few lines for zarr: none of megaconv's own code.

Every reader gives the tensors by the name that a parameter has on the only rank of a model of Transformer Engine's layers, and by
slot: `weight`, `master`, `exp_avg`, `exp_avg_sq`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.megatron_oracle import read_rank_file

Tensors = dict[str, torch.Tensor]
Slots = dict[str, Tensors]
"""Tensors by slot and name."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTERS = ("fp32_param", "param")
_UNTRAINED = (".expert_bias", "_extra_state")
_EXPERT = re.compile(
    r"(.*\.mlp)\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d)\.weight|(linear_fc\d)\.weight(\d+))"
)
_PARTS = {
    "mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    "mixer.conv1d.weight": ("x", "B", "C"),
    "mixer.conv1d.bias": ("x", "B", "C"),
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
}
"""The parts that Megatron stores one by one in a distributed checkpoint. Source: mamba_mixer.py, gated_delta_net.py
of core 0.16."""


def version_of(path: Path) -> Path:
    (version,) = path.glob("iter_*")
    return version


def weights_of(state: Mapping[str, Any]) -> Tensors:
    return {
        name: tensor
        for name, tensor in state["model"].items()
        if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state")
    }


def trained(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of trained weights, in the order of the model."""
    return [name for name in weights if not name.endswith(_UNTRAINED)]


# Rank files of a model on one rank.


def read_single(path: Path) -> Slots:
    """The optimizer without the distributed one's buffers: matrices are the first group, vectors the second."""
    state = read_rank_file(version_of(path) / "mp_rank_00" / "model_optim_rng.pt")
    weights = weights_of(state)
    names = trained(weights)
    order = [name for name in names if weights[name].dim() > 1] + [
        name for name in names if weights[name].dim() == 1
    ]
    optimizer = state["optimizer"]
    inner = optimizer.get("optimizer", optimizer)
    listed = [index for group in inner["param_groups"] for index in group["params"]]
    assert len(listed) == len(order)
    slots: Slots = {slot: {} for slot in MOMENTS}
    for name, index in zip(order, listed, strict=True):
        for slot in MOMENTS:
            slots[slot][name] = inner["state"][index][slot]
    if "fp32_from_fp16_params" in optimizer:
        copies = [copy for group in optimizer["fp32_from_fp16_params"] for copy in group]
        slots["master"] = dict(zip(order, copies, strict=True))
    return slots | {"weight": weights}


def read_buffers(path: Path) -> Slots:
    """The distributed optimizer: one buffer, filled from its back to its front, each parameter at a multiple of 64."""
    folder = version_of(path) / "mp_rank_00"
    weights = weights_of(read_rank_file(folder / "model_optim_rng.pt"))
    flat = read_rank_file(folder / "distrib_optim.pt")
    ((_, entry),) = flat[0].items()
    places, position = dict[str, int](), 0
    for name in reversed(trained(weights)):
        places[name] = -(-position // 64) * 64
        position = places[name] + weights[name].numel()
    assert entry["numel_unpadded"] == position
    slots: Slots = {"weight": weights}
    for slot, word in (("master", "param"), *zip(MOMENTS, MOMENTS, strict=True)):
        slots[slot] = {
            name: entry[word][start : start + weights[name].numel()].reshape(weights[name].shape)
            for name, start in places.items()
        }
    return slots


# Distributed checkpoints, of any layout.


def read_torch_dist(path: Path, names: Iterable[str]) -> Slots:
    """The optimizer's tensors of a checkpoint, read by torch's own DCP."""
    reader = dcp.FileSystemReader(version_of(path))
    metadata = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(held.size, dtype=held.properties.dtype)
        for key, held in metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return _by_slot(state, names)


def read_zarr(path: Path, names: Iterable[str]) -> Slots:
    """Arrays whose chunks are stored as they are."""
    arrays = {file.parent.name: _array(file.parent) for file in version_of(path).glob("*/.zarray")}
    return _by_slot(arrays, names)


def _array(folder: Path) -> torch.Tensor:
    described = json.loads((folder / ".zarray").read_text())
    dtypes = {
        "bfloat16": torch.bfloat16,
        "<f4": torch.float32,
        "<f2": torch.float16,
        "|u1": torch.uint8,
        "<i8": torch.int64,
    }
    dtype, shape, chunks = dtypes[described["dtype"]], described["shape"], described["chunks"]
    assert described["compressor"] is None
    assert described["order"] == "C"
    whole = torch.zeros(shape, dtype=dtype)
    counts = [-(-size // step) for size, step in zip(shape, chunks, strict=True)]
    for place in product(*map(range, counts)):
        file = folder / (".".join(map(str, place)) or "0")
        if prod(shape):
            chunk = torch.frombuffer(bytearray(file.read_bytes()), dtype=dtype).reshape(chunks)
            corner = [at * step for at, step in zip(place, chunks, strict=True)]
            ends = [
                min(start + step, size)
                for start, step, size in zip(corner, chunks, shape, strict=True)
            ]
            where = tuple(slice(start, end) for start, end in zip(corner, ends, strict=True))
            whole[where] = chunk[
                tuple(slice(0, end - start) for start, end in zip(corner, ends, strict=True))
            ]
    return whole


def _by_slot(arrays: Mapping[str, torch.Tensor], names: Iterable[str]) -> Slots:
    slots: Slots = {"weight": {}, "master": {}, **{slot: {} for slot in MOMENTS}}
    words = {
        "weight": ("",),
        "master": _prefixes(_MASTERS),
        **{slot: _prefixes((slot,)) for slot in MOMENTS},
    }
    for name in names:
        for slot, prefixes in words.items():
            found = [_parameter(arrays, prefix, name) for prefix in prefixes]
            held = [tensor for tensor in found if tensor is not None]
            assert len(held) < 2, f"{slot} of {name} is there twice"
            if held:
                slots[slot][name] = held[0]
    return {slot: held for slot, held in slots.items() if held}


def _prefixes(words: Iterable[str]) -> tuple[str, ...]:
    chains = ("", "chained_0.", "chained_1.")
    return tuple(f"{chain}optimizer.state.{word}." for chain, word in product(chains, words))


def _parameter(arrays: Mapping[str, torch.Tensor], prefix: str, name: str) -> torch.Tensor | None:
    """A parameter by the key that it has alone, or as one of the layers and experts that are stacked."""
    expert = _EXPERT.fullmatch(name)
    index: list[int] = []
    if expert:
        index = [int(expert[2] or expert[5])]
        name = f"{expert[1]}.experts.experts.{expert[3] or expert[4]}.weight"
    stacked = re.sub(r"^decoder\.layers\.\d+\.", "decoder.layers.", name)
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    for key, place in ((name, index), (stacked, [int(layer[1]), *index] if layer else index)):
        tensor = _whole(arrays, prefix + key)
        if tensor is not None:
            return tensor[tuple(place)] if place else tensor
    return None


def _whole(arrays: Mapping[str, torch.Tensor], key: str) -> torch.Tensor | None:
    if key in arrays:
        return arrays[key]
    parts = next((parts for end, parts in _PARTS.items() if key.endswith(end)), ())
    if parts and f"{key}.{parts[0]}" in arrays:
        return torch.cat([arrays[f"{key}.{part}"] for part in parts])
    return None
