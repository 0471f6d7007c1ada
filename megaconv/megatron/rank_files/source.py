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
from megaconv.errors import NotExpressible, UnknownFormat, UsageError
from megaconv.families import family, is_multimodal, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.whole_model import refuse_optimizer
from megaconv.megatron.arguments.encoder import refuse_lost_head
from megaconv.megatron.arguments.param_groups import WITHOUT
from megaconv.megatron.arguments.read import read_layout
from megaconv.megatron.arguments.run_arguments import OPTIMIZATION, plain_arguments
from megaconv.megatron.arguments.size_tensors import SizeTensors, with_stacks
from megaconv.megatron.arguments.sizes import (
    expert_tensor_parallel_size,
    find_layout,
    find_sizes,
    padded_rows,
    require_gate,
)
from megaconv.megatron.arguments.tokenizer import NamedTokenizer, named_tokenizer
from megaconv.megatron.arguments.whole import read_whole, refuse_unknown_beside, without_images
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
from megaconv.megatron.states.early_gpt2 import arguments as early_arguments
from megaconv.megatron.states.early_gpt2 import is_early
from megaconv.megatron.states.ranks import RankId, Ranks, is_legacy, read_ranks
from megaconv.model.assembled import Placed, assemble
from megaconv.model.beside import BESIDE
from megaconv.model.ceilings import ITERATION, OPERATIONS, VOCABULARY
from megaconv.model.check import same_names, well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype, shift_of
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import LEGACY, Naming
from megaconv.model.natives import NativeTensor, RankTensors
from megaconv.model.table import canonical_shapes, second_names, with_beside
from megaconv.model.training import TrainingState
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
    source, beside = _without_images(source, options)
    listing, ranks, args = source.listing, source.ranks, source.args
    names = with_stacks(spellings.size_tensors, ranks)
    sidecars = options.config or (listing.directory.parent / SIDECAR_DIRECTORY)
    with well_formed(ranks.files[min(ranks.files)]):
        layout = find_layout(ranks, args, names)
        found = find_sizes(ranks, layout, args, names)
        if options.config is None:
            require_gate(ranks, layout, args, names)
    legacy = spellings.naming == LEGACY
    config = configure(
        found,
        args,
        sidecars,
        required=options.config is not None,
        legacy=legacy,
        text_only=options.text_only,
    )
    config = _with_beside(config, beside, source, sidecars, options)
    if config.experts.count:
        with well_formed("the experts' shapes"):
            etp = expert_tensor_parallel_size(ranks, config.experts.ffn, config.experts.count)
        layout = replace(layout, etp=etp)
    # `layout` is that of the files, `written` that of the run that saved them. They may differ with by_args.
    if by_args:
        refuse_lost_head(args, config, str(listing.directory))
    written = read_layout(args, config) if by_args else layout
    padded = padded_rows(ranks, names)
    config = changed(config, {"vocab": vocabulary_size(options, config, args, padded, written.tp)})
    named = named_tokenizer(args) if config.hf is None else NamedTokenizer()
    ids = {name: number for name, number in named.ids.items() if are_ids(number, config.vocab)}
    config = changed(config, ids) if ids else config
    shapes = canonical_shapes(family(config.family).rows, config)
    training = _training(source)
    # An optimizer stored per parameter is placed with the weights. One stored as buffers of the run's ranks needs that
    # run's layout (open_buckets): its tensors have separate places, which then replace `placed`.
    wanted = options.optimizer and training.optimizer is not None
    if wanted:
        refuse_optimizer(config, ranks.files[min(ranks.files)])
    if (
        wanted
        and layout.encoder_stage_layers
        and training.optimizer
        and training.optimizer.kind == "distributed"
    ):
        raise NotExpressible(f"{ranks.files[min(ranks.files)]}: {ENCODER_STAGES}; {WITHOUT}")
    optimizers, aliases = Optimizers({}), second_names(family(config.family).rows, spellings.naming)
    if wanted and source.dist is not None:
        optimizers = source.dist.open(ranks.weights[RankId(0, 0, 0)][0], aliases)
    elif wanted:
        optimizers = open_optimizers(ranks, args, shared_names(config, names, ranks.pp), aliases)
    placed = list(_place(ranks, layout, config, padded, spellings, optimizers))
    tensors = assemble(shapes, placed, strict=False)
    if wanted and training.optimizer is not None:
        without = untrained(placed)
        if source.dist is not None and source.dist.in_buckets:
            optimizers, placed = source.dist.open_buckets(config, written, padded, placed)
        tensors = assemble_slots(shapes, placed, tensors, without)
        known = optimizer_state(optimizers, placed, training.optimizer, training.iteration)
        rng = source.dist.rng() if source.dist and not options.metadata_only else training.rng
        training = replace(training, optimizer=known, rng=rng)
    manifest = describe(tensors)
    divisor = getattr(args, "make_vocab_size_divisible_by", None)
    header = Header(
        config=changed(config, {"dtype": main_dtype(manifest)}),
        manifest=manifest,
        layout=written,
        training=training,
        files=find_sidecars(sidecars) or named.files,
        named_tokenizer=named.name,
        vocab_divisor=divisor if isinstance(divisor, int) and 0 < divisor <= VOCABULARY else None,
        source=spellings.description,
        padded_vocab=padded,
        has_optimizer=training.optimizer is not None,
        shifts={key: shift for key, tensor in tensors.items() if (shift := shift_of(tensor))},
    )
    return OpenedSource(header, {} if options.metadata_only else tensors)


def _without_images(
    source: RankSource, options: LoadOptions
) -> tuple[RankSource, dict[str, Shape]]:
    """(the source with its language model's args, shapes of the tensors beside the language model by name).

    With --text-only, the source loses these tensors.
    """
    ranks = source.ranks
    held = ranks.beside.get(min(ranks.states), {})
    beside = {name: tuple(tensor.shape) for name, tensor in held.items()}
    if options.text_only:
        ranks = replace(ranks, beside={})
    args = without_images(source.args) if beside else source.args
    return replace(source, ranks=ranks, args=args), beside


def _with_beside(
    config: ModelConfig,
    beside: Mapping[str, Shape],
    source: RankSource,
    sidecars: Path,
    options: LoadOptions,
) -> ModelConfig:
    """The model's configuration as a part of the multimodal model in the checkpoint.

    Raises UsageError if that model isn't known.
    """
    where = source.ranks.files[min(source.ranks.files)]
    if options.text_only:
        if not beside and not is_multimodal(sidecars):
            raise UsageError(f"--text-only: {where}: holds a language model alone; leave it out")
        return config
    if config.whole is None:
        refuse_unknown_beside(beside, where)
        return config
    return replace(config, whole=read_whole(config.whole, beside, source.args, where))


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
    # Arguments that replace missing args describe the model. Only the optimization is about their run.
    run = vars(args)
    if source.writer:
        run = {name: value for name, value in run.items() if name in OPTIMIZATION}
    return TrainingState(
        iteration if isinstance(iteration, int) else None,
        release=listing.iteration is None and listing.directory.name == rank_files.RELEASE,
        consumed_train_samples=getattr(args, "consumed_train_samples", None) or 0,
        consumed_valid_samples=getattr(args, "consumed_valid_samples", None) or 0,
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


def _place(
    ranks: Ranks,
    layout: Layout,
    config: ModelConfig,
    padded: int,
    spellings: Spellings,
    optimizers: Optimizers,
) -> Iterator[Placed]:
    """Every tensor of every rank at its place. Raises TensorMismatch for missing and unknown tensors."""
    rows = with_beside(family(config.family).rows, config)
    tensors = RankTensors(rows, config, spellings.naming, layout, padded)
    for chunk in layout.chunks():
        expert_shards: set[tuple[int, int]] = set()
        for tp_rank in range(layout.tp):
            for index, rank in enumerate(ranks.of(tp_rank, chunk.pp_rank)):
                natives = tensors.of(tp_rank, chunk, rank.ep)
                shard = (rank.ep, tp_rank % layout.etp)
                # Every expert rank stores dense tensors again, and some tensor ranks store the experts' shards again.
                for placed in _place_chunk(
                    ranks, rank, chunk, layout, [spellings.arrange(native) for native in natives]
                ):
                    if (shard not in expert_shards) if placed.native.of_experts else index == 0:
                        yield optimizers.place(placed, rank, chunk.vpp_rank)
                expert_shards.add(shard)


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
