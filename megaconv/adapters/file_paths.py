"""The path of a module in a model's files.

transformers names the modules of a multimodal model with wrappers that its files leave out or have elsewhere:
`model.language_model.layers.0` is `model.layers.0` in Qwen2.5-VL's files, and `language_model.model.layers.0` in Gemma 3's.
"""

from collections.abc import Iterable

WRAPPERS = frozenset({"model", "language_model", "vision_model"})
"""Names of modules that only hold another module."""


class FilePaths:
    """The paths of all modules with tensors."""

    def __init__(self, names: Iterable[str]) -> None:
        """names: of all tensors in the files."""
        self._paths = {name.rpartition(".")[0] for name in names}
        self._by_core: dict[str, list[str]] = {}
        for path in sorted(self._paths):
            self._by_core.setdefault(_core(path), []).append(path)

    def module(self, path: str) -> str:
        """The path in the files of a module of transformers' class. Unchanged if no path, or more than one, could be it."""
        found = self._by_core.get(_core(path), [])
        return found[0] if path not in self._paths and len(found) == 1 else path

    def tensor(self, name: str) -> str:
        """The same for a tensor."""
        path, dot, last = name.rpartition(".")
        return self.module(path) + dot + last


def _core(path: str) -> str:
    """The path without the names of wrappers."""
    return ".".join(word for word in path.split(".") if word not in WRAPPERS)
