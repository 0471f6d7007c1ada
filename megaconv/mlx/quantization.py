"""Chooses the weights of an MLX output to quantize, and places their codes, scales and biases.

Weights of attention, MLP, experts and other linear layers are quantized, and so are embeddings and heads, as mlx-lm does.
Routers, norms and convolutions are not, and neither are matrices that MLX stores transposed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from formats.tensor import matrix_shape
from megaconv.errors import UsageError
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.values.forms import AFFINE, Form
from megaconv.values.quantizing import BIAS, SCALE

SIZES = (32, 64, 128)
"""Elements of a row that may share a scale."""
OPTIONS = {
    "bits": f"quantize linear layers and embeddings to so many bits: {', '.join(map(str, AFFINE.values()))}; default: not quantized",
    "group_size": f"with bits: elements of a row that share a scale, {', '.join(map(str, SIZES))}; default: 64",
}
_PLAIN_PARTS = re.compile(r".*(router|norm|\.conv\.|positions|indexer|shared_gate).*")
"""Canonical tensors that stay as they are."""


class Affine(NamedTuple):
    """The choices of `--option`."""

    bits: int
    size: int

    @property
    def settings(self) -> dict[str, object]:
        """`quantization` of config.json."""
        return {"group_size": self.size, "bits": self.bits, "mode": "affine"}


def affine_of(extra: Mapping[str, str]) -> Affine | None:
    """The choices; None if nothing is quantized. Raises UsageError for unknown values."""
    bits, size = extra.get("bits"), extra.get("group_size", "64")
    if bits is None:
        if "group_size" in extra:
            raise UsageError(
                "--option group_size: is for a quantized output; give --option bits=4 too"
            )
        return None
    for key, given, known in (("bits", bits, (*AFFINE.values(),)), ("group_size", size, SIZES)):
        if given not in map(str, known):
            raise UsageError(
                f"--option {key}={given}: is not supported; choose {', '.join(map(str, known))}"
            )
    return Affine(int(bits), int(size))


def affine_forms(natives: "list[NativeTensor]", affine: Affine) -> dict[Key, Form]:
    """The form of each quantized canonical tensor."""
    form = Form(f"affine-{affine.bits}", group=affine.size)
    return {
        Key(name): form
        for native in natives
        if _is_quantized(native, affine)
        for name in native.parts
    }


def _is_quantized(native: NativeTensor, affine: Affine) -> bool:
    """True for a weight of a linear layer or of an embedding, stored in whole rows of whole groups."""
    if len(native.shape) < 2 or not native.name.endswith(".weight"):
        return False
    columns = native.shape[-1]
    has_whole_rows = all(
        region == Region(region.box, region.row)
        and (region.box.col0, region.box.col1) == (0, columns)
        for regions in native.parts.values()
        for region in regions
    )
    is_linear = not any(map(_PLAIN_PARTS.match, native.parts))
    return is_linear and has_whole_rows and not columns % affine.size


def with_scales(native: NativeTensor, header: Header) -> Iterator[NativeTensor]:
    """A native tensor as it is stored, followed by its scales and biases if it is quantized. header: of stored tensors."""
    first = next(iter(native.parts))
    if Key(first + BIAS) not in header.manifest:
        yield native
        return
    module = native.name.removesuffix(".weight")
    for end, name in (("", native.name), (SCALE, f"{module}.scales"), (BIAS, f"{module}.biases")):
        _, columns = matrix_shape(header.manifest[Key(first + end)].shape)
        parts = {
            part + end: tuple(
                Region(region.box._replace(col0=0, col1=columns), region.row) for region in regions
            )
            for part, regions in native.parts.items()
        }
        yield NativeTensor(name, parts, (*native.shape[:-1], columns))
