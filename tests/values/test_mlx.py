"""MLX's quantized weights: read as mlx.core.dequantize reads them, and written as mlx.core.quantize writes them.

tests/fixtures/mlx/groups.safetensors has one bfloat16 matrix, and for every mode, number of bits and size of groups what
`mlx.core.quantize` of mlx 0.32.4 made of it, with the values of `mlx.core.dequantize` in float32.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats import safetensors
from formats.tensor import Box, LazyTensor, read_tensor
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import Rounding
from megaconv.values.mlx_groups import GroupedTensor, Grouping, unpacked
from megaconv.values.mlx_quantizing import AffineCodes, AffineGroups, AffineScales, packed
from tests.conftest import FIXTURES

BITS = (2, 3, 4, 5, 6, 8)
AFFINE = [f"affine-{bits}-{size}" for bits in BITS for size in (32, 64, 128)]
FORMS = (*AFFINE, "mxfp4-4-32", "mxfp8-8-32", "nvfp4-4-16")


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
    bits = data.draw(st.sampled_from(BITS))
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


def test_a_value_that_is_not_finite_is_refused(stored: dict[str, LazyTensor]) -> None:
    class WithInfinity:
        shape, dtype = (1, 32), "float32"

        def read_into(
            self, box: Box, out: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
        ) -> None:
            np.copyto(out, np.full((1, box.cols), np.inf, np.float32).view(np.uint8))

    codes = AffineCodes(AffineGroups(WithInfinity(), "layers.0.x", 4, 32), Rounding())
    with pytest.raises(NotExpressible, match=r"layers\.0\.x: holds values that are not finite"):
        read_tensor(codes)
