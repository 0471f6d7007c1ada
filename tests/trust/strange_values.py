"""JSON documents with one thing changed: a value of another type or size, a key gone, doubled or moved."""

import json
from random import Random
from typing import Any

HUGE = (
    10**9,
    10**12,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -1,
    -(2**63),
    0,
    1,
    2,
    3,
    1 << 20,
)
"""Sizes that no model has, and some that only another one has."""

STRANGE: tuple[Any, ...] = (
    None, True, False, "", "x", "../outside/secret", "/dev/zero", "\0", "\ud800", "a\nb", "1", [], {}, [[]], {"a": {}}, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), [1, 2], "A" * 10_000, "\x1b[31mred",
)  # fmt: skip


def mutate_json(content: bytes, random: Random) -> tuple[bytes, str]:
    """A changed document, and what was changed. Content that is not JSON comes back with a byte inserted."""
    try:
        document = json.loads(content)
    except ValueError:
        return content + b"]", "something at the end"
    places = list(_places(document))
    if not places:
        return json.dumps(strange_value(random)).encode(), "everything"
    owner, key = random.choice(places)
    text = str(key)[:40]
    action = random.random()
    if action < 0.7 or not isinstance(owner, dict):
        owner[key] = strange_value(random, owner[key])
        text = f"{text} = {str(owner[key])[:40]!r}"
    elif action < 0.85:
        del owner[key]
        text = f"without {text}"
    else:
        other, name = random.choice(places)
        owner[key], other[name] = other[name], owner[key]
        text = f"{text} and {str(name)[:40]} exchanged"
    try:
        return json.dumps(document, indent=1).encode(), text
    except (ValueError, RecursionError):  # something was moved into itself
        return b"{}", "everything gone"


def strange_value(random: Random, old: Any = None) -> Any:
    """Often near to what was there: a number becomes another one."""
    if isinstance(old, bool) or old is None or random.random() < 0.3:
        return random.choice(STRANGE)
    if isinstance(old, int):
        numbers = old + 1, old - 1, old * 2, old // 2, -old
        return random.choice([*HUGE, *numbers, float(old), str(old)])
    if isinstance(old, str):
        shorter = old[:-1]
        longer = old + "x"
        return random.choice([shorter, longer, old.upper(), *STRANGE])
    if isinstance(old, list):
        shorter, doubled, reverse = old[:-1], old * 2, old[::-1]
        return random.choice([shorter, doubled, reverse, *HUGE])
    return random.choice(HUGE)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        node = waiting.pop()
        keys = (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else ()
        )
        found += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
    return found
