"""The models that Megatron's names and arguments can't express, each with its reason."""

from collections.abc import Iterator

from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.megatron.arguments.beyond_core import is_of_the_trainer
from megaconv.megatron.arguments.router import router_refusals
from megaconv.model.config import ModelConfig
from megaconv.model.naming import CORE, LEGACY

UNKNOWN_POSITIONS = ("alibi", "sinusoidal")
"""Kinds of positions that Megatron doesn't have."""


def require_names(config: ModelConfig) -> None:
    """Raise NotExpressible for a model without names in Megatron core, or with names that only the trainer knows."""
    found = family(config.family)
    if not found.rows[0].spelling(CORE) or is_of_the_trainer(config):
        savers = "hf or dcp" if config.whole is not None else "hf, dcp or deepspeed"
        raise NotExpressible(
            f"{_architecture(config)} has no names in Megatron's formats (see docs/families.md); choose --saver {savers}"
        )


def require_legacy_names(config: ModelConfig) -> None:
    """Raise NotExpressible for a model without names in Megatron's models before core."""
    if not family(config.family).rows[0].spelling(LEGACY):
        raise NotExpressible(
            f"Megatron's legacy models can't represent a {config.family}; choose --saver core"
        )


def _architecture(config: ModelConfig) -> str:
    """The class that the model's config.json names, or else the first class of its family."""
    found = family(config.family)
    stated = (config.hf or {}).get("architectures") or ()
    named = (each for each in (*stated, *found.architectures) if each in found.architectures)
    return next(named, found.name)


def is_representable(config: ModelConfig) -> bool:
    """True if Megatron core's arguments can describe the layers of a model, without a config.json beside them."""
    refusals = _refusals(config, legacy=False, beside_config=False)
    return not any(applies for applies, _ in refusals)


def require_representable(config: ModelConfig, *, legacy: bool, beside_config: bool) -> None:
    """Raise NotExpressible for the first reason why Megatron can't have this model. beside_config: see `_refusals`."""
    for applies, reason in _refusals(config, legacy=legacy, beside_config=beside_config):
        if applies:
            raise NotExpressible(reason)


def _refusals(
    config: ModelConfig, *, legacy: bool, beside_config: bool
) -> Iterator[tuple[bool, str]]:
    """(whether a problem applies, why Megatron can't have this model) for each possible problem.

    beside_config: True if a config.json beside the checkpoint has all fields.
    """
    attention, mlp = config.attention, config.mlp
    yield (
        not beside_config
        and (attention.o_bias != mlp.bias or (attention.o_bias and not attention.qkv_bias)),
        "Megatron has biases on all linear layers, on q, k and v only, or on none; this model has another set",
    )
    yield (
        config.has("rope gelu_tanh plain !mlp_bias !encoder"),
        "the model has the approximate gelu in an MLP without biases; Megatron has it only fused with a bias",
    )
    yield (
        config.attention.qk_l2_norm and (legacy or config.has("mla")),
        "the model divides q and k by their L2 norm, which Megatron core has for attention with heads of keys alone",
    )
    yield (
        config.positions.kind in UNKNOWN_POSITIONS and not beside_config,
        "the model encodes positions by ALiBi (biases that grow with the distance) or by sines, which Megatron doesn't have",
    )
    yield (
        config.has("norm_by_mixer") and not beside_config,
        "the model has norms before its delta nets and after its attention, which Megatron core doesn't have; it is converted "
        "between Hugging Face's files",
    )
    yield (
        config.has("convolution_layers") and not beside_config,
        "the model has short convolutions, which Megatron core doesn't have; it is converted between Hugging Face's files",
    )
    yield (
        legacy and (config.has("interleaved") or config.has("skips_rope")),
        "the model has rotary positions of neighbouring elements, or not in all layers, which Megatron's legacy models don't "
        "know: choose --saver core",
    )
    if config.experts.count:
        yield from router_refusals(config.experts, beside_config=beside_config)
