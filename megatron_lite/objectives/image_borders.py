"""The vectors of Ovis2 around and between the tiles of an image.

    start | whole image in small | grid | tile, column, tile, row, tile, column, tile | end

An image of one tile has only the part before its tiles, and the end. Source: Ovis2Processor of transformers 5.24.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor


def with_borders(
    tiles: Tensor, borders: Tensor, grids: Iterable[Sequence[int]]
) -> Iterator[Tensor]:
    """Yield the vectors of images, in order. grids: (rows, columns) of the tiles of each.

    tiles: [tiles, tokens, hidden], of all images. The first tile of an image is the whole image in small.
    borders: [5, hidden]: for the start, the grid, the end of a column, the end of a row, and the end.
    """
    start, grid, column, row, end = borders.unsqueeze(1)
    waiting = iter(tiles)
    for rows, columns in grids:
        yield from (start, next(waiting), grid)
        count = rows * columns
        for number in range(1, count + 1) if count > 1 else ():
            yield next(waiting)
            if number < count:
                yield column if number % columns else row
        yield end
