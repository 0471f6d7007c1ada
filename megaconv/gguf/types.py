"""The storage type of each tensor of a GGUF file, for a requested type of matrices.

The k-quants of llama.cpp are mixtures: `q4_k_m` stores most matrices in Q4_K, and the most sensitive ones in Q6_K. The rules
are those of llama_tensor_get_type in llama.cpp. A matrix whose rows don't consist of whole blocks gets the next type that
fits: Q8_0, or F16. llama.cpp takes Q5_0 or Q5_1 in some of these cases.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from formats.gguf import BLOCK_TYPES
from formats.tensor import matrix_shape
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor

PLAIN_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""Values of gguf_type without blocks -> the dtype of matrices."""


@dataclass(frozen=True)
class Mixture:
    """A value of gguf_type that stores matrices in blocks."""

    kind: str
    """The type of most matrices."""
    file_type: int
    """The value of general.file_type."""
    head: str = "q6_k"
    """The type of the output matrix."""
    sensitive: str | None = None
    """The type of the values' and the MLP's down matrices in some layers; None: as others."""
    fused: str | None = None
    """The type of fused q, k and v; None: as others."""


MIXTURES = {
    "q8_0": Mixture("q8_0", 7, head="q8_0"),
    "q4_0": Mixture("q4_0", 2),
    "q4_k_m": Mixture("q4_k", 15, sensitive="q6_k", fused="q5_k"),
    "q5_k_m": Mixture("q5_k", 17, sensitive="q6_k", fused="q6_k"),
    "q6_k": Mixture("q6_k", 18),
}
ALL_TYPES = (*PLAIN_TYPES, *MIXTURES)
"""The accepted values of gguf_type."""
_ALWAYS_F32 = ("_norm.weight", ".bias", "ffn_gate_inp.weight", "position_embd.weight")
"""The ends of names of tensors that llama.cpp stores in F32, whatever the model had."""
_LAYER = re.compile(r"blk\.(\d+)\.(.*)\.weight")
_DOWN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
_EXPERTS_OF_MIXTRAL = 8
"""With so many experts, llama.cpp stores k and v in Q8_0, because they are small."""


def types_of(natives: Sequence[NativeTensor], wanted: str, config: ModelConfig) -> dict[str, str]:
    """The type of each tensor by name. Raises UsageError for an unknown request."""
    if wanted not in ALL_TYPES:
        raise UsageError(
            f"--option gguf_type={wanted}: is not known; choose one of {', '.join(ALL_TYPES)}"
        )
    has_head = any(native.name == "output.weight" for native in natives)
    return {native.name: _type_of(native, wanted, config, has_head=has_head) for native in natives}


def is_always_f32(name: str, shape: Sequence[int]) -> bool:
    """Return whether llama.cpp stores a tensor in F32, whatever the dtype of the model's matrices is."""
    return len(shape) == 1 or name.endswith(_ALWAYS_F32)


def _type_of(native: NativeTensor, wanted: str, config: ModelConfig, *, has_head: bool) -> str:
    if is_always_f32(native.name, native.shape):
        return "float32"
    if wanted in PLAIN_TYPES:
        return PLAIN_TYPES[wanted]
    mixture = MIXTURES[wanted]
    if native.name == ("output.weight" if has_head else "token_embd.weight"):
        return _fitting(native, mixture.head)
    match = _LAYER.fullmatch(native.name)
    kind = mixture.kind if match is None else _of_layer(mixture, int(match[1]), match[2], config)
    return _fitting(native, kind)


def _of_layer(mixture: Mixture, layer: int, name: str, config: ModelConfig) -> str:
    """The type of a matrix of a layer. name: such as `attn_v`."""
    is_mixtral = config.experts.count == _EXPERTS_OF_MIXTRAL
    if is_mixtral and name in ("attn_k", "attn_v"):
        return "q8_0"
    if is_mixtral and name == "attn_output" and mixture.sensitive is not None:
        return "q5_k"
    if name == "attn_qkv":
        return mixture.fused or mixture.kind
    is_sensitive = name == "attn_v" or name in _DOWN
    if is_sensitive and _has_more_bits(layer, config.layer_count):
        return mixture.sensitive or mixture.kind
    return mixture.kind


def _has_more_bits(layer: int, layers: int) -> bool:
    """True for the first and the last eighth of the layers, and for each third one between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _fitting(native: NativeTensor, kind: str) -> str:
    """The type, or the next one whose blocks fit the rows."""
    if is_transposed(native):
        return "float16"
    cols = matrix_shape(native.shape)[1]
    return next((each for each in (kind, "q8_0") if cols % BLOCK_TYPES[each][0] == 0), "float16")


def is_transposed(native: NativeTensor) -> bool:
    """True if the tensor's rows are columns of canonical tensors, along whose rows the blocks lie."""
    return any(region.transposed for regions in native.parts.values() for region in regions)
