"""Opens a model from the flags: the checkpoint, its tokenizer, the ranks, the memory for rows."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from formats.tensor import LazyTensor
from megaconv.commands.forward_pass import MAX_MEMORY
from megaconv.engine.adapted import adapted
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import OpenedSource
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megaconv.options.values import AdapterChoice, byte_size
from megaconv.terminal import show
from megatron_lite.checkpoint.restore import Start, open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.embedding_form import EmbeddingForm, read_form
from megatron_lite.data.harmony import Marks, harmony_marks
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.forward.opening import open_streamed
from megatron_lite.inference.adapters import (
    AdapterBank,
    NamedAdapter,
    joint_options,
    read_adapters,
)
from megatron_lite.inference.drafting_model import DraftingModel
from megatron_lite.inference.gallery import TEXT_ALONE, Images
from megatron_lite.inference.generation_config import sampling_of_generation
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.opening_images import open_images
from megatron_lite.inference.prompts import stop_ids
from megatron_lite.inference.quantizing import check_quantize, load_quantized
from megatron_lite.inference.sampling import PLAIN, Sampling
from megatron_lite.inference.slots import LanguageModel
from megatron_lite.loop.tokenizer import make_tokenizer
from megatron_lite.models.purposes import is_headless, named_class, refuse_encoders
from megatron_lite.objectives.catalog import objective_of
from megatron_lite.parallel.grid import Grid, make_grid
from megatron_lite.processes import launch
from megatron_lite.processes.failure import all_or_none, report
from megatron_lite.processes.node import once_a_node
from megatron_lite.settings.architecture import check_against, model_type
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Data
from megatron_lite.settings.options import LoRA, ModelOptions
from megatron_lite.settings.parallel import Parallel
from megatron_lite.settings.sizes import LONGEST_UNASKED, check_sizes

_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Opened:
    """The objects of a command, on rank 0."""

    model: EngineModel
    config: ModelConfig
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    """Tokens with which the model ends a text."""
    path: str
    store: Any
    """The store in which ranks record the first failure (processes/failure.py); None in a single process."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters 1, 2 and so on."""
    sampling: Sampling = PLAIN
    """The sampling of generation_config.json."""
    retrieving: LanguageModel | None = None
    """The same model with neighbors of chunks, which answers instead of `model`."""
    images: Images = TEXT_ALONE
    files: Mapping[str, Path] = field(default_factory=dict)
    """The small files beside the model, by their paths below its directory."""
    vector_files: tuple[Mapping[str, Path], ...] = ()
    """Those of sentence-transformers beside each adapter."""

    def embedding_form(self, adapter: int | None) -> EmbeddingForm:
        """Return how the model makes vectors of texts. Raises CorruptCheckpoint, NotExpressible. adapter: see embedding_files."""
        return read_form(self.embedding_files(adapter))

    def embedding_files(self, adapter: int | None) -> dict[str, Path]:
        """Return the small files beside the model, with sentence-transformers' files of an adapter in place of the model's.

        adapter: its number; 0 for the model alone, None for the first adapter, if there is one.
        """
        number = min(1, len(self.adapters)) if adapter is None else adapter
        beside = self.vector_files[number - 1] if number else {}
        return {**self.files, **beside}

    @property
    def answering(self) -> LanguageModel:
        """The model that answers."""
        return self.model if self.retrieving is None else self.retrieving

    @cached_property
    def harmony(self) -> Marks | None:
        """The special tokens of harmony, if the tokenizer has them."""
        return harmony_marks(self.tokenizer)

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return Path(self.path.rstrip("/")).name or self.path


def run(given: argparse.Namespace, use: Callable[[Opened], None], *, lasting: bool = False) -> None:
    """Open the model on every rank. Rank 0 calls `use`, the others compute for it. On an error the process ends.

    lasting: only rank 0 reacts to signals, because launchers and terminals send signals to all ranks.
    """

    def work(parallel: Parallel, place: launch.Place) -> None:
        opened = open_model(given, parallel, place)
        if place.rank:
            for number in (signal.SIGTERM, signal.SIGINT) if lasting else ():
                signal.signal(number, signal.SIG_IGN)
            opened.model.follow()
        else:
            use(opened)
            opened.model.close()

    run_on_ranks(given, work)


def run_on_ranks(given: argparse.Namespace, work: Callable[[Parallel, launch.Place], None]) -> None:
    """Call `work` on every rank. On an error the process ends."""
    parallel = Parallel(
        tensor_model_parallel_size=given.tp, pipeline_model_parallel_size=given.pp, expert_model_parallel_size=given.ep,
        distributed_backend=given.distributed_backend, distributed_timeout_minutes=given.distributed_timeout_minutes,
    )  # fmt: skip
    place: launch.Place | None = None
    try:
        place = launch.start(parallel)
        work(parallel, place)
        launch.end(place)
    except KeyboardInterrupt:
        launch.leave(130)
    except BrokenPipeError:  # the reader of the output closed the pipe
        launch.leave(0)
    except Exception as error:
        launch.leave(report(error, f"rank {launch.rank()}", place.store if place else None))


@dataclass(frozen=True)
class OpenedEngine:
    """A model on every rank, without memory for the generation of rows."""

    engine: Engine
    start: Start
    tokenizer: Tokenizer
    length: int
    """Tokens of the longest row."""
    adapters: AdapterBank | None = None

    @property
    def config(self) -> ModelConfig:
        return self.engine.config


def open_model(given: argparse.Namespace, parallel: Parallel, place: launch.Place) -> Opened:
    """Open the model. Collective. Raises CheckpointError."""
    if given.slots is not None and given.slots < 1:
        raise UsageError(f"--slots {given.slots} must be 1 or more")
    found = open_engine(given, parallel, place)
    names = () if found.adapters is None else found.adapters.names
    vector_files = () if found.adapters is None else found.adapters.vector_files
    files = found.start.files
    stops = all_or_none(lambda: stop_ids(found.config, found.tokenizer, files))
    sampling = all_or_none(lambda: sampling_of_generation(files))
    model = _model(given, found)
    opened = Opened(
        model,
        found.config,
        found.tokenizer,
        stops,
        given.load,
        place.store,
        names,
        sampling,
        files=files,
        vector_files=vector_files,
    )
    if not hasattr(given, "image_encoder"):
        return opened
    images = all_or_none(lambda: open_images(given, model, found.tokenizer))
    return replace(opened, images=images)


def _model(given: argparse.Namespace, found: OpenedEngine) -> EngineModel:
    """Return the model, with memory for the rows that it generates. Collective. Raises UsageError if it can't draft."""
    drafts: int = given.draft_tokens
    # A command without --slots may generate nothing.
    slots: int = given.slots or 0
    if drafts == 0:
        return EngineModel(found.engine, slots, found.length, found.adapters)
    if drafts < 0:
        raise UsageError(f"--draft-tokens {drafts} must be 0 or more")
    if given.stream_weights or found.adapters is not None:
        raise UsageError(
            "--draft-tokens excludes --stream-weights and --adapter; leave one of them out"
        )
    return DraftingModel(found.engine, slots, found.length, drafts)


def open_engine(
    given: argparse.Namespace,
    parallel: Parallel,
    place: launch.Place,
    merged: Sequence[AdapterChoice] = (),
    *,
    most: int = LONGEST_UNASKED,
) -> OpenedEngine:
    """Open the checkpoint, its tokenizer and an engine with its weights. Collective. Raises CheckpointError.

    merged: adapters to merge into the weights, which thereby become those of the start.
    most: the most tokens of a row without --max-length.
    """
    start = once_a_node(lambda: _start(given.load, merged), place.node)
    tokenizer = all_or_none(lambda: _tokenizer(given, start))
    config, dtype = start.config, start.config.dtype
    refuse_encoders(config, given.load)
    if getattr(given, "generates", True) and is_headless(config) and not place.rank:
        show(
            f"warning: {given.load}: the model is a {named_class(config)} without a head for words: its vectors mean something, and the "
            "texts that it generates don't",
            sys.stderr,
        )
    if not given.stream_weights and getattr(given, "max_memory", None):
        raise UsageError("--max-memory is for --stream-weights; pass both, or neither")
    if given.training is not None:
        _check_flags_of_model(given.training, config, given.load)
    if given.dtype:
        dtype = _TORCH[given.dtype]
    length = given.max_length or min(config.max_positions, most)
    if not place.rank:
        _warn_of_length(length, config)
    tensors = {key.name: tensor for key, tensor in start.tensors.items()}
    described = changed(config, {"dtype": dtype})
    if given.stream_weights:
        engine = _streamed(given, described, tensors, place, length)
        return OpenedEngine(engine, start, tokenizer, length, None)
    adapters = all_or_none(lambda: read_adapters(given.adapter, config))
    if not place.rank:
        _warn_of_other_bases(adapters, given.load, config)
    plain = not given.quantize
    if not plain:
        check_quantize(place.device)
    engine = make_engine(
        described, parallel, place, length, joint_options(adapters), allocates=plain
    )
    if plain:
        load_weights(engine, tensors)
    else:
        quantized = load_quantized(engine, tensors)
        if not place.rank:
            show(str(quantized), sys.stderr)
    bank = AdapterBank(engine, adapters, tensors) if adapters else None
    return OpenedEngine(engine, start, tokenizer, length, bank)


def _start(load: str, merged: Sequence[AdapterChoice]) -> Start:
    """Open the weights of a checkpoint, with adapters merged. Raises CheckpointError."""
    start = open_weights(load)
    if not merged:
        return start
    source = adapted(OpenedSource(start.header, start.tensors), merged)
    header = source.header
    return replace(start, header=header, tensors=dict(source.tensors()), files=header.files)


def _warn_of_length(length: int, config: ModelConfig) -> None:
    """Print a warning of rows that are longer than those for which the model was made."""
    most = config.max_positions
    if config.positions.kind == "rope" and length > most:
        show(
            f"megatron-lite: warning: --max-length {length} exceeds the model's {most} positions: "
            "the positions beyond are extrapolated",
            sys.stderr,
        )


def _warn_of_other_bases(adapters: Sequence[NamedAdapter], load: str, config: ModelConfig) -> None:
    """Print a line for each adapter whose configuration names another model."""
    for adapter in adapters:
        read = adapter.read
        if read.is_of_another(load, config):
            show(
                f"warning: the adapter {adapter.name} was trained on {read.base}, but --load is {load}",
                sys.stderr,
            )


def _streamed(
    given: argparse.Namespace,
    config: ModelConfig,
    tensors: Mapping[str, LazyTensor],
    place: launch.Place,
    length: int,
) -> Engine:
    """Return an engine that reads its weights when it uses them.

    Raises UsageError for adapters, for weights in int8, and for several processes.
    """
    if given.quantize:
        raise UsageError("--stream-weights computes with plain weights; leave --quantize out")
    if given.adapter:
        raise UsageError("--stream-weights computes without adapters; leave --adapter out")
    if place.world > 1:
        raise UsageError("--stream-weights computes in one process; start only one")
    limit = byte_size(given.max_memory or MAX_MEMORY, "--max-memory ")
    dtype = config.dtype or "float32"
    return open_streamed(given.load, config, tensors, dtype, place.device, limit, length)


def _check_flags_of_model(training: Settings, config: ModelConfig, load: str) -> None:
    """Raise UsageError for a training script's flag that contradicts the checkpoint."""
    model_type(training, config)
    check_against(training, config, {}, load)


def make_engine(
    config: ModelConfig,
    parallel: Parallel,
    place: launch.Place,
    length: int,
    lora: LoRA | None = None,
    *,
    allocates: bool = True,
) -> Engine:
    """Return an engine for inference; its weights are zero until they are loaded. length: of the longest row.

    allocates: False for parameters without memory.
    """
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    stage_layers = split_layers(config.layer_count, pp, 1, LayerSplit())
    layout = Layout(tp, pp, 1, ep, stage_layers=stage_layers)
    options = ModelOptions(dtype=config.dtype or "float32", trains=False, lora=lora)
    dp = check_sizes(
        config, layout, world=place.world, options=options, sequence=length, microbatches=1
    )
    has_experts = config.experts.count > 0
    grid: Grid = make_grid(layout, dp, place.device, experts=has_experts, timeout=place.timeout)
    return Engine(config, grid, options, None, allocates=allocates)


def _tokenizer(given: argparse.Namespace, start: Start) -> Tokenizer:
    data = Data(
        tokenizer_type=given.tokenizer_type, tokenizer_model=given.tokenizer_model,
        vocab_file=given.vocab_file, merge_file=given.merge_file,
    )  # fmt: skip
    settings = Settings(data=data)
    objective = objective_of(
        settings, model_type(settings, None if start is None else start.config)
    )
    return make_tokenizer(settings, start, objective.extra_ids(settings))
