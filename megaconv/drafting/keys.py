"""The keys of a drafted family: those of its base, changed by transformers' configuration class and by precedents.

A key that the base doesn't declare is declared as in another family that has it. If no family has it, the draft supports
only its default, and says so. So a draft never ignores a key.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megaconv.drafting.code import Node, call, dictionary, literal, node_of
from megaconv.drafting.known import Known
from megaconv.drafting.reference import Reference
from megaconv.errors import CheckpointError
from megaconv.families import Family
from megaconv.families.parts.key_changes import Declared, with_defaults, with_keys, without_keys
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw
from megaconv.model.check import well_formed
from megaconv.model.fields import STRUCTURE

_MODULE = "megaconv.families.parts.key_changes"
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""transformers' names of activations -> those of ModelConfig."""
_ALWAYS = frozenset(
    (
        *("torch_dtype", "dtype", "tie_word_embeddings", "partial_rotary_factor"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
)
"""Keys of every architecture."""
_OLDER = frozenset(("rope_theta", "rope_scaling", "original_max_position_embeddings"))
"""Keys of transformers 4 for rope_parameters."""
_MIXERS = frozenset(("linear", "mamba", "mamba1", "recurrent", "convolution", "compressed"))
"""Subjects of a model's description about single kinds of mixers."""
_NEEDED = frozenset(
    ("hidden", "vocab", "max_positions", "layers.count", "mlp.ffn", "attention.heads")
)
"""Fields without which there is no model."""


@dataclass(frozen=True)
class DraftedKeys:
    """The declarations of a drafted family, as objects and as source."""

    keys: Declared
    source: Node
    only: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that follow from keys with one supported value."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of missing keys where they differ from the base's; `_DEFAULTS` in the source."""
    imports: tuple[tuple[str, str], ...] = ()
    standing_on: tuple[Known, ...] = ()
    """Families whose declarations are taken."""
    questions: tuple[str, ...] = ()


def drafted_keys(reference: Reference, base: Known, known: Iterable[Known]) -> DraftedKeys:
    """The declarations for an architecture. known: the families that may be precedents."""
    own = reference.own_keys
    draft = DraftedKeys(
        base.family.keys, f"{base.constant}.keys", _kept_only(reference, base.family)
    )
    draft = _dropped(draft, reference)
    draft = _fitting(draft, reference, list(known))
    unknown = own - _declared(draft.keys) - set(base.family.only) - set(reference.aliases)
    for key in sorted(unknown):
        if key in _declared(draft.keys):  # declared together with another unknown key
            continue
        draft = _declare(draft, key, reference, [base, *known])
    draft = _with_activation(draft, reference)
    draft = _with_own_defaults(draft, reference)
    return replace(draft, questions=(*draft.questions, *_lost(draft, reference, base.family)))


def only_source(draft: DraftedKeys) -> Node:
    """The source of the keys with one supported value."""
    return dictionary({key: node_of(value) for key, value in draft.only.items()})


def _declared(keys: Declared) -> set[str]:
    return {name for each in keys for name in each.names}


def _kept_only(reference: Reference, base: Family) -> dict[str, Any]:
    """The base's keys with one supported value that the architecture has too."""
    return {
        key: value
        for key, value in base.only.items()
        if key in reference.defaults and reference.defaults[key] == value
    }


def _dropped(draft: DraftedKeys, reference: Reference) -> DraftedKeys:
    """Leave out the declarations of keys that the architecture doesn't have."""
    present = set(reference.defaults) | _ALWAYS
    gone = []
    for each in draft.keys:
        if not each.names or not present.isdisjoint(each.names):
            continue
        if _NEEDED.isdisjoint(_read(each, reference.raw)):
            gone.append(each.names[0])
    if not gone:
        return draft
    return replace(
        draft,
        keys=without_keys(draft.keys, *gone),
        source=call("without_keys", draft.source, *map(literal, gone)),
        imports=(*draft.imports, (_MODULE, "without_keys")),
    )


def _fitting(draft: DraftedKeys, reference: Reference, known: list[Known]) -> DraftedKeys:
    """Replace declarations of several keys of which the architecture lacks some."""
    allowed = set(reference.defaults) | _ALWAYS | _OLDER
    for loose in draft.keys:
        names = set(loose.names)
        if names <= allowed or names.isdisjoint(allowed):
            continue
        present = [name for name in loose.names if name in reference.defaults]
        if not present:
            continue
        key = present[0]
        without = replace(draft, keys=without_keys(draft.keys, key))
        precedents = [
            each
            for each in _precedents(without, key, reference, known)
            if set(present) <= set(each.declared.names)
        ]
        if precedents:
            draft = _taken(draft, key, precedents)
            continue
        lacking = ", ".join(sorted(names - allowed))
        question = (
            f"{key} is declared together with {lacking}, which the configuration doesn't have."
        )
        draft = replace(draft, questions=(*draft.questions, question))
    return draft


def _read(declared: Keys, raw: Raw) -> Fields:
    """The fields that a declaration gives; none if it can't read the configuration."""
    try:
        with well_formed(CONFIG_NAME):
            return declared.read(raw)
    except CheckpointError:
        return {}


@dataclass(frozen=True)
class _Precedent:
    known: Known
    declared: Keys
    fields: Fields


def _precedents(
    draft: DraftedKeys, key: str, reference: Reference, known: Iterable[Known]
) -> Iterator[_Precedent]:
    """Yield the families that declare a key, together with nothing that the architecture lacks.

    Declarations about a single kind of mixer count only without others: a key such as use_bias has another meaning in
    most architectures.
    """
    kept = _declared(draft.keys)
    allowed = set(reference.defaults) | _ALWAYS | _OLDER
    usual, of_mixers = [], []
    for each in known:
        for declared in each.family.keys:
            names = set(declared.names)
            fields = _read(declared, reference.raw) if key in names <= allowed else {}
            if not fields or names & kept:
                continue
            found = _Precedent(each, declared, fields)
            if {name.partition(".")[0] for name in fields} <= _MIXERS:
                of_mixers.append(found)
            else:
                usual.append(found)
    yield from usual or of_mixers


def _declare(draft: DraftedKeys, key: str, reference: Reference, known: list[Known]) -> DraftedKeys:
    """Declare a key that the base doesn't have."""
    default = reference.defaults[key]
    if key in _ACTIVATION_KEYS:
        return draft
    precedents = list(_precedents(draft, key, reference, known))
    if not precedents:
        refused = any(each.family.only.get(key, ...) == default for each in known)
        question = (
            f"no family declares {key}. Other values than {literal(default)} are refused until a declaration says what "
            "they change."
        )
        return replace(
            draft,
            only={**draft.only, key: default},
            questions=draft.questions if refused else (*draft.questions, question),
        )
    return _taken(draft, key, precedents)


def _taken(draft: DraftedKeys, key: str, precedents: list[_Precedent]) -> DraftedKeys:
    """Declare a key as most families with this key do."""
    meanings: dict[str, list[_Precedent]] = {}
    for each in precedents:
        meanings.setdefault(repr(sorted(each.fields.items())), []).append(each)
    usual, *others = sorted(meanings.values(), key=len, reverse=True)
    chosen = usual[0].known
    questions = draft.questions
    if others:
        named = ", ".join(each[0].known.family.name for each in others)
        questions = (
            *questions,
            f"{key} is declared as in {chosen.family.name}. It means something else in {named}.",
        )
    return replace(
        draft,
        keys=with_keys(draft.keys, chosen.family.keys, key),
        source=call("with_keys", draft.source, f"{chosen.constant}.keys", literal(key)),
        imports=(*draft.imports, (_MODULE, "with_keys")),
        standing_on=(*draft.standing_on, chosen),
        questions=questions,
    )


def _with_activation(draft: DraftedKeys, reference: Reference) -> DraftedKeys:
    """Fix the activation unless a declaration reads it."""
    for key in _ACTIVATION_KEYS:
        if key not in reference.defaults or key in draft.only:
            continue
        declared = [each for each in draft.keys if key in each.names]
        if any(_read(each, reference.raw) for each in declared):
            continue
        draft = _fixed_activation(draft, key, reference.defaults[key], is_declared=bool(declared))
    return draft


def _fixed_activation(draft: DraftedKeys, key: str, word: Any, *, is_declared: bool) -> DraftedKeys:
    if is_declared:
        draft = replace(
            draft,
            keys=without_keys(draft.keys, key),
            source=call("without_keys", draft.source, literal(key)),
            imports=(*draft.imports, (_MODULE, "without_keys")),
        )
    only = {**draft.only, key: word}
    if word in _ACTIVATIONS:
        fixed = {**draft.fixed, "mlp.activation": _ACTIVATIONS[word]}
        return replace(draft, only=only, fixed=fixed)
    question = f"{key} is {literal(word)}, an activation that ModelConfig doesn't have."
    return replace(draft, only=only, questions=(*draft.questions, question))


def _with_own_defaults(draft: DraftedKeys, reference: Reference) -> DraftedKeys:
    """Give missing keys the architecture's own defaults."""
    found: dict[str, Any] = {}
    by_layer: list[str] = []
    layers = reference.defaults.get("num_hidden_layers")
    for each in draft.keys:
        for name in each.names:
            default = reference.defaults.get(name)
            if name not in reference.defaults or not _differs_if_missing(
                each, name, reference.defaults
            ):
                continue
            if isinstance(default, list) and len(default) == layers:
                by_layer.append(name)
            else:
                found[name] = default
    questions = tuple(
        f"if {name} is missing, transformers makes it, a value for each layer. Declare the same, or "
        "check that published files have it."
        for name in by_layer
    )
    draft = replace(draft, questions=(*draft.questions, *questions))
    if not found:
        return draft
    return replace(
        draft,
        keys=with_defaults(draft.keys, found),
        source=call("with_defaults", draft.source, "_DEFAULTS"),
        defaults=found,
        imports=(*draft.imports, (_MODULE, "with_defaults")),
    )


def _differs_if_missing(declared: Keys, name: str, defaults: Raw) -> bool:
    """True if a missing key has another meaning than its default in transformers. A required key has none."""
    stated = _read(declared, defaults)
    missing = _read(declared, {key: value for key, value in defaults.items() if key != name})
    return bool(stated) and bool(missing) and stated != missing


def _lost(draft: DraftedKeys, reference: Reference, base: Family) -> Iterator[str]:
    """Yield a question for each field that the base reads, and that no key of the architecture gives."""
    given = {name for each in draft.keys for name in _read(each, reference.raw)}
    for each in base.keys:
        fields = _read(each, reference.raw)
        lost = [name for name in fields if name not in {*given, *draft.fixed, *STRUCTURE}]
        if lost and not set(each.names) & set(draft.only):
            yield (
                f"the configuration has no {', '.join(each.names)}. {', '.join(lost)} has its default."
            )
