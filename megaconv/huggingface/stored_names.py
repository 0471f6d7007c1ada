"""Names of tensors in files, and the names in the family's table: wrappers and prefixes differ by who saved the model.

_orig_mod.model.embed_tokens.weight       torch.compile
module.model.embed_tokens.weight          DistributedDataParallel, DeepSpeed
embed_tokens.weight                       the bare model, as of most text embedding models
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from formats.tensor import LazyTensor
from formats.wording import listing
from megaconv.errors import TensorMismatch
from megaconv.families import Family
from megaconv.model.naming import HF

_log = logging.getLogger("megaconv")
_T = TypeVar("_T", bound=LazyTensor)

_WRAPPERS = re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
"""Parts of names that torch.compile, FSDP and activation recomputation add, at any depth."""
_OUTER = ("module.", "pretrained_model.")
"""Prefixes of all names: of DistributedDataParallel and DeepSpeed, and of TRL's models with a value head."""
_LIGHTNING, _INSIDE = "model.", "model.model."
"""The prefix of all names that a module of Lightning adds, and of most names in such a file."""
_VALUE_HEAD = "v_head."
_HEAD, _BASE = "lm_head.", "model."


def renamed(tensors: Mapping[str, _T], names: Mapping[str, str], where: str) -> dict[str, _T]:
    """The tensors that have a new name in `names` (old -> new). where: for messages.

    Raises TensorMismatch if two tensors would get the same name: neither is dropped.
    """
    found: dict[str, _T] = {}
    taken: dict[str, str] = {}
    for old, new in names.items():
        if new in found:
            both = " and ".join(sorted([taken[new], old]))
            raise TensorMismatch(
                f"{where}: holds both {both}, two names of one tensor; remove the one that is wrong"
            )
        found[new], taken[new] = tensors[old], old
    return found


def unwrapped(name: str) -> str:
    """A tensor's name without the parts that wrappers of torch add to it."""
    return _WRAPPERS.sub("", name)


def without_wrappers(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """The tensors by their names in the model. where: for messages.

    Raises TensorMismatch if two tensors have the same name without wrappers.
    """
    names = {name: unwrapped(name) for name in tensors}
    while (prefix := _outer_prefix(names.values())) is not None:
        names = {old: name.removeprefix(prefix) for old, name in names.items()}
    value_head = [old for old, name in names.items() if name.startswith(_VALUE_HEAD)]
    if value_head:
        _log.warning("%s: a value head is not converted: %s", where, listing(value_head))
        names = {old: name for old, name in names.items() if old not in value_head}
    return renamed(tensors, names, where)


def _outer_prefix(names: Iterable[str]) -> str | None:
    """A prefix of all names but a value head's that is none of the model's own; None if there is none."""
    names = [name for name in names if not name.startswith(_VALUE_HEAD)]
    is_of_lightning = any(name.startswith(_INSIDE) for name in names)
    possible = (*_OUTER, _LIGHTNING) if is_of_lightning else _OUTER
    shared = (prefix for prefix in possible if all(name.startswith(prefix) for name in names))
    return next(shared, None) if names else None


def is_of_bare_model(names: Iterable[str], family: Family) -> bool:
    """True if files hold the model that the class with a head has inside: their names lack its prefix."""
    prefix, held = prefix_of(family), list(names)
    return bool(prefix and held) and not any(name.startswith(prefix) for name in held)


def with_names_of_family(
    found: dict[str, LazyTensor], family: Family, where: str
) -> dict[str, LazyTensor]:
    """The tensors by the names in the family's table. Files may lack its prefix, or have other names for some tensors."""
    if is_of_bare_model(found, family):
        names = {name: prefix_of(family) + name for name in found}
        names |= {name: name for name in found if name.startswith(_HEAD)}
        found = renamed(found, names, where)
    for old, new in family.older.items():
        names = {name: name for name in found}
        names |= {name: name.removesuffix(old) + new for name in found if name.endswith(old)}
        found = renamed(found, names, where)
    others = family.other_names(found)
    if not others:
        return found
    return renamed(found, {name: others.get(name, name) for name in found}, where)


def prefix_of(family: Family) -> str:
    """The prefix of all names except the head's; empty for a family whose names have none, or several."""
    if family.prefix:
        return family.prefix
    embedding = next((row for row in family.rows if row.stage == "first"), None)
    names = [] if embedding is None else [spelling.name for spelling in embedding.spelling(HF)]
    return _BASE if names and all(name.startswith(_BASE) for name in names) else ""


def name_in_class(family: Family, name: str) -> str:
    """The name in transformers' class of a tensor in files."""
    for ours, theirs in family.renamed.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
