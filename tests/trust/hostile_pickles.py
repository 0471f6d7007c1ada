"""Hostile pickles in every container that a checkpoint has: alone, or hidden in a pickle that is otherwise valid."""

import json
import pickletools
from collections.abc import Callable
from functools import cache
from random import Random

from megaconv.engine.record import RECORD_NAME
from tests.trust import server
from tests.trust.bench import Bench
from tests.trust.gadgets import gadget, monster, number, soup, value
from tests.trust.hostile import judge
from tests.trust.judging import Failure
from tests.trust.strange_values import HUGE
from tests.trust.torch_containers import CONTAINERS, replace_pickle

_PROTOCOL = 2


def attack(bench: Bench, case: int) -> None:
    random = bench.random("hostile pickles", case)
    container = CONTAINERS[case % len(CONTAINERS)]
    bench.fresh_folder()
    source = bench.copy(container.checkpoint)
    maker, text = random.choice(MAKERS)
    reported: list[str] = []

    def change(old: bytes) -> bytes:
        new, what = maker(old, random)
        reported.append(what)
        return new

    replace_pickle(source, container, change)
    judge(bench, random, what := f"{container}: {text} {' '.join(reported)}")
    record = bench.folder / "out" / RECORD_NAME
    if text == "hidden:" and record.exists():
        expected = _fingerprint(bench, container.checkpoint)
        if json.loads(record.read_bytes())["fingerprint"] != expected:
            raise Failure("wrong", f"{what}: exit 0, and another model")


@cache
def _fingerprint(bench: Bench, name: str) -> str:
    return server.run("fingerprint", bench.checkpoints[name].path, folder=bench.root).out.split()[0]


def _alone(
    make: Callable[[Random], tuple[bytes, str]],
) -> Callable[[bytes, Random], tuple[bytes, str]]:
    def maker(old: bytes, random: Random) -> tuple[bytes, str]:
        content, text = make(random)
        return b"\x80" + bytes([random.choice([_PROTOCOL, 4])]) + content + b".", text

    return maker


def _hidden(
    make: Callable[[Random], tuple[bytes, str]],
) -> Callable[[bytes, Random], tuple[bytes, str]]:
    """Before everything else, and thrown away; or in a dictionary of which nobody asks that key."""

    def maker(old: bytes, random: Random) -> tuple[bytes, str]:
        content, text = make(random)
        if random.random() < 0.5:
            return old[:2] + content + b"0" + old[2:], f"{text}, thrown away"
        end = old.rindex(b".")
        return old[:end] + value("more") + content + b"s" + old[end:], f"{text}, as an entry"

    return maker


def _other_number(old: bytes, random: Random) -> tuple[bytes, str]:
    """One number of the pickle is another: a size, a stride, an offset, an argument of the training run."""
    places = _places(old, ("BININT", "BININT1", "BININT2", "LONG1"))
    if not places:
        return old[:-1], "without its end"
    start, end, found = random.choice(places)
    new = random.choice([*HUGE, int(found or 0) + 1, int(found or 0) * 2])
    return old[:start] + number(new) + old[end:], f"{found} at {start} becomes {new}"


def _other_text(old: bytes, random: Random) -> tuple[bytes, str]:
    """One name of the pickle is another: a key, a dtype, a path, a class."""
    places = _places(old, ("BINUNICODE", "SHORT_BINUNICODE", "GLOBAL"))
    if not places:
        return old[:-1], "without its end"
    start, end, found = random.choice(places)
    if old[start : start + 1] == b"c":
        module, name, _ = random.choice(
            [
                ("torch", "float64", 0),
                ("torch", "HalfStorage", 0),
                ("os", "system", 0),
                ("torch", "x", 0),
            ]
        )
        return old[:start] + f"c{module}\n{name}\n".encode() + old[
            end:
        ], f"{found} becomes {module}.{name}"
    word = str(found)
    new = random.choice(
        [
            word[:-1],
            word + "x",
            word.upper(),
            "../outside/secret",
            "/dev/zero",
            "",
            "\n\x1b[31m",
            "0",
            "a" * 100_000,
        ]
    )
    return old[:start] + value(new) + old[end:], f"{word[:40]!r} becomes {new[:40]!r}"


def _places(pickle: bytes, names: tuple[str, ...]) -> list[tuple[int, int, object]]:
    """(start, end, argument) of instructions; of as many as the pickle's first object has."""
    found = [
        (position, opcode.name, argument)
        for opcode, argument, position in pickletools.genops(pickle)
    ]
    ends = [position for position, _, _ in found[1:]]
    return [
        (start, end, argument)
        for (start, name, argument), end in zip(found, ends, strict=False)
        if name in names
    ]


MAKERS: list[tuple[Callable[[bytes, Random], tuple[bytes, str]], str]] = [
    (_alone(gadget), "alone:"),
    (_alone(monster), "alone:"),
    (_alone(soup), "alone:"),
    (_hidden(gadget), "hidden:"),
    (_hidden(gadget), "hidden:"),
    (_hidden(monster), "hidden:"),
    (_hidden(soup), "hidden:"),
    (_other_number, ""),
    (_other_number, ""),
    (_other_text, ""),
]
