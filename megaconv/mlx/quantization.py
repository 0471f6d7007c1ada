"""Chooses the weights of an MLX output to quantize, and places their codes, scales and biases. Floats have no biases.

Weights of attention, MLP, experts and other linear layers are quantized, and so are embeddings and heads, as mlx-lm does.
Routers, norms and convolutions are not, and neither are matrices that MLX stores transposed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from formats.tensor import matrix_shape
from megaconv.errors import UsageError
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.values.forms import AFFINE, Form
from megaconv.values.mlx_floats import MODES
from megaconv.values.quantizing import BIAS, SCALE

SIZES = (32, 64, 128)
"""Elements of a row that may share a scale and a bias."""
_AFFINE = "affine"
_MODES = (_AFFINE, *MODES)
_BITS = tuple(AFFINE.values())
OPTIONS = {
    "bits": f"quantize linear layers and embeddings to so many bits: {', '.join(map(str, _BITS))}; default: not quantized",
    "group_size": f"with bits: elements of a row that share a scale, {', '.join(map(str, SIZES))}; default: 64",
    "mode": "quantize with integers (affine, the default with bits) or with floats that MLX knows: mxfp4, mxfp8, nvfp4",
}
_PLAIN_PARTS = re.compile(r".*(router|norm|\.conv\.|positions|indexer|shared_gate).*")
"""Canonical tensors that stay as they are."""


class Quantization(NamedTuple):
    """The choices of `--option`."""

    mode: str
    bits: int
    size: int

    @property
    def settings(self) -> dict[str, object]:
        """`quantization` of config.json."""
        return {"group_size": self.size, "bits": self.bits, "mode": self.mode}

    @property
    def form(self) -> Form:
        """The form of a quantized tensor."""
        if self.mode == _AFFINE:
            return Form(f"affine-{self.bits}", group=self.size)
        return Form(f"mlx-{self.mode}")

    @property
    def description(self) -> str:
        """The form of a weight for a notice."""
        shared = "a scale and a bias" if self.mode == _AFFINE else "a scale"
        numbers = f"{self.bits} bits" if self.mode == _AFFINE else self.mode
        return f"{numbers}, with {shared} for each {self.size} of a row"


def quantization_of(extra: Mapping[str, str]) -> Quantization | None:
    """The choices; None if nothing is quantized. Raises UsageError for unknown values."""
    mode, bits, size = (extra.get(key) for key in ("mode", "bits", "group_size"))
    _require_known("mode", mode, _MODES)
    if mode in MODES:
        form = MODES[mode]
        _require_known("bits", bits, (form.bits,), f" with mode={mode}")
        _require_known("group_size", size, (form.size,), f" with mode={mode}")
        return Quantization(mode, form.bits, form.size)
    if bits is None:
        for key in ("mode", "group_size"):
            if key in extra:
                raise UsageError(
                    f"--option {key}: is for a quantized output; give --option bits=4 too"
                )
        return None
    _require_known("bits", bits, _BITS)
    _require_known("group_size", size, SIZES)
    return Quantization(_AFFINE, int(bits), int(size or "64"))


def _require_known(
    key: str, given: str | None, known: Sequence[object], condition: str = ""
) -> None:
    """Raise UsageError for an unknown value. condition: under which `known` are the values."""
    if given not in (None, *map(str, known)):
        raise UsageError(
            f"--option {key}={given}: is not supported{condition}; choose {', '.join(map(str, known))}"
        )


def quantized_forms(natives: "list[NativeTensor]", quantization: Quantization) -> dict[Key, Form]:
    """The form of each quantized canonical tensor."""
    return {
        Key(name): quantization.form
        for native in natives
        if _is_quantized(native, quantization)
        for name in native.parts
    }


def _is_quantized(native: NativeTensor, quantization: Quantization) -> bool:
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
    return is_linear and has_whole_rows and not columns % quantization.size


def with_scales(native: NativeTensor, header: Header) -> Iterator[NativeTensor]:
    """A native tensor as it is stored, followed by its scales and biases if it is quantized. header: of stored tensors."""
    first = next(iter(native.parts))
    if Key(first + SCALE) not in header.manifest:
        yield native
        return
    module = native.name.removesuffix(".weight")
    for end, name in (("", native.name), (SCALE, f"{module}.scales"), (BIAS, f"{module}.biases")):
        if Key(first + end) not in header.manifest:
            continue
        _, columns = matrix_shape(header.manifest[Key(first + end)].shape)
        parts = {
            part + end: tuple(
                Region(region.box._replace(col0=0, col1=columns), region.row) for region in regions
            )
            for part, regions in native.parts.items()
        }
        yield NativeTensor(name, parts, (*native.shape[:-1], columns))
