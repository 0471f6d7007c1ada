"""The start of a biencoder from a BERT: its layers go to all towers, which get the same new projection.

A pooler stays for ICTBertModel (--ict-head-size). The BERT's other heads are left out by name.
"""

from collections.abc import Callable
from dataclasses import replace

from formats.tensor import LazyTensor
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.families.biencoder import TOWERS
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Key
from megaconv.model.retrieving import Retriever
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.restore import Start
from megatron_lite.settings.architecture import retriever_of
from megatron_lite.settings.model import Model

_WITHOUT_WORDS = {
    "head.activation": "", "head.binary": False, "head.classes": 0, "head.choices": False, "tie_embeddings": False,
}  # fmt: skip


def with_towers(start: Start, model: Model, seed: int, say: Callable[[str], None]) -> Start:
    """Return the start of a biencoder from a BERT. say: receives a line that lists new and removed tensors.

    Raises UsageError for a checkpoint that is no BERT, or that lacks the pooler.
    """
    config = start.config
    if config.family != "bert":
        raise UsageError(
            f"--bert-load {start.path}: is a {config.family}; the towers of a retriever start with a BERT"
        )
    retriever = retriever_of(model)
    if retriever.pooler and not config.has("pooler"):
        raise UsageError(
            f"--bert-load {start.path}: the BERT has no pooler, which --ict-head-size needs; give --biencoder-projection-dim"
        )
    trained = _biencoder(config, retriever)
    held = start.weights
    fresh = initial_weights(trained, model.init_method_std, seed)
    tensors: dict[Key, LazyTensor] = {}
    used, new = set[str](), list[str]()
    for name in canonical_shapes(family(trained.family).rows, trained):
        inner = _in_tower(name)
        if inner in held:
            tensors[Key(name)] = held[inner]
            used.add(inner)
        else:
            # The same random numbers in both towers: they follow from the first tower's name.
            first = next(each for each in fresh if _in_tower(each) == inner)
            tensors[Key(name)] = fresh[first]
            new.append(name)
    left_out = sorted({name.rpartition(".")[0] for name in held.keys() - used})
    say(
        f"towers from {start.path}; new: {', '.join(sorted(new)) or 'nothing'}; left out: {', '.join(left_out) or 'nothing'}"
    )
    return replace(start, header=replace(start.header, config=trained), tensors=tensors)


def _biencoder(config: ModelConfig, retriever: Retriever) -> ModelConfig:
    plain = changed(config, _WITHOUT_WORDS)
    return replace(plain, family="biencoder", retriever=retriever, hf=None)


def _in_tower(name: str) -> str:
    """The name that a tower's tensor has in a BERT."""
    tower, _, inner = name.partition(".")
    return inner if tower in TOWERS else name
