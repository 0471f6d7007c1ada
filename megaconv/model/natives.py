"""What ranks hold: native tensors, worked out from a family's table as rectangles of canonical ones.

A row is worked out once for all ranks, layers and experts where it is the same (`joined.py`); here names are filled in, and
second copies are added.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.joined import Rank, Template, of_expert, templates
from megaconv.model.layout import Chunk, Layout, divide
from megaconv.model.naming import Naming
from megaconv.model.regions import Copy, NativeTensor, Region
from megaconv.model.sharding import RANKS, rank_sizes
from megaconv.model.table import Row, Separate, Stacked, StackedTransposed, layers_of, with_beside

__all__ = ["Copy", "NativeTensor", "RankTensors", "Region", "native_tensors"]


@dataclass(frozen=True)
class RankTensors:
    """The native tensors of all ranks of a layout.

    Layers in names count from 0 in each chunk, and experts from 0 on each expert-parallel rank, as Megatron has it. Second
    copies of tensors are there too (`copy`), also those that such a checkpoint needn't have.
    """

    rows: tuple[Row, ...]
    config: ModelConfig
    naming: Naming
    layout: Layout
    vocab_rows: int
    """Of the whole vocabulary, padding included."""
    _templates: dict[tuple[Row, int, int, int], tuple[Template, ...]] = field(default_factory=dict)

    def of(self, tp_rank: int, chunk: Chunk, ep_rank: int = 0, etp_rank: int | None = None) -> Iterator[NativeTensor]:
        """What one rank holds of one chunk. etp_rank: None for that of Megatron's ranks where etp divides tp.

        Raises LayoutError for what can't be sharded, NotExpressible for what the naming scheme has no name for.
        """
        whole, sizes = self._sizes
        etp_rank = tp_rank % self.layout.etp if etp_rank is None else etp_rank
        chunk_natives = _ChunkTensors(self, Rank(self.layout, whole, sizes, tp_rank, ep_rank, etp_rank), chunk)
        yield from chunk_natives.all()

    @cached_property
    def _sizes(self) -> tuple[dict[str, int], dict[str, int]]:
        """(of the whole model, its vocabulary padded; of a rank)."""
        whole = self.config.sizes()
        what = "vocabulary" if self.vocab_rows == whole["vocab"] else "padded vocabulary"
        divide(self.vocab_rows, self.layout.tp, what, RANKS["tp"])
        # Megatron core alone lets tensor ranks share key/value heads.
        sizes = rank_sizes(self.config, self.layout, shares_heads=self.naming.scheme == "core")
        return whole | {"vocab": self.vocab_rows}, sizes

    def templates(self, row: Row, rank: Rank) -> tuple[Template, ...]:
        """Raises NotExpressible where the naming scheme has no name for a row."""
        spelled = row.spelling(self.naming)
        if not spelled:
            what = row.when or "this tensor"
            raise NotExpressible(f"{row.canonical}: {what} can't be represented in the naming scheme {self.naming}")
        # Expert ranks differ in more than names only where all experts of a rank are in one tensor.
        stacked = any(isinstance(one, (Stacked, StackedTransposed)) for one in spelled)
        key = row, rank.tp_rank, rank.ep_rank if stacked else 0, rank.etp_rank
        if key not in self._templates:
            self._templates[key] = tuple(templates(row, spelled, rank))
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
    """What a single rank holds of one chunk, as RankTensors.of."""
    ranks = RankTensors(with_beside(rows, config), config, naming, layout, vocab_rows)
    return ranks.of(tp_rank, chunk, ep_rank, etp_rank)


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
            if row.copies and config.tie_embeddings and self.chunk.is_last:
                yield from self._tied(row)
        if self.chunk.encoder is not None:
            yield from self._separate_stacks()
        if self.chunk.is_last:
            yield from self._mtp()

    def _natives(self, row: Row, local_layer: int, layer: int) -> Iterator[NativeTensor]:
        """Those of one layer of a row."""
        found = self.shared.templates(row, self.rank)
        natives = [template.of(local_layer, layer) for template in found]
        if found[0].each_expert:
            for local, expert in enumerate(self.rank.experts):
                yield from (of_expert(native, str(local), str(expert)) for native in natives)
        else:
            yield from natives

    def _copy(self, row: Row, name: str | None, copy: Copy, number: int = 0) -> NativeTensor:
        """A second copy of a row's tensor. name: its own if None. number: of the layer in its name."""
        spelled = row.spelling(self.shared.naming) if name is None else (Separate(name),)
        (template,) = templates(row, spelled, self.rank)
        return template.of(number, 0)._replace(copy=copy)

    def _names(self, row: Row, place: str) -> Iterator[str]:
        """What second copies at a place are called."""
        scheme = self.shared.naming.scheme
        return (name for copied in row.copied_with(place) for name in copied.names.get(scheme, ()))

    def _second_names(self, row: Row) -> Iterator[NativeTensor]:
        """Megatron writes a tensor under all its names, Hugging Face once."""
        copy = Copy(written=self.shared.naming.scheme != "hf")
        return (self._copy(row, name, copy) for name in self._names(row, "itself"))

    def _tied(self, row: Row) -> Iterator[NativeTensor]:
        """A tied head: Megatron has it again where the embedding is on another stage, Meta always, Hugging Face never."""
        scheme = self.shared.naming.scheme
        # The stage of MTP layers has the embedding too, and computes its head with that.
        used = not (self.shared.config.mtp_layers and scheme == "core" and not self.chunk.embeds)
        copy = Copy(written=scheme == "meta" or (scheme != "hf" and not self.chunk.embeds), used=used)
        return (self._copy(row, name, copy) for name in self._names(row, "head"))

    def _mtp(self) -> Iterator[NativeTensor]:
        """MTP layers: Megatron counts them for themselves, Hugging Face after all others."""
        config, copy = self.shared.config, Copy(written=True)
        for layer in range(config.mtp_layers):
            local = config.layer_count + layer if self.shared.naming.scheme == "hf" else layer
            for row in self.shared.rows:
                if row.stage == "mtp" and row.exists(config, config.layer_count - 1):
                    yield from self._natives(row, local, layer)
            for row in (row for row in self.shared.rows if row.copies and row.exists(config, 0)):
                for name in self._names(row, "mtp"):
                    # One for each such layer, or one for all where the tensor itself is on another stage.
                    if "{l}" in name or (layer == 0 and not self.chunk.is_first):
                        yield self._copy(row, name, copy, local)

    def _separate_stacks(self) -> Iterator[NativeTensor]:
        """What a chunk holds again because an encoder and its decoder are on stages of their own."""
        config, chunk = self.shared.config, self.chunk
        # Core gives the encoder's last stage a head as well, which it never computes with.
        has_unused_head = chunk.ends_encoder and self.shared.naming.scheme == "core"
        for row in (row for row in self.shared.rows if row.copies and row.exists(config, 0)):
            names = (None, *self._names(row, "itself"))
            if chunk.starts_decoder and any(row.copied_with("decoder")):
                yield from (self._copy(row, name, Copy(written=True)) for name in names)
            if has_unused_head and any(row.copied_with("encoder_end")):
                yield from (self._copy(row, name, Copy(written=True, used=False)) for name in names)
            # On every stage but the one that the row is listed for: the encoder's end, or the model's.
            own_stage = chunk.ends_encoder if row.stage == "between" else chunk.is_last
            if any(row.copied_with("stacks")) and not own_stage:
                used = bool(chunk.encoder) == (row.stage == "between")  # each stack computes with its own
                copy = Copy(written=True, used=used, must_equal=used)
                yield from (self._copy(row, name, copy) for name in names)
            if has_unused_head and config.tie_embeddings and not chunk.embeds:
                unused = Copy(written=True, used=False)
                yield from (self._copy(row, name, unused) for name in self._names(row, "head"))
