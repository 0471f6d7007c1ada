"""Formats numbers with nouns."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 pair`, `2,000 pairs`. plural: if it is not the noun with an s."""
    return f"1 {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"
