"""The notation of a table: patterns of tensor names, and shapes in sizes of the model."""

import re
from collections.abc import Mapping
from math import prod

from formats.tensor import Shape


def expand(pattern: str) -> tuple[str, ...]:
    """`a.{q|k}.b` -> (`a.q.b`, `a.k.b`); at most one alternative per pattern."""
    match = re.search(r"\{([^{}]*\|[^{}]*)\}", pattern)
    if match is None:
        return (pattern,)
    before, after = pattern[: match.start()], pattern[match.end() :]
    return tuple(before + word + after for word in match[1].split("|"))


def evaluate(shape: str, sizes: Mapping[str, int]) -> Shape:
    """A shape in numbers: the value of `kv_heads*head_dim hidden` for these sizes."""
    return tuple(_product(axis, sizes) for axis in shape.split())


def _product(axis: str, sizes: Mapping[str, int]) -> int:
    return prod(int(word) if word.isdigit() else sizes[word] for word in axis.split("*"))


def with_sizes(pattern: str, sizes: Mapping[str, int]) -> str:
    """A name with the values of sizes: `{=block_use}` stands for the number of that size in the layer."""
    if "{=" not in pattern:
        return pattern
    return re.sub(r"\{=(\w+)\}", lambda found: str(sizes[found[1]]), pattern)


def of_layer(pattern: str, layer: int) -> str:
    """A name with its layer number. The placeholder `{e}` stays in it.

    `{l-1}` is the layer before. `{l/2}` is half the number, for names that count two layers as one. `{l%2}` is 0 or 1: the
    first or the second of the two. `{2l}` and `{2l+1}` are for names that count one layer as two.
    """
    if "{l" not in pattern and "{2l" not in pattern:
        return pattern
    named = pattern.replace("{l}", str(layer))
    named = named.replace("{l-1}", str(layer - 1)).replace("{l/2}", str(layer // 2))
    named = named.replace("{2l}", str(2 * layer)).replace("{2l+1}", str(2 * layer + 1))
    return named.replace("{l%2}", str(layer % 2))
