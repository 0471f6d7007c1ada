"""A row: one line of a family's table, which names canonical tensors and spells them in each naming scheme.

    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", ...), tp=0,
        hf="model.layers.{l}.self_attn.{q|k|v}_proj.weight",
        core=Fused("decoder.layers.{l}.self_attention.linear_qkv.weight", groups="kv_heads"))

The description of a model may hold its own rows. This module therefore imports nothing of the description.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from megaconv.model.naming import KEYS, Naming
from megaconv.model.patterns import expand
from megaconv.model.pieces import Pieces, Template
from megaconv.model.rank import Rank
from megaconv.model.spellings.separate import Separate

STAGES = ("tower", "deepstack", "first", "encoder", "between", "retriever", "layer", "last", "mtp")
"""Places of a row's tensors, in model order."""

SHARDED_SCHEMES = ("core", "legacy", "meta", "trtllm")
"""Naming schemes whose files are sharded over tensor-parallel ranks."""

COPIED_WITH = ("head", "itself", "uses", "decoder", "encoder_end", "stacks", "mtp")


Spelling = str | Separate | tuple[str | Separate, ...]


class HasFeatures(Protocol):
    """A model that says which features its layers have."""

    def has(self, features: str, layer: int = 0) -> bool:
        """True if a layer has all of these features (see ModelConfig.has)."""
        ...


@dataclass(frozen=True)
class Copied:
    """A second copy of a row's tensor in a checkpoint.

    place: where the copy is stored.
        `head`: with the head of a model that ties it to the embedding.
        `itself`: next to the tensor, under a second name of the same tensor.
        `uses`: in each further layer that has the same shared block, whose number is {=block_holder} in the name.
        `mtp`: with the MTP layers.
        `decoder`: with the first decoder stage, if the encoder has its own stages.
        `encoder_end`: in core, with the last encoder stage, where it is unused.
        `stacks`: with every stage of encoder and decoder; each stack uses its own copy.
    names: the copy's names, by scheme. Without names, the copy has the tensor's own name.
    untied: schemes whose software doesn't tie the head, whatever the configuration says. Their files have to hold it.
    """

    place: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    untied: tuple[str, ...] = ("meta",)

    def __post_init__(self) -> None:
        if self.place not in COPIED_WITH:
            raise ValueError(
                f"{self.place!r} is not a place of a copy; known: {', '.join(COPIED_WITH)}"
            )


@dataclass(frozen=True, eq=False, init=False)
class Row:
    """One line of a family's table.

    canonical: name pattern. `{l}` is the layer, `{l-1}` the layer before, `{l/2}` half its number, `{l%2}` the rest of that,
        `{2l}` and `{2l+1}` the two numbers of a layer that names count as two, `{e}` an expert;
        in a native name, `{=block_use}` is the layer's value of a size;
        `{q|k|v}` stands for several tensors.
    shapes: one shape per canonical tensor, in sizes of ModelConfig: `heads*head_dim hidden`.
    names: the row's spelling in each naming scheme, by the scheme's keys (`hf=`, `core_local=` ...; see naming.py).
    tp: the axis that tensor parallelism shards; None if every rank holds a copy.
    stage: the place of the tensors in the model, in model order.
        `tower`: in each layer of a vision encoder.
        `deepstack`: in each part of the vision encoder that feeds one of the language model's first layers.
        `first`: with the embedding.
        `encoder`: in each encoder layer.
        `between`: at the encoder's end.
        `retriever`: in each layer of Retro's encoder of retrieved text.
        `layer`: in each layer of the decoder, or of the only stack.
        `last`: with the head.
        `mtp`: in each MTP layer after the last layer.
    when: features that the model or layer needs for the row to exist (see ModelConfig.has).
    copies: second copies of the tensor in checkpoints.
    """

    canonical: str
    shapes: tuple[str, ...]
    names: Mapping[str, tuple[Separate, ...]]
    tp: int | None
    stage: str
    when: str | None
    padded_vocab: bool
    copies: tuple[Copied, ...]

    def __init__(
        self,
        canonical: str,
        shapes: tuple[str, ...],
        *,
        names: Mapping[str, Spelling] | None = None,
        tp: int | None = None,
        stage: str = "layer",
        when: str | None = None,
        padded_vocab: bool = False,
        copies: tuple[Copied, ...] = (),
        **spelled: Spelling,
    ) -> None:
        """spelled: more entries of `names`. Raises ValueError for contradictory values."""
        given = {**(names or {}), **spelled}
        values = {
            "canonical": canonical,
            "shapes": shapes,
            "names": {key: _spellings(spelling) for key, spelling in given.items()},
            "tp": tp,
            "stage": stage,
            "when": when,
            "padded_vocab": padded_vocab,
            "copies": copies,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        tensors = len(expand(self.canonical))
        if self.stage not in STAGES:
            raise self._wrong(f"{self.stage!r} is not a stage; known: {', '.join(STAGES)}")
        if tensors != len(self.shapes):
            raise self._wrong(f"{tensors} tensors with {len(self.shapes)} shapes")
        if tensors > 1 and any(copied.place != "uses" for copied in self.copies):
            raise self._wrong("only a row of one tensor can have copies, except of shared blocks")
        for key, spellings in self.names.items():
            self._check_spellings(key, spellings)

    def _check_spellings(self, key: str, spellings: tuple[Separate, ...]) -> None:
        if key not in KEYS:
            raise self._wrong(f"{key!r} is not a naming scheme's key; known: {', '.join(KEYS)}")
        held: list[int] = []
        for _, members in self.with_members(spellings):
            held += members
        if sorted(held) != list(range(len(self.shapes))):
            raise self._wrong(f"{key} has to hold each of its tensors once")
        if key.partition("_")[0] not in SHARDED_SCHEMES:
            return
        for spelling in spellings:
            refusal = spelling.refusal(self.tp)
            if refusal:
                raise self._wrong(f"{key}: {refusal}; it has tp {self.tp}")

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.canonical}: {what}")

    def spelling(self, naming: Naming) -> tuple[Separate, ...]:
        """The spellings that together hold the row's canonical tensors; empty if the naming scheme has no name for
        them."""
        # The scheme's keys are in order: its variant (`core_local`) comes before the scheme itself (`core`).
        return next((self.names[key] for key in naming.keys if key in self.names), ())

    def with_members(
        self, spellings: tuple[Separate, ...]
    ) -> Iterator[tuple[Separate, tuple[int, ...]]]:
        """Yield (spelling, numbers of the canonical tensors that it holds).

        A spelling without `members` holds all tensors that no other spelling names.
        """
        named: set[int] = set()
        for spelling in spellings:
            named.update(spelling.members or ())
        rest = tuple(number for number in range(len(self.shapes)) if number not in named)
        for spelling in spellings:
            yield spelling, rest if spelling.members is None else spelling.members

    def templates(self, spelled: tuple[Separate, ...], rank: Rank) -> Iterator[Template]:
        """Yield the native tensors of the row on a rank. spelled: all spellings of the row in a naming scheme."""
        for spelling, members in self.with_members(spelled):
            yield from spelling.natives(self._pieces(members, rank))

    def _pieces(self, members: tuple[int, ...], rank: Rank) -> Pieces:
        names = expand(self.canonical)
        return Pieces(
            self.canonical,
            members,
            names=tuple(names[member] for member in members),
            shapes=tuple(self.shapes[member] for member in members),
            tp=self.tp,
            of_experts=self.of_experts,
            padded_vocab=self.padded_vocab,
            rank=rank,
        )

    def renamed(self, **spelled: Spelling) -> "Row":
        """The same row with additional or replaced names."""
        more = {key: _spellings(value) for key, value in spelled.items()}
        return replace(self, names={**self.names, **more})

    def shaped(self, *shapes: str) -> "Row":
        """The same row with other shapes."""
        return replace(self, shapes=shapes)

    def without(self, *schemes: str) -> "Row":
        """The same row without the names of these schemes."""
        kept = {
            key: spelling
            for key, spelling in self.names.items()
            if key.split("_")[0] not in schemes
        }
        return replace(self, names=kept)

    def exists(self, model: HasFeatures, layer: int) -> bool:
        return self.when is None or model.has(self.when, layer)

    def copied_with(self, place: str) -> Iterator[Copied]:
        return (copied for copied in self.copies if copied.place == place)

    def has_copies(self, place: str) -> bool:
        return any(copied.place == place for copied in self.copies)

    @property
    def of_experts(self) -> bool:
        return "{e}" in self.canonical


def _spellings(spelling: Spelling) -> tuple[Separate, ...]:
    several = spelling if isinstance(spelling, tuple) else (spelling,)
    return tuple(Separate(one) if isinstance(one, str) else one for one in several)
