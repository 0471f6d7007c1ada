"""LoRA and DoRA adapters as peft loads them: adapter_config.json and adapter_model.safetensors."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from formats import safetensors
from formats.output import FileLayout, PlainFile
from formats.safetensors import SafetensorsLayout
from formats.tensor import LazyTensor
from megaconv.adapters.peft_files import CONFIG, PREFIX, WEIGHTS
from megaconv.adapters.translation import (
    Module,
    adaptable_weights,
    is_flipped,
    module_of,
    require_all_written,
)
from megaconv.engine.plan import OutputPlan, Placement, add_placements, native_dtype
from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.adapter import AdapterInfo
from megaconv.model.ir import Header, Key
from megaconv.model.naming import HF
from megaconv.options import SaveOptions
from megaconv.saver import Saver


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ()


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises NotExpressible for a whole model, and for an adapter that peft can't represent in
    the same modules."""
    if header.adapter is None:
        raise NotExpressible(
            "--saver peft: writes adapters, and the input is a whole model; choose --saver hf"
        )
    table, config = family(header.config.family), header.config
    weights = adaptable_weights(table, config, HF)
    paths = {name.removesuffix(".weight"): weight for name, weight in weights.items()}
    modules = {
        path: module
        for path, weight in paths.items()
        if (module := module_of(weight, header.adapter.weights))
    }
    written = {name for module in modules.values() for name in module.lows}
    require_all_written(
        header.adapter, written, f"transformers' {config.family} has no linear layers of theirs"
    )
    if header.adapter.is_dora and not all(module.low.length for module in modules.values()):
        raise NotExpressible(
            "some modules have DoRA's magnitudes and others don't; peft has them in all or in none"
        )
    natives = [
        native for path, module in modules.items() for native in module.natives(_names(path))
    ]
    file = WEIGHTS[0]
    layout = SafetensorsLayout(
        {each.name: (each.shape, native_dtype(header, each)) for each in natives}
    )
    files: dict[str, FileLayout] = {
        CONFIG: PlainFile(_config(modules, list(paths), header.adapter, options.extra)),
        file: layout,
    }
    placements: dict[Key, list[Placement]] = {}
    for native in natives:
        add_placements(placements, header, native, file, native.name)
    return OutputPlan(files, placements)


def read_back(directory: Path) -> dict[str, LazyTensor]:
    """The tensors of an output. A loader gives them only together with the base model."""
    return dict(safetensors.read(directory / WEIGHTS[0]))


def _names(path: str) -> tuple[str, str, str]:
    module = f"{PREFIX}{path}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight", f"{module}.lora_magnitude_vector"


def _config(
    modules: Mapping[str, Module], paths: Sequence[str], info: AdapterInfo, extra: Mapping[str, str]
) -> bytes:
    """The content of adapter_config.json. paths: the paths of all linear layers, including those without an adapter."""
    lows = {path: module.low for path, module in modules.items()}
    [(rank, _)] = Counter(low.rank for low in lows.values()).most_common(1)
    [(alpha, _)] = Counter(low.alpha for low in lows.values()).most_common(1)
    ranks = {path: low.rank for path, low in lows.items() if low.rank != rank}
    alphas = {path: _number(low.alpha) for path, low in lows.items() if low.alpha != alpha}
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": extra.get("base") or info.base or None,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": _targets(list(modules), paths),
        "lora_dropout": info.dropout,
        "fan_in_fan_out": any(is_flipped(module.weight) for module in modules.values()),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": info.is_dora,
        "modules_to_save": None,
    }
    return (json.dumps(written, indent=2, sort_keys=True) + "\n").encode()


def _number(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha


def _targets(paths: list[str], all_paths: Sequence[str]) -> list[str]:
    """The words by which peft finds the modules: the last words of their paths, or whole paths if the last words also
    match other modules."""
    words = {path.rpartition(".")[2] for path in paths}
    found = [path for path in all_paths if path.rpartition(".")[2] in words]
    return sorted(words) if len(found) == len(paths) else paths


SAVER = Saver(
    name="peft",
    description="LoRA and DoRA adapters for peft, translated from Megatron-Bridge's",
    plan=plan,
    options={
        "base": "the model that adapter_config.json names as the adapter's base, by its path or Hub name"
    },
    uses=uses,
    holds_adapter=True,
    read_back=read_back,
)
