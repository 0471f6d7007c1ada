"""Numbers with their nouns and verbs, for messages."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 pair`, `2,000 pairs`. plural: if it is not the noun with an s."""
    return f"1 {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def are(number: int) -> str:
    """Return the verb for a number of things."""
    return "is" if number == 1 else "are"
