"""Opens a Megatron checkpoint's ranks as a source of canonical tensors, for core and legacy models and all formats."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats import rank_files
from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor, Shape
from megaconv.engine.sidecars import SIDECAR_DIRECTORY, find_sidecars
from megaconv.errors import NotExpressible, UnknownFormat
from megaconv.families import family, read_config
from megaconv.families.parts.hf_config import naming_file
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.whole_model import refuse_optimizer
from megaconv.megatron.arguments.encoder import refuse_lost_head
from megaconv.megatron.arguments.param_groups import WITHOUT
from megaconv.megatron.arguments.read import read_layout
from megaconv.megatron.arguments.run_arguments import OF_TRAINING, plain_arguments, vocab_divisor
from megaconv.megatron.arguments.size_tensors import SizeTensors, with_stacks
from megaconv.megatron.arguments.sizes import (
    expert_tensor_parallel_size,
    find_layout,
    find_sizes,
    padded_rows,
    require_gate,
)
from megaconv.megatron.arguments.tokenizer import NamedTokenizer, named_tokenizer
from megaconv.megatron.optimizer.shared_embeddings import shared_names
from megaconv.megatron.optimizer.source import (
    Optimizers,
    assemble_slots,
    describe_optimizer,
    open_optimizers,
    optimizer_state,
    read_scheduler,
    untrained,
)
from megaconv.megatron.optimizer.training_output import ENCODER_STAGES
from megaconv.megatron.rank_files.configuration import are_ids, configure, vocabulary_size
from megaconv.megatron.rank_files.multimodal import (
    Beside,
    beside_of,
    require_multimodal,
    with_whole,
)
from megaconv.megatron.states.early_gpt2 import arguments as early_arguments
from megaconv.megatron.states.early_gpt2 import is_early
from megaconv.megatron.states.hybrid_form import is_of_pairs, ranks_as_gpt, read_as_gpt
from megaconv.megatron.states.ranks import RankId, Ranks, is_legacy, read_ranks
from megaconv.megatron.states.releases import note_release
from megaconv.model.assembled import Placed, assemble
from megaconv.model.beside import BESIDE
from megaconv.model.ceilings import ITERATION, OPERATIONS
from megaconv.model.check import same_names, well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Key, OpenedSource, describe, main_dtype, shift_of
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import LEGACY, Naming
from megaconv.model.natives import NativeTensor, RankTensors
from megaconv.model.table import canonical_shapes, second_names, with_beside
from megaconv.model.training import OptimizerState, TrainingState
from megaconv.options import LoadOptions

if TYPE_CHECKING:
    from megaconv.megatron.distributed.optimizer import DistOptimizer


@dataclass(frozen=True)
class RankSource:
    """All opened rank files of one iteration."""

    listing: rank_files.RankFiles
    ranks: Ranks
    args: Namespace
    dist: "DistOptimizer | None" = None
    """The optimizer of a distributed checkpoint."""
    writer: str = ""
    """The software that wrote a distributed checkpoint without Megatron's own args, for messages."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of the first rank."""
        return self.ranks.states[min(self.ranks.states)]


@dataclass(frozen=True)
class Spellings:
    """The naming scheme of a checkpoint's model."""

    size_tensors: SizeTensors
    naming: Naming
    description: str
    """Description for people."""
    arrange: Callable[[NativeTensor], NativeTensor] = lambda native: native
    """Rearranges the rows of a tensor from the naming scheme's order to the checkpoint's order."""


def open_ranks(path: Path, options: LoadOptions, *, legacy: bool) -> RankSource:
    """Open the rank files. Raises UnknownFormat for another format, CorruptCheckpoint for an incomplete checkpoint."""
    version = rank_files.find_version(path)
    if version is None or not rank_files.is_rank_files(version):
        raise UnknownFormat(f"{path}: holds no Megatron checkpoint in torch format")
    listing = rank_files.read(version)
    ranks = read_ranks(listing, metadata_only=options.metadata_only)
    first = min(ranks.states)
    if is_legacy(ranks.states[first]) != legacy:
        kinds = ("a legacy Megatron checkpoint (its model has a language_model)", "legacy")
        kind, loader = (
            ("a Megatron core checkpoint (its model has no language_model)", "core")
            if legacy
            else kinds
        )
        raise UnknownFormat(f"{ranks.files[first]}: is {kind}; read it with --loader {loader}")
    if is_early(ranks.states[first]):
        weights = ranks.weights[first][0]
        return RankSource(
            listing, ranks, early_arguments(weights, _heads(options), ranks.files[first])
        )
    args = ranks.states[first].get("args")
    if not isinstance(args, Namespace):
        raise CorruptCheckpoint(
            f"{ranks.files[first]}: has no args; Megatron writes them into every rank file"
        )
    note_release(args, ranks.stored_names())
    if is_of_pairs(args):
        return RankSource(listing, ranks_as_gpt(ranks), read_as_gpt(args))
    return RankSource(listing, ranks, args)


def _heads(options: LoadOptions) -> int | None:
    """The number of attention heads that the user gives, by --num-attention-heads or --config."""
    if options.num_attention_heads is not None or options.config is None:
        return options.num_attention_heads
    _, config = read_config(options.config / CONFIG_NAME)
    return config.attention.heads


def open_model(
    source: RankSource, options: LoadOptions, spellings: Spellings, *, by_args: bool = False
) -> OpenedSource:
    """Open the model as a source.

    by_args: True if the files aren't sharded as the run was; the run's layout is then taken from its args.
    Raises CheckpointError for a checkpoint that is incomplete, contradicts itself, or is of no known family.
    """
    beside = beside_of(source.ranks, source.args)
    source = replace(
        source,
        ranks=replace(source.ranks, beside={}) if options.text_only else source.ranks,
        args=beside.args_of_text,
    )
    sidecars = options.config or (source.listing.directory.parent / SIDECAR_DIRECTORY)
    names = with_stacks(spellings.size_tensors, source.ranks)
    with naming_file(source.listing.directory):
        model = _describe(source, beside, options, names, sidecars, spellings, by_args=by_args)
    training = _training(source)
    if options.optimizer and training.optimizer is not None:
        _refuse_optimizer(source, model, training.optimizer)
        tensors, training = _with_optimizer(source, model, names, spellings, training, options)
    else:
        placed = _place(source.ranks, model, spellings, Optimizers({}))
        tensors = assemble(model.shapes, placed, strict=False)
    manifest = describe(tensors)
    header = Header(
        config=changed(model.config, {"dtype": main_dtype(manifest)}),
        manifest=manifest,
        layout=model.run_layout,
        training=training,
        files=find_sidecars(sidecars) or model.tokenizer.files,
        named_tokenizer=model.tokenizer.name,
        vocab_divisor=vocab_divisor(vars(source.args)),
        source=spellings.description,
        padded_vocab=model.padded_vocab,
        has_optimizer=training.optimizer is not None,
        shifts={key: shift for key, tensor in tensors.items() if (shift := shift_of(tensor))},
    )
    return OpenedSource(header, {} if options.metadata_only else tensors)


@dataclass(frozen=True)
class _Model:
    """The model in the files, as args, sidecars and the shapes of tensors describe it."""

    config: ModelConfig
    layout: Layout
    """The layout of the files."""
    run_layout: Layout
    """The layout of the run that saved them. It differs from `layout` if the files aren't sharded as the run was."""
    padded_vocab: int
    tokenizer: NamedTokenizer

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of the canonical tensors by name."""
        return canonical_shapes(family(self.config.family).rows, self.config)


def _describe(
    source: RankSource,
    beside: Beside,
    options: LoadOptions,
    names: SizeTensors,
    sidecars: Path,
    spellings: Spellings,
    *,
    by_args: bool,
) -> _Model:
    """names: the tensors that show sizes."""
    ranks, args = source.ranks, source.args
    with well_formed(_first_file(source)):
        layout = find_layout(ranks, args, names)
        found = find_sizes(ranks, layout, args, names)
        if options.config is None:
            require_gate(ranks, layout, args, names)
    config = configure(
        found,
        args,
        sidecars,
        required=options.config is not None,
        legacy=spellings.naming == LEGACY,
        text_only=options.text_only,
    )
    if options.text_only:
        require_multimodal(beside, sidecars, _first_file(source))
    else:
        config = with_whole(config, beside, _first_file(source))
    if config.experts.count:
        with well_formed("the experts' shapes"):
            etp = expert_tensor_parallel_size(ranks, config.experts.ffn, config.experts.count)
        layout = replace(layout, etp=etp)
    if by_args:
        refuse_lost_head(args, config, str(source.listing.directory))
    run_layout = read_layout(args, config) if by_args else layout
    padded = padded_rows(ranks, names)
    vocab = vocabulary_size(options, config, args, padded, run_layout.tp)
    tokenizer = named_tokenizer(args) if config.hf is None else NamedTokenizer()
    ids = {name: number for name, number in tokenizer.ids.items() if are_ids(number, vocab)}
    return _Model(
        config=changed(config, {"vocab": vocab, **ids}),
        layout=layout,
        run_layout=run_layout,
        padded_vocab=padded,
        tokenizer=tokenizer,
    )


def _refuse_optimizer(source: RankSource, model: _Model, optimizer: OptimizerState) -> None:
    """Raise NotExpressible for an optimizer state that can't be read with this model."""
    first_file = _first_file(source)
    refuse_optimizer(model.config, first_file)
    if model.layout.encoder_stage_layers and optimizer.kind == "distributed":
        raise NotExpressible(f"{first_file}: {ENCODER_STAGES}; {WITHOUT}")


def _with_optimizer(
    source: RankSource,
    model: _Model,
    names: SizeTensors,
    spellings: Spellings,
    training: TrainingState,
    options: LoadOptions,
) -> tuple[dict[Key, LazyTensor], TrainingState]:
    """(weights and optimizer state, the training state with all settings of the optimizer)."""
    assert training.optimizer is not None
    ranks, dist = source.ranks, source.dist
    aliases = second_names(family(model.config.family).rows, spellings.naming)
    if dist is not None:
        first_rank = RankId(0, 0, 0)
        optimizers = dist.open(ranks.weights[first_rank][0], aliases)
    else:
        shared = shared_names(model.config, names, ranks.pp)
        optimizers = open_optimizers(ranks, source.args, shared, aliases)
    placed = list(_place(ranks, model, spellings, optimizers))
    weights = assemble(model.shapes, placed, strict=False)
    without = untrained(placed)
    # State per parameter lies where the weights lie. Buffers of the run's ranks need that run's layout: their tensors
    # have separate places, which replace those of the weights.
    if dist is not None and dist.in_buckets:
        optimizers, placed = dist.open_buckets(
            model.config, model.run_layout, model.padded_vocab, placed
        )
    tensors = assemble_slots(model.shapes, placed, weights, without)
    optimizer = optimizer_state(optimizers, placed, training.optimizer, training.iteration)
    reads_generators = dist is not None and not options.metadata_only
    rng = dist.rng() if dist is not None and reads_generators else training.rng
    return tensors, replace(training, optimizer=optimizer, rng=rng)


def _first_file(source: RankSource) -> str:
    return source.ranks.files[min(source.ranks.files)]


def _training(source: RankSource) -> TrainingState:
    listing, args = source.listing, source.args
    iteration = source.state.get("iteration", listing.iteration)
    if isinstance(iteration, int) and not 0 <= iteration <= ITERATION:
        raise CorruptCheckpoint(
            f"{listing.directory}: its iteration should be from 0 to {ITERATION:,}"
        )
    operations = source.state.get("num_floating_point_operations_so_far", 0)
    if isinstance(operations, (int, float)) and not 0 <= operations <= OPERATIONS:
        raise CorruptCheckpoint(
            f"{listing.directory}: its num_floating_point_operations_so_far should be from 0 to {OPERATIONS:.0e}"
        )
    # Arguments that replace missing args describe the model. Only optimization and dropouts are about their run.
    run = vars(args)
    if source.writer:
        run = {name: value for name, value in run.items() if name in OF_TRAINING}
    return TrainingState(
        iteration if isinstance(iteration, int) else None,
        release=listing.iteration is None and listing.directory.name == rank_files.RELEASE,
        consumed_train_samples=_samples(args, "consumed_train_samples"),
        consumed_valid_samples=_samples(args, "consumed_valid_samples"),
        floating_point_operations=operations if isinstance(operations, (int, float)) else 0,
        optimizer=source.dist.describe() if source.dist else describe_optimizer(source.ranks),
        scheduler=read_scheduler(source.dist.common if source.dist else source.state),
        rng={
            rank: state["rng_state"]
            for rank, state in source.ranks.states.items()
            if "rng_state" in state
        },
        arguments=plain_arguments(run),
    )


def _samples(args: Namespace, name: str) -> Any:
    """A count of samples; 0 if it is missing. Raises CorruptCheckpoint unless it is a number."""
    count = getattr(args, name, None) or 0
    if type(count) not in (int, float):
        raise CorruptCheckpoint(
            f"the checkpoint's {name} should be a number of samples, found {count!r:.100}"
        )
    return count


def _place(
    ranks: Ranks, model: _Model, spellings: Spellings, optimizers: Optimizers
) -> Iterator[Placed]:
    """Every tensor of every rank at its place. Raises TensorMismatch for missing and unknown tensors."""
    config, layout = model.config, model.layout
    rows = with_beside(family(config.family).rows, config)
    tensors = RankTensors(rows, config, spellings.naming, layout, model.padded_vocab)
    for chunk in layout.chunks():
        seen_shards: set[tuple[int, int]] = set()
        for rank, tp_rank, is_first in _ranks_of(ranks, chunk, layout):
            natives = [spellings.arrange(each) for each in tensors.of(tp_rank, chunk, rank.ep)]
            # Every expert rank stores dense tensors again, and some tensor ranks store the experts' shards again.
            shard = (rank.ep, tp_rank % layout.etp)
            has_new_experts = shard not in seen_shards
            for placed in _place_chunk(ranks, rank, chunk, layout, natives):
                is_new = has_new_experts if placed.native.of_experts else is_first
                if is_new:
                    yield optimizers.place(placed, rank, chunk.vpp_rank)
            seen_shards.add(shard)


def _ranks_of(ranks: Ranks, chunk: Chunk, layout: Layout) -> Iterator[tuple[RankId, int, bool]]:
    """(rank, tensor-parallel rank, True for the first of the ranks with the same dense tensors) of a chunk's ranks."""
    for tp_rank in range(layout.tp):
        for index, rank in enumerate(ranks.of(tp_rank, chunk.pp_rank)):
            yield rank, tp_rank, index == 0


def _place_chunk(
    ranks: Ranks, rank: RankId, chunk: Chunk, layout: Layout, natives: list[NativeTensor]
) -> Iterator[Placed]:
    weights = dict[str, LazyTensor]()
    chunks = ranks.weights[rank]
    if chunk.vpp_rank < len(chunks):
        weights |= chunks[chunk.vpp_rank]
    if chunk.vpp_rank == 0:
        outside = ranks.beside.get(rank, {})
        weights |= {BESIDE + name: tensor for name, tensor in outside.items()}
    stored = [native for native in natives if native.copy is None or native.name in weights]
    where = ranks.files[rank]
    if layout.vpp > 1:
        where += f" (model{chunk.vpp_rank})"
    same_names([native.name for native in stored], weights, where)
    for native in stored:
        if native.copy is None or native.copy.used:
            yield Placed(native, weights[native.name], where)
