"""Errors of a pickle while it is read. `pickle_guard` turns them into errors for users."""


class MalformedError(ValueError):
    """The pickle contains something that no writer of checkpoints writes."""


class UnsafeCallError(Exception):
    """The pickle asks to run code."""
