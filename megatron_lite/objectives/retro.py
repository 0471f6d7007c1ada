"""The next token, with the neighbors of each chunk: Retro's training on a project directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.tensor import LazyTensor
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed
from megaconv.model.ir import Key
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.samples import NO_TOKEN, Dataset, SampleForm
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.corpus import cache_path
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.retro_project import project_of
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.retrieval.retro.database import ChunkDatabase
from megatron_lite.retrieval.retro.neighbors import Neighbors
from megatron_lite.retrieval.retro.project import Project
from megatron_lite.retrieval.retro.windows import Windows
from megatron_lite.settings.config import Settings
from megatron_lite.settings.contradictions import flag_name

SPLITS = ("train", "valid", "test")
NEIGHBORS = "neighbor_tokens"
_FLAGS = {
    "retro_chunk_length": "retrieval.chunk",
    "retro_encoder_layers": "retrieval.layers",
    "retro_num_neighbors": "retrieval.neighbors",
    "retro_num_retrieved_chunks": "retrieval.chunks",
}


class RetroSample(NamedTuple):
    """A sample with the neighbors of its chunks; other fields as in data.samples.Sample."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    documents: NDArray[np.int32]
    neighbor_tokens: NDArray[np.int64]
    """int64 [chunks, neighbors, tokens of a neighbor]; [0, 0, 0] for a model without retrieval."""


@dataclass(frozen=True)
class RetroDataset:
    """The samples of one split."""

    windows: Windows
    form: SampleForm
    database: ChunkDatabase | None
    neighbors: Neighbors | None
    """None for a model without retrieval, and for a split without neighbors."""
    count: int = 0
    """Neighbors of a chunk."""
    chunks: int = 0
    megatron: bool = False

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> RetroSample:
        sample = self.form.sample(self.windows[index].tokens)
        found = np.zeros((0, 0, 0), np.int64)
        if self.neighbors is not None and self.database is not None:
            rows = self.neighbors.of_sample(index, self.count)
            found = self.database.retrieved(rows, self.chunks, megatron=self.megatron)
        return RetroSample(*sample, found)


@dataclass(frozen=True)
class RetroData(TrainingData):
    """The data of a project."""

    project: Project

    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        """See TrainingData.datasets."""
        wanted = retrieves(setup.config, setup.settings)
        return [
            dataset_of(self.project, setup, split, wanted=wanted) if count else None
            for split, count in zip(SPLITS, samples, strict=True)
        ]

    def identity(self, setup: Setup) -> str:
        """See TrainingData.identity."""
        return self.project.identity(
            "train", with_neighbors=retrieves(setup.config, setup.settings)
        )


def dataset_of(project: Project, setup: Setup, split: str, *, wanted: bool) -> RetroDataset | None:
    """Return the dataset of a split; None if it has no samples. wanted: with neighbors."""
    windows = project.windows(split, cache_path(setup.settings))
    if windows is None:
        return None
    data, eod = setup.settings.data, setup.tokenizer.eod
    resets = data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
    form = SampleForm(NO_TOKEN if eod is None else eod, NO_TOKEN, *resets)
    if not wanted:
        return RetroDataset(windows, form, None, None)
    neighbors = project.neighbors(split)
    if neighbors is None:
        raise UsageError(
            f"{project.path}: the samples of {split} have no neighbors; `megatron-lite retro build` finds them"
        )
    retrieval = setup.config.retrieval
    return RetroDataset(
        windows,
        form,
        project.database(project.eod(setup.tokenizer)),
        neighbors,
        retrieval.neighbors,
        retrieval.chunks,
        setup.settings.retro.retro_megatron_neighbors,
    )


def retrieves(config: ModelConfig, settings: Settings) -> bool:
    """Return whether a run needs neighbors: its model has retrieval, and the gate is not 0."""
    return config.retrieval.layers > 0 and settings.retro.retro_attention_gate != 0


class RetroText(Objective):
    """The next token of a project's samples, with their neighbors if the model has retrieval."""

    tokens: ClassVar = ("tokens", "labels", NEIGHBORS)
    nothing_found: ClassVar = "the project was built without training samples"

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "RetroText | None":
        return None if settings.retro.retro_project_dir is None else cls()

    def prepared(
        self, start: Start | None, settings: Settings, say: Say, *, finetune: bool
    ) -> Start | None:
        """Return the start; a GPT with retrieval added (retro-fitting) if the flags ask for it. Raises UsageError."""
        if start is None:
            return None
        if settings.retro.retro_no_final_norm and start.config.norm.final:
            raise UsageError(
                f"--retro-no-final-norm is for new models: {start.path} has a norm after its last layer; leave the flag out"
            )
        if start.config.retrieval.layers:
            _require_same(start.config, settings, start.path)
            return start
        if not settings.retro.retro_add_retriever:
            return start
        return fitted(start, settings, say)

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        return RetroData(project_of(settings))

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        made = super().microbatch(batch, settings)
        neighbors = batch[NEIGHBORS]
        if not neighbors.numel():
            return made
        return replace(made, source=neighbors.reshape(-1, neighbors.shape[-1]))


def _require_same(config: ModelConfig, settings: Settings, path: str) -> None:
    """Raise UsageError if the project or a flag contradicts the checkpoint."""
    for name, field in _FLAGS.items():
        asked, held = getattr(settings.retro, name), value_of(config, field)
        of_project = name == "retro_chunk_length"
        if asked != held and (of_project or name in settings.given):
            source = "the project's chunk length" if of_project else flag_name(name)
            raise UsageError(
                f"{source} {asked} contradicts the checkpoint {path}, which has {held}"
            )


def fitted(start: Start, settings: Settings, say: Say) -> Start:
    """Return a GPT's start with retrieval added: all of its tensors, and initial weights for what is new.

    Raises UsageError for a run that continues, and for a model that can't have retrieval.
    """
    if start.with_optimizer or start.arguments:
        raise UsageError(
            f"{start.path}: is a GPT's run; add --finetune and another --save to start a Retro from its weights"
        )
    config = start.config
    sizes: Mapping[str, Any] = {
        field: getattr(settings.retro, name) for name, field in _FLAGS.items()
    }
    trained = replace(changed(config, sizes), family="retro", hf=None)
    shapes = canonical_shapes(family("retro").rows, trained)
    held = start.weights
    lost = sorted(held.keys() - shapes.keys())
    if lost:
        raise UsageError(
            f"{start.path}: a {config.family} can't have retrieval: {lost[0]} has no place in a Retro"
        )
    fresh = initial_weights(trained, settings.model.init_method_std, settings.training.seed)
    tensors: dict[Key, LazyTensor] = {
        Key(name): held[name] if name in held else fresh[name] for name in shapes
    }
    new = [name for name in shapes if name not in held]
    say(f"new for retrieval: {len(new)} tensors: {', '.join(_modules(new))}")
    return replace(start, header=replace(start.header, config=trained), tensors=tensors)


def _modules(names: Sequence[str]) -> list[str]:
    """Return the modules of these tensors, each once: `layers.5.cross`, `retriever.layers.0` …"""
    return list(dict.fromkeys(".".join(name.split(".")[:3]) for name in names))
