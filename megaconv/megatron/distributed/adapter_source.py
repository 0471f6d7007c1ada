"""The adapter of a Megatron-Bridge run: a distributed checkpoint of only the trained matrices.

    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight             [layers, rank, in]        LoRA: one A for q, k, v
    decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight            [layers, out, rank]       rows as the weight has them
    decoder.layers.self_attention.linear_qkv.adapter.weight_magnitude             [layers, out]             DoRA
    decoder.layers.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight                             CanonicalLoRA: one for each
    decoder.layers.mlp.linear_fc1.adapter.adapter_gate.linear_out.weight
    decoder.layers.mlp.experts.experts.linear_fc2.adapter.linear_in.weight        [layers, rank, in]        grouped experts: one for all
    decoder.layers.mlp.experts.experts.linear_fc2.adapter.linear_in.weight        [layers, experts, rank, in]     sequential: one for each

The last form is also that of grouped experts since Bridge 0.5.1, whether they share an adapter or have one for each. The one before
is that of earlier releases. run_config.yaml has alpha (adapter_settings.py). Source: lora.py, dora.py, dora_layers.py, canonical_lora.py,
utils.py and adapter_wrapper.py in megatron/bridge/peft, checkpointing.py in megatron/bridge/training, 0.3.1 to 0.6.2;
sharded_state_dict() of megatron/core/transformer/moe/experts.py.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from formats.chunked import ChunkedTensor
from formats.tensor import LazyTensor
from megaconv.adapters.sharing import with_shared
from megaconv.adapters.translation import (
    Pair,
    adaptable_weights,
    of_all_experts,
    open_pairs,
)
from megaconv.engine.sidecars import SIDECAR_DIRECTORY
from megaconv.errors import NotExpressible, TensorMismatch, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.distributed.adapter_fit import EXPERT_RANKS, require_dora_fits
from megaconv.megatron.distributed.adapter_rows import (
    is_halved,
    of_mamba,
    require_plain_rows,
    rows_of_b,
    rows_of_lengths,
)
from megaconv.megatron.distributed.adapter_settings import Settings, read_settings
from megaconv.megatron.distributed.keys import ADAPTER, EXTRA_STATE, model_tensors, unstack
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor
from megaconv.options import LoadOptions

_TENSOR = re.compile(
    r"(.+)\.adapter\.(?:(?:adapter_(\w+)\.)?linear_(in|out)\.weight|weight_(magnitude))"
)
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)experts\.(?!\d)(.+)")
_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_GROUPED = "grouped."


def open_adapter_source(
    version: Path, tensors: Mapping[str, ChunkedTensor], options: LoadOptions
) -> OpenedSource:
    """Open an adapter as a source.

    Raises CheckpointError for an adapter of another model, of another kind than LoRA, or without one of its matrices.
    """
    directory = options.config or version.parent / SIDECAR_DIRECTORY
    if not (directory / CONFIG_NAME).is_file():
        raise UsageError(
            f"{version}: is an adapter of Megatron-Bridge, which holds only what is added to a model; give --config with the "
            "Hugging Face directory of its base, and --saver peft",
            code="config-needed",
        )
    table, config = read_config(directory / CONFIG_NAME)
    settings = read_settings(version, options)
    pairs = list(_pairs(version, tensors, adaptable_weights(table, config, CORE), settings))
    if settings.dora:
        require_dora_fits(
            table, config, {name for pair in pairs for name in pair.weight.parts}, settings.tp
        )
    kind = "DoRA" if settings.dora else "LoRA"
    opened = open_pairs(
        config, pairs,
        base="", dropout=settings.dropout, source=f"core, torch_dist format of Megatron-Bridge, {kind}", where=str(version),
    )  # fmt: skip
    return opened if options.metadata_only else with_shared(opened, table)


def _pairs(
    version: Path,
    tensors: Mapping[str, ChunkedTensor],
    weights: Mapping[str, NativeTensor],
    settings: Settings,
) -> Iterator[Pair]:
    held = _parts_by_module(version, tensors, weights)
    for (module, kind), parts in held.items():
        adapter = f"adapter_{kind}" if kind else ""
        name = f"{module}{ADAPTER}{adapter}".rstrip(".")
        if not {"in", "out"} <= parts.keys():
            raise TensorMismatch(
                f"{version}: {name} has only one of its two matrices", code="missing-tensor"
            )
        if settings.dora != ("magnitude" in parts):
            has = "no" if settings.dora else "a"
            raise TensorMismatch(
                f"{version}: {name} has {has} weight_magnitude, "
                "but its settings require the opposite"
            )
        native = f"{module}.weight"
        weight = weights[_first_of(native)]
        if _first_of(native) != native:
            weight = of_all_experts(weight)
        ranks = settings.etp if weight.of_experts else settings.tp
        where = f"{version}: {name.replace(_GROUPED, '')}"
        if weight.of_experts and ranks > EXPERT_RANKS:
            raise NotExpressible(
                f"{where}: an adapter of experts at expert tensor-parallel size {ranks}; Megatron-Bridge computes something else "
                "with it than a merged model does; train it with expert_tensor_parallel_size=1"
            )
        require_plain_rows(weight, ranks, where)
        halved = is_halved(weight, kind, ranks, parts["out"], where)
        rows = rows_of_b(weight, kind, ranks, where, halved=halved)
        lengths = rows_of_lengths(weight, ranks, where) if settings.dora else None
        yield Pair(
            rows, parts["in"], parts["out"], settings.alpha, name, parts.get("magnitude"), lengths
        )


def _parts_by_module(
    version: Path, tensors: Mapping[str, ChunkedTensor], weights: Mapping[str, NativeTensor]
) -> dict[tuple[str, str], dict[str, LazyTensor]]:
    """(module, kind of adapter) -> the adapter's tensors: `in`, `out` and `magnitude`.

    Raises TensorMismatch for a tensor of anything that is not a linear layer, NotExpressible for one of a Mamba mixer.
    """
    model, _ = model_tensors(tensors)
    stacked = {
        _grouped(name, tensor): tensor for name, tensor in model.items() if EXTRA_STATE not in name
    }
    held: dict[tuple[str, str], dict[str, LazyTensor]] = {}
    for name, tensor in unstack(stacked).items():
        found = _TENSOR.fullmatch(name)
        if ".mixer.in_proj.adapter." in name:
            raise of_mamba(f"{version}: {name}")
        if found is None or _first_of(f"{found[1]}.weight") not in weights:
            raise TensorMismatch(
                f"{version}: {name} is no adapter of a linear layer of the model",
                code="unknown-tensor",
            )
        parts = held.setdefault((found[1], found[2] or ""), {})
        parts[found[3] or found[4]] = tensor
    return held


def _grouped(name: str, tensor: ChunkedTensor) -> str:
    """The name with another word for the second `experts` if the tensor has no axis for them."""
    found, stacked = _EXPERTS.fullmatch(name), _LAYER.match(name) is None
    if found is None or len(tensor.shape) != 2 + stacked:
        return name
    return f"{found[1]}{_GROUPED}{found[2]}"


def _first_of(native: str) -> str:
    """The name of the first expert's weight, for a tensor of all experts of a grouped layer."""
    return native.replace(f".experts.{_GROUPED}", ".experts.local_experts.0.")
