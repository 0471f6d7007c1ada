"""`megaconv new-family`: a draft of a family's file for a config.json."""

from dataclasses import replace
from pathlib import Path

from megaconv.drafting.draft import Draft, draft_of
from megaconv.drafting.reference import reference_of
from megaconv.errors import TargetExists, UsageError
from megaconv.families import all_families, families
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.local_paths import require_place

_SAVE = "--save"


def new_family(place: Path) -> Draft:
    """The draft of a family. place: a config.json, or a directory with one.

    Raises UsageError if there is no config.json, or without transformers. Raises UnknownFamily if transformers has no
    class for the model.
    """
    path = place / CONFIG_NAME if place.is_dir() else place
    if not path.is_file():
        raise UsageError(f"{place}: there is no {CONFIG_NAME}; name one, or a directory with one")
    reference = reference_of(path)
    existing = [
        name
        for name, each in all_families().items()
        if reference.architecture in each.architectures
    ]
    draft = draft_of(reference, families(), frozenset(existing))
    return replace(draft, existing=tuple(existing))


def save(draft: Draft, file: Path) -> None:
    """Write a draft to a new file. Raises TargetExists, and UsageError for an impossible place."""
    require_place(_SAVE, file)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(draft.text)
    except FileExistsError:
        raise TargetExists(f"{_SAVE} {file}: already exists; choose another file") from None
