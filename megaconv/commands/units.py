"""Formats numbers for people: sizes and shares."""


def share(part: int, whole: int) -> str:
    """A percentage: 12%; <1% for a share that would round to 0 but isn't 0."""
    if 0 < 200 * part < whole:
        return "<1%"
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def readable(size: float) -> str:
    """A size with a unit: 1.5 GiB."""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def readable_time(seconds: float) -> str:
    """`1.50 s`, or `8.3 ms` for less than a second."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
