"""MLX's quantized weights: read as mlx.core.dequantize reads them, and written as mlx.core.quantize writes them.

tests/fixtures/mlx/groups.safetensors has one bfloat16 matrix, and for every mode, number of bits and size of groups what
`mlx.core.quantize` of mlx 0.32.4 made of it, with the values of `mlx.core.dequantize` in float32.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats import safetensors
from formats.tensor import Box, Bytes, LazyTensor, read_tensor
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import Rounding
from megaconv.values.mlx_floats import FloatCodes, FloatGroups, FloatScales
from megaconv.values.mlx_groups import GroupedTensor, Grouping, unpacked
from megaconv.values.mlx_quantizing import AffineCodes, AffineGroups, AffineScales, packed
from megaconv.values.rounding import exact
from tests.conftest import FIXTURES

BITS = (2, 3, 4, 5, 6, 8)
AFFINE = [f"affine-{bits}-{size}" for bits in BITS for size in (32, 64, 128)]
FLOATS = ("mxfp4-4-32", "mxfp8-8-32", "nvfp4-4-16")
ONE_BIT = [f"affine-1-{size}" for size in (32, 64, 128)]
"""Forms that are read alone."""
FORMS = (*ONE_BIT, *AFFINE, *FLOATS)


@pytest.fixture(scope="module")
def stored() -> dict[str, LazyTensor]:
    return dict(safetensors.read(FIXTURES / "mlx" / "groups.safetensors"))


def plain(stored: dict[str, LazyTensor], form: str) -> GroupedTensor:
    mode, bits, size = form.split("-")
    words, scales = stored[f"{form}.words"], stored[f"{form}.scales"]
    grouping = Grouping(mode, int(bits), int(size))
    biases = stored.get(f"{form}.biases")
    return GroupedTensor(words, scales, biases, grouping, (4, 128), "float32")


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_mlx(form: str, stored: dict[str, LazyTensor]) -> None:
    expected = read_tensor(stored[f"{form}.values"])
    assert np.array_equal(read_tensor(plain(stored, form)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_any_rectangle_has_the_values_of_the_whole(
    form: str, stored: dict[str, LazyTensor]
) -> None:
    expected = read_tensor(stored[f"{form}.values"]).reshape(4, -1)
    for box in (Box(1, 3, 5, 71), Box(0, 4, 127, 128), Box(2, 3, 0, 1)):
        found = np.empty((box.rows, box.cols * 4), np.uint8)
        plain(stored, form).read_into(box, found)
        assert np.array_equal(found, expected[box.row0 : box.row1, box.col0 * 4 : box.col1 * 4])


@pytest.mark.parametrize("form", AFFINE)
def test_codes_scales_and_biases_are_those_of_mlx(form: str, stored: dict[str, LazyTensor]) -> None:
    _, bits, size = form.split("-")
    groups = AffineGroups(stored["weight"], "w", int(bits), int(size))
    made = {
        "words": AffineCodes(groups, Rounding()),
        "scales": AffineScales(groups, of_biases=False),
        "biases": AffineScales(groups, of_biases=True),
    }
    for part, tensor in made.items():
        expected = stored[f"{form}.{part}"]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(read_tensor(tensor), read_tensor(expected)), part


@pytest.mark.parametrize("form", FLOATS)
def test_floats_are_those_of_mlx_except_for_ties(form: str, stored: dict[str, LazyTensor]) -> None:
    """The fixture was made on a CPU, where MLX rounds ties towards zero, and has the scale 1 for zeros.

    On a GPU it rounds them to even, and has the smallest scale.
    """
    groups = FloatGroups(stored["weight"], "w", form.partition("-")[0])
    words, scales = FloatCodes(groups, Rounding()), FloatScales(groups)
    made = {**stored, f"{form}.words": words, f"{form}.scales": scales}
    found, expected = (read_tensor(plain(each, form)).view(np.float32) for each in (made, stored))
    weight = exact(read_tensor(stored["weight"]).reshape(-1), "bfloat16").reshape(4, -1)
    is_zero = ~weight.reshape(*scales.shape, -1).any(-1)
    of_mlx = read_tensor(stored[f"{form}.scales"])
    assert (is_zero | (read_tensor(scales) == of_mlx)).all()
    is_tied = np.abs(found - weight) == np.abs(expected - weight)
    assert ((found == expected) | is_tied).all()
    assert (found == expected).mean() > 0.9


@pytest.mark.parametrize(
    ("mode", "size", "largest", "scale"),
    [
        ("mxfp4", 32, 6.0, 127),
        ("mxfp4", 32, 6.01, 128),
        ("mxfp4", 32, 3.0, 126),
        ("mxfp4", 32, 0.0, 0),
        ("mxfp4", 32, 1e-45, 0),
        ("mxfp8", 32, 448.0, 127),
        ("mxfp8", 32, 449.0, 128),
        ("nvfp4", 16, 6.0, 0x38),
        ("nvfp4", 16, 0.0, 0),
        ("nvfp4", 16, 2688.0, 0x7E),
        ("mxfp4", 32, 2.5e38, 252),
    ],
)
def test_scales_of_floats(mode: str, size: int, largest: float, scale: int) -> None:
    """MLX stores exponents + 127, and for nvfp4 float8_e4m3fn: 0x38 is 1, 0x7E is 448."""
    numbers = np.zeros((1, size), np.float32)
    numbers[0, 3] = -largest
    groups = FloatGroups(Stored(numbers), "w", mode)
    assert read_tensor(FloatScales(groups)).tolist() == [[scale]]


@pytest.mark.parametrize(
    ("mode", "size", "number"),
    [("mxfp4", 32, 3e38), ("mxfp8", 32, 3e38), ("nvfp4", 16, 2690.0), ("nvfp4", 16, np.nan)],
)
def test_numbers_beyond_the_range_of_a_mode_are_refused(
    mode: str, size: int, number: float
) -> None:
    """mlx.core.quantize makes infinity or 0 of them."""
    numbers = np.zeros((1, size), np.float32)
    numbers[0, 3] = number
    groups = FloatGroups(Stored(numbers), "w", mode)
    for tensor in (FloatScales(groups), FloatCodes(groups, Rounding())):
        with pytest.raises(NotExpressible, match=f"w: holds .*, or beyond .*, which {mode} can't"):
            read_tensor(tensor)


def test_ties_of_floats_go_to_the_even_code() -> None:
    numbers = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75]
    groups = FloatGroups(Stored(np.array([numbers + [0] * 22], np.float32)), "w", "mxfp4")
    codes = unpacked(read_tensor(FloatCodes(groups, Rounding())), 4)
    assert codes[0, :10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10]


@pytest.mark.parametrize("form", AFFINE)
def test_fingerprints_are_of_the_values_that_are_read(
    form: str, stored: dict[str, LazyTensor]
) -> None:
    _, bits, size = form.split("-")
    codes = AffineCodes(AffineGroups(stored["weight"], "w", int(bits), int(size)), Rounding())
    words, scales, biases = (stored[f"{form}.{part}"] for part in ("words", "scales", "biases"))
    grouping = Grouping("affine", int(bits), int(size))
    expected = GroupedTensor(words, scales, biases, grouping, (4, 128), "bfloat16")
    box = Box(0, 4, 0, codes.shape[1])
    read = codes.read_both(box, np.empty((box.rows, 4 * box.cols), np.uint8))
    assert np.array_equal(read, read_tensor(expected).reshape(4, -1))


@given(st.data())
def test_packed_codes_come_back(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from((1, *BITS)))
    rows, eights = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    codes = data.draw(
        st.lists(
            st.integers(0, (1 << bits) - 1), min_size=rows * eights * 8, max_size=rows * eights * 8
        )
    )
    matrix = np.array(codes, np.uint8).reshape(rows, -1)
    made = packed(matrix, bits)
    assert made.shape == (rows, eights * bits)
    assert np.array_equal(unpacked(made, bits), matrix)


@dataclass(frozen=True)
class Stored:
    """A matrix in memory."""

    numbers: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        wanted = self.numbers[box.row0 : box.row1, box.col0 : box.col1]
        np.copyto(out, np.ascontiguousarray(wanted).view(np.uint8))


def test_a_value_that_is_not_finite_is_refused() -> None:
    infinite = Stored(np.full((1, 32), np.inf, np.float32))
    name = "layers.0.x"
    for codes in (
        AffineCodes(AffineGroups(infinite, name, 4, 32), Rounding()),
        FloatCodes(FloatGroups(infinite, name, "mxfp8"), Rounding()),
    ):
        with pytest.raises(NotExpressible, match=r"layers\.0\.x: holds values that are not finite"):
            read_tensor(codes)
