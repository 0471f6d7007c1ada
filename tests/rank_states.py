"""Changes what the rank files of a checkpoint of ours say, through torch itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def rank_paths(root: Path) -> list[Path]:
    """The rank files below a directory, and common.pt of a distributed checkpoint."""
    return sorted((*root.rglob("model_optim_rng.pt"), *root.rglob("common.pt")))


def edit(files: Iterable[Path], *, args: dict[str, Any] | None = None, **values: Any) -> None:
    """Set keys of the states (values), and attributes of their args; None takes a key away."""
    for file in files:
        state = torch.load(file, weights_only=False)
        for name, value in values.items():
            state.pop(name, None) if value is None else state.update({name: value})
        vars(state["args"]).update(args or {})
        torch.save(state, file)
