"""Numbers of things, as one says them."""


def counted(number: int, noun: str) -> str:
    """`1 pair`, `2,000 pairs`, `3 processes`, `4 microbatches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"
