"""MLX's names for a family's tensors: those of transformers' files, except for these parts.

    experts                  all experts of a layer in one tensor, with gate and up apart: switch_mlp.gate_proj.weight
    latent attention         embed_q.weight [heads, latent, keys] and unembed_out.weight [heads, values, latent] in place of
                             kv_b_proj.weight; older releases of mlx-lm kept it
    convolutions             [channels, width, 1] in place of [channels, 1, width]
    norms of Qwen3-Next      stored with 1 added
    GPT-OSS                  gate and up apart, whose rows alternate in transformers' files
    multimodal models        language_model. before the names of the language model, which mlx-lm keeps alone

Source: the `sanitize` methods of mlx-lm 0.32.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from math import prod
from typing import Any

from formats.tensor import LazyTensor, Shape, reshaped
from megaconv.errors import TensorMismatch
from megaconv.families import Family
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.table import PerHead, Row, Spelling, Stacked, expand
from megaconv.values.alternating import AlternatingRows
from megaconv.values.beside_weights import needed
from megaconv.values.cast import CastTensor
from megaconv.values.stored_forms import AddedTensor

SUPPORTED = (
    "afmoe", "apertus", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "exaone", "exaone4",
    "exaone_moe", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_bigcode", "gpt_oss", "granite", "granite_moe", "granite_moe_hybrid", "helium", "hunyuan_v1_dense",
    "internlm2", "internlm3", "iquestcoder", "jamba", "laguna", "lfm2", "lfm2_moe", "llama", "llama4", "mamba", "mamba2", "mimo",
    "minimax_m2", "ministral3", "mistral", "mistral4", "mixtral", "nemotron", "nemotron_h", "nemotron_nas", "olmo2", "olmo3",
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
_ROUTER_BIAS = "layers.{l}.mlp.router.bias"
_OWN: Mapping[tuple[str, str], Spelling] = {
    ("exaone_moe", _ROUTER_BIAS): _L + "mlp.gate.e_score_correction_bias",
    ("laguna", _ROUTER_BIAS): _L + "mlp.gate.e_score_correction_bias",
    ("laguna", "layers.{l}.mlp.router.weight"): _L + "mlp.gate.proj.weight",
    ("lfm2_moe", "layers.{l}.mlp.{gate|up}.weight"): _L + "feed_forward.{gate_proj|up_proj}.weight",
    ("lfm2_moe", "layers.{l}.mlp.down.weight"): _L + "feed_forward.down_proj.weight",
}
"""(family, canonical tensors) -> a name that one family alone has."""

_KV_UP = "layers.{l}.attn.{k|v}_up.weight"
_KV_B = ".kv_b_proj."
_WITH_ABSORBED = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "mistral4")
"""Families whose latent attention multiplies queries by the matrix that makes keys."""

_WITH_SHIFTED_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_SHIFTED_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight"),
)
_SCALARS = (".act_fn.alpha_p", ".act_fn.alpha_n")
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


def is_shifted(family: str, name: str) -> bool:
    """True if MLX stores a tensor with 1 added."""
    return family in _WITH_SHIFTED_NORMS and name.endswith(_SHIFTED_NORMS)


def as_in_mlx(name: str, shape: Shape) -> Shape:
    """The shape in MLX of a tensor of transformers' shape.

    A convolution of each channel for itself is [channels, width, 1], and a parameter of an activation has no axis.
    """
    if name.endswith(_SCALARS):
        return ()
    is_convolution = len(shape) == 3 and shape[1] == 1
    return (shape[0], shape[2], 1) if is_convolution else shape


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
        return row.renamed(
            mlx=(
                PerHead(_L + "self_attn.embed_q.weight", transposed=True, members=(0,)),
                PerHead(_L + "self_attn.unembed_out.weight", members=(1,)),
            )
        )
    if family == "gpt_oss":
        return row.renamed(mlx=row.spelling(HF_STACKED))
    if row.of_experts and row.stage == "layer":
        return row.renamed(mlx=tuple(_stacks(row, family)))
    return row.renamed(mlx=row.names[HF.scheme])


def _stacks(row: Row, family: str) -> Iterator[Stacked]:
    """Yield the stack of each tensor that every expert has."""
    if family in _ROUTED:
        for member, name in enumerate(expand(row.canonical)):
            _, part, last = name.rsplit(".", 2)
            yield Stacked(f"{_ROUTED[family]}{part}_proj.{last}", members=(member,))
        return
    parts = _PARTS_OF_NEMOTRON if family == "nemotron_h" else _PARTS
    spelled = chain.from_iterable(expand(spelling.name) for spelling in row.spelling(HF))
    for member, name in enumerate(spelled):
        found = _EXPERT.fullmatch(name)
        assert found is not None, name
        part = parts.get(found["part"], found["part"])
        yield Stacked(f"{found['module']}switch_mlp.{part}.{found['last']}", members=(member,))


def undone(tensors: Mapping[str, LazyTensor], family: str, where: str) -> dict[str, LazyTensor]:
    """The tensors with the axes and the values of transformers' files, and GPT-OSS's gate and up joined.

    Raises TensorMismatch for a gate without an up of the same form.
    """
    # mlx-lm adds 1 to norms when it turns the convolutions around, and looks at the convolutions to know.
    is_plain = any(map(_is_convolution_of_transformers, tensors, tensors.values()))
    found = {
        name: _undone(name, tensor, shifted=is_shifted(family, name) and not is_plain)
        for name, tensor in tensors.items()
    }
    return _joined_experts(found, where) if family == "gpt_oss" else found


def _is_convolution_of_transformers(name: str, tensor: LazyTensor) -> bool:
    """True for [channels, 1, width]."""
    return name.endswith("conv1d.weight") and tuple(tensor.shape)[2:] not in ((), (1,))


def _undone(name: str, tensor: LazyTensor, *, shifted: bool) -> LazyTensor:
    shape = tuple(tensor.shape)
    if len(shape) == 3 and shape[2] == 1:  # a convolution of each channel for itself
        return reshaped(tensor, (shape[0], 1, shape[1]))
    if name.endswith(_SCALARS):
        return reshaped(tensor, (1,))
    if shifted:
        return CastTensor(AddedTensor(tensor, -1), tensor.dtype, name, overflow=False)
    return tensor


def _joined_experts(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """GPT-OSS's tensors by transformers' names."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        in_hf = name.removesuffix(".weight").replace(".bias", "_bias")
        if ".gate_proj" in name:
            up = needed(name.replace(".gate_proj", ".up_proj"), tensors, where)
            found[in_hf.replace(".gate_proj", ".gate_up_proj")] = _alternating(
                name, tensor, up, where
            )
        elif ".up_proj" not in name:
            found[in_hf] = tensor
    return found


def _alternating(name: str, gate: LazyTensor, up: LazyTensor, where: str) -> LazyTensor:
    """Gate and up of all experts [experts, rows, cols], or their biases [experts, rows], with alternating rows."""
    shape = tuple(gate.shape)
    if (tuple(up.shape), up.dtype) != (shape, gate.dtype) or not shape:
        raise TensorMismatch(
            f"{where}: {name} is {list(shape)} {gate.dtype}, and its up_proj is {list(up.shape)} {up.dtype}; expected the same "
            "shape with an axis of experts",
            code="misshapen-tensor",
        )
    if len(shape) == 3:
        return AlternatingRows(gate, up)
    columns = (prod(shape), 1)
    joined = AlternatingRows(reshaped(gate, columns), reshaped(up, columns))
    return reshaped(joined, (*shape[:-1], 2 * shape[-1]))
