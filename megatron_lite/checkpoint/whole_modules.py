"""Modules that are trained and stored whole beside adapters (peft's modules_to_save), in the files of an adapter.

The head of a reward model always is one, under the name `score.weight` [labels, hidden]. Embedding and head of a language
model are two if the run trains them. A tied model's tensor is stored under both names, as by peft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.tensor import LazyTensor, read_tensor
from formats.wording import listing
from megaconv.adapters.low_rank import FLOATS
from megaconv.adapters.peft_files import Adapter
from megaconv.adapters.targets import replaced_tensors
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.families import family
from megaconv.huggingface.stored_names import name_in_class
from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor
from megatron_lite.checkpoint.held_tensor import HeldTensor
from megatron_lite.models.lora.whole import MODULES, modules_of_tensors, whole_tensors

HEAD_OF_SCORES = "score.weight"
"""The head of scores, by its canonical name and in peft's files."""


def stored_wholes(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the whole tensors of an adapter by their names in transformers. tensors: by canonical name."""
    found = {HEAD_OF_SCORES: tensors[HEAD_OF_SCORES]} if config.has("scores") else {}
    for name, native in whole_tensors(config).items():
        (canonical,) = native.parts
        if canonical in tensors:
            stored = name_in_class(family(config.family), name)
            found[stored] = tensors[canonical].view(native.shape)
    return found


def fields_of_wholes(stored: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Any]:
    """Return the fields of adapter_config.json for whole tensors. stored: of stored_wholes."""
    if not stored:
        return {}
    modules = {name.rpartition(".")[0].rpartition(".")[2] for name in stored}
    fields: dict[str, Any] = {"modules_to_save": sorted(modules)}
    if config.has("scores"):
        fields["task_type"] = "SEQ_CLS"
    if config.tie_embeddings and len(modules) > 1:
        fields["ensure_weight_tying"] = True
    return fields


def read_wholes(
    adapter: Adapter, config: ModelConfig, directory: Path
) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Return (the whole tensors of an adapter by canonical name, Megatron core's paths of their modules but that of scores).

    Raises NotExpressible for a tensor that can't be trained beside adapters, TensorMismatch for one of another shape.
    """
    head = _head(adapter.replaced, config, directory)
    others = {name: tensor for name, tensor in adapter.replaced.items() if name not in head}
    if not others:
        return head, ()
    if config.tie_embeddings and not adapter.config.keeps_tie:
        raise NotExpressible(
            f"{directory}: the adapter unties the head from the embedding (ensure_weight_tying is not set); "
            "merge it into its base (megaconv merge)"
        )
    known = whole_tensors(config)
    found = replaced_tensors(replace(adapter, replaced=others), family(config.family), config)
    trained = {part for native in known.values() for part in native.parts}
    if found.keys() - trained:
        raise NotExpressible(
            f"{directory}: the adapter has whole tensors ({listing(sorted(others))}); beside adapters, only embedding and head can be "
            "trained whole here; megaconv merge merges it"
        )
    modules = modules_of_tensors(config, list(found))
    _require_whole(found, modules, known, directory)
    # They are large, and a rank may need only a part of them: they are read where they are used.
    return head | found, modules


def _require_whole(
    found: Mapping[str, LazyTensor],
    modules: Sequence[str],
    known: Mapping[str, NativeTensor],
    directory: Path,
) -> None:
    """Raise TensorMismatch for a module of which a tensor is missing, or for values that are no floats.

    found: by canonical name. known: of whole_tensors.
    """
    for name, native in known.items():
        (canonical,) = native.parts
        if MODULES[canonical] in modules and canonical not in found:
            raise TensorMismatch(
                f"{directory}: the adapter has no {name}, a tensor of a whole module"
            )
    for canonical, tensor in found.items():
        if tensor.dtype not in FLOATS:
            raise TensorMismatch(
                f"{directory}: {canonical} has dtype {tensor.dtype}; expected {', '.join(FLOATS)}"
            )


def _head(
    replaced: Mapping[str, LazyTensor], config: ModelConfig, directory: Path
) -> dict[str, LazyTensor]:
    """Return the adapter's head of scores by name, {} for a model without one. replaced: the adapter's whole tensors.

    Raises NotExpressible if the head is missing, TensorMismatch if it has another shape.
    """
    if not config.has("scores"):
        return {}
    if HEAD_OF_SCORES not in replaced:
        raise NotExpressible(
            f"{directory}: the adapter has no head of scores (score.weight), and the model has one; merge the adapter into its base "
            "(megaconv merge), and start from the result"
        )
    found, expected = replaced[HEAD_OF_SCORES], (config.head.labels, config.hidden)
    if tuple(found.shape) != expected:
        raise TensorMismatch(
            f"{directory}: score.weight has shape {list(found.shape)}, the model needs {list(expected)}"
        )
    return {HEAD_OF_SCORES: HeldTensor(as_floats(found))}


def as_floats(tensor: LazyTensor) -> Tensor:
    """Return the whole tensor in float32."""
    stored = torch.from_numpy(read_tensor(tensor)).view(getattr(torch, tensor.dtype))
    return stored.float().view(tuple(tensor.shape))
