"""Model families, one small file each: a table of tensors and the way from and to Hugging Face's configuration."""

import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from megaconv.errors import UnknownFamily
from megaconv.families.parts.hf_config import load_config
from megaconv.model.ceilings import require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row


@dataclass(frozen=True)
class Family:
    """What a file in this folder defines, as FAMILY."""

    name: str
    architectures: tuple[str, ...]
    """transformers' class names: `LlamaForCausalLM`."""
    model_type: str
    rows: tuple[Row, ...]
    read_hf: Callable[[Mapping[str, Any]], ModelConfig]
    """From config.json to our configuration."""
    write_hf: Callable[[ModelConfig], dict[str, Any]]
    """From our configuration to a config.json that transformers 4 and 5 both understand."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of native names that hold nothing of the model."""
    features: tuple[str, ...] = ()
    """What every model of the family has, of that which others may have: `qk_norm`."""
    prefix: str = ""
    """In front of all Hugging Face names but the head's; files saved from the bare model lack it."""
    older: Mapping[str, str] = field(default_factory=dict)
    """How Hugging Face names end in older files -> how they end now."""
    complete: Callable[[ModelConfig, Collection[str]], ModelConfig] = lambda config, names: config
    """What a config.json leaves open and only the names of the tensors beside it tell."""


REFUSED = {
    **dict.fromkeys(
        ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM"),
        "Gemma 2 and later have norms after attention and MLP, and Gemma 2 caps its logits, for which Megatron core has no layers",
    ),
    **dict.fromkeys(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        "Llama 4 scales queries by their position, for which Megatron core has no layer",
    ),
}
"""Architectures that we know and have no family for, with the reason."""


@cache
def families() -> dict[str, Family]:
    """All families by name."""
    found = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg):
        family: Family = import_module(f"{__name__}.{module}").FAMILY
        found[family.name] = family
    return found


def family_of_hf(config: Mapping[str, Any], source: str) -> Family:
    """The family of a config.json. Raises UnknownFamily listing what is known."""
    architectures = config.get("architectures") or []
    for family in families().values():
        if set(architectures) & set(family.architectures) or (
            not architectures and config.get("model_type") == family.model_type
        ):
            return family
    for architecture in map(str, architectures):
        if architecture in REFUSED:
            raise UnknownFamily(f"{source}: {architecture} can't be converted: {REFUSED[architecture]}")
    asked = ", ".join(map(str, architectures)) or config.get("model_type") or "no architecture"
    known = ", ".join(name for family in families().values() for name in family.architectures)
    raise UnknownFamily(
        f"{source}: architecture {asked} is not known; known are {known}. A family is one file: see CONTRIBUTING.md"
    )


def read_config(path: Path) -> tuple[Family, ModelConfig]:
    """The model that a config.json describes. Raises CorruptCheckpoint for values that can't be, UnknownFamily."""
    raw = load_config(path)
    require_countable(raw, str(path))
    with well_formed(str(path)):
        found = family_of_hf(raw, str(path))
        return found, found.read_hf(raw)


def family(name: str) -> Family:
    if name not in families():
        raise UnknownFamily(f"model family {name!r} is not known; known are {', '.join(families())}")
    return families()[name]
