"""The native tensors of each rank, computed from a family's table as rectangles of canonical tensors.

A row is computed once for all ranks, layers and experts that share the result (`pieces.py` and `spellings/`). This module fills in the
names and adds second copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, divide
from megaconv.model.naming import Naming
from megaconv.model.pieces import Template, of_expert
from megaconv.model.rank import RANKS, Rank
from megaconv.model.regions import Copy, NativeTensor, Region
from megaconv.model.sharding import own_shares, rank_sizes
from megaconv.model.table import Row, Separate, layers_of, with_beside

__all__ = ["Copy", "NativeTensor", "RankTensors", "Region", "native_tensors"]


_Evaluated = tuple[Row, tuple[tuple[str, int], ...], int, int, int]
"""A row, the sizes that its layer has of its own, and the numbers of a rank. Equal values give equal templates."""


@dataclass(frozen=True)
class RankTensors:
    """The native tensors of all ranks of a layout.

    Layer numbers in names start at 0 in each chunk, and expert numbers start at 0 on each expert-parallel rank, as in
    Megatron. Second copies of tensors are included (`copy`), even those that a checkpoint may lack.
    """

    rows: tuple[Row, ...]
    config: ModelConfig
    naming: Naming
    layout: Layout
    vocab_rows: int
    """Embedding rows of the whole vocabulary, including padding."""
    _templates: dict[_Evaluated, tuple[Template, ...]] = field(default_factory=dict)

    def of(
        self, tp_rank: int, chunk: Chunk, ep_rank: int = 0, etp_rank: int | None = None
    ) -> Iterator[NativeTensor]:
        """Yield the native tensors that one rank holds of one chunk.

        etp_rank: None for the rank that Megatron uses where etp divides tp. Raises LayoutError if a tensor can't be
        sharded, and NotExpressible if the naming scheme has no name for a tensor.
        """
        whole, sizes = self._sizes
        etp_rank = tp_rank % self.layout.etp if etp_rank is None else etp_rank
        rank = Rank(self.layout, whole, sizes, tp_rank, ep_rank, etp_rank)
        yield from _ChunkTensors(self, rank, chunk).all()

    @cached_property
    def _sizes(self) -> tuple[dict[str, int], dict[str, int]]:
        """(sizes of the whole model with the padded vocabulary, sizes of one rank)."""
        whole = self.config.sizes()
        what = "vocabulary" if self.vocab_rows == whole["vocab"] else "padded vocabulary"
        divide(self.vocab_rows, self.layout.tp, what, RANKS["tp"])
        # Only Megatron core lets tensor-parallel ranks share key/value heads.
        sizes = rank_sizes(self.config, self.layout, shares_heads=self.naming.scheme == "core")
        padded = {"vocab": self.vocab_rows}
        if self.naming.scheme != "hf":
            # Megatron's head is as long as its embedding.
            padded["predicted"] = self.vocab_rows
        return whole | padded, sizes

    def templates(self, row: Row, rank: Rank, layer: int) -> tuple[Template, ...]:
        """The templates of a row on a rank, in a layer. Raises NotExpressible if the naming scheme has no name for the
        row."""
        spelled = row.spelling(self.naming)
        if not spelled:
            what = row.when or "this tensor"
            raise NotExpressible(
                f"{row.canonical}: {what} can't be represented in the naming scheme {self.naming}"
            )
        # Expert ranks differ only in names, unless one tensor holds all experts of a rank.
        stacked = any(spelling.holds_all_experts for spelling in spelled)
        own = self.config.layer_sizes(layer) if row.stage == "layer" else {}
        ranks = rank.tp_rank, rank.ep_rank if stacked else 0, rank.etp_rank
        key = row, tuple(own.items()), *ranks
        if key not in self._templates:
            rank = rank.of_layer(own, own_shares(own, self.layout)) if own else rank
            self._templates[key] = tuple(row.templates(spelled, rank))
        return self._templates[key]


def native_tensors(
    rows: tuple[Row, ...],
    config: ModelConfig,
    naming: Naming,
    layout: Layout,
    tp_rank: int,
    chunk: Chunk,
    vocab_rows: int,
    ep_rank: int = 0,
    etp_rank: int | None = None,
) -> Iterator[NativeTensor]:
    """Yield the native tensors that a single rank holds of one chunk, as RankTensors.of does."""
    ranks = RankTensors(with_beside(rows, config), config, naming, layout, vocab_rows)
    return ranks.of(tp_rank, chunk, ep_rank, etp_rank)


def unsharded_tensors(
    rows: tuple[Row, ...], config: ModelConfig, naming: Naming, vocab_rows: int | None = None
) -> Iterator[NativeTensor]:
    """Yield the native tensors of a single rank that holds the whole model. vocab_rows: None for config.vocab."""
    return native_tensors(
        rows,
        config,
        naming,
        layout=Layout(),
        tp_rank=0,
        chunk=Chunk.of_whole_model(config.layer_count),
        vocab_rows=config.vocab if vocab_rows is None else vocab_rows,
    )


@dataclass(frozen=True)
class _ChunkTensors:
    """The native tensors of one rank and chunk."""

    shared: RankTensors
    rank: Rank
    chunk: Chunk

    def all(self) -> Iterator[NativeTensor]:
        config = self.shared.config
        for row in self.shared.rows:
            if row.stage == "mtp":
                continue
            for local, layer in layers_of(row.stage, config, self.chunk):
                if row.exists(config, layer):
                    yield from self._natives(row, local, layer)
                    if row.copies:
                        yield from self._second_names(row)
                        yield from self._other_uses(row, local, layer)
            if row.copies and config.tie_embeddings and self.chunk.is_last:
                yield from self._tied(row)
        if self.chunk.encoder is not None:
            yield from self._separate_stacks()
        if self.chunk.is_last:
            yield from self._mtp()

    def _natives(self, row: Row, local_layer: int, layer: int) -> Iterator[NativeTensor]:
        """Yield the native tensors of one layer of a row."""
        found = self.shared.templates(row, self.rank, layer)
        natives = [template.of(local_layer, layer) for template in found]
        if found[0].each_expert:
            for local, expert in enumerate(self.rank.experts):
                yield from (of_expert(native, str(local), str(expert)) for native in natives)
        else:
            yield from natives

    def _copy(self, row: Row, name: str | None, copy: Copy, number: int = 0) -> NativeTensor:
        """A second copy of a row's tensor.

        name: the copy's name; None for the tensor's own name. number: the layer number in the name.
        """
        spelled = row.spelling(self.shared.naming) if name is None else (Separate(name),)
        (template,) = row.templates(spelled, self.rank)
        return template.of(number, 0)._replace(copy=copy)

    def _names(self, row: Row, place: str) -> Iterator[str]:
        """The names of a row's second copies at a place."""
        scheme = self.shared.naming.scheme
        return (name for copied in row.copied_with(place) for name in copied.names.get(scheme, ()))

    def _second_names(self, row: Row) -> Iterator[NativeTensor]:
        """Yield the copies under a tensor's second names. Megatron writes a tensor under all its names, Hugging Face
        only under one."""
        copy = Copy(written=self.shared.naming.scheme != "hf")
        return (self._copy(row, name, copy) for name in self._names(row, "itself"))

    def _other_uses(self, row: Row, local_layer: int, layer: int) -> Iterator[NativeTensor]:
        """Yield the copies in other layers with the same shared block. A state dictionary has them, Hugging Face's files
        hold the tensor once."""
        if not row.has_copies("uses"):
            return
        config, spelled = self.shared.config, row.spelling(self.shared.naming)
        own = config.layer_sizes(layer)
        for other, place in config.block_places.items():
            holder = place["block_holder"]
            if holder == own["block_holder"] and holder != other:
                rank = self.rank.of_layer({**own, "block_holder": other}, own)
                for template in row.templates(spelled, rank):
                    yield template.of(local_layer, layer)._replace(copy=Copy(written=False))

    def _tied(self, row: Row) -> Iterator[NativeTensor]:
        """Yield the copies of a tied head.

        Megatron stores the head again if the embedding is on another stage. Hugging Face stores it only for a class
        that doesn't tie it.
        """
        scheme = self.shared.naming.scheme
        elsewhere = not self.chunk.embeds
        # The stage of the MTP layers also holds the embedding, and computes its head with that copy.
        unused = elsewhere and scheme == "core" and self.shared.config.mtp_layers > 0
        untied = any(scheme in copied.untied for copied in row.copied_with("head"))
        copy = Copy(written=untied or (elsewhere and scheme != "hf"), used=not unused)
        return (self._copy(row, name, copy) for name in self._names(row, "head"))

    def _mtp(self) -> Iterator[NativeTensor]:
        """Yield the tensors of MTP layers. Megatron counts these layers from 0, Hugging Face counts them after all
        other layers."""
        config = self.shared.config
        first = config.layer_count if self.shared.naming.scheme == "hf" else 0
        for layer in range(config.mtp_layers):
            local = first + layer
            for row in self.shared.rows:
                if row.stage == "mtp" and row.exists(config, config.layer_count - 1):
                    yield from self._natives(row, local, layer)
            for row in self._copied_rows():
                yield from self._mtp_copies(row, local, layer)

    def _mtp_copies(self, row: Row, local_layer: int, layer: int) -> Iterator[NativeTensor]:
        """Yield the copies of a tensor with an MTP layer: one for each MTP layer, or one for all of them if the tensor
        itself is on another stage."""
        with_first = layer == 0 and not self.chunk.is_first
        for name in self._names(row, "mtp"):
            if "{l}" in name or with_first:
                yield self._copy(row, name, Copy(written=True), local_layer)

    def _separate_stacks(self) -> Iterator[NativeTensor]:
        """Yield the copies that a chunk holds because encoder and decoder are on separate stages."""
        ties_unused_head = (
            self._has_unused_head and self.shared.config.tie_embeddings and not self.chunk.embeds
        )
        for row in self._copied_rows():
            names = (None, *self._names(row, "itself"))
            for copy in self._stack_copies(row):
                for name in names:
                    yield self._copy(row, name, copy)
            if ties_unused_head:
                unused = Copy(written=True, used=False)
                for head in self._names(row, "head"):
                    yield self._copy(row, head, unused)

    def _stack_copies(self, row: Row) -> Iterator[Copy]:
        """Yield the kinds of copies of a row's tensor that this chunk holds."""
        if self.chunk.starts_decoder and row.has_copies("decoder"):
            yield Copy(written=True)
        if self._has_unused_head and row.has_copies("encoder_end"):
            yield Copy(written=True, used=False)
        if row.has_copies("stacks") and not self._is_own_stage(row):
            of_encoder = bool(self.chunk.encoder)
            # Each stack uses its own copy.
            used = of_encoder == (row.stage == "between")
            yield Copy(written=True, used=used, must_equal=used)

    @property
    def _has_unused_head(self) -> bool:
        """True if the chunk is the encoder's last stage in core, which also gets a head and never uses it."""
        return self.chunk.ends_encoder and self.shared.naming.scheme == "core"

    def _is_own_stage(self, row: Row) -> bool:
        """True if the tensor itself is here: at the encoder's end or at the model's end. Other stages have copies."""
        return self.chunk.ends_encoder if row.stage == "between" else self.chunk.is_last

    def _copied_rows(self) -> Iterator[Row]:
        """Yield the rows whose tensors may have second copies."""
        for row in self.shared.rows:
            if row.copies and row.exists(self.shared.config, 0):
                yield row
