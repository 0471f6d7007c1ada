"""Random numbers on the pretended GPU: its generators draw the numbers of a CPU's generator with the same state."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class WrongGenerator(RuntimeError):
    """An operation on one device has a generator of the other device."""


@cache
def default_generator() -> torch.Generator:
    """Return the GPU's default generator."""
    return torch.Generator("cuda")


def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def draw(kernel: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return kernel(*args, **kwargs) with numbers of the given generator, or of the GPU's default one."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)]
    if any(each.device.type != "cuda" for each in given):
        raise WrongGenerator("an operation on the GPU has a generator of the CPU")
    source = given[0] if given else default_generator()
    args, kwargs = tree_map(_without, args), tree_map(_without, kwargs)
    of_cpu = torch.get_rng_state()
    torch.set_rng_state(source.get_state())
    try:
        return kernel(*args, **kwargs)
    finally:
        source.set_state(torch.get_rng_state())
        torch.set_rng_state(of_cpu)


def _without(given: Any) -> Any:
    """Replace a generator by None, which stands for the CPU's default generator."""
    return None if isinstance(given, torch.Generator) else given
