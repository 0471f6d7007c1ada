"""Chooses the weights to store in MXFP4 or as packed integers, and describes them in config.json.

MXFP4 is GPT-OSS's form: transformers and vLLM read it for experts of this architecture alone. They expect all experts in it
and no other weight. Packed integers are the format `pack-quantized` of compressed-tensors, which vLLM and transformers
read for linear layers. `--option` chooses the elements that share a scale, and experts alone, as in Kimi K2 Thinking.
Sources: config.json of openai/gpt-oss-20b and moonshotai/Kimi-K2-Thinking; compressed-tensors 0.20.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from formats.lazy_numpy import np
from megaconv.errors import NotExpressible, UsageError
from megaconv.huggingface.matrices import is_routed
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor
from megaconv.options import MXFP4, PACKED, QUANTIZATIONS, W4A16, SaveOptions
from megaconv.values.forms import Constant, Form, Scaling
from megaconv.values.four_bits import MXFP4_GROUP

GROUP_SIZES = (32, 64, 128)
"""The accepted numbers of elements with one scale: those for which vLLM has kernels."""
WEIGHT_SHAPE = "weight_shape"
"""The last part of the name of the tensor that holds the shape of a packed weight."""
OPTIONS = {
    "group_size": f"w4a16 and w8a16: elements of a row that share a scale, {', '.join(map(str, GROUP_SIZES))}; default: 128",
    "modules": "w4a16 and w8a16: experts: quantize only the routed experts, as in Kimi K2 Thinking",
}
_EXPERTS = "experts"
_READ_ONE_BY_ONE = ("llama4",)
"""The families whose experts transformers reads one by one from packed integers, while their files have them stacked."""
_READ_IN_MXFP4 = ("gpt_oss",)
"""The families whose engines read experts in MXFP4."""
_KEPT_IN_MXFP4 = [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
]  # fmt: skip
"""modules_to_not_convert of OpenAI's config.json."""


class Packing(NamedTuple):
    """The choices of `--option` for packed integers."""

    group: int
    only_experts: bool

    def fits(self, native: NativeTensor) -> bool:
        """True if rows consist of whole groups, and the weight is one of those to be quantized."""
        is_chosen = not self.only_experts or is_routed(native)
        return is_chosen and not native.shape[-1] % self.group

    @property
    def condition(self) -> str:
        """The condition in words, as the end of a message."""
        only = " of a routed expert" if self.only_experts else ""
        return f"{only}, with a multiple of {self.group} columns"


def packing_of(options: SaveOptions) -> Packing:
    """The choices of `--option`. Raises UsageError for an unknown value, and for options of another quantization."""
    given = {key: options.extra[key] for key in OPTIONS if key in options.extra}
    if given and options.quantize not in PACKED:
        raise UsageError(
            f"--option {next(iter(given))}: is for --quantize {' and '.join(PACKED)}; leave it out"
        )
    group = given.get("group_size", "128")
    if group not in map(str, GROUP_SIZES):
        raise UsageError(
            f"--option group_size={group}: is not supported; choose {', '.join(map(str, GROUP_SIZES))}"
        )
    modules = given.get("modules", _EXPERTS)
    if modules != _EXPERTS:
        raise UsageError(f"--option modules={modules}: is not known; choose {_EXPERTS}")
    return Packing(group=int(group), only_experts="modules" in given)


def smaller_group(natives: Sequence[NativeTensor], options: SaveOptions) -> int | None:
    """The largest smaller group of which rows of all matrices consist; None if there is none, or no choice of one."""
    if options.quantize not in PACKED:
        return None
    fitting = [
        size
        for size in GROUP_SIZES
        if size < packing_of(options).group and not any(each.shape[-1] % size for each in natives)
    ]
    return max(fitting, default=None)


def require_readable(kind: str, header: Header) -> None:
    """Raise NotExpressible for a family that transformers can't read in packed integers."""
    name = header.config.family
    if name in _READ_ONE_BY_ONE:
        raise NotExpressible(
            f"--quantize {kind}: transformers reads the experts of {name} in this form from a tensor for each expert, and the "
            "model's files have all experts of a layer in one tensor; choose another value"
        )


def packed_forms(natives: Sequence[NativeTensor], kind: str, packing: Packing) -> dict[Key, Form]:
    """The forms of weights as packed integers. The shape of a native tensor is stored with its first part."""
    forms: dict[Key, Form] = {}
    for native in natives:
        rows, cols = native.shape
        stored = np.array([[rows], [cols]], np.int64).view(np.uint8)
        shape = Scaling(constants={WEIGHT_SHAPE: Constant(stored, (2,), "int64")})
        for place, name in enumerate(native.parts):
            scaling = Scaling() if place else shape
            forms[Key(name)] = Form(kind, scaling=scaling, group=packing.group)
    return forms


def mxfp4_forms(natives: Sequence[NativeTensor], header: Header) -> dict[Key, Form]:
    """The forms of experts in MXFP4.

    Raises NotExpressible for a family whose engines don't read MXFP4, and for rows that aren't whole blocks.
    """
    name = header.config.family
    if name not in _READ_IN_MXFP4:
        others = [each for each in QUANTIZATIONS if each != MXFP4]
        raise NotExpressible(
            f"--quantize {MXFP4}: engines read this form for {', '.join(_READ_IN_MXFP4)} alone, and this model is {name}; "
            f"choose {', '.join(others[:4])} or another value"
        )
    experts = [native for native in natives if is_routed(native)]
    for native in experts:
        if native.shape[-1] % MXFP4_GROUP:
            raise NotExpressible(
                f"--quantize {MXFP4}: {native.name} has {native.shape[-1]} columns, and the form needs a multiple of {MXFP4_GROUP}; "
                "leave it out"
            )
    return {Key(name): Form(MXFP4) for native in experts for name in native.parts}


def mxfp4_settings() -> dict[str, Any]:
    """quantization_config of GPT-OSS."""
    return {"modules_to_not_convert": _KEPT_IN_MXFP4, "quant_method": "mxfp4"}


def packed_settings(ignored: Sequence[str], options: SaveOptions) -> Mapping[str, Any]:
    """quantization_config of compressed-tensors. ignored: names and patterns of the modules that aren't quantized."""
    weights = {
        "num_bits": 4 if options.quantize == W4A16 else 8,
        "type": "int",
        "symmetric": True,
        "group_size": packing_of(options).group,
        "strategy": "group",
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    return {
        "config_groups": {"group_0": group},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignored),
    }
