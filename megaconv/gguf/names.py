"""GGUF's names for a family's tensors: those of llama.cpp's `llama`, which its other architectures share.

llama.cpp's `llama` rotates pairs of neighbours, as Meta does, so the rows of q and k are stored as pairs. Its other
architectures rotate halves, as transformers does. Experts are stacked, with gate and up as separate tensors.
`deepseek2` (V2 and V3) also rotates pairs of neighbours, as DeepSeek's own files do. `deepseek2` multiplies queries by
the matrix that makes keys from latent vectors, so this matrix is stored transposed, head by head.
"""

from megaconv.families import Family
from megaconv.gguf.architectures import BY_FAMILY
from megaconv.model.table import Fused, PerHead, RotaryPairs, Row, Spelling, Stacked

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "gemma": "gemma", "gpt2": "gpt2",
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe", "phi3": "phi3", "gemma2": "gemma2", "gemma3_text": "gemma3", "olmo2": "olmo2",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    **{family: architecture.name for family, architecture in BY_FAMILY.items()},
}  # fmt: skip
"""Family -> llama.cpp's architecture. Only these are supported: they are tested against llama.cpp's own converter, and
DeepSeek's against its rules."""
ROUTER_BIAS = "exp_probs_b.bias"
"""The end of the name of the bias that affects the selection of experts."""

LLAMA3 = "rope_freqs.weight"
DIVISORS = (LLAMA3, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of divisors for the frequencies of positions. They are not weights of a model."""

SHARED_HEADS = ("gpt2", "phi3", "olmo2", "qwen2moe")
"""Architectures whose head size is hidden size / heads, whatever the metadata say."""

_L = "blk.{l}."
_NAMES: dict[str, Spelling] = {
    "embed.weight": "token_embd.weight",
    "positions.weight": "position_embd.weight",
    "layers.{l}.input_norm.weight": _L + "attn_norm.weight",
    "layers.{l}.input_norm.{weight|bias}": _L + "attn_norm.{weight|bias}",
    "layers.{l}.attn.{q|k|v}.weight": _L + "attn_{q|k|v}.weight",
    "layers.{l}.attn.{q|k|v}.bias": _L + "attn_{q|k|v}.bias",
    "layers.{l}.attn.{q|k}_norm.weight": _L + "attn_{q|k}_norm.weight",
    "layers.{l}.attn.o.weight": _L + "attn_output.weight",
    "layers.{l}.attn.o.bias": _L + "attn_output.bias",
    "layers.{l}.mlp_norm.weight": _L + "ffn_norm.weight",
    "layers.{l}.mlp_norm.{weight|bias}": _L + "ffn_norm.{weight|bias}",
    "layers.{l}.mlp.{gate|up}.weight": _L + "ffn_{gate|up}.weight",
    "layers.{l}.mlp.{gate|up}.bias": _L + "ffn_{gate|up}.bias",
    "layers.{l}.mlp.up.weight": _L + "ffn_up.weight",
    "layers.{l}.mlp.up.bias": _L + "ffn_up.bias",
    "layers.{l}.mlp.down.weight": _L + "ffn_down.weight",
    "layers.{l}.mlp.down.bias": _L + "ffn_down.bias",
    "layers.{l}.mlp.router.weight": _L + "ffn_gate_inp.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": (
        Stacked(_L + "ffn_gate_exps.weight", members=(0,)), Stacked(_L + "ffn_up_exps.weight", members=(1,)),
    ),
    "layers.{l}.mlp.experts.{e}.down.weight": Stacked(_L + "ffn_down_exps.weight"),
    "layers.{l}.mlp.router.bias": _L + ROUTER_BIAS,
    "layers.{l}.mlp.shared.{gate|up}.weight": _L + "ffn_{gate|up}_shexp.weight",
    "layers.{l}.mlp.shared.down.weight": _L + "ffn_down_shexp.weight",
    "layers.{l}.mlp.shared_gate.weight": _L + "ffn_gate_inp_shexp.weight",
    "layers.{l}.attn_output_norm.weight": _L + "post_attention_norm.weight",
    "layers.{l}.mlp_output_norm.weight": _L + "post_ffw_norm.weight",
    "layers.{l}.attn.q.weight": _L + "attn_q.weight",
    "layers.{l}.attn.q_down.weight": _L + "attn_q_a.weight",
    "layers.{l}.attn.q_latent_norm.weight": _L + "attn_q_a_norm.weight",
    "layers.{l}.attn.q_up.weight": _L + "attn_q_b.weight",
    "layers.{l}.attn.kv_down.weight": _L + "attn_kv_a_mqa.weight",
    "layers.{l}.attn.kv_latent_norm.weight": _L + "attn_kv_a_norm.weight",
    "layers.{l}.attn.{k|v}_up.weight": (
        PerHead(_L + "attn_k_b.weight", transposed=True, members=(0,)), PerHead(_L + "attn_v_b.weight", members=(1,)),
    ),
    "final_norm.weight": "output_norm.weight",
    "final_norm.{weight|bias}": "output_norm.{weight|bias}",
    "head.weight": "output.weight",
    "head.bias": "output.bias",
}  # fmt: skip
_PAIRED: dict[str, Spelling] = {
    f"layers.{{l}}.attn.{{q|k|v}}.{what}": RotaryPairs(_L + "attn_{q|k|v}." + what, rotating=(0, 1))
    for what in ("weight", "bias")
}
_GPT2: dict[str, Spelling] = {
    f"layers.{{l}}.attn.{{q|k|v}}.{what}": Fused(_L + "attn_qkv." + what)
    for what in ("weight", "bias")
}
_PHI3: dict[str, Spelling] = {
    "layers.{l}.attn.{q|k|v}.weight": Fused(_L + "attn_qkv.weight"),
    "layers.{l}.mlp.{gate|up}.weight": Fused(_L + "ffn_up.weight"),
}
_OWN = {"llama": _PAIRED, "gpt2": _GPT2, "phi3": _PHI3}


def full_every(family: str) -> int:
    """The distance between layers without a window, if the file gives no pattern to llama.cpp."""
    return 2 if family == "gemma2" else 6


def gguf_rows(family: Family) -> tuple[Row, ...]:
    """A family's table with GGUF's names. Rows without such a name stay unchanged."""
    own = BY_FAMILY[family.name].names if family.name in BY_FAMILY else {}
    names = {**_NAMES, **_OWN.get(ARCHITECTURES[family.name], {}), **own}
    return tuple(
        row.renamed(gguf=names[row.canonical]) if row.canonical in names else row
        for row in family.rows
    )
