"""MLX's names for a family's tensors: those of transformers' files, except for these parts.

    experts                  all experts of a layer in one tensor, with gate and up apart: switch_mlp.gate_proj.weight
    latent attention         embed_q.weight [heads, latent, keys] and unembed_out.weight [heads, values, latent] in place of
                             kv_b_proj.weight; older releases of mlx-lm kept it
    multimodal models        language_model. before the names of the language model, which mlx-lm keeps alone

`tensors.py` has the changes of axes and values. Source: the `sanitize` methods of mlx-lm 0.32.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megaconv.families import Family
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.table import PerHead, Row, Spelling, Stacked, expand

SUPPORTED = (
    "afmoe", "apertus", "cohere", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "exaone", "exaone4",
    "exaone_moe", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_bigcode", "gpt_oss", "granite", "granite_moe", "granite_moe_hybrid", "helium", "hunyuan_v1_dense",
    "internlm2", "internlm3", "iquestcoder", "jamba", "laguna", "lfm2", "lfm2_moe", "llama", "llama4", "longcat_flash", "mamba", "mamba2",
    "mimo", "minimax_m2", "ministral3", "mistral", "mistral4", "mixtral", "nemotron", "nemotron_h", "nemotron_nas", "olmo2", "olmo3",
    "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2",
)  # fmt: skip
"""Families whose names and values were compared with those that mlx-lm writes."""

WRITTEN = tuple(name for name in SUPPORTED if name != "gpt_oss")
"""Families that are also written. mlx-lm reads GPT-OSS from `--saver hf --quantize mxfp4`."""

_L = "model.layers.{l}."
_ROUTED: Mapping[str, str] = {
    "afmoe": _L + "mlp.experts.",
    "dots1": _L + "mlp.experts.",
    "gemma4_text": _L + "experts.switch_glu.",
    "granite_moe": _L + "block_sparse_moe.switch_mlp.",
    "granite_moe_hybrid": _L + "block_sparse_moe.switch_mlp.",
    "llama4": _L + "feed_forward.experts.",
    "mistral4": _L + "mlp.switch_mlp.",
    "qwen3_5_moe": _L + "mlp.switch_mlp.",
}
"""Family -> the beginning of the names of its stacked experts, if it doesn't follow from transformers' names."""
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_PARTS_OF_NEMOTRON = {"up_proj": "fc1", "down_proj": "fc2"}
_EXPERT = re.compile(r"(?P<module>.*\.)experts\.\{e\}\.(?P<part>\w+)\.(?P<last>\w+)")
_DBRX = "transformer.blocks.{l}.ffn.experts.{e}."
_ROUTER_BIAS = "layers.{l}.mlp.router.bias"
_OWN: Mapping[tuple[str, str], Spelling] = {
    ("dbrx", "layers.{l}.mlp.experts.{e}.{gate|up}.weight"): _DBRX + "{w1|v1}.weight",
    ("dbrx", "layers.{l}.mlp.experts.{e}.down.weight"): _DBRX + "w2.weight",
    ("exaone_moe", _ROUTER_BIAS): _L + "mlp.gate.e_score_correction_bias",
    ("laguna", _ROUTER_BIAS): _L + "mlp.gate.e_score_correction_bias",
    ("laguna", "layers.{l}.mlp.router.weight"): _L + "mlp.gate.proj.weight",
    ("lfm2_moe", "layers.{l}.mlp.{gate|up}.weight"): _L + "feed_forward.{gate_proj|up_proj}.weight",
    ("lfm2_moe", "layers.{l}.mlp.down.weight"): _L + "feed_forward.down_proj.weight",
}
"""(family, canonical tensors) -> a name that one family alone has."""

_KV_UP = "layers.{l}.attn.{k|v}_up.weight"
_KV_B = ".kv_b_proj."
_WITH_ABSORBED = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "mistral4",
)
"""Families whose latent attention multiplies queries by the matrix that makes keys."""

INSIDE = "language_model."
"""The beginning of all names of a language model that was inside a multimodal model."""
_WRAPPERS = {
    "llama4": {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"},
    "qwen3_5": {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
    },
}
"""Families that mlx-lm knows only inside a multimodal model -> the keys of that model's config.json."""


def wrapper_of(family: str) -> Mapping[str, Any] | None:
    """The keys of the config.json around that of the language model; None if it stands alone."""
    return _WRAPPERS.get(family)


def mlx_rows(family: Family, names: Collection[str] = ()) -> tuple[Row, ...]:
    """A family's table with MLX's names. names: those in the files, which show what release wrote them."""
    has_whole = any(_KV_B in name for name in names)
    return tuple(_named(row, family.name, has_whole=has_whole) for row in family.rows)


def _named(row: Row, family: str, *, has_whole: bool) -> Row:
    if HF.scheme not in row.names:
        return row
    own = _OWN.get((family, row.canonical))
    if own is not None:
        return row.renamed(mlx=own)
    if row.canonical == _KV_UP and family in _WITH_ABSORBED and not has_whole:
        (joined,) = row.spelling(HF)
        keys, values = (joined.name.replace(_KV_B, each) for each in (".embed_q.", ".unembed_out."))
        return row.renamed(
            mlx=(PerHead(keys, transposed=True, members=(0,)), PerHead(values, members=(1,)))
        )
    if family == "gpt_oss":
        return row.renamed(mlx=row.spelling(HF_STACKED))
    if row.of_experts and row.stage == "layer":
        return row.renamed(mlx=tuple(_stacks(row, family)))
    return row.renamed(mlx=row.names[HF.scheme])


def _stacks(row: Row, family: str) -> Iterator[Stacked]:
    """Yield the stack of each tensor that every expert has."""
    for member, name in enumerate(_names_of_stacks(row, family)):
        yield Stacked(name, members=(member,))


def _names_of_stacks(row: Row, family: str) -> Iterator[str]:
    if family in _ROUTED:
        for name in expand(row.canonical):
            yield _ROUTED[family] + _last_words(name)
        return
    parts = _PARTS_OF_NEMOTRON if family == "nemotron_h" else _PARTS
    for spelling in row.spelling(HF):
        for name in expand(spelling.name):
            yield _name_of_stack(name, parts)


def _last_words(canonical: str) -> str:
    """`gate_proj.weight` for a canonical name that ends with `gate.weight`."""
    _, part, last = canonical.rsplit(".", 2)
    return f"{part}_proj.{last}"


def _name_of_stack(name: str, parts: Mapping[str, str]) -> str:
    """The stack of a tensor of each expert. name: transformers' pattern. parts: transformers' words -> MLX's."""
    found = _EXPERT.fullmatch(name)
    assert found is not None, name
    part = parts.get(found["part"], found["part"])
    return f"{found['module']}switch_mlp.{part}.{found['last']}"
