"""--drop-retrieval: the GPT inside a Retro, as a source: its decoder without cross attention and encoder."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from formats.tensor import LazyTensor
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import recognize
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT, Header, Key, Source
from megaconv.model.table import canonical_shapes
from megaconv.model.training import TrainingState


@dataclass(frozen=True)
class InnerSource:
    """The weights of the GPT inside a Retro. Optimizer state is left out."""

    source: Source
    header: Header

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield the tensors of the GPT, in the order of the manifest."""
        for key, tensor in self.source.tensors():
            if key in self.header.manifest:
                yield key, tensor


def without_retrieval(source: Source) -> Source:
    """The GPT inside a Retro. Raises UsageError for another model, NotExpressible if no family has this GPT."""
    header = source.header
    if not header.config.retrieval.layers:
        raise UsageError(
            f"--drop-retrieval: the model is a {header.config.family} without retrieval; leave the option out"
        )
    config, shapes = _inner(header.config)
    manifest = {
        key: info
        for key, info in header.manifest.items()
        if key.slot == WEIGHT and key.name in shapes
    }
    inner = replace(
        header,
        config=config,
        manifest=manifest,
        training=_plain(header.training),
        has_optimizer=False,
    )
    return InnerSource(source, inner)


def _inner(config: ModelConfig) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
    """(the GPT's configuration, the shapes of its tensors by name)."""
    if not config.norm.final:
        raise NotExpressible(
            "--drop-retrieval: the model's norm.final is False: it has no norm after its last layer, as Megatron core 0.8 and newer "
            "writes Retro; every GPT has one"
        )
    plain = changed(config, {"retrieval.layers": 0})
    member = recognize(plain)
    inner = replace(plain, family=member.name)
    return inner, canonical_shapes(member.rows, inner)


def _plain(training: TrainingState) -> TrainingState:
    """The training state of a run without retrieval and without an optimizer."""
    kept = {
        name: value for name, value in training.arguments.items() if not name.startswith("retro_")
    }
    return replace(training, arguments=kept, optimizer=None, scheduler=None, rng={})
