"""Plans a Megatron `torch` checkpoint: a directory per tensor and pipeline rank, the tracker, `hf/` for other files."""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from formats import rank_files, torch_zip
from formats.output import FileLayout, PlainFile
from formats.pickle_records import TorchDtype
from formats.pickle_writer import Placeholder
from formats.tensor import ITEMSIZE, Shape, matrix_shape
from megaconv.engine.plan import OutputPlan, Placement, native_dtype, native_shift
from megaconv.engine.sidecars import SIDECAR_DIRECTORY, small_files
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.arguments.expressible import require_legacy_names
from megaconv.megatron.arguments.head_sizes import require_scores_shown
from megaconv.megatron.arguments.latent import latent_norm_argument
from megaconv.megatron.arguments.mamba import time_step_argument
from megaconv.megatron.arguments.sparse import INDEXER_ORDER, ROPE_LAST, writes_rope_last
from megaconv.megatron.arguments.whole import whole_arguments
from megaconv.megatron.arguments.write import to_arguments
from megaconv.megatron.optimizer.plan import Parameter, Piece, once
from megaconv.megatron.optimizer.plan import Planned as PlannedOptimizer
from megaconv.megatron.optimizer.shared_embeddings import is_shared, shared_tensors
from megaconv.megatron.optimizer.training_output import (
    OutputTraining,
    output_training,
    with_form_notice,
)
from megaconv.megatron.rank_files.iteration import (
    at_iteration,
    check_iteration,
    directory_iteration,
)
from megaconv.megatron.rank_files.output_layout import DEFAULT_DIVISOR
from megaconv.megatron.states.hybrid_form import hybrid_arguments, writes_hybrid
from megaconv.megatron.states.order import NameOrder, Order
from megaconv.megatron.states.origin import rank_of
from megaconv.megatron.states.whole_names import in_whole
from megaconv.model.beside import BESIDE
from megaconv.model.ir import WEIGHT, Header, Key
from megaconv.model.layout import (
    Chunk,
    Layout,
    padded_vocab,
)
from megaconv.model.naming import Naming
from megaconv.model.natives import NativeTensor, RankTensors
from megaconv.model.table import with_beside
from megaconv.options import SaveOptions


@dataclass(frozen=True)
class ModelStyle:
    """The way in which one kind of Megatron model is written."""

    naming: Naming
    order: Order
    """Sorts names in the order of the model's own state_dict."""
    extra_states: Callable[[Collection[str]], Mapping[str, bool]]
    """The `_extra_state` entries for these parameter names -> True for an empty tensor, False for None."""
    nest: Callable[[dict[str, Any]], dict[str, Any]] = lambda flat: flat
    renamed: Callable[[str], str] = str
    """The name in the release that the files are for, from the name in the table."""
    legacy: bool = False


def check_options(options: SaveOptions, formats: tuple[str, ...] = ("torch",)) -> None:
    """Raises UsageError for an unknown option. formats: the formats that the saver can write."""
    check_iteration(options)
    if options.ckpt_format not in formats:
        raise UsageError(
            f"checkpoint format {options.ckpt_format!r} can't be written; choose one of {', '.join(formats)}"
        )
    if options.vocab_padding not in ("repeat", "zero"):
        raise UsageError(
            f"vocabulary padding {options.vocab_padding!r} is not known; choose repeat or zero"
        )


def plan_ranks(
    header: Header,
    options: SaveOptions,
    layout: Layout,
    style: ModelStyle,
    *,
    transformer_impl: str,
) -> OutputPlan:
    """The plan of all rank files.

    Raises LayoutError for a model that can't be sharded this way, NotExpressible for a model that Megatron doesn't
    support.
    """
    header = at_iteration(header, options)
    arguments = megatron_args(
        header, options, layout, transformer_impl=transformer_impl, legacy=style.legacy
    )
    if style.legacy:
        require_legacy_names(header.config)
    arguments.use_dist_ckpt = False
    require_scores_shown(header.config, arguments.padded_vocab_size // layout.tp)
    kept = output_training(
        header, layout, keeps_rng=True, distributed=bool(options.distributed_optimizer)
    )
    vars(arguments).update(kept.arguments(distributed=bool(options.distributed_optimizer)))
    kept = with_form_notice(kept, options)
    return _Planner(
        header, options, layout, style, arguments.padded_vocab_size, arguments, kept
    ).plan()


def megatron_args(
    header: Header,
    options: SaveOptions,
    layout: Layout,
    *,
    transformer_impl: str,
    legacy: bool = False,
) -> Namespace:
    """The args to write. Raises NotExpressible for a model that Megatron doesn't support."""
    divisor = options.vocab_divisor or header.vocab_divisor or DEFAULT_DIVISOR
    arguments = to_arguments(
        header.config,
        layout,
        header.training,
        transformer_impl=transformer_impl,
        grouped_experts=options.grouped_experts,
        vocab_divisor=divisor,
        padded_vocab=padded_vocab(header.config.vocab, divisor, layout.tp),
        allow_lossy="rope_scaling" in options.allow_lossy,
        legacy=legacy,
    )
    if writes_rope_last(header.config, options.extra):
        arguments[INDEXER_ORDER] = ROPE_LAST
    # A checkpoint in Megatron's format keeps its run's arguments; other sources get Megatron's own.
    if header.layout is not None:
        arguments |= latent_norm_argument(header.config) | time_step_argument(header.config)
    arguments |= whole_arguments(header.config.whole)
    if writes_hybrid(options.extra, header.training.arguments):
        arguments |= hybrid_arguments(header.config, layout)
    return Namespace(**arguments | {"params_dtype": TorchDtype(arguments["params_dtype"])})


def tracker_and_sidecars(header: Header, iteration: int | None) -> dict[str, FileLayout]:
    """The tracker file, and config.json and tokenizer files, which hold information that Megatron's args lack."""
    config = header.config
    files: dict[str, FileLayout] = {
        f"{SIDECAR_DIRECTORY}/{name}": copy for name, copy in small_files(header).items()
    }
    # A mixture-of-experts model that only Megatron supports has no config.json: its args describe it completely.
    with suppress(NotExpressible):
        config_json = family(config.family).config_json(config, header.training.arguments)
        files[f"{SIDECAR_DIRECTORY}/{CONFIG_NAME}"] = PlainFile(config_json)
    tracked = rank_files.RELEASE if iteration is None else str(iteration)
    return files | {rank_files.TRACKER: PlainFile(tracked.encode())}


@dataclass
class _Output:
    """The output as far as it is planned. See OutputPlan."""

    files: dict[str, FileLayout] = field(default_factory=dict)
    placements: dict[Key, list[Placement]] = field(default_factory=dict)
    zeros: list[tuple[str, str, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Planner:
    header: Header
    options: SaveOptions
    layout: Layout
    style: ModelStyle
    padded: int
    arguments: Namespace
    kept: OutputTraining
    # The rank files of a stage hold different parts of the model, but are otherwise mostly equal. There may be
    # thousands of them, so the common parts are cached.
    _dense: dict[tuple[int, Chunk], list[NativeTensor]] = field(default_factory=dict)
    _layouts: dict[object, torch_zip.TorchZipLayout] = field(default_factory=dict)
    _records: dict[str, str] = field(default_factory=dict)

    def plan(self) -> OutputPlan:
        iteration = directory_iteration(self.header.training)
        version = rank_files.iteration_directory(iteration)
        output = _Output()
        for pp_rank in range(self.layout.pp):
            chunks = [chunk for chunk in self.layout.chunks() if chunk.pp_rank == pp_rank]
            for tp_rank, ep_rank in self._ranks():
                self._add_rank(output, version, (tp_rank, pp_rank, ep_rank), chunks)
        files = output.files | tracker_and_sidecars(self.header, iteration)
        return OutputPlan(files, output.placements, output.zeros, self.kept.notices)

    def _add_rank(
        self, output: _Output, version: str, rank: tuple[int, int, int], chunks: list[Chunk]
    ) -> None:
        """Add the files of one rank. version: directory of the iteration. rank: (tensor, pipeline, expert rank)."""
        tp_rank, pp_rank, ep_rank = rank
        layout, has_experts = self.layout, self.header.config.experts.count > 0
        directory = rank_files.rank_directory(tp_rank, pp_rank, ep_rank, layout.pp, layout.ep)
        name = f"{version}/{directory}/{rank_files.MODEL_FILE}"
        models = {
            self._model_key(chunk): self._natives(tp_rank, ep_rank, chunk) for chunk in chunks
        }
        optimizer = self._optimizer(models, rank)
        training = self.kept.state(rank, optimizer.state if optimizer else None)
        number = rank_of(tp_rank, pp_rank, ep_rank, layout, experts=has_experts)
        output.files[name] = torch_zip.NumberedLayout(self._file(models, training), number)
        for model, natives in models.items():
            for native in natives:
                piece = Piece(native, WEIGHT, self._record(model, native.name))
                self._place(output, name, piece)
        if optimizer is not None:
            own_file = f"{version}/{directory}/{rank_files.OPTIMIZER_FILE}"
            self._add_optimizer(output, optimizer, model_file=name, own_file=own_file)

    def _add_optimizer(
        self, output: _Output, optimizer: PlannedOptimizer, *, model_file: str, own_file: str
    ) -> None:
        """Add the optimizer's tensors to the rank's model file, or in a file of their own if they are in buffers."""
        file = model_file
        if optimizer.buffers is not None:
            file = own_file
            output.files[file] = torch_zip.plan(optimizer.buffers, "distrib_optim")
        for record, start, count in optimizer.gaps:
            output.zeros.append((file, record, 4 * start, 4 * count))
        for piece in optimizer.pieces:
            self._place(output, file, piece)

    def _optimizer(
        self, models: Mapping[str, Sequence[NativeTensor]], rank: tuple[int, int, int]
    ) -> PlannedOptimizer | None:
        writer = self.kept.writer
        if writer is None:
            return None
        config = self.header.config
        shared = shared_tensors(config, self.layout.pp)
        parameters = [
            Parameter(model, native, is_shared(native, shared, config))
            for model, natives in models.items()
            for native in once(natives)
            if writer.trains(native)
        ]
        if not self.options.distributed_optimizer:
            return writer.plain(parameters)
        first = min(ep_rank for tp_rank, ep_rank in self._ranks() if tp_rank == rank[0])
        return writer.distributed(parameters, gathers_dense=rank[2] == first)

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """(tensor rank, expert rank) of each file of a stage.

        Ranks with expert data-parallel rank 0 write the files.
        """
        tp, ep, etp = self.layout.tp, self.layout.ep, self.layout.etp
        if not self.header.config.experts.count:
            yield from ((tp_rank, 0) for tp_rank in range(tp))
        elif etp == tp:
            yield from ((tp_rank, ep_rank) for tp_rank in range(tp) for ep_rank in range(ep))
        else:
            yield from sorted({(rank % tp, rank // etp % ep) for rank in range(etp * ep)})

    def _model_key(self, chunk: Chunk) -> str:
        return "model" if self.layout.vpp == 1 else f"model{chunk.vpp_rank}"

    @cached_property
    def _tensors(self) -> tuple[RankTensors, RankTensors]:
        """(tensors that are equal on all expert ranks, tensors of experts)."""
        config, naming = self.header.config, self.style.naming
        rows = with_beside(family(config.family).rows, config)
        dense, experts = (
            tuple(row for row in rows if row.of_experts == kind) for kind in (False, True)
        )
        return (
            RankTensors(dense, config, naming, self.layout, self.padded),
            RankTensors(experts, config, naming, self.layout, self.padded),
        )

    def _natives(self, tp_rank: int, ep_rank: int, chunk: Chunk) -> list[NativeTensor]:
        dense, experts = self._tensors
        if (tp_rank, chunk) not in self._dense:
            natives = dense.of(tp_rank, chunk)
            written = [each for each in natives if each.copy is None or each.copy.written]
            self._dense[tp_rank, chunk] = written
        found = [*self._dense[tp_rank, chunk], *experts.of(tp_rank, chunk, ep_rank)]
        return sorted(found, key=lambda native: self._order(native.name))

    def _order(self, name: str) -> NameOrder:
        """The position of a name. An encoder of a multimodal model comes before the language model, as in its files."""
        return () if name.startswith(BESIDE) else self.style.order(name)

    def _record(self, model: str, name: str) -> str:
        """The name of a record, as one shared string for all files."""
        record = f"{model}/{name}"
        return self._records.setdefault(record, record)

    def _file(
        self, models: dict[str, list[NativeTensor]], training: Mapping[str, Any]
    ) -> torch_zip.TorchZipLayout:
        """The layout of a rank file. Files with the same tensors share one layout, except for their rank.

        A layout contains the places of tensors, not their content.
        """
        alike = tuple((model, *map(self._kind, natives)) for model, natives in models.items())
        if training or alike not in self._layouts:  # training: the rank's own state
            self._layouts[alike] = torch_zip.plan(self._state(models, training), "model_optim_rng")
        return self._layouts[alike]

    def _kind(self, native: NativeTensor) -> tuple[str, Shape, str]:
        return native.name, native.shape, native_dtype(self.header, native)

    def _state(
        self, models: dict[str, list[NativeTensor]], training: Mapping[str, Any]
    ) -> dict[str, Any]:
        state: dict[str, Any] = {
            "args": Namespace(**vars(self.arguments), rank=torch_zip.Varying()),
            "checkpoint_version": 3.0,
            "iteration": self.header.training.iteration,
        }
        called = in_whole if self.header.config.whole else str
        for model, natives in models.items():
            state[model] = self.style.nest(
                {
                    called(self.style.renamed(name)): entry
                    for name, entry in self._entries(model, natives)
                }
            )
        operations = self.header.training.floating_point_operations
        return {**state, **training, "num_floating_point_operations_so_far": operations}

    def _entries(
        self, model: str, natives: list[NativeTensor]
    ) -> Iterator[tuple[str, Placeholder | None]]:
        entries: dict[str, Placeholder | None] = {}
        for native in natives:
            dtype = native_dtype(self.header, native)
            entries[native.name] = Placeholder(f"{model}/{native.name}", native.shape, dtype)
        # Transformer Engine's modules have extra states: empty tensors or None.
        for prefix, names in self._names_by_prefix(list(entries)):
            for name, is_tensor in self.style.extra_states(names).items():
                empty = Placeholder(f"{model}/{name}", (0,), "uint8")
                entries[prefix + name] = empty if is_tensor else None
        yield from sorted(entries.items(), key=lambda entry: self._order(entry[0]))

    def _names_by_prefix(self, names: list[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield the names of the language model, then those of an encoder that Megatron builds, without its prefix."""
        yield "", [name for name in names if not name.startswith(BESIDE)]
        whole = self.header.config.whole
        if whole:
            yield BESIDE, [name.removeprefix(BESIDE) for name in names if whole.builds(name)]

    def _place(self, output: _Output, file: str, piece: Piece) -> None:
        """Add the places of the canonical tensors in one native tensor, and the rows of padding that stay zero."""
        native = piece.native
        itemsize = ITEMSIZE[native_dtype(self.header, native, piece.slot)]
        rows, cols = matrix_shape(native.shape)
        row_bytes = cols * itemsize
        offset = piece.offset * itemsize
        filled = rows - native.padding_rows
        for name, regions in native.parts.items():
            if self.options.vocab_padding == "repeat":
                tokens = self.header.config.tokens_of(name)
                regions = native.with_padding(regions, tokens)
            key = Key(name, piece.slot)
            shift = native_shift(self.header, native.shift, key)
            place = Placement(file, piece.record, row_bytes, regions, offset, shift)
            output.placements.setdefault(key, []).append(place)
        if native.padding_rows and self.options.vocab_padding == "zero":
            start = offset + filled * row_bytes
            output.zeros.append((file, piece.record, start, native.padding_rows * row_bytes))
