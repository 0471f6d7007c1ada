"""A config.json as data: one declaration says which keys give which fields of a model's description, for reading and
writing.

    size("num_hidden_layers", "layers.count")
    flags("attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=False)

A model must not have features that these declarations can't represent. `write_keys` reads back what it wrote, and
refuses every field that changed, with its name. Therefore no feature of a model is ever dropped because somebody forgot
to list it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any

from formats.wording import counted
from megaconv.errors import CorruptCheckpoint, NotExpressible, UnknownFamily
from megaconv.families.parts.computable import require_computable, require_counts
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import from_fields
from megaconv.model.meaning import require_kept

CONFIG_NAME = "config.json"
WEIGHT_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model_fsdp.bin",
)
"""Files with weights, in the order in which transformers looks for them next to config.json. The last is accelerate's, of
FSDP with a full state dictionary."""

Raw = Mapping[str, Any]
Fields = Mapping[str, Any]

OFF: Raw = {"is_encoder_decoder": False, "add_cross_attention": False}
"""Keys that every configuration may have. Only a family that declares them may have another value."""


@dataclass(frozen=True)
class Keys:
    """Keys that belong together, and the fields that they give."""

    names: tuple[str, ...]
    read: Callable[[Raw], Fields]
    """Fields by dotted name. Raises CorruptCheckpoint for impossible values, and NotExpressible for unsupported values.
    """
    write: Callable[[ModelConfig], Raw]


def need_size(raw: Raw, key: str, default: int | None = None) -> int:
    """The positive number of a key. Raises CorruptCheckpoint for anything else."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {key} should be a positive number, found {value!r:.60}"
        )
    return value


def need_token(raw: Raw, key: str, default: int | None) -> int | None:
    """The number of a token, or None. Raises CorruptCheckpoint for anything else, such as NaN.

    The number may lie outside of the vocabulary: many a model has -1 or the number of its tokens for padding.
    """
    value = raw.get(key, default)
    if value is not None and type(value) is not int:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {key} should be the number of a token or null, found {value!r:.60}"
        )
    return value


def need_tokens(
    raw: Raw, key: str, default: int | tuple[int, ...] | None
) -> int | tuple[int, ...] | None:
    """The number of a token, the numbers of several, or None. Raises CorruptCheckpoint as need_token does."""
    value = raw.get(key, default)
    if not isinstance(value, list | tuple):
        return need_token({key: value}, key, None)
    for number in value:
        if type(number) is not int:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} should list numbers of tokens, found {number!r:.60}"
            )
    return tuple(value)


def need_number(raw: Raw, key: str, default: float) -> float:
    """The number of a key. Raises CorruptCheckpoint for anything else."""
    value = raw.get(key, default)
    if type(value) not in (int, float):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a number, found {value!r:.60}")
    return float(value)


def need_positive(raw: Raw, key: str, default: float) -> float:
    """The number of a key, which is above 0. Raises NotExpressible for another number."""
    value = need_number(raw, key, default)
    if value <= 0:
        raise NotExpressible(
            f"{CONFIG_NAME}: {key} {value} is not supported in this architecture; expected a positive number"
        )
    return value


def require_each_layer(key: str, listed: Sequence[Any], layers: int) -> None:
    """Raise CorruptCheckpoint unless a key has one value for each layer."""
    if len(listed) != layers:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {key} lists {counted(len(listed), 'layer')}, the model has {layers}"
        )


def size(key: str, field: str, default: int | None = None) -> Keys:
    """A positive number. default: the value of a missing key; None if the key is required."""
    return Keys(
        (key,),
        lambda raw: {field: need_size(raw, key, default)},
        lambda config: {key: value_of(config, field)},
    )


def count(key: str, field: str, default: int = 0) -> Keys:
    """A number that may be 0. null also means 0."""

    def read(raw: Raw) -> Fields:
        value = raw.get(key, default)
        if value is not None and (type(value) is not int or value < 0):
            raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a number, found {value!r:.60}")
        return {field: value or 0}

    return Keys((key,), read, lambda config: {key: value_of(config, field)})


def number(key: str, field: str, default: float) -> Keys:
    return Keys(
        (key,),
        lambda raw: {field: need_number(raw, key, default)},
        lambda config: {key: value_of(config, field)},
    )


def positive_number(key: str, field: str, default: float) -> Keys:
    """A number above 0. Another one would compute something else in transformers' class."""

    return Keys(
        (key,),
        lambda raw: {field: need_positive(raw, key, default)},
        lambda config: {key: value_of(config, field)},
    )


def only_in_files(values: Raw) -> Keys:
    """Keys that published files have and transformers' class doesn't read, with the values that it computes."""

    def read(raw: Raw) -> Fields:
        for key, value in values.items():
            if raw.get(key, value) != value:
                raise NotExpressible(
                    f"{CONFIG_NAME}: {key} {raw[key]!r} is not supported in this architecture, only {value!r} is"
                )
        return {}

    return Keys(tuple(values), read, lambda config: {})


def maybe_number(key: str, field: str, default: float | None) -> Keys:
    """A number, or null for none."""

    def read(raw: Raw) -> Fields:
        stated = raw.get(key, default)
        return {field: None if stated is None else need_number({key: stated}, key, 0.0)}

    return Keys((key,), read, lambda config: {key: value_of(config, field)})


def factor(key: str, field: str) -> Keys:
    """A factor above 0. The field is None for the factor 1, which is also the default."""

    def read(raw: Raw) -> Fields:
        value = need_positive(raw, key, 1.0)
        return {field: None if value == 1 else value}

    def write(config: ModelConfig) -> Raw:
        value = value_of(config, field)
        return {key: 1.0 if value is None else value}

    return Keys((key,), read, write)


def multiplier(key: str, field: str, default: float = 1.0) -> Keys:
    """A key that multiplies, for a field that divides. The field is None for the factor 1."""

    def read(raw: Raw) -> Fields:
        value = need_number(raw, key, default)
        if not value:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} should be a number but 0, found {value!r:.60}"
            )
        return {field: None if value == 1 else 1 / value}

    def write(config: ModelConfig) -> Raw:
        return {key: _inverse(value_of(config, field) or 1.0)}

    return Keys((key,), read, write)


def _inverse(divisor: float) -> float:
    """The number whose inverse is the divisor. Rounding may put it next to the divisor's inverse."""
    near = 1 / divisor
    candidates = (near, nextafter(near, inf), nextafter(near, -inf))
    return next((each for each in candidates if 1 / each == divisor), near)


def need_flag(raw: Raw, key: str, default: bool) -> bool:
    """True or false; null is false. Some published files have numbers.

    Raises CorruptCheckpoint for a text, a list or an object: Python would take even "false" for true.
    """
    value = raw.get(key, default)
    if isinstance(value, str | list | dict):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be true or false, found {value!r}")
    return bool(value)


def flags(key: str, fields: tuple[str, ...], *, default: bool) -> Keys:
    """One true or false for several fields."""
    return Keys(
        (key,),
        lambda raw: dict.fromkeys(fields, need_flag(raw, key, default)),
        lambda config: {key: value_of(config, fields[0])},
    )


def choice(key: str, field: str, values: Mapping[Any, Any], default: Any) -> Keys:
    """A word for each value of a field. If several words mean one value, the first one is written."""

    def read(raw: Raw) -> Fields:
        word = raw.get(key, default)
        if word not in values:
            raise UnknownFamily(
                f"{CONFIG_NAME}: {key} {word!r} is not supported in this architecture; "
                f"expected {' or '.join(map(str, values))}"
            )
        return {field: values[word]}

    def write(config: ModelConfig) -> Raw:
        wanted = value_of(config, field)
        named = [word for word, value in values.items() if value == wanted]
        if not named:
            possible = map(str, dict.fromkeys(values.values()))
            raise NotExpressible(
                f"the model's {field} is {wanted}, which {key} of this architecture's {CONFIG_NAME} "
                f"can't represent: it has {' and '.join(possible)}"
            )
        return {key: named[0]}

    return Keys((key,), read, write)


def follows(field: str, rule: Callable[[Raw], Any]) -> Keys:
    """A field that follows from other keys and has no key."""
    return Keys((), lambda raw: {field: rule(raw)}, lambda config: {})


def by_own_names(raw: Raw, aliases: Mapping[str, str]) -> Raw:
    """A config.json with each value under its main key instead of transformers' second names.

    aliases: second name -> key. Raises CorruptCheckpoint if the two have different values.
    """
    if not raw.keys() & aliases.keys():
        return raw
    found = dict(raw)
    for alias, key in aliases.items():
        if alias not in found:
            continue
        value = found.pop(alias)
        if key in found and found[key] != value:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} is {found[key]!r} and {alias} {value!r}, two names for one thing; leave the wrong one out "
                f"(transformers takes {alias})"
            )
        found[key] = value
    return found


def read_keys(family: str, keys: Sequence[Keys], fixed: Fields, only: Raw, raw: Raw) -> ModelConfig:
    """The model that a config.json describes.

    fixed: fields that every model of the family has. only: keys that change the computation, with their only supported
    value.
    """
    for key, value in {**OFF, **only}.items():
        if raw.get(key, value) != value:
            raise UnknownFamily(
                f"{CONFIG_NAME}: {key} {raw[key]!r} is not supported in this architecture, only {value!r} is"
            )
    given: dict[str, Any] = dict(fixed)
    for each in keys:
        present = ", ".join(name for name in each.names if name in raw)
        with well_formed(f"{CONFIG_NAME}: {present}" if present else CONFIG_NAME):
            require_counts(CONFIG_NAME, raw, each.names)
            found = each.read(raw)
        require_computable(CONFIG_NAME, found, raw, each.names)
        given |= found
    return from_fields(family, given, dict(raw))


def write_keys(
    keys: Sequence[Keys],
    fixed: Fields,
    only: Raw,
    config: ModelConfig,
    architecture: str,
    model_type: str,
    *,
    but: Sequence[str] = (),
) -> dict[str, Any]:
    """The config.json of a model. Raises NotExpressible, which names the field, for a field that the architecture can't
    represent. but: fields that other keys give."""
    written: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, **only}
    for each in keys:
        written |= each.write(config)
    try:
        back = read_keys(config.family, keys, fixed, only, written)
    except (CorruptCheckpoint, UnknownFamily) as error:
        raise NotExpressible(
            f"the model can't be represented as {architecture}: {error}"
        ) from error
    require_kept(config, back, f"{architecture}'s {CONFIG_NAME}", but=but)
    return written
