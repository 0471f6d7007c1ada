"""A model's own state dict while peft wraps it: the base's weights beside the adapter's, as verl's FSDP saves both.

    base_model.model.<name>                                      a tensor of the base
    base_model.model.<module>.base_layer.weight                  the weight of a module with an adapter
    base_model.model.<module>.lora_A.default.weight, lora_B …    the adapter `default` of the module
    lora_train_meta.json                                         {"r": 32, "lora_alpha": 64, "task_type": "CAUSAL_LM"}
    lora_adapter/adapter_config.json                             peft's own configuration, in older checkpoints

Source: peft 0.21.2, and the files that verl saves.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from formats.tensor import LazyTensor
from megaconv.adapters.peft_files import CONFIG, PREFIX, AdapterConfig, adapter_of, peft_config
from megaconv.errors import CorruptCheckpoint, UnsupportedInput, UsageError
from megaconv.families import Family
from megaconv.model.ir import OpenedSource
from megaconv.options import AdapterChoice

_log = logging.getLogger("megaconv")

_PART = re.compile(r"\.(?P<part>lora_\w+)\.(?P<adapter>[^.]+)(?=\.weight$|\.bias$|$)")
"""The part of an adapter's tensor in a name: `.lora_A.default`, before `.weight`."""
_META, _DIRECTORY = "lora_train_meta.json", "lora_adapter"


def is_wrapped(names: Mapping[str, LazyTensor]) -> bool:
    """True if all names are those of a model inside of peft's."""
    return bool(names) and all(name.startswith(PREFIX) for name in names)


def base_of(tensors: Mapping[str, LazyTensor], path: Path) -> dict[str, LazyTensor]:
    """The base's tensors by their names in the base. Raises UsageError if the checkpoint has none. path: the checkpoint."""
    found = {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if not _PART.search(name)
    }
    if not found:
        raise UsageError(
            f"{path}: holds a LoRA adapter without its base (save_lora_only of verl); `python -m verl.model_merger` writes "
            f"{_DIRECTORY}, and `megaconv merge MODEL ADAPTER` merges it"
        )
    return found


def merged_into(
    base: OpenedSource, tensors: Mapping[str, LazyTensor], path: Path, family: Family
) -> OpenedSource:
    """The base with the adapter among the tensors merged into it. path: the checkpoint.

    Raises UsageError if the checkpoint doesn't say how the adapter is scaled, UnsupportedInput for several adapters.
    """
    found: dict[str, LazyTensor] = {}
    adapters: set[str] = set()
    for name, tensor in tensors.items():
        part = _PART.search(name)
        if part is not None:
            adapters.add(part["adapter"])
            found[_PART.sub(r".\g<part>", name)] = tensor
    if not found:
        return base
    if len(adapters) > 1:
        raise UnsupportedInput(
            f"{path}: holds {len(adapters)} adapters ({', '.join(sorted(adapters))}); only one is merged"
        )
    adapter = adapter_of(path, _config(path), path, found)
    _log.warning(
        "%s: the run's LoRA adapter is merged into its base (rank %d, alpha %g)",
        path,
        adapter.config.rank,
        adapter.config.alpha,
    )
    # Every detection of a format imports this module, and few checkpoints get here.
    from megaconv.adapters.merging import Merged, MergedSource
    from megaconv.adapters.targets import changes_of

    changes = changes_of(adapter, 1.0, family, base.header.config)
    merged = MergedSource(base, [Merged(AdapterChoice(str(path)), adapter, changes)])
    return OpenedSource(merged.header, dict(merged.tensors()))


def _config(path: Path) -> AdapterConfig:
    """The adapter's settings beside verl's files. Raises UsageError if there are none."""
    for file in (path / _DIRECTORY / CONFIG, path / _META):
        if file.is_file():
            settings = read_json(file, CONFIG_BYTES)
            if not isinstance(settings, dict):
                raise CorruptCheckpoint(f"{file}: expected a JSON object")
            # The checkpoint holds the base as PiSSA and others changed it.
            settings = {"peft_type": "LORA", **settings, "init_lora_weights": True}
            return peft_config(settings, file)
    raise UsageError(
        f"{path}: holds a model with a LoRA adapter, and no {_META} or {_DIRECTORY}/{CONFIG}, which give the adapter's alpha; copy one of "
        f'them, or write {_META}: {{"r": …, "lora_alpha": …}}',
        code="config-needed",
    )
