"""InternLM 3: Llama with its own head size. Its projections all have biases, or none has."""

from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN, SILU, decoder_keys
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_flag
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of

_OF_ATTENTION, _OF_MLP = "attention_bias", "mlp_bias"
_BIASES = ("attention.qkv_bias", "attention.o_bias", "mlp.bias")


def _read_biases(raw: Raw) -> Fields:
    """Biases of all projections, or of none: transformers refuses other models."""
    attention, mlp = need_flag(raw, _OF_ATTENTION, False), need_flag(raw, _OF_MLP, False)
    if attention != mlp:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_OF_ATTENTION} (or qkv_bias) is {attention}, but {_OF_MLP} (or bias) is {mlp}; "
            "in this architecture, both have the same value"
        )
    return dict.fromkeys(_BIASES, attention)


def _write_biases(config: ModelConfig) -> Raw:
    found = {name: value_of(config, name) for name in _BIASES}
    if len(set(found.values())) > 1:
        stated = ", ".join(f"{name} {value}" for name, value in found.items())
        raise NotExpressible(
            f"the model has {stated}; an InternLM 3 has all of these biases, or none"
        )
    return {_OF_ATTENTION: config.attention.qkv_bias, _OF_MLP: config.mlp.bias}


_KEYS = (
    *decoder_keys(positions=32768, kv_heads=2, head_dim=128, epsilon=1e-5, tokens=(1, 2, 2)),
    Keys((_OF_ATTENTION, _OF_MLP), _read_biases, _write_biases),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = replace(
    LLAMA, name="internlm3", architectures=("InternLM3ForCausalLM",), model_type="internlm3", rows=in_core(LLAMA.rows),
    keys=_KEYS, only=SILU, aliases={"qkv_bias": _OF_ATTENTION, "bias": _OF_MLP}, recognized=None,
)  # fmt: skip
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Llama."""
