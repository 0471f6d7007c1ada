"""An architecture as the installed transformers has it: keys with defaults, names and shapes of tensors, source file.

The class is built on torch's meta device, which has no memory. Code from a checkpoint never runs: only classes of the
installed package are used, and keys that name code are left out.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from formats.tensor import Shape
from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.extras import require_transformers
from megaconv.families.parts.code_keys import without_code
from megaconv.families.parts.harmless_keys import HARMLESS
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.ceilings import require_countable, require_possible

COMMAND = "megaconv new-family"


@dataclass(frozen=True)
class Reference:
    """One architecture of transformers."""

    architecture: str
    model_type: str
    version: str
    """The version of transformers."""
    raw: Mapping[str, Any]
    """The complete config.json: the user's keys, and transformers' defaults for the others."""
    defaults: Mapping[str, Any]
    """transformers' default of each key that the architecture's own configuration class has."""
    aliases: Mapping[str, str]
    """Second name of a key -> the key."""
    tensors: Mapping[str, Shape]
    """The tensors of a file, by name. A tied head is listed once, as the embedding."""
    source: Path
    """The file of the class."""

    @property
    def own_keys(self) -> set[str]:
        """The keys that may change the computation."""
        return set(self.defaults) - HARMLESS


def reference_of(path: Path) -> Reference:
    """transformers' class for a config.json.

    path: the config.json. For a multimodal model, the class is that of its language model. Raises UsageError without torch or
    transformers 5, CorruptCheckpoint for a file with impossible values, and UnknownFamily if transformers has no class for
    the model or can't build it.
    """
    raw = without_code(load_config(path))
    require_countable(raw, str(path))
    transformers = require_transformers(COMMAND)
    _require_known_type(transformers, raw, path)
    config = _config(transformers, raw, path)
    _require_few_experts(raw, config, path)
    kind = _class_of(transformers, config, path)
    model = _on_meta_device(kind, config, path)
    stated = _default_keys(type(config), path)
    bare = set(transformers.PreTrainedConfig().to_dict())
    return Reference(
        architecture=kind.__name__,
        model_type=config.model_type,
        version=transformers.__version__,
        raw={**_complete(config), "architectures": [kind.__name__]},
        defaults={key: value for key, value in stated.items() if key not in bare},
        aliases=dict(config.attribute_map),
        tensors=dict(_tensors(model)),
        source=Path(inspect.getfile(kind)),
    )


def _require_known_type(transformers: Any, raw: Mapping[str, Any], path: Path) -> None:
    """Raise UnknownFamily for another model_type than those of the installed transformers."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UnknownFamily(f"{path}: model_type should be a word, found {model_type!r:.40}")
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnknownFamily(
            f"{path}: transformers {transformers.__version__} has no model_type {model_type!r:.40}; install the release "
            "that has it. A draft never runs code from a checkpoint"
        )


def _config(transformers: Any, raw: Mapping[str, Any], path: Path) -> Any:
    """The configuration of transformers, from a copy in a directory without other files. That of a multimodal model is its
    text_config.
    """
    with TemporaryDirectory() as directory, _refusing(path, "transformers can't read it"):
        Path(directory, CONFIG_NAME).write_text(json.dumps(raw), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        _complete(config)  # fails if a key has replaced a method
        return config.get_text_config()  # fails if there are several


def _require_few_experts(raw: Mapping[str, Any], config: Any, path: Path) -> None:
    """Raise CorruptCheckpoint before a class is built with more layers or experts than any model has."""
    sizes = {
        "layers.count": getattr(config, "num_hidden_layers", None),
        "experts.count": max(_experts(raw), default=0),
    }
    try:
        require_possible(sizes)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(
            f"{path}: {error}; a draft needs the names alone: state fewer in a copy of the file"
        ) from None


def _experts(raw: Mapping[str, Any]) -> Iterator[int]:
    """Yield each number of experts: num_local_experts, n_routed_experts."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _experts(value)
        elif key.endswith("experts") and type(value) is int:
            yield value


def _default_keys(kind: Any, path: Path) -> dict[str, Any]:
    """Every key of a configuration class with its default."""
    with _refusing(path, f"transformers' {kind.__name__} has no defaults"):
        return _complete(kind())


@contextmanager
def _refusing(path: Path, failure: str) -> Iterator[None]:
    """Turn any error into UnknownFamily. Configurations and models check their values with errors of many kinds."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnknownFamily(f"{path}: {failure}: {reason:.160}; check its values") from error


def _class_of(transformers: Any, config: Any, path: Path) -> Any:
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise UnknownFamily(
            f"{path}: transformers {transformers.__version__} has no causal language model of the type "
            f"{config.model_type}; a draft needs such a class"
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _on_meta_device(kind: Any, config: Any, path: Path) -> Any:
    import torch

    with (
        _refusing(path, f"transformers' {kind.__name__} can't be built from it"),
        torch.device("meta"),
    ):
        return kind(config)


def _complete(config: Any) -> dict[str, Any]:
    """Every key of a configuration, in JSON's types."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def _tensors(model: Any) -> Iterator[tuple[str, Shape]]:
    """Yield (name in files, shape). In memory, transformers 5 may use other names and shapes."""
    from transformers.core_model_loading import revert_weight_conversion

    once = {name for name, _ in model.named_parameters()}
    once |= {name for name, _ in model.named_buffers()}
    held = {name: value for name, value in model.state_dict().items() if name in once}
    for name, value in revert_weight_conversion(model, held).items():
        yield name, tuple(value.shape)
