"""Writes adapters as a directory that peft loads and megaconv merges, and reads such a directory back for training.

All experts of a layer are one parameter in transformers, and peft stacks their adapters:

- A [experts · r, in]: the rows of expert 0, then of expert 1, …
- B [out, r · experts]: expert e has the columns e, e + experts, e + 2 · experts …

The language model inside a multimodal model has the names of transformers' class of the whole model, so that peft loads
the adapter into it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.tensor import LazyTensor
from megaconv.adapters.named_tensors import INSIDE, INSIDE_BY_TYPE
from megaconv.adapters.opening import open_adapter
from megaconv.adapters.peft_files import CONFIG, Adapter, ModuleAdapter
from megaconv.adapters.targets import weights_of
from megaconv.engine.provenance import names_another
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.families import family, has_text_only
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.hub import hub_id
from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.held_tensor import HeldTensor
from megatron_lite.checkpoint.tensor_file import TensorFile
from megatron_lite.checkpoint.token_rows import read_token_rows, stored_rows
from megatron_lite.checkpoint.whole_modules import (
    as_floats,
    fields_of_wholes,
    read_wholes,
    stored_wholes,
)
from megatron_lite.models.lora.parameters import MAGNITUDE_VECTOR
from megatron_lite.models.lora.shares import Module, modules_of
from megatron_lite.settings.options import LoRA

WEIGHTS = "adapter_model.safetensors"
_A, _B = "lora_A.weight", "lora_B.weight"


def adapter_files(
    tensors: Mapping[str, Tensor], config: ModelConfig, options: LoRA, base: str
) -> dict[str, bytes | TensorFile]:
    """Return the contents of the adapter's files by file name.

    tensors: whole float32 matrices; a key is Module.name with `.lora_A.weight`, `.lora_B.weight` or
    `.lora_magnitude_vector` appended, or the canonical name of a tensor that was trained whole.
    """
    named = {where.module.name: where.module for where in modules_of(config).values()}
    modules = [module for name, module in named.items() if f"{name}.{_A}" in tensors]
    of_modules = _stacked(modules, tensors, dora=options.dora)
    wholes = stored_wholes(tensors, config)
    rows, fields_of_rows = stored_rows(tensors, config, options)
    # A model with scores has a class of its own, which holds the language model alone.
    inside = None if config.has("scores") else _place_inside(base)
    stored = {
        f"base_model.model.{name if inside is None else _inside(name, inside)}": tensor
        for name, tensor in (of_modules | wholes | rows).items()
    }
    fields = _described(modules, named.values(), options, base) | fields_of_wholes(wholes, config)
    fields |= fields_of_rows
    if inside is not None:
        fields["target_modules"] = _pattern(fields["target_modules"], inside)
    described = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    return {CONFIG: described.encode(), WEIGHTS: TensorFile(stored)}


def _place_inside(base: str) -> str | None:
    """Return the beginning of the names of the adapters' model in transformers' class of a multimodal model.

    None: it is inside no multimodal model, as far as its files are on a local disk.
    """
    if not has_text_only(Path(base)):
        return None
    model_type = load_config(Path(base) / CONFIG_NAME).get("model_type")
    return INSIDE_BY_TYPE.get(str(model_type), INSIDE)


def _inside(name: str, place: str) -> str:
    """Return the name of a language model's module in transformers' class of a multimodal model."""
    body = name.removeprefix("model.")
    return name if body == name else f"{place}{body}"


def _pattern(modules: Sequence[str], place: str) -> str:
    """Return a regular expression for modules of the language model. Modules of the encoder may have the same names."""
    names = "|".join(re.escape(name) for name in modules)
    return rf".*{re.escape(place.removeprefix('model.'))}.*({names})"


def _stacked(
    modules: Sequence[Module], tensors: Mapping[str, Tensor], *, dora: bool
) -> dict[str, Tensor]:
    """Return the tensors of adapters by name, those of experts stacked. dora: whether linear modules have magnitudes."""
    ends = (_A, _B, MAGNITUDE_VECTOR) if dora else (_A, _B)
    found: dict[str, Tensor] = {}
    stacks: defaultdict[str, defaultdict[str, list[Module]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for module in modules:
        if module.parameter is None:
            found |= {f"{module.path}.{end}": tensors[f"{module.name}.{end}"] for end in ends}
        else:
            stacks[module.path][module.parameter].append(module)
    for path, parameters in stacks.items():
        for wrapped, experts in enumerate(reversed(parameters.values())):
            # peft wraps the last parameter outermost.
            place = path + ".base_layer" * wrapped
            ordered = sorted(experts, key=lambda module: module.expert or 0)
            found[f"{place}.{_A}"] = torch.cat(
                [tensors[f"{module.name}.{_A}"] for module in ordered]
            )
            found[f"{place}.{_B}"] = torch.stack(
                [tensors[f"{module.name}.{_B}"] for module in ordered], -1
            ).flatten(1)
    return found


def _described(
    modules: Sequence[Module], every: Iterable[Module], options: LoRA, base: str
) -> dict[str, Any]:
    """Return the content of adapter_config.json. every: all modules that could have an adapter."""
    # peft knows no `hf://`, and has a field of its own for the revision.
    name, revision = hub_id(base) or (base, None)
    linear = [module for module in modules if module.parameter is None]
    parameters = [module for module in modules if module.parameter is not None]
    every = list(every)
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name, "revision": revision, "r": options.rank,
        "lora_alpha": options.alpha, "lora_dropout": options.dropout, "use_rslora": options.rslora,
        "use_dora": options.dora, "bias": "none",
        "inference_mode": True, "fan_in_fan_out": any(module.transposed for module in linear), "init_lora_weights": True,
        "target_modules": _selecting(linear, every),
        "target_parameters": _selecting(parameters, every) or None,
    }  # fmt: skip


def _selecting(modules: Iterable[Module], every: Iterable[Module]) -> list[str]:
    """Return the ends of paths that select these modules, and none of the others.

    An end has two words: one word is ambiguous (GPT-2 has two modules named c_proj). If only some layers have adapters,
    whole paths are needed.
    """
    wholes = {_end(module) for module in modules}
    ends = {_end(module, 2) for module in modules}
    others = (module for module in every if _end(module) not in wholes)
    is_ambiguous = any(_end(module, 2) in ends for module in others)
    return sorted(wholes if is_ambiguous else ends)


def _end(module: Module, words: int = 0) -> str:
    """Return the last words of a module's path, or the whole path inside the model, with the name of its parameter."""
    path = ".".join(module.path.removeprefix("model.").split(".")[-words:])
    return path if module.parameter is None else f"{path}.{module.parameter}"


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter read from a peft directory."""

    options: LoRA
    tensors: Mapping[str, LazyTensor]
    """Whole matrices by the names that load_adapters uses."""
    base: str | None
    """The model that it was trained on, if its configuration names one."""

    def is_of_another(self, load: str, config: ModelConfig) -> bool:
        """Return whether it was trained on another model, as far as the names tell. load: the model's path or Hub id."""
        names = [load.partition("@")[0], (config.hf or {}).get("_name_or_path")]
        return names_another(self.base, names)


def read_adapter(directory: Path, config: ModelConfig) -> ReadAdapter:
    """Read a peft adapter for training.

    Raises CheckpointError if the directory holds no adapter of this model. Raises NotExpressible if the trainer can't
    train it.
    """
    adapter = open_adapter(directory)
    described = adapter.config
    _require_trainable(adapter, directory)
    wholes, whole = read_wholes(adapter, config, directory)
    rows, tokens = read_token_rows(adapter, config)
    by_name = _modules_by_name(config)
    tensors: dict[str, LazyTensor] = {**wholes, **rows}
    adapted: list[Module] = []
    for module, native in weights_of(adapter, family(config.family), config):
        path, _, last = native.name.rpartition(".")
        own = by_name.get((path, None if last == "weight" else last))
        if own is None:
            raise NotExpressible(
                f"{directory}: has an adapter of {native.name}, which can't be trained here"
            )
        adapted += own
        tensors |= _shares(module, own, adapter)
    every = [module for listed in by_name.values() for module in listed]
    targets = tuple(_selecting(adapted, every))
    return ReadAdapter(
        LoRA(
            described.rank,
            described.alpha,
            targets,
            rslora=described.rslora,
            dora=described.dora,
            whole=whole,
            rows=tokens,
        ),
        tensors,
        described.base,
    )


def _require_trainable(adapter: Adapter, directory: Path) -> None:
    """Raise NotExpressible for an adapter that the trainer can't train, CheckpointError for one that contradicts itself."""
    refused = (
        (adapter.config.ranks, "other ranks for some modules"),
        (adapter.config.alphas, "another alpha for some modules"),
        (any(module.bias for module in adapter.modules), "biases"),
        (any(module.embedding for module in adapter.modules), "an adapter of the embedding"),
    )
    for wrong, what in refused:
        if wrong:
            raise NotExpressible(
                f"{directory}: the adapter has {what}, which can't be trained here; megaconv merge merges it"
            )
    for module in adapter.modules:
        module.refuse_contradiction(adapter.config, directory)


def _modules_by_name(config: ModelConfig) -> dict[tuple[str, str | None], list[Module]]:
    """Return the modules that can have adapters by (path, parameter): several for experts, in their order."""
    found: defaultdict[tuple[str, str | None], list[Module]] = defaultdict(list)
    for where in modules_of(config).values():
        same = found[where.module.path, where.module.parameter]
        if where.module not in same:
            same.append(where.module)
    for same in found.values():
        same.sort(key=lambda module: module.expert or 0)
    return dict(found)


def _shares(
    module: ModuleAdapter, own: Sequence[Module], adapter: Adapter
) -> dict[str, LazyTensor]:
    """Return the matrices of each of the modules that share an adapter: of one, or of all experts of a layer."""
    a, b = as_floats(module.a), as_floats(module.b)
    rows = adapter.config.rank * len(own)
    if len(a) != rows:
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has an A of {len(a)} rows, and this model needs "
            f"{rows}; give the model that the adapter was trained on",
            code="misshapen-tensor",
        )
    found: dict[str, LazyTensor] = {}
    for number, (each, rows_of_a) in enumerate(zip(own, a.chunk(len(own)), strict=True)):
        found[f"{each.name}.{_A}"] = HeldTensor(rows_of_a)
        found[f"{each.name}.{_B}"] = HeldTensor(b[:, number :: len(own)])
        if module.magnitude is not None:
            lengths = as_floats(module.magnitude).flatten()
            found[f"{each.name}.{MAGNITUDE_VECTOR}"] = HeldTensor(lengths)
    return found
