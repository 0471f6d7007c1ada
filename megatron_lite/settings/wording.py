"""Numbers of things, as one says them."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 pair`, `2,000 pairs`. plural: where it isn't the noun and an s."""
    return f"1 {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"
