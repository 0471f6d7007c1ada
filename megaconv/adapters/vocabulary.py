"""Changes of the vocabulary by an adapter: another number of tokens, and rows of single tokens (trainable_token_indices).

If the vocabulary was resized before the training, peft stores the whole embedding and the whole head in the adapter.
Source: peft 0.21.2, utils/save_and_load.py and tuners/trainable_tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from formats.tensor import Box, Bytes, ComputedTensor, LazyTensor, Shape
from megaconv.adapters.derived import are_equal
from megaconv.adapters.low_rank import FLOATS
from megaconv.adapters.peft_files import Adapter
from megaconv.errors import TensorMismatch
from megaconv.families import Family
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.naming import HF
from megaconv.model.natives import unsharded_tensors
from megaconv.model.table import canonical_shapes
from megaconv.values.cast import CastTensor

_OF_VOCABULARY = ("embed.weight", "head.weight")


@dataclass(frozen=True)
class WithRows(ComputedTensor):
    """A matrix [vocab, hidden] with other rows for some tokens."""

    rows: Mapping[int, int]
    """Row of the matrix -> row of `values`."""
    values: LazyTensor
    """[number of tokens, hidden], in the matrix's dtype."""

    def read_into(self, box: Box, out: Bytes) -> None:
        self.source.read_into(box, out)
        for row, at in self.rows.items():
            if box.row0 <= row < box.row1:
                first = row - box.row0
                self.values.read_into(Box(at, at + 1, box.col0, box.col1), out[first : first + 1])


@dataclass(frozen=True)
class TokenRows:
    """New rows of an embedding or a head, for single tokens."""

    tokens: tuple[int, ...]
    values: LazyTensor
    """[number of tokens, hidden]."""

    def put_into(self, tensor: LazyTensor, name: str, *, overflow: bool) -> WithRows:
        """The matrix with these rows, in its own dtype. name: for messages."""
        values = self.values
        if values.dtype != tensor.dtype:
            values = CastTensor(values, tensor.dtype, name, overflow)
        return WithRows(tensor, {token: at for at, token in enumerate(self.tokens)}, values)


def resized(adapter: Adapter, family: Family, config: ModelConfig) -> tuple[Adapter, ModelConfig]:
    """(the adapter, the model's configuration with the adapter's number of tokens).

    Head and embedding of a tied model stay tied if both are the same in the adapter: its head is left out.
    Raises TensorMismatch if the adapter resizes only one of head and embedding.
    """
    if config.own_names is not None:
        return adapter, config
    untied = changed(config, {"tie_embeddings": False})
    names = _names_in_files(family, untied)
    held = {kind: adapter.replaced.get(name) for kind, name in names.items()}
    embedding, head = held.get("embed.weight"), held.get("head.weight")
    whole = head if embedding is None else embedding
    if whole is None or len(whole.shape) != 2 or whole.shape[0] in (0, config.vocab):
        return adapter, config
    larger = changed(config, {"vocab": whole.shape[0]})
    checked = config, larger
    if not adapter.config.keeps_tie:
        # The base's head can't stay tied to a larger embedding that was trained alone.
        checked = untied, changed(larger, {"tie_embeddings": False})
    _require_both(adapter, family, checked, names)
    if not config.tie_embeddings or embedding is None or head is None:
        return adapter, larger
    if _is_shared(adapter, names, embedding, head):
        adapter = _without(adapter, names["head.weight"])
    return adapter, larger


def _without(adapter: Adapter, head: str) -> Adapter:
    """The adapter of a model that stays tied, without the tensor of the head."""
    return replace(
        adapter,
        config=replace(adapter.config, keeps_tie=True),
        replaced={name: each for name, each in adapter.replaced.items() if name != head},
        tokens={name: each for name, each in adapter.tokens.items() if name != head},
    )


def _names_in_files(family: Family, config: ModelConfig) -> dict[str, str]:
    """Canonical name -> transformers' name, of embedding and head."""
    natives = unsharded_tensors(family.rows, config, HF)
    return {
        name: native.name
        for native in natives
        for name in native.parts
        if name in _OF_VOCABULARY and native.copy is None
    }


def _require_both(
    adapter: Adapter,
    family: Family,
    configs: tuple[ModelConfig, ModelConfig],
    names: Mapping[str, str],
) -> None:
    """Raise TensorMismatch if a tensor of the base would have another number of tokens than the adapter's.

    configs: the base's configuration, and the one with the adapter's number of tokens.
    """
    config, larger = configs
    before, after = (canonical_shapes(family.rows, each) for each in (config, larger))
    for name, shape in after.items():
        of_adapter = adapter.replaced.get(names.get(name, name))
        if shape != before[name] and (of_adapter is None or of_adapter.shape != shape):
            raise TensorMismatch(
                f"{adapter.weights}: has a vocabulary of {larger.vocab} tokens, the base of {config.vocab}, and no {names.get(name, name)} "
                f"of {larger.vocab}; resize the base's vocabulary first (transformers: resize_token_embeddings)",
                code="misshapen-tensor",
            )


def require_rows_of_base(adapter: Adapter, name: str, tensor: LazyTensor, expected: Shape) -> None:
    """Raise TensorMismatch if a whole tensor of the adapter differs from the base's only in its number of rows.

    A bare model has one, or a model without a family: their vocabulary isn't resized here. name: in the adapter.
    """
    found = tuple(tensor.shape)
    if len(found) == len(expected) > 1 and found != expected and found[1:] == expected[1:]:
        raise TensorMismatch(
            f"{adapter.weights}: {name} has {found[0]} rows, the base's has {expected[0]}; if the vocabulary was resized before the "
            "training, resize the base's first (megaconv convert --tokenizer, or resize_token_embeddings of transformers)",
            code="misshapen-tensor",
        )


def _is_shared(
    adapter: Adapter, names: Mapping[str, str], embedding: LazyTensor, head: LazyTensor
) -> bool:
    """True if an adapter stores one tensor as embedding and as head, with the same new rows."""
    adapted = {f"{module.module.replace('.base_layer', '')}.weight" for module in adapter.modules}
    if adapted & set(names.values()) or not are_equal((embedding, head)):
        return False
    rows = [adapter.tokens[name] for name in names.values() if name in adapter.tokens]
    return not rows or (len(rows) == len(names) and are_equal(rows))


def require_token_rows(adapter: Adapter, *, tied: bool) -> None:
    """Raise TensorMismatch if the configuration lists trained tokens of a module, and the files lack their rows.

    tied: True for a model with a tied head, whose rows peft leaves out.
    """
    paths = [f".{name.removesuffix('.weight')}" for name in adapter.tokens]
    for module, tokens in adapter.config.tokens.items():
        has_rows = any(path.endswith(f".{module}" if module else "") for path in paths)
        if tokens and not has_rows and not (tied and paths):
            raise TensorMismatch(
                f"{adapter.weights}: has no rows of the tokens in trainable_token_indices{module and f' for {module}'}; copy the "
                "adapter again",
                code="missing-tensor",
            )


def token_rows(adapter: Adapter, name: str, values: LazyTensor, shape: Shape) -> TokenRows:
    """The new rows of the embedding or the head `name`, a name in the adapter. shape: of the whole matrix.

    Raises TensorMismatch if the configuration lists other tokens.
    """
    tokens, (vocab, hidden) = adapter.config.tokens_of(name.removesuffix(".weight")), shape
    if tuple(values.shape) != (len(tokens), hidden):
        raise TensorMismatch(
            f"{adapter.weights}: has rows {list(values.shape)} for {name}; trainable_token_indices lists {len(tokens)} tokens, "
            f"so expected [{len(tokens)}, {hidden}]",
            code="misshapen-tensor",
        )
    if values.dtype not in FLOATS:
        raise TensorMismatch(
            f"{adapter.weights}: has rows of {values.dtype} for {name}; expected {', '.join(FLOATS)}"
        )
    beyond = [token for token in tokens if not 0 <= token < vocab]
    if beyond:
        raise TensorMismatch(
            f"{adapter.weights}: has a row for token {beyond[0]} of {name}, and the model has {vocab} tokens"
        )
    return TokenRows(tokens, values)
