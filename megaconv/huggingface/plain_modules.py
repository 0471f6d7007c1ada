"""Lists the modules of a quantized output that hold no quantized weight, so that engines load them as they are."""

from collections.abc import Sequence

from megaconv.huggingface.matrices import is_stacked
from megaconv.huggingface.scales import is_quantized
from megaconv.model.ir import Header
from megaconv.model.natives import NativeTensor

_RENAMED = {"backbone.": "(backbone|model)[.]"}
"""The beginning of names in the files of Nemotron-H -> a pattern that has transformers' and vLLM's name too."""


def plain_modules(natives: Sequence[NativeTensor], header: Header) -> list[str]:
    """The modules whose matrices aren't quantized, and `lm_head`.

    natives: native tensors without their scales. header: header of the stored tensors.
    """
    found = {"lm_head"}
    for native in natives:
        is_matrix = len(native.shape) == 2 and native.name.endswith(".weight")
        if (is_matrix or is_stacked(native)) and not is_quantized(native, header):
            found.add(_module(native))
    return sorted(found)


def patterns(plain: Sequence[str], natives: Sequence[NativeTensor], header: Header) -> list[str]:
    """Patterns of compressed-tensors for all that lies in a module without quantized weights.

    Engines rename and split modules, such as the experts of a layer and the projections of a mixer. Exact names of files
    would miss them. plain: the modules of `plain_modules`.
    """
    stacked = {_module(native) for native in natives if is_stacked(native)}
    quantized = [native.name for native in natives if is_quantized(native, header)]
    parents = {name if name in stacked else name.rpartition(".")[0] for name in plain}
    return [
        f"re:{_pattern(parent)}[.].*"
        for parent in sorted(parents)
        if parent and not any(name.startswith(f"{parent}.") for name in quantized)
    ]


def _module(native: NativeTensor) -> str:
    """The module of a tensor. A stacked tensor without `.weight` is a parameter of its module."""
    module, _, last = native.name.rpartition(".")
    return module if last == "weight" or is_stacked(native) else native.name


def _pattern(module: str) -> str:
    for beginning, renamed in _RENAMED.items():
        if module.startswith(beginning):
            return renamed + _pattern(module.removeprefix(beginning))
    return module.replace(".", "[.]")
