"""The parts of a multimodal model in a checkpoint of rank files, beside its language model."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from formats.tensor import Shape
from megaconv.errors import UsageError
from megaconv.families import is_multimodal
from megaconv.megatron.arguments.whole import read_whole, refuse_unknown_beside, without_images
from megaconv.megatron.states.ranks import Ranks
from megaconv.model.config import ModelConfig


@dataclass(frozen=True)
class Beside:
    """The parts of a multimodal model beside its language model, and the arguments of the whole."""

    shapes: Mapping[str, Shape]
    """Shapes of the parts' tensors by name; none for a language model by itself."""
    args: Namespace

    @property
    def args_of_text(self) -> Namespace:
        """The arguments of the language model by itself."""
        return without_images(self.args) if self.shapes else self.args


def beside_of(ranks: Ranks, args: Namespace) -> Beside:
    """Return what the first rank holds beside its language model."""
    held = ranks.beside.get(min(ranks.states), {})
    return Beside({name: tuple(tensor.shape) for name, tensor in held.items()}, args)


def with_whole(config: ModelConfig, beside: Beside, where: str) -> ModelConfig:
    """Return the language model's configuration as a part of the multimodal model in the checkpoint.

    Raises UsageError if that model isn't known, TensorMismatch if config.json is of another one.
    """
    if config.whole is None:
        refuse_unknown_beside(beside.shapes, where)
        return config
    return replace(config, whole=read_whole(config.whole, beside.shapes, beside.args, where))


def require_multimodal(beside: Beside, sidecars: Path, where: str) -> None:
    """Raise UsageError if --text-only is given for a language model by itself."""
    if not beside.shapes and not is_multimodal(sidecars):
        raise UsageError(f"--text-only: {where}: holds a language model alone; leave it out")
