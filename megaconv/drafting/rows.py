"""The table of a drafted family: its base's rows, changed until they name the tensors of transformers' class.

Each change is tried, and kept if fewer tensors differ. Names and shapes are compared, so a kept change is proven by them.
Order of values inside a fused tensor isn't: the draft asks about it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from formats.tensor import Shape
from megaconv.drafting.code import Node, call, literal
from megaconv.drafting.reference import Reference
from megaconv.errors import CheckpointError
from megaconv.families import Family
from megaconv.families.parts import norm_places, row_changes
from megaconv.families.parts.decoder_keys import PARALLEL
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.check import well_formed
from megaconv.model.naming import Naming
from megaconv.model.natives import unsharded_tensors
from megaconv.model.table import Fused, Row, Separate, Spelling, Transposed, expand

Tensors = Mapping[str, Shape]
_NAMINGS = (Naming("hf"), Naming("hf", ("stacked",)), Naming("hf", ("stacked_transposed",)))


@dataclass(frozen=True)
class _Change:
    """A change that may bring a table nearer to the tensors of a class."""

    function: str
    """A function of rows in `families/parts/`; empty if only fields change."""
    fixed: Mapping[str, Any]
    module: Any = row_changes


_CHANGES = (
    _Change("with_norm_biases", {"norm.kind": "LayerNorm", "norm.bias": True}),
    _Change("without_gate", {"mlp.gated": False}),
    _Change("with_shared_norm", PARALLEL),
    _Change("without_norms", {"norm.weight": False}),
    _Change("with_head_bias", {"head.bias": True}),
    _Change(
        "normed_over_all_heads",
        {"attention.qk_norm": True, "attention.qk_norm_width": "all"},
        norm_places,
    ),
    _Change(
        "with_own_norms", {"attention.qk_norm": True, "attention.qk_norm_width": "own"}, norm_places
    ),
    _Change("", {"attention.qk_norm": True}),
    _Change("", {"attention.qkv_bias": True}),
    _Change("", {"attention.o_bias": True}),
    _Change("", {"attention.qkv_bias": True, "attention.o_bias": True}),
    _Change("", {"mlp.bias": True}),
    _Change("", {"attention.sinks": True}),
    _Change("", {"attention.qk_norm": False}),
    _Change("", {"attention.qkv_bias": False}),
    _Change("", {"attention.o_bias": False}),
    _Change("", {"mlp.bias": False}),
)


@dataclass(frozen=True)
class DraftedRows:
    """The table of a drafted family, as objects and as source."""

    rows: tuple[Row, ...]
    source: Node
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, Spelling] = field(default_factory=dict)
    """Canonical pattern -> Hugging Face's name, for rows with other names than the base's; `_NAMES` in the source."""
    imports: tuple[tuple[str, str], ...] = ()
    questions: tuple[str, ...] = ()


def drafted_rows(reference: Reference, family: Family, source: str) -> DraftedRows:
    """The table for an architecture.

    family: the drafted family with its base's rows. source: the source of these rows. Raises CheckpointError if the
    family can't read the architecture's configuration.
    """
    draft = DraftedRows(family.rows, source)
    drafting = _Drafting(reference, family)
    draft = drafting.changed(draft)
    draft = drafting.renamed(draft)
    draft = drafting.without_absent(draft)
    draft = _in_core(draft)
    return replace(draft, questions=(*draft.questions, *drafting.unnamed(draft)))


def _in_core(draft: DraftedRows) -> DraftedRows:
    """Only Hugging Face's and Megatron core's names: nobody has tried the other naming schemes."""
    return _applied(draft, _Change("in_core", {}))


def _applied(draft: DraftedRows, change: _Change) -> DraftedRows:
    if not change.function:
        return replace(draft, fixed={**draft.fixed, **change.fixed})
    function = getattr(change.module, change.function)
    return replace(
        draft,
        rows=function(draft.rows),
        source=call(change.function, draft.source),
        fixed={**draft.fixed, **change.fixed},
        imports=(*draft.imports, (change.module.__name__, change.function)),
    )


@dataclass(frozen=True)
class _Drafting:
    reference: Reference
    family: Family

    @cached_property
    def namings(self) -> tuple[Naming, ...]:
        """The forms of experts that the class may have. Stacked forms are only tried if no expert has its own tensors."""
        is_alone = any(re.search(r"\.experts\.\d+\.", name) for name in self.reference.tensors)
        return _NAMINGS[:1] if is_alone else _NAMINGS

    def changed(self, draft: DraftedRows) -> DraftedRows:
        """Apply the change that leaves the fewest differences, as long as there is one."""
        left = self._count(draft)
        while left:
            tried = [_applied(draft, change) for change in _CHANGES]
            counts = [self._count(each) for each in tried]
            if min(counts) >= left:
                break
            left = min(counts)
            draft = tried[counts.index(left)]
        return draft

    def tensors(self, draft: DraftedRows) -> Tensors:
        """The tensors that a draft names, in the form of experts that fits best."""
        fixed = {**self.family.fixed, **draft.fixed}
        config = replace(self.family, fixed=fixed).read_hf(self.reference.raw)
        found = []
        for naming in self.namings:
            natives = unsharded_tensors(draft.rows, config, naming)
            found.append({each.name: each.shape for each in natives if each.copy is None})
        return min(found, key=self._difference)

    def _difference(self, tensors: Tensors) -> int:
        return len(tensors.items() ^ self.reference.tensors.items())

    def _count(self, draft: DraftedRows) -> int:
        """The number of tensors that the draft or the class has alone."""
        try:
            with well_formed(CONFIG_NAME):
                return self._difference(self.tensors(draft))
        except CheckpointError:
            return 10**9

    def missing(self, draft: DraftedRows) -> dict[str, Shape]:
        """The class's tensors that the draft doesn't name."""
        return dict(self.reference.tensors.items() - self.tensors(draft).items())

    def renamed(self, draft: DraftedRows) -> DraftedRows:
        """Give rows without a tensor the names of tensors without a row, if the shapes fit."""
        missing, surplus = self.missing(draft), self._surplus(draft)
        names: dict[str, Spelling] = {}
        questions: list[str] = []
        for row in draft.rows:
            own = _first_names(row, surplus)
            spelled = own and _other_names(own, surplus, missing)
            if not spelled:
                continue
            names[row.canonical] = spelled
            if isinstance(spelled, Fused):
                questions.append(
                    f"{spelled.name} holds {row.canonical} one after the other here. Some models join them group by group: "
                    'Fused(…, groups="kv_heads").'
                )
        if not names:
            return draft
        spellings: dict[str, Mapping[str, Spelling]] = {
            canonical: {"hf": name} for canonical, name in names.items()
        }
        return replace(
            draft,
            rows=row_changes.respelled(draft.rows, spellings),
            source=call("respelled", draft.source, "_NAMES"),
            names=names,
            imports=(*draft.imports, (row_changes.__name__, "respelled")),
            questions=(*draft.questions, *questions),
        )

    def _surplus(self, draft: DraftedRows) -> dict[str, Shape]:
        """The draft's tensors that the class doesn't have."""
        return dict(self.tensors(draft).items() - self.reference.tensors.items())

    def without_absent(self, draft: DraftedRows) -> DraftedRows:
        """Leave out the rows whose tensors the class doesn't have."""
        surplus, known = self._surplus(draft), set(self.reference.tensors)
        absent = []
        for row in draft.rows:
            names = _first_names(row, surplus)
            if names and known.isdisjoint(names):
                absent.append(row.canonical)
        if not absent:
            return draft
        return replace(
            draft,
            rows=row_changes.without_rows(draft.rows, *absent),
            source=call("without_rows", draft.source, *map(literal, absent)),
            imports=(*draft.imports, (row_changes.__name__, "without_rows")),
            questions=(
                *draft.questions,
                f"the class has no tensors for {', '.join(absent)}. Is the part missing, or has it other names?",
            ),
        )

    def unnamed(self, draft: DraftedRows) -> Iterator[str]:
        """Yield a question for each kind of tensors that no row names, or that has another shape."""
        kinds: dict[str, Shape] = {}
        for name, shape in sorted(self.missing(draft).items()):
            kinds.setdefault(_of_experts(_of_layers(name)), shape)
        for kind, shape in kinds.items():
            yield f"no row names {kind} {list(shape)}. A checkpoint with this tensor is refused."


def _first_names(row: Row, tensors: Tensors) -> tuple[str, ...]:
    """The names of a row's tensors in the first layer where all of them are in tensors."""
    spelled = row.names.get("hf", ())
    if len(spelled) != 1 or row.of_experts:
        return ()
    names = expand(spelled[0].name)
    layers = range(len(tensors)) if "{l}" in spelled[0].name else range(1)
    for layer in layers:
        here = tuple(name.replace("{l}", str(layer)) for name in names)
        if all(name in tensors for name in here):
            return here
    return ()


def _other_names(own: tuple[str, ...], ours: Tensors, missing: dict[str, Shape]) -> Spelling | None:
    """The spelling of tensors under the class's names; None if no names fit. Names that are taken leave `missing`."""
    chosen = [_like(name, ours[name], missing) for name in own]
    if all(chosen) and len(set(chosen)) == len(own):
        for name in filter(None, chosen):
            del missing[name]
        return _pattern([str(name) for name in chosen])
    if len(own) > 1:
        joined = (sum(ours[name][0] for name in own), *ours[own[0]][1:])
        fused = _like(own[0], joined, missing)
        if fused:
            del missing[fused]
            return Fused(_of_layers(fused))
        return None
    transposed = ours[own[0]][::-1]
    found = _like(own[0], transposed, missing) if len(transposed) == 2 else None
    if found:
        del missing[found]
        return Transposed(_of_layers(found))
    return None


def _like(name: str, shape: Shape, missing: Tensors) -> str | None:
    """The name that is most like another one, of the tensors of a shape in the same layer; None if there is none."""
    ending, numbers = name.rpartition(".")[2], re.findall(r"\.(\d+)\.", name)
    fitting = [
        other
        for other, size in missing.items()
        if size == shape
        and other.endswith(f".{ending}")
        and re.findall(r"\.(\d+)\.", other) == numbers
    ]
    if not fitting:
        return None
    return max(sorted(fitting), key=lambda other: SequenceMatcher(None, name, other).ratio())


def _of_layers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{l}", name, count=1)


def _of_experts(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{e}", name, count=1)


def _pattern(names: list[str]) -> Spelling | None:
    """One pattern for several names: `a.{q|k}.b`. None if they differ in more than one word."""
    if len(names) == 1:
        return _of_layers(names[0])
    words = [name.split(".") for name in names]
    if len({len(each) for each in words}) != 1:
        return None
    pattern = [
        column[0] if len(set(column)) == 1 else "{" + "|".join(column) + "}"
        for column in zip(*words, strict=True)
    ]
    if sum("|" in word for word in pattern) != 1:
        return None
    return _of_layers(".".join(pattern))


def spelling_source(spelling: Spelling) -> str:
    """The source of a spelling."""
    assert isinstance(spelling, str | Separate)
    if isinstance(spelling, str):
        return literal(spelling)
    return f"{type(spelling).__name__}({literal(spelling.name)})"
