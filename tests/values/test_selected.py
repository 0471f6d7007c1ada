"""Some rows and columns of a tensor, read in any rectangles."""

from random import Random

import numpy as np
import pytest
import torch

from formats.tensor import ITEMSIZE, Box, LazyTensor, matrix_shape, read_tensor
from megaconv.engine.stream import as_lazy
from megaconv.values import selected
from megaconv.values.selected import SelectedColumns, SelectedRows

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.complex128]


def read(tensor: LazyTensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    out = np.zeros((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, out)
    return torch.from_numpy(out.reshape(-1)).view(dtype).reshape(box.rows, box.cols)


def any_box(random: Random, rows: int, cols: int) -> Box:
    row0, col0 = random.randrange(rows), random.randrange(cols)
    return Box(row0, random.randint(row0, rows), col0, random.randint(col0, cols))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("read_bytes", [1, 100, selected._READ_BYTES])
def test_any_rectangle_has_the_selected_rows_and_columns(
    dtype: torch.dtype, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "_READ_BYTES", read_bytes)
    random = Random(0)
    stored = torch.randint(-100, 100, (40, 30)).to(dtype)
    for count in (1, 3, 20, 30):
        rows = sorted(random.sample(range(40), count))
        columns = sorted(random.sample(range(30), count))
        made = SelectedColumns(SelectedRows(as_lazy(stored), rows), columns)
        assert made.shape == (count, count)
        expected = stored[rows][:, columns]
        for _ in range(20):
            box = any_box(random, *made.shape)
            found = read(made, box, dtype)
            assert torch.equal(found, expected[box.row0 : box.row1, box.col0 : box.col1])


def test_elements_of_a_vector_are_rows() -> None:
    stored = torch.arange(50, dtype=torch.bfloat16)
    made = SelectedRows(as_lazy(stored), [0, 1, 7, 48, 49])
    assert matrix_shape(made.shape) == (5, 1)
    found = torch.from_numpy(np.ascontiguousarray(read_tensor(made)).reshape(-1))
    assert found.view(torch.bfloat16).tolist() == [0, 1, 7, 48, 49]


def test_rows_far_apart_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice as many rows are read as are selected."""
    bands: list[int] = []

    def counting(tensor: LazyTensor, box: Box, itemsize: int) -> np.ndarray:
        bands.append(box.rows)
        return np.zeros((box.rows, box.cols * itemsize), np.uint8)

    monkeypatch.setattr(selected, "read_bytes", counting)
    made = SelectedRows(as_lazy(torch.zeros(1000, 4)), [0, 1, 3, 500, 502, 999])
    read(made, Box(0, 6, 0, 4), torch.float32)
    assert bands == [4, 3, 1]
