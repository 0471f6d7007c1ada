"""Embeddings on both the first and the last pipeline stage, which Megatron marks as `shared_embedding`.

    tied                   embedding.word_embeddings.weight on the first, output_layer.weight on the last
    MTP layers             embedding.word_embeddings.weight on both
    tied, MTP layers       as with MTP layers; the last stage has an unused output_layer.weight too

In a gradient buffer, each shared embedding begins a new bucket. Source: language_module.py, gpt_model.py and
param_and_grad_buffer.py of Megatron core 0.16.
"""

from collections.abc import Mapping

from megaconv.families import family
from megaconv.megatron.arguments.size_tensors import SizeTensors
from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor


def shared_names(config: ModelConfig, names: SizeTensors, stages: int) -> Mapping[int, str]:
    """The native name of the shared embedding by stage; empty if there is none."""
    if stages == 1 or not (config.tie_embeddings or config.mtp_layers):
        return {}
    return {
        0: names.embedding,
        stages - 1: names.embedding if config.mtp_layers else names.tied_copy,
    }


def shared_tensors(config: ModelConfig, stages: int) -> frozenset[str]:
    """The canonical names of shared embeddings."""
    if stages == 1:
        return frozenset()
    found: set[str] = set()
    for row in family(config.family).rows:
        is_head = config.tie_embeddings and any(row.copied_with("head"))
        copies_with_mtp = row.copied_with("mtp") if config.mtp_layers else ()
        if is_head or any("core" in copy.names for copy in copies_with_mtp):
            found.add(row.canonical)
    return frozenset(found)


def is_shared(native: NativeTensor, shared: frozenset[str], config: ModelConfig) -> bool:
    """True if a native tensor is a shared embedding. shared: the result of shared_tensors()."""
    idle = bool(config.mtp_layers) and native.copy is not None and not native.copy.used
    return not idle and not shared.isdisjoint(native.parts)
