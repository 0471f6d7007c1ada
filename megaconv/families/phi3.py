"""Phi-3 and 3.5 (mini, medium): Llama's tensors, with q, k, v in one and gate, up in another as Hugging Face ships them."""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.llama import IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys, window
from megaconv.families.parts.decoder_rows import in_core, respelled
from megaconv.families.parts.keys import CONFIG_NAME, Keys, Raw
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused

_FUSED = {
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused("model.layers.{l}.self_attn.qkv_proj.weight")},
    "layers.{l}.mlp.{gate|up}.weight": {"hf": Fused("model.layers.{l}.mlp.gate_up_proj.weight")},
}
ROWS = in_core(respelled(LLAMA_ROWS, _FUSED))


def _write_original(config: ModelConfig) -> Raw:
    if config.positions.scaling is not None:
        raise NotExpressible(
            f"the model's positions.scaling is {dict(config.positions.scaling)}, which Phi3ForCausalLM can't represent in its "
            f"{CONFIG_NAME}: it supports only a kind of scaling of its own"
        )
    return {"original_max_position_embeddings": config.max_positions}


_ORIGINAL = Keys(("original_max_position_embeddings",), lambda raw: {}, _write_original)

FAMILY = Family(
    "phi3", ("Phi3ForCausalLM",), "phi3", ROWS,
    keys=(*decoder_keys(positions=4096, epsilon=1e-5, tokens=(1, 32000, 32000)), window(None), _ORIGINAL),
    fixed=LLAMA_LIKE, only=SILU, ignored=IGNORED, recognized=None,
)  # fmt: skip
