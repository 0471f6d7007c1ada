"""LoRA adapters as peft loads them: adapter_config.json and adapter_model.safetensors."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from formats.output import FileLayout, PlainFile
from formats.safetensors import SafetensorsLayout
from formats.tensor import ITEMSIZE
from megaconv.engine.adapters.peft_files import CONFIG, PREFIX, WEIGHTS
from megaconv.engine.adapters.translation import a_tensor, b_tensor, is_flipped, linear_weights, module_of
from megaconv.engine.plan import OutputPlan, Placement, native_dtype
from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.adapter import AdapterInfo, LowRank
from megaconv.model.ir import Header, Key
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor
from megaconv.options import SaveOptions

DESCRIPTION = "LoRA adapters for peft, translated from Megatron-Bridge's"
HOLDS_ADAPTER = True
OPTIONS = {"base": "the model that adapter_config.json names as the adapter's base, by its path or Hub name"}


class _Module(NamedTuple):
    path: str
    weight: NativeTensor
    low: LowRank


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that choose something."""
    return ()


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """Raises NotExpressible for a whole model, and for an adapter that peft can't have in the same modules."""
    if header.adapter is None:
        raise NotExpressible("--saver peft: writes adapters, and the input is a whole model; choose --saver hf")
    table, config = family(header.config.family), header.config
    weights = linear_weights(table, config, HF)
    modules = [
        _Module(name.removesuffix(".weight"), weight, low)
        for name, weight in weights.items()
        if (low := module_of(weight, header.adapter)) is not None
    ]
    natives = [
        native
        for path, weight, low in modules
        for native in (
            a_tensor(weight, f"{PREFIX}{path}.lora_A.weight", low.a, low.rank),
            b_tensor(weight, f"{PREFIX}{path}.lora_B.weight", low.rank),
        )
    ]
    file = WEIGHTS[0]
    layout = SafetensorsLayout({each.name: (each.shape, native_dtype(header, each)) for each in natives})
    files: dict[str, FileLayout] = {
        CONFIG: PlainFile(_config(modules, weights, header.adapter, options.extra)),
        file: layout,
    }
    placements: dict[Key, list[Placement]] = {}
    for native in natives:
        row_bytes = native.shape[1] * ITEMSIZE[native_dtype(header, native)]
        for name, regions in native.parts.items():
            placements.setdefault(Key(name), []).append(Placement(file, native.name, row_bytes, regions))
    return OutputPlan(files, placements)


def _config(
    modules: list[_Module], weights: Mapping[str, NativeTensor], info: AdapterInfo, extra: Mapping[str, str]
) -> bytes:
    rank = Counter(module.low.rank for module in modules).most_common(1)[0][0]
    alpha = Counter(module.low.alpha for module in modules).most_common(1)[0][0]
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": extra.get("base") or info.base or None,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {module.path: module.low.rank for module in modules if module.low.rank != rank},
        "alpha_pattern": {module.path: _number(module.low.alpha) for module in modules if module.low.alpha != alpha},
        "target_modules": _targets([module.path for module in modules], list(weights)),
        "lora_dropout": info.dropout,
        "fan_in_fan_out": any(is_flipped(module.weight) for module in modules),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    return (json.dumps(written, indent=2, sort_keys=True) + "\n").encode()


def _number(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha


def _targets(paths: list[str], weights: list[str]) -> list[str]:
    """What peft finds the modules by: the last words of their paths, or all of each where that would find others too."""
    words = {path.rpartition(".")[2] for path in paths}
    found = [
        name.removesuffix(".weight") for name in weights if name.removesuffix(".weight").rpartition(".")[2] in words
    ]
    return sorted(words) if len(found) == len(paths) else paths
