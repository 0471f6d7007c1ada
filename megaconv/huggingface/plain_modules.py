"""Lists the modules of a quantized output that hold no quantized weight, so that engines load them as they are."""

from collections.abc import Iterator, Sequence

from megaconv.huggingface.matrices import is_stacked
from megaconv.huggingface.scales import is_quantized
from megaconv.model.ir import Header
from megaconv.model.natives import NativeTensor

_RENAMED = {"backbone.": "model."}
"""The beginning of names in the files of Nemotron-H -> that of transformers' and vLLM's modules."""


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


def closed_modules(
    plain: Sequence[str], natives: Sequence[NativeTensor], header: Header
) -> list[str]:
    """The modules that hold matrices and no quantized weight, under the names of files and of engines.

    Engines rename and split what lies in a module, such as the experts of a layer and the projections of a mixer. Names of
    the files' matrices would miss them. plain: the modules of `plain_modules`.
    """
    stacked = {_module(native) for native in natives if is_stacked(native)}
    found = {name.rpartition(".")[0] for name in plain} | stacked
    quantized = (native.name for native in natives if is_quantized(native, header))
    closed = found - {parent for name in quantized for parent in _parents(name)} - {""}
    for old, new in _RENAMED.items():
        closed |= {new + name.removeprefix(old) for name in closed if name.startswith(old)}
    return sorted(closed)


def _parents(name: str) -> Iterator[str]:
    """All modules in which a tensor lies."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def pattern(module: str) -> str:
    """The pattern of compressed-tensors for all that lies in a module."""
    escaped = module.replace(".", "[.]")
    return f"re:{escaped}[.].*"


def _module(native: NativeTensor) -> str:
    """The module of a tensor. A stacked tensor without `.weight` is a parameter of its module."""
    module, _, last = native.name.rpartition(".")
    return module if last == "weight" or is_stacked(native) else native.name
