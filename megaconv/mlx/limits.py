"""Models that mlx-lm's classes can't load, or compute otherwise than transformers.

A model is refused if mlx-lm would fail, or give other outputs for every text. Windows that mlx-lm ignores only change the
outputs for long texts: a notice names them. Source: the models of mlx-lm 0.32, whose logits were compared with transformers'.
"""

from collections.abc import Callable, Iterator, Mapping

from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.config import ModelConfig

_Limit = tuple[Callable[[ModelConfig], bool], str]
"""(True for a model beyond the limit, what mlx-lm's class does)."""

_TIED: _Limit = (
    lambda config: not config.tie_embeddings,
    "always ties the head to the embedding",
)
_EPSILON: _Limit = (
    lambda config: config.norm.epsilon != 1e-5,
    "has no key for the epsilon of its norms, which is 1e-05",
)
_GROUPS: _Limit = (
    lambda config: config.mamba.groups > 1 and config.has("mamba_layers"),
    "normalizes all groups of a Mamba layer together",
)
_DENSE_FIRST: _Limit = (
    lambda config: _has_dense_layers_after_experts(config),
    "has layers without experts before all others only",
)
_LIMITS: Mapping[str, tuple[_Limit, ...]] = {
    "apertus": ((lambda config: config.attention.qkv_bias, "has no biases in attention"),),
    "cohere": (_TIED,),
    "cohere2": (_TIED,),
    "deepseek_v2": (
        _DENSE_FIRST,
        (lambda config: not config.positions.scaling, "fails without rope_scaling"),
    ),
    "deepseek_v3": (_DENSE_FIRST,),
    "deepseek_v32": (_DENSE_FIRST,),
    "dots1": (_DENSE_FIRST,),
    "falcon_mamba": (_EPSILON,),
    "gemma": (_TIED,),
    "gemma2": (
        _TIED,
        (
            lambda config: None in (config.attention.score_cap, config.head.logit_cap),
            "always limits scores and logits",
        ),
    ),
    "glm": (
        (
            lambda config: config.positions.rotary_percent != 1,
            "rotates whole heads, without partial_rotary_factor",
        ),
    ),
    "glm4_moe": (_DENSE_FIRST,),
    "glm4_moe_lite": (_DENSE_FIRST,),
    "glm_moe_dsa": (
        _DENSE_FIRST,
        (lambda config: config.has("shared_index"), "has an indexer in every layer"),
    ),
    "gpt_bigcode": ((lambda config: config.attention.kv_heads > 1, "expects one key/value head"),),
    "granite_moe_hybrid": (_GROUPS,),
    "laguna": ((lambda config: not config.attention.head_gate, "has one gate for each head"),),
    "lfm2": (_TIED,),
    "lfm2_moe": (_TIED,),
    "llama4": ((lambda config: _rotates_otherwise(config), "rotates all but every fourth layer"),),
    "mamba": (_EPSILON,),
    "mamba2": (_GROUPS,),
    "phimoe": (
        (
            lambda config: not (config.attention.qkv_bias and config.head.bias),
            "has biases in attention and in the head",
        ),
    ),
    "qwen2_moe": (
        (
            lambda config: len(config.layers_with("moe")) < config.layer_count,
            "has experts in all layers",
        ),
    ),
    "solar_open": (_DENSE_FIRST,),
}
_WITHOUT_WINDOWS = (
    *("dots1", "gemma2", "mimo", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "starcoder2",
)  # fmt: skip
"""Families whose windows mlx-lm ignores."""


def require_within(config: ModelConfig) -> None:
    """Raise NotExpressible for a model that mlx-lm's class can't load, or computes otherwise."""
    if family(config.family).is_bare(config):
        raise NotExpressible(
            "--saver mlx: mlx-lm's classes have a head for words, and this model has none; choose another --saver"
        )
    for is_beyond, said in _LIMITS.get(config.family, ()):
        if is_beyond(config):
            raise NotExpressible(
                f"--saver mlx: mlx-lm's class of {config.family} {said}; this model differs. Choose another --saver"
            )


def differences(config: ModelConfig) -> Iterator[str]:
    """Yield a notice for each difference that some outputs have."""
    if config.window is not None and config.family in _WITHOUT_WINDOWS:
        yield (
            f"mlx-lm ignores the attention window of {config.family}: from {config.window + 1} tokens on, its outputs differ from "
            "those of transformers"
        )
    if config.family == "jamba" and config.layers_with("moe"):
        yield (
            "mlx-lm makes the weights of Jamba's chosen experts sum up to 1, and transformers doesn't: its outputs differ"
        )


def _has_dense_layers_after_experts(config: ModelConfig) -> bool:
    with_experts = config.layers_with("moe")
    first = config.layer_count - len(with_experts)
    return with_experts != tuple(range(first, config.layer_count))


def _rotates_otherwise(config: ModelConfig) -> bool:
    rotating = [layer.rotates for layer in config.layers]
    return rotating != [(number + 1) % 4 != 0 for number in range(config.layer_count)]
