"""linear_attn_config of Kimi's models: the sizes of Kimi delta attention, and the layers that have it, counted from 1.

    {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}

Kimi Linear and Kimi K3 have the same class name and model_type. Keys that only Kimi K3 has distinguish them.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Raw
from megaconv.model.config import ModelConfig

KDA_CONFIG = "linear_attn_config"
LISTS = ("full_attn_layers", "kda_layers")
WORDS = {"linear_attention": "kda", "full_attention": "attention"}
"""Word for a layer -> mixer."""
_ONLY_IN_K3 = (
    "activation_situ_beta",
    "attn_res_block_size",
    "mla_use_output_gate",
    "routed_expert_hidden_size",
)


def is_kimi_k3(raw: Raw) -> bool:
    """True if a config.json of KimiLinearForCausalLM has a part that only Kimi K3 has."""
    return raw.get("hidden_act") == "situ" or any(raw.get(key) for key in _ONLY_IN_K3)


def is_kimi_linear(raw: Raw) -> bool:
    """True if a config.json of KimiLinearForCausalLM has no part that only Kimi K3 has."""
    return not is_kimi_k3(raw)


def kda_config(raw: Raw, *keys: str) -> dict[str, Any]:
    """linear_attn_config; empty without it.

    keys: its keys that the architecture supports besides the lists. Raises NotExpressible for another one.
    """
    stated = raw.get(KDA_CONFIG) or {}
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {KDA_CONFIG} should be an object, found {stated!r}"
        )
    for key, value in stated.items():
        if key not in (*keys, *LISTS) and value:
            raise NotExpressible(
                f"{CONFIG_NAME}: {KDA_CONFIG} has {key} {value!r}, which this architecture doesn't support"
            )
    return stated


def words_of_lists(stated: Raw, layers: int) -> list[str]:
    """The word for each layer. Raises CorruptCheckpoint unless the two lists have each layer once."""
    attends, forgets = (set(stated[key] or ()) for key in LISTS)
    numbers = range(1, layers + 1)
    if attends & forgets or not attends | forgets >= set(numbers):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {KDA_CONFIG} should list each of {layers} layers once, in full_attn_layers or kda_layers"
        )
    linear, full = WORDS
    return [full if number in attends else linear for number in numbers]


def layer_lists(config: ModelConfig) -> dict[str, list[int]]:
    """The two lists of a model."""
    mixers = zip(LISTS, ("attention", "kda"), strict=True)
    return {key: [layer + 1 for layer in config.layers_with(mixer)] for key, mixer in mixers}
