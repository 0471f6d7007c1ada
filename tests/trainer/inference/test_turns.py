"""Feeds and rows as the numbers of a turn, and back."""

import pytest

from megatron_lite.inference.slots import Feed
from megatron_lite.inference.turns import feeds_of, rows_of, words_of_feeds, words_of_rows

FEEDS = [Feed(3, 0, (5, 6, 7)), Feed(0, 12, (9,)), Feed(1, 4, (2, 2))]


@pytest.mark.parametrize("count", range(4))
def test_feeds_come_back(count: int) -> None:
    assert feeds_of(words_of_feeds(FEEDS[:count])) == FEEDS[:count]


@pytest.mark.parametrize("rows", [[], [[]], [[1]], [[], [4, 5], []], [[1, 2, 3], [7]]])
def test_rows_come_back(rows: list[list[int]]) -> None:
    assert rows_of(words_of_rows(rows)) == rows


def test_the_numbers_of_feeds_have_a_fixed_order() -> None:
    assert words_of_feeds(FEEDS[:2]) == [2, 3, 0, 3, 0, 12, 1, 5, 6, 7, 9]
