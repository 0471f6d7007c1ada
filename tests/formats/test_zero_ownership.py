"""The parameters of each rank of ZeRO 1 and 2, for any number of ranks."""

from hypothesis import given
from hypothesis import strategies as st

from formats.zero_ownership import slices


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(1, 12),
)
def test_slices_are_those_of_a_vector_that_is_cut_by_hand(
    sizes: list[tuple[int, int]], ranks: int
) -> None:
    """sizes: elements of a parameter, and of the padding behind it."""
    names = [
        str(number)
        for number, (elements, padding) in enumerate(sizes)
        for _ in range(elements + padding)
    ]
    is_padding = [
        index >= elements for elements, padding in sizes for index in range(elements + padding)
    ]
    piece = -(-len(names) // ranks)
    partitions = [max(0, min(piece, len(names) - rank * piece)) for rank in range(ranks)]
    expected: list[dict[str, tuple[int, int]]] = []
    for rank in range(ranks):
        held: dict[str, tuple[int, int]] = {}
        for place in range(partitions[rank]):
            name = names[rank * piece + place]
            if not is_padding[rank * piece + place]:
                start, count = held.get(name, (place, 0))
                held[name] = start, count + 1
        expected.append(held)
    starts = {str(number): names.index(str(number)) for number in range(len(sizes))}
    shapes = {str(number): (elements,) for number, (elements, _) in enumerate(sizes)}
    assert slices(starts, shapes, partitions) == expected
