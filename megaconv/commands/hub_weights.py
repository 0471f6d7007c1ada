"""Weight files that a repository holds already, and that a push doesn't replace.

A model in several files has other names than one in a single file. After a push, both would lie in the repository, and
transformers reads the single file first.
"""

import re
from collections.abc import Collection, Iterable

from formats.wording import listing
from megaconv.errors import UsageError
from megaconv.families.parts.keys import WEIGHT_NAMES

_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?", re.ASCII
)
REPLACE = "--replace-weights"


def old_weights(there: Iterable[str], pushed: Collection[str]) -> list[str]:
    """The weight files on a branch that a push leaves there; empty if the push has no weights itself.

    there: paths on the branch. pushed: paths of the push.
    """
    if not any(map(_WEIGHTS.fullmatch, pushed)):
        return []
    return sorted(name for name in there if _WEIGHTS.fullmatch(name) and name not in pushed)


def require_read(repository: str, old: Collection[str], pushed: Collection[str]) -> None:
    """Raises UsageError if transformers would read an old weight file in place of the pushed ones."""
    first = next((name for name in WEIGHT_NAMES if name in old or name in pushed), None)
    if first in old:
        raise UsageError(
            f"{repository}: holds {first}, which transformers reads in place of the pushed weights; `megaconv push` with "
            f"{REPLACE} removes old weight files in the same commit"
        )


def notice_of(repository: str, old: Collection[str]) -> str:
    """The notice about old weight files that stay."""
    return (
        f"{repository} also holds old weight files: {listing(sorted(old))}; {REPLACE} removes them"
    )
