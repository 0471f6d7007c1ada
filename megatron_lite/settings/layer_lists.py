"""Lists of 0 and 1 in flags, one number for each layer: `[0]*3+[1]*58`. Source: eval() of such flags in Megatron-LM."""

import re

_REPEATED = re.compile(r"\[([01, ]+)\](?:\*(\d+))?")


def read_list(text: str) -> list[bool] | None:
    """Return the list that a flag gives; None if it has another form. text: without spaces."""
    found: list[bool] = []
    for term in text.split("+"):
        match = _REPEATED.fullmatch(term)
        if match is None:
            return None
        once = [number == "1" for number in match[1].split(",")]
        found += once * int(match[2] or 1)
    return found
