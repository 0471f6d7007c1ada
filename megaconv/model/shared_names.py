"""Refuses models that are used together if one of them keeps its own tensor names and another has canonical names."""

from megaconv.errors import UnknownFamily
from megaconv.model.ir import Header


def require_shared_names(name: str, header: Header, other: str, other_header: Header) -> None:
    """Raise UnknownFamily if only one of two models has a family, because their tensors' names can't match.

    name, other: of the models, for messages.
    """
    ours, theirs = header.config, other_header.config
    if (ours.own_names is None) == (theirs.own_names is None):
        return
    if ours.own_names is None:
        name, other, ours, theirs = other, name, theirs, ours
    assert ours.own_names is not None
    if theirs.whole is not None:
        raise UnknownFamily(
            f"{name} holds a multimodal model under the names of its files, and {other} holds it in parts: convert {name} with --saver hf "
            "first"
        )
    raise UnknownFamily(
        f"{name} keeps its own tensor names, which {other} doesn't have: {ours.own_names.reason}"
    )
