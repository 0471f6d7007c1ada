"""An architecture as the installed transformers has it: keys with defaults, names and shapes of tensors, source file.

The class is built on torch's meta device, which has no memory. Code from a checkpoint never runs: only classes of the
installed package are used.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.tensor import Shape
from megaconv.errors import UnknownFamily, UsageError
from megaconv.extras import install
from megaconv.families.parts.keys import CONFIG_NAME, HARMLESS

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


def reference_of(directory: Path) -> Reference:
    """transformers' class for a config.json.

    directory: holds the config.json. Raises UsageError without transformers or torch, and UnknownFamily if transformers
    has no class for the model.
    """
    transformers = _require_transformers()
    config = _config(transformers, directory)
    kind = _class_of(transformers, config, directory)
    model = _on_meta_device(kind, config)
    defaults = type(config)()
    bare = set(transformers.PreTrainedConfig().to_dict())
    stated = _complete(defaults)
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


def _require_transformers() -> Any:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{COMMAND} reads the model's class in transformers, and needs it and torch ({error}); "
            f"{install('data,torch')}"
        ) from error
    return transformers


def _config(transformers: Any, directory: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnknownFamily(
            f"{directory / CONFIG_NAME}: transformers {transformers.__version__} can't read it: {reason:.120}; "
            "install the release that has the architecture"
        ) from error


def _class_of(transformers: Any, config: Any, directory: Path) -> Any:
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise UnknownFamily(
            f"{directory / CONFIG_NAME}: transformers {transformers.__version__} has no causal language model of the type "
            f"{config.model_type}; a draft needs such a class"
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _on_meta_device(kind: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
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
