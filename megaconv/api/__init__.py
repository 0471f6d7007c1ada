"""The Python interface: one function per command, with the same options as plain arguments.

The options are defined in `megaconv.options`. A function passes all of its arguments on by name (`locals()`), so that
nothing but its signature repeats them. Tests compare the signatures with the options, and docs/api.md with both.
"""

from megaconv.api.planning import plan, plan_serving, plan_training
from megaconv.api.reading import (
    diff,
    fingerprint,
    inspect,
    load_transformers,
    open,  # noqa: A004
    scan,
    state_dict,
    verify,
)
from megaconv.api.writing import apply, average, clean, convert, delta, merge, push, seal

__all__ = [
    "apply",
    "average",
    "clean",
    "convert",
    "delta",
    "diff",
    "fingerprint",
    "inspect",
    "load_transformers",
    "merge",
    "open",
    "plan",
    "plan_serving",
    "plan_training",
    "push",
    "scan",
    "seal",
    "state_dict",
    "verify",
]
