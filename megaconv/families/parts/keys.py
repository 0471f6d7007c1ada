"""A config.json as data: which of its keys give which fields of a model's description, read and written by one declaration.

    size("num_hidden_layers", "layers.count")
    flags("attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=False)

What such declarations can't tell, a model mustn't have: `write_keys` reads back what it wrote, and refuses by name every
field that came back otherwise. So nothing that a model computes is ever dropped because somebody forgot to list it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible, UnknownFamily
from megaconv.model.config import ModelConfig, value_of
from megaconv.model.fields import from_fields, require_kept

CONFIG_NAME = "config.json"
WEIGHT_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which transformers looks for them beside it."""

Raw = Mapping[str, Any]
Fields = Mapping[str, Any]

HARMLESS = frozenset(
    (
        # bookkeeping
        *("transformers_version", "architectures", "model_type", "_name_or_path", "auto_map", "dtype", "torch_dtype"),
        *(
            "id2label",
            "label2id",
            "problem_type",
            "finetuning_task",
            "task_specific_params",
            "tokenizer_class",
            "prefix",
        ),
        # what a call returns, and how it is computed: the same numbers
        *(
            "return_dict",
            "output_hidden_states",
            "output_attentions",
            "output_router_logits",
            "use_cache",
            "torchscript",
        ),
        *(
            "chunk_size_feed_forward",
            "reorder_and_upcast_attn",
            "pretraining_tp",
            "use_bfloat16",
            "_attn_implementation",
        ),
        # in which precision experts are summed up: Megatron rounds as it does
        "enable_moe_fp32_combine",
        # how Mamba 2 is computed: by which kernels, in chunks of which length, in which precision its state and the residual are
        *("use_mamba_kernels", "chunk_size", "mamba_ssm_cache_dtype", "residual_in_fp32", "moe_shared_expert_overlap"),
        # what its initialization alone asks for, and a width that mamba_num_heads gives
        *("time_step_max", "time_step_floor", "rescale_prenorm_residual", "expand"),
        # of generation: which logits are computed
        "num_logits_to_keep",
        # training alone
        *(
            "initializer_range",
            "initializer_factor",
            "attention_dropout",
            "hidden_dropout",
            "residual_dropout",
            "embedding_dropout",
            "resid_pdrop",
            "embd_pdrop",
        ),
        *("attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "classifier_dropout"),
        *("router_aux_loss_coef", "router_jitter_noise"),
        # heads for other tasks, which no model here has
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    )
)
"""Keys that change nothing in what a model computes from its weights and its input."""


OFF: Raw = {"is_encoder_decoder": False, "add_cross_attention": False}
"""Keys that every configuration may have, and that only a family which says so has with another value."""


@dataclass(frozen=True)
class Keys:
    """Keys that belong together, and the fields that they tell."""

    names: tuple[str, ...]
    read: Callable[[Raw], Fields]
    """Fields by dotted name. Raises CorruptCheckpoint for values that can't be, NotExpressible for those that aren't known."""
    write: Callable[[ModelConfig], Raw]


def need_size(raw: Raw, key: str, default: int | None = None) -> int:
    """A positive number. Raises CorruptCheckpoint."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a positive number, found {value!r}")
    return value


def need_number(raw: Raw, key: str, default: float) -> float:
    """Raises CorruptCheckpoint."""
    value = raw.get(key, default)
    if type(value) not in (int, float):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a number, found {value!r}")
    return float(value)


def size(key: str, field: str, default: int | None = None) -> Keys:
    """A positive number; default: what a missing key means, None where there has to be one."""
    return Keys(
        (key,), lambda raw: {field: need_size(raw, key, default)}, lambda config: {key: value_of(config, field)}
    )


def count(key: str, field: str, default: int = 0) -> Keys:
    """A number that may be 0, which null means too."""

    def read(raw: Raw) -> Fields:
        value = raw.get(key, default)
        if value is not None and (type(value) is not int or value < 0):
            raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a number, found {value!r}")
        return {field: value or 0}

    return Keys((key,), read, lambda config: {key: value_of(config, field)})


def number(key: str, field: str, default: float) -> Keys:
    return Keys(
        (key,), lambda raw: {field: need_number(raw, key, default)}, lambda config: {key: value_of(config, field)}
    )


def maybe_number(key: str, field: str, default: float) -> Keys:
    """A number that null says there is none of."""

    def read(raw: Raw) -> Fields:
        return {field: None if raw.get(key, default) is None else need_number(raw, key, default)}

    return Keys((key,), read, lambda config: {key: value_of(config, field)})


def flags(key: str, fields: tuple[str, ...], *, default: bool) -> Keys:
    """One yes or no for several fields."""
    return Keys(
        (key,),
        lambda raw: dict.fromkeys(fields, bool(raw.get(key, default))),
        lambda config: {key: value_of(config, fields[0])},
    )


def choice(key: str, field: str, values: Mapping[str, Any], default: str) -> Keys:
    """A word for each value of a field; the first of several for one value is written."""

    def read(raw: Raw) -> Fields:
        word = raw.get(key, default)
        if word not in values:
            raise UnknownFamily(
                f"{CONFIG_NAME}: {key} {word!r} is not supported in this architecture; expected {' or '.join(values)}"
            )
        return {field: values[word]}

    def write(config: ModelConfig) -> Raw:
        named = [word for word, value in values.items() if value == value_of(config, field)]
        if not named:
            raise NotExpressible(
                f"the model's {field} is {value_of(config, field)}, which {key} of this architecture's {CONFIG_NAME} "
                f"can't represent: it has {' and '.join(map(str, dict.fromkeys(values.values())))}"
            )
        return {key: named[0]}

    return Keys((key,), read, write)


def follows(field: str, rule: Callable[[Raw], Any]) -> Keys:
    """A field that other keys decide, and no key of its own."""
    return Keys((), lambda raw: {field: rule(raw)}, lambda config: {})


def other_names(names: Mapping[str, str]) -> Keys:
    """Further names of keys (name -> key), which transformers lets win over these: refused where they say something else."""

    def read(raw: Raw) -> Fields:
        for name, key in names.items():
            if raw.get(name, raw.get(key)) != raw.get(key):
                raise CorruptCheckpoint(
                    f"{CONFIG_NAME}: {name} is {raw[name]!r} and {key} {raw.get(key)!r}, two names for one thing; leave {name} out"
                )
        return {}

    return Keys(tuple(names), read, lambda config: {})


def read_keys(family: str, keys: Sequence[Keys], fixed: Fields, only: Raw, raw: Raw) -> ModelConfig:
    """The model that a config.json describes.

    fixed: fields that every model of the family has. only: keys that compute something, with the one value that is known.
    """
    for key, value in {**OFF, **only}.items():
        if raw.get(key, value) != value:
            raise UnknownFamily(
                f"{CONFIG_NAME}: {key} {raw[key]!r} is not supported in this architecture, only {value!r} is"
            )
    given: dict[str, Any] = dict(fixed)
    for each in keys:
        given |= each.read(raw)
    return from_fields(family, given, dict(raw))


def write_keys(
    keys: Sequence[Keys], fixed: Fields, only: Raw, config: ModelConfig, architecture: str, model_type: str
) -> dict[str, Any]:
    """A config.json. Raises NotExpressible, naming it, for a field that the architecture doesn't keep."""
    written: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, **only}
    for each in keys:
        written |= each.write(config)
    try:
        back = read_keys(config.family, keys, fixed, only, written)
    except (CorruptCheckpoint, UnknownFamily) as error:
        raise NotExpressible(f"the model can't be represented as {architecture}: {error}") from error
    require_kept(config, back, f"{architecture}'s {CONFIG_NAME}")
    return written
