"""A checkpoint of any format, opened to look into: `megaconv.open(path)`."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.tensor import LazyTensor, read_tensor
from megaconv.commands.inspected import Inspection
from megaconv.commands.units import readable
from megaconv.engine.opening import open_source
from megaconv.extras import require_torch
from megaconv.input import find_input
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header, Key
from megaconv.model.layout import Layout
from megaconv.options import LoadOptions
from megaconv.terminal import one_line
from megaconv.values.shifted import plain

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A checkpoint's metadata, and its lazy tensors by canonical name (`layers.0.attn.q.weight`)."""

    header: Header
    tensors: Mapping[str, LazyTensor]
    slots: Mapping[Key, LazyTensor] = field(default_factory=dict)
    """The optimizer's tensors, if there are any: `Key("layers.0.attn.q.weight", "exp_avg")`."""

    def __repr__(self) -> str:
        layout = "" if self.header.layout is None else f", {self.layout}"
        size = f"{self.header.parameters:,} parameters in {len(self.tensors)} tensors, {readable(self.header.nbytes)}"
        return f"<Checkpoint: {self.config.family}, {size}, {self.header.source}{layout}>"

    def _repr_html_(self) -> str:
        """A table for notebooks with the contents of `megaconv inspect`."""
        rows = Inspection("", "", self.header).lines()
        cells = "".join(
            f"<tr><th>{escape(label)}</th><td>{escape(one_line(text))}</td></tr>"
            for label, text in rows
        )
        return f"<table>{cells}</table>"

    @property
    def config(self) -> ModelConfig:
        """The configuration that defines the model's function."""
        return self.header.config

    @property
    def layout(self) -> Layout:
        """The parallel layout. For an unsharded checkpoint (`header.layout` is None) it is that of a single rank."""
        return self.header.layout or Layout(stage_layers=(self.config.layer_count,))

    def load(self, name: str) -> "torch.Tensor":
        """One whole tensor in memory.

        Raises KeyError for a name that the model doesn't have, UsageError if torch isn't installed.
        """
        require_torch("loading a tensor")
        import torch

        if name not in self.tensors:
            raise KeyError(self._no_tensor(name))
        tensor = self.tensors[name]
        values: Any = torch.from_numpy(read_tensor(tensor).reshape(-1)).view(
            getattr(torch, tensor.dtype)
        )
        loaded: torch.Tensor = values.reshape(tensor.shape)
        return loaded

    def _no_tensor(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.tensors, n=1)
        hint = f"did you mean {near[0]}?" if near else "`.tensors` lists them"
        return f"{name}: the model has no such tensor; {hint}"


def open_checkpoint(
    path: str | Path, options: LoadOptions | None = None, loader: str | None = None
) -> Checkpoint:
    """Open a directory, a Hub id, or any other input that a loader reads.

    Reads metadata only. Raises CheckpointError.
    """
    source = open_source(find_input(path, loader, options), options)
    found = dict(source.tensors())
    weights = {key.name: plain(key, tensor) for key, tensor in found.items() if key.slot == WEIGHT}
    slots = {key: plain(key, tensor) for key, tensor in found.items() if key.slot != WEIGHT}
    return Checkpoint(source.header, weights, slots)
