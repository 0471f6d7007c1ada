"""Texts between marks, found in time that grows with the length of the text: regular expressions with `.*?` can take its square."""

import re
from collections.abc import Iterator


def between(text: str, begin: re.Pattern[str], end: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield (a begin mark, the text between it and the next end mark), one part after the other.

    begin: a pattern that can't match across another begin mark, or each search would read the text to its end.
    """
    place = 0
    while head := begin.search(text, place):
        stop = text.find(end, head.end())
        if stop < 0:
            return
        yield head, text[head.end() : stop]
        place = stop + len(end)


_KEY = re.compile("<arg_key>")
_VALUE = re.compile(r"</arg_key>\s*<arg_value>")


def keys_and_values(text: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments that GLM and Hunyuan 3 write: `<arg_key>city</arg_key><arg_value>Köln</arg_value>`."""
    for _, inner in between(text, _KEY, "</arg_value>"):
        key, *values = _VALUE.split(inner, maxsplit=1)
        for value in values:
            yield key, value


def parameters(text: str, begin: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) of parameters that end with `</parameter>`. begin: its first group is the name."""
    for head, value in between(text, begin, "</parameter>"):
        yield head[1], value.removesuffix("\n")
