"""The files by which readers find a checkpoint. They become visible last, one after another.

model.safetensors.index.json, .metadata, metadata.json      name the files with tensors
megaconv.json
config.json, latest_checkpointed_iteration.txt              the last one makes the checkpoint complete
latest_train_state.pt, latest, latest_universal             the same in runs of Megatron-Bridge and DeepSpeed
delta.json, sparse.json                                     the same for a patch and for a sparse update
"""

from collections.abc import Iterable

_RECORD = "megaconv.json"
_INDEXES = (".index.json", "/.metadata", "/metadata.json", "/.zmetadata")
_DOORS = (
    "config.json",
    "adapter_config.json",
    "latest",
    "latest_checkpointed_iteration.txt",
    "latest_train_state.pt",
    "latest_universal",
    "delta.json",
    "sparse.json",
)


def _place(name: str) -> int:
    """0 for files that may appear in any order, else the place in the order of selectors."""
    if name in _DOORS:
        return 3
    if name == _RECORD:
        return 2
    return 1 if f"/{name}".endswith(_INDEXES) else 0


def is_selector(name: str) -> bool:
    """True if readers find other files by this one."""
    return _place(name) > 0


def others(names: Iterable[str]) -> list[str]:
    """The names that are no selectors."""
    return [name for name in names if not _place(name)]


def in_order(names: Iterable[str]) -> list[str]:
    """The selectors among the names of an output's files, in the order in which they appear."""
    return sorted((name for name in names if _place(name)), key=lambda name: (_place(name), name))


def last(names: Iterable[str]) -> str | None:
    """The selector that makes an output complete; None if there is none."""
    ordered = in_order(names)
    return ordered[-1] if ordered else None
