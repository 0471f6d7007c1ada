"""Model families, one small file each, and how the family of a model is found."""

import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from megaconv import plugins
from megaconv.errors import (
    CheckpointError,
    NotExpressible,
    UnknownFamily,
    UnsupportedInput,
    UsageError,
)
from megaconv.families.parts.bare import bare_classes
from megaconv.families.parts.family import Family as Family  # the files of families import it here
from megaconv.families.parts.hf_config import load_config, naming_file
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import inner_config
from megaconv.families.parts.llama_vision import llama_config, text_config
from megaconv.families.parts.own_names import OWN_NAMES, without_family
from megaconv.families.parts.scores import class_inside, classes_with_scores
from megaconv.families.parts.unsupported import UNSUPPORTED
from megaconv.families.parts.whole_model import named
from megaconv.model.beside import Whole
from megaconv.model.ceilings import require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.meaning import name_contradictions, require_same_structure

_WITHOUT_FAMILY = Family(OWN_NAMES, (), "", rows=(), keys=(), proven="names")
"""Takes the place of the family of a model that no family describes. Its rows are in the model's configuration."""


@cache
def _names() -> tuple[str, ...]:
    """The names of megaconv's own families, which are also the names of their files."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg))


def _own(name: str) -> Family | None:
    """megaconv's own family of this name, without the import of any other; None if there is none."""
    if name not in _names():
        return None
    found: Family = import_module(f"{__name__}.{name}").FAMILY
    return found


@cache
def families() -> dict[str, Family]:
    """megaconv's own families, by name. Imports all of them."""
    return {name: import_module(f"{__name__}.{name}").FAMILY for name in _names()}


def all_families() -> dict[str, Family]:
    """megaconv's own families and those of other packages, by name."""
    return families() | dict(plugins.usable("families", tuple(families())))


def family_of_hf(config: Mapping[str, Any], source: str) -> Family:
    """The family of a config.json. Raises UnknownFamily, which lists the supported families."""
    found, architectures = _family_of(config), config.get("architectures") or []
    if found is not None:
        return found
    _refuse_known(architectures, source)
    _refuse_bare(config, source)
    if text_config(config) is not None:
        raise UnknownFamily(
            f"{source}: {named(config)} has layers with cross-attention to images, which Megatron core lacks; --text-only converts its "
            "language model (LlamaForCausalLM) to every format"
        )
    inside = _family_inside(config)
    if inside is not None:
        raise UnknownFamily(
            f"{source}: {', '.join(map(str, architectures))} is a multimodal model; convert it with --saver hf first. From this "
            f"directory it goes to Megatron core, and --text-only converts its language model ({inside.architectures[0]}) to every format"
        )
    asked = ", ".join(map(str, architectures)) or config.get("model_type")
    if not asked:
        raise UnknownFamily(
            f"{source}: has neither architectures nor model_type, which name the architecture; is it a model's config.json?"
        )
    near = _nearest(asked)
    raise UnknownFamily(
        f"{source}: architecture {asked} is not supported{near}; `megaconv formats` lists all that are, and "
        "docs/add-a-model.md says how to add one"
    )


def _nearest(asked: str) -> str:
    """Text for a message: the supported architectures with names similar to an unsupported one, which may be a
    misspelling."""
    # Compare the part before ForCausalLM, which nearly all names have.
    known = {
        name.partition("For")[0]: name
        for family in all_families().values()
        for name in family.architectures
    }
    found = [known[near] for near in get_close_matches(asked.partition("For")[0], known, n=3)]
    return f" (names like it that are: {', '.join(found)})" if found else ""


def _family_of(config: Mapping[str, Any]) -> Family | None:
    architectures = config.get("architectures") or []

    def fits(family: Family) -> bool:
        if not family.describes(config):
            return False
        if architectures:
            is_named = config.get("model_type") == family.model_type
            classes = (
                *family.architectures,
                *classes_with_scores(family.name),
                *(family.classes_of_others if is_named else ()),
            )
            return bool(set(architectures) & set(classes)) or (
                is_named and _is_bare(family, config)
            )
        if family.no_class:
            return False
        return config.get("model_type") in (family.model_type, *family.other_types)

    # Most families have the name of their model_type. Then no other file is imported, which takes a fifth of the start.
    namesake = _own(str(config.get("model_type")))
    if namesake is not None and fits(namesake):
        return namesake
    # Search other packages only if none of our families fits.
    for known_families in (families, all_families):
        for family in known_families().values():
            if fits(family):
                return family
    return None


def _is_bare(family: Family, config: Mapping[str, Any]) -> bool:
    """True for a model without a head that the family describes. Any other one is copied by its own names."""
    if not _has_bare_class(family, config):
        return False
    try:
        family.read_hf(config)
    except CheckpointError:
        return False
    return True


def _has_bare_class(family: Family, config: Mapping[str, Any]) -> bool:
    classes = bare_classes(family.name, family.architectures)
    return bool(set(config.get("architectures") or []) & set(classes))


def _refuse_bare(config: Mapping[str, Any], source: str) -> None:
    """Raise UnknownFamily with the reason if a family has models of the class without a head, but not this one."""
    namesake = _own(str(config.get("model_type")))
    if namesake is None or not _has_bare_class(namesake, config):
        return
    try:
        namesake.read_hf(config)
    except CheckpointError as error:
        asked = ", ".join(map(str, config["architectures"]))
        raise UnknownFamily(f"{source}: this {asked} is not supported: {error}") from error


def _refuse_known(architectures: Collection[Any], source: str) -> None:
    for architecture in map(str, architectures):
        if architecture in UNSUPPORTED:
            raise UnknownFamily(
                f"{source}: {architecture} can't be converted: {UNSUPPORTED[architecture]}"
            )


def _family_inside(raw: Mapping[str, Any]) -> Family | None:
    """The family of the language model inside a multimodal model; None if there is none, or if its family is not
    supported."""
    inside = inner_config(raw)
    if inside is None or inside["model_type"] is None:
        return None
    kind = inside["model_type"]
    return next(
        (
            each
            for each in all_families().values()
            if kind in (each.model_type, *each.other_types) and each.describes(inside)
        ),
        None,
    )


def is_multimodal(directory: Path) -> bool:
    """True if a Hugging Face directory holds a multimodal model with a supported language model inside."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        return False
    raw = load_config(path)
    with well_formed(str(path)):
        return _is_multimodal(raw)


def has_text_only(directory: Path) -> bool:
    """True if `--text-only` takes a language model out of a Hugging Face directory."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        return False
    raw = load_config(path)
    with well_formed(str(path)):
        return _is_multimodal(raw) or text_config(raw) is not None


def _is_multimodal(raw: Mapping[str, Any]) -> bool:
    refused = any(
        str(architecture) in UNSUPPORTED for architecture in raw.get("architectures") or []
    )
    return not refused and _family_of(raw) is None and _family_inside(raw) is not None


def _text_only(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config.json of the language model as a standalone model.

    Raises UnknownFamily, and UsageError if there is no language model inside.
    """
    _refuse_known(raw.get("architectures") or [], source)
    of_llama_vision = text_config(raw)
    if of_llama_vision is not None:
        return llama_config(of_llama_vision)
    inside, family = inner_config(raw), _family_inside(raw)
    named = ", ".join(map(str, raw.get("architectures") or [])) or raw.get("model_type")
    if inside is None:
        raise UsageError(
            f"--text-only: {source} has no text_config: {named} is a language model by itself; leave it out"
        )
    if family is None:
        raise UnknownFamily(
            f"{source}: the language model in {named} is {inside['model_type']}, which is not supported"
        )
    return inside | class_inside(raw, family.name, family.architectures[0])


def fitting_config(path: Path, found: ModelConfig, where: str) -> ModelConfig:
    """The model of a config.json that --config gives. Raises TensorMismatch if the checkpoint has another structure.

    found: the model of the checkpoint `where`. Warns of values that differ and that no tensor shows.
    """
    _, stated = read_config(path)
    require_same_structure(stated, found, str(path), where)
    name_contradictions(stated, found, str(path), where)
    return stated


def read_config(
    path: Path, *, text_only: bool = False, whole: bool = False, own_names: bool = False
) -> tuple[Family, ModelConfig]:
    """The family and the model of a config.json. Raises CorruptCheckpoint for impossible values, and UnknownFamily.

    text_only: take the language model inside a multimodal model. Raises UsageError if there is none.
    whole: take it as a part of the multimodal model, which is refused otherwise.
    own_names: take a model that no family describes too, unless it is the language model inside another.
    """
    raw = load_config(path)
    try:
        return _described(raw, path, text_only=text_only, whole=whole)
    except (UnknownFamily, NotExpressible, UnsupportedInput) as error:
        if text_only or not own_names:
            raise
        return _WITHOUT_FAMILY, without_family(raw, str(error))


def _described(
    raw: dict[str, Any], path: Path, *, text_only: bool, whole: bool
) -> tuple[Family, ModelConfig]:
    require_countable(raw, str(path))
    with naming_file(path), well_formed(str(path)):
        larger = Whole(raw) if whole and not text_only and _is_multimodal(raw) else None
        raw = _text_only(raw, str(path)) if text_only or larger else raw
        found = family_of_hf(raw, str(path))
        config = found.read_hf(raw)
        if larger is not None and config.has("scores"):
            raise UnsupportedInput(
                f"{path}: {named(larger.config)}, a multimodal model with a head of scores, can't be converted as a whole; --text-only "
                "converts its language model and the head"
            )
        return found, replace(config, whole=larger)


def family(name: str) -> Family:
    """A family of this package or of another package. Raises UnknownFamily."""
    if name == OWN_NAMES:
        return _WITHOUT_FAMILY
    found = _own(name) or all_families().get(name)
    if found is None:
        raise UnknownFamily(
            f"model family {name!r} is not known; known: {', '.join(all_families())}"
        )
    return found


def recognize(config: ModelConfig) -> Family:
    """The family of a model whose configuration doesn't name it. Raises UnknownFamily unless exactly one family fits."""
    for known in (families, all_families):  # families of other packages only if none of ours fits
        found = [family for family in known().values() if _is_of(config, family)]
        if found:
            break
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownFamily(
            f"the checkpoint may be of several model families: {', '.join(family.name for family in found)}; "
            "give --config with the Hugging Face directory of the model"
        )
    near = min(
        (family for family in all_families().values() if family.recognized),
        key=lambda family: len(_unlike(config, family)),
    )
    raise UnknownFamily(
        f"the checkpoint is of no supported model family; the nearest is {near.name}, and differs in: "
        + "; ".join(_unlike(config, near))
    )


def _is_of(config: ModelConfig, family: Family) -> bool:
    """True if the features identify the family. A model with retrieval has all features of the GPT inside it."""
    if family.recognized is None or config.has("retrieval") != (family.recognized == "retrieval"):
        return False
    return config.has(family.recognized)


def _unlike(config: ModelConfig, family: Family) -> list[str]:
    """The features that a model would need, or would have to lack, to be recognized as a model of the family."""
    return [
        f"the model has {name[1:]}" if name.startswith("!") else f"the model has no {name}"
        for name in (family.recognized or "").split()
        if not config.has(name)
    ]
