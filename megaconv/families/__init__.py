"""Model families, one small file each: a table of tensors, and the conversion from and to Hugging Face's configuration."""

import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from formats.tensor import LazyTensor
from megaconv import plugins
from megaconv.errors import (
    CheckpointError,
    NotExpressible,
    UnknownFamily,
    UnsupportedInput,
    UsageError,
)
from megaconv.families.parts.dropouts import written_dropouts
from megaconv.families.parts.hf_config import (
    as_file,
    load_config,
    quant_method,
    require_causal,
    updated,
)
from megaconv.families.parts.keys import CONFIG_NAME, Keys, by_own_names, read_keys, write_keys
from megaconv.families.parts.language_model import inner_config
from megaconv.families.parts.own_names import OWN_NAMES, config_of_own_names, without_family
from megaconv.families.parts.unsupported import UNSUPPORTED
from megaconv.families.parts.whole_model import named, whole_config_json
from megaconv.model.beside import Whole
from megaconv.model.ceilings import require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED, changed
from megaconv.model.meaning import name_contradictions, require_kept, require_same_structure
from megaconv.model.table import Row

SHOWN_BY_TENSORS = ("tie_embeddings", "mtp_layers")
"""Fields in which a multimodal model's config.json may differ. Its files show whether there is a head, and whether
there are layers after the last one."""

_NO_RUN: Mapping[str, Any] = {}

PROOFS = {
    "megatron-core": "the real megatron-core computes transformers' logits from the output",
    "custom module": "the same, with the test's own modules for parts that megatron-core lacks",
    "names": "names, shapes and bytes; megatron-core has no model that computes the same",
}


@dataclass(frozen=True)
class Family:
    """A model family, which a file in this folder defines as FAMILY."""

    name: str
    architectures: tuple[str, ...]
    """Class names of transformers, such as `LlamaForCausalLM`."""
    model_type: str
    rows: tuple[Row, ...]
    keys: tuple[Keys, ...]
    """The keys of the family's config.json, with the fields of the model's description that they give."""
    classes_of_others: tuple[str, ...] = ()
    """Classes of another family that transformers uses for this family's models as well. Only `model_type` tells them
    apart."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are the same in all models of the family, whatever config.json says."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the computation but have only one supported value. They are written with that value."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of keys (`hidden_size`) -> the keys (`n_embd`), as in the attribute_map of transformers' class."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of native names that hold no part of the model."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions of native names that belong to the model but aren't converted -> their description."""
    unused: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    """A function that returns further patterns of the same kind: tensors that the class never computes with."""
    features: tuple[str, ...] = ()
    """Optional features that every model of the family has, such as `qk_norm`."""
    prefix: str = ""
    """Prefix of all Hugging Face names except the head's. Files saved from the bare model lack it."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of modules in transformers' class, and so in adapters -> the prefixes of the same modules in files."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Endings of Hugging Face names in older files -> the current endings."""
    other_names: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {}
    """A function from all Hugging Face names of a checkpoint: names that some release writes -> the usual names."""
    complete: Callable[[ModelConfig, Mapping[str, LazyTensor]], ModelConfig] = (
        lambda config, tensors: config
    )
    """A function that adds to a configuration what only the names and shapes of its tensors show."""
    recognized: str | None = None
    """Features (see ModelConfig.has) that identify the family if only Megatron's arguments describe a model. None if
    they don't distinguish it from another family with the same computation."""
    beyond_core: tuple[str, ...] = ()
    """Fields without a Megatron argument that don't follow from other fields. Megatron-Bridge's provider may give them;
    otherwise a config.json has to."""
    assumed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: {}
    """Fields without a Megatron argument that follow from other fields in all models of the family."""
    describes: Callable[[Mapping[str, Any]], bool] = lambda raw: True
    """A function that returns False for a config.json of the same class that another family describes."""
    other_types: tuple[str, ...] = ()
    """Further values of model_type for this architecture, such as `kimi_k2`."""
    older_types: tuple[str, ...] = ()
    """The members of `other_types` whose files have keys that transformers' class doesn't read. An output has the
    class's keys."""
    proven: str = "megatron-core"
    """The evidence that models are converted correctly: one of PROOFS."""
    no_class: str = ""
    """The reason why Hugging Face can't have models of the family, for messages; empty if it can."""
    reads_hf: bool = True
    """False if megaconv doesn't read the Hugging Face directories that it writes for the family."""
    notices: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    """A function that returns notices for the user, if Megatron is on either side of a conversion. They report where
    Megatron's computation of the model differs from transformers' computation."""

    def read_hf(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The model of a config.json. Raises CorruptCheckpoint, NotExpressible or UnknownFamily for unsupported values."""
        quant_method(raw, CONFIG_NAME)
        found = read_keys(
            self.name, self.keys, self.fixed, self.only, by_own_names(raw, self.aliases)
        )
        if not found.has("encoder") and not found.has("transform"):
            require_causal(raw, CONFIG_NAME)
        return replace(found, hf=dict(raw))

    def write_hf(self, config: ModelConfig) -> dict[str, Any]:
        """A config.json for transformers 4 and 5. Raises NotExpressible, which names the field, for a field that it
        can't represent."""
        if self.no_class:
            raise NotExpressible(self.no_class)
        return write_keys(
            self.keys, self.fixed, self.only, config, self.architectures[0], self.model_type
        )

    def config_json(self, config: ModelConfig, run: Mapping[str, Any] = _NO_RUN) -> bytes:
        """The config.json of the output: the model's own if it is known, with the necessary changes.

        run: Megatron's arguments of the run that trained the model. A new config.json gets its dropouts. Raises
        NotExpressible like write_hf.
        """
        if config.own_names is not None:
            return config_of_own_names(config.own_names, config.dtype)
        if config.whole is not None:
            return self._whole_config_json(config)
        now = self.write_hf(config)
        if config.hf is None or config.hf.get("model_type") in self.older_types:
            return as_file(now | written_dropouts(self.name, run))
        # Many a config.json lists MTP layers that its files don't hold.
        before = changed(self.read_hf(config.hf), {"mtp_layers": config.mtp_layers})
        return as_file(updated(config.hf, self.write_hf(before), now, self.aliases))

    def _whole_config_json(self, config: ModelConfig) -> bytes:
        """The own config.json of a multimodal model. Raises NotExpressible if it no longer describes the language
        model."""
        assert config.whole is not None
        raw = config.whole.config
        original = self.read_hf(_text_only(raw, CONFIG_NAME))
        require_kept(
            config,
            original,
            f"the {CONFIG_NAME} of {named(raw)}",
            but=(*NOT_COMPUTED, *SHOWN_BY_TENSORS),
        )
        return whole_config_json(raw, config.dtype)


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
    inside = _family_inside(config)
    if inside is not None:
        raise UnknownFamily(
            f"{source}: {', '.join(map(str, architectures))} is a multimodal model; it is converted between Hugging Face directories and "
            f"Megatron core only. --text-only converts its language model ({inside.architectures[0]}) to every format"
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
            classes = (*family.architectures, *(family.classes_of_others if is_named else ()))
            return bool(set(architectures) & set(classes))
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
    return inside | {"architectures": [family.architectures[0]]}


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
        return found, replace(found.read_hf(raw), whole=larger)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Errors that begin with `config.json`, by which families know the file, or with `the model`, begin with its path."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(f"{CONFIG_NAME}: "):
            error.args = (f"{path}{str(error).removeprefix(CONFIG_NAME)}",)
        elif str(error).startswith("the model"):
            error.args = (f"{path}: {error}",)
        raise


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
