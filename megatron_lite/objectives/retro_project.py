"""A run's settings from its Retro project, which no flag may contradict."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.retrieval.retro.project import Project, open_project
from megatron_lite.settings.config import Settings
from megatron_lite.settings.contradictions import flag_name

OF_RUNS = (
    "retro_attention_gate",
    "retro_encoder_hidden_dropout",
    "retro_encoder_attention_dropout",
)
"""Settings that a Retro needs on other data too."""
OTHER_DATA = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "mock_data"),
    *("finetune_data", "valid_finetune_data", "rampup_batch_size", "step_batch_size_schedule"),
)
"""Settings that a project replaces."""
RETRIEVING_FROM = 6
"""The first layer that attends to retrieved text."""


def with_project(settings: Settings) -> Settings:
    """Return the settings with the project's. Raises UsageError for a flag that contradicts it, CorruptCheckpoint."""
    asked = settings.retro
    if asked.retro_project_dir is None:
        for name in vars(asked):
            if name in settings.given and name not in OF_RUNS:
                raise UsageError(f"{flag_name(name)} requires --retro-project-dir")
        return settings
    project = project_of(settings)
    for name in OTHER_DATA:
        if name in settings.given:
            raise UsageError(
                f"{flag_name(name)}: the data are those of {project.path}; leave the flag out"
            )
    if settings.parallel.context_parallel_size > 1:
        raise UsageError(
            "--context-parallel-size is not supported with --retro-project-dir; take tensor and data parallelism"
        )
    _require_layers(settings)
    found = dict(_values(project, settings))
    for subject, values in found.items():
        _require_same(settings, subject, values, project.path)
        settings = replace(settings, **{subject: replace(getattr(settings, subject), **values)})
    _require_queried(settings, project)
    return settings


def project_of(settings: Settings) -> Project:
    """Open the run's project, and check that its datasets have not changed. Raises UsageError, CorruptCheckpoint."""
    assert settings.retro.retro_project_dir is not None
    project = open_project(settings.retro.retro_project_dir)
    project.check_data()
    return project


def _require_layers(settings: Settings) -> None:
    layers = settings.model.num_layers
    if settings.retro.retro_add_retriever and layers is not None and layers < RETRIEVING_FROM:
        raise UsageError(
            f"--retro-add-retriever: layer {RETRIEVING_FROM} is the first with retrieval; --num-layers {layers} has none"
        )


def _values(project: Project, settings: Settings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (subject of the settings, values by name)."""
    own = project.settings
    counts = {} if settings.training.train_iters else {"train_samples": own.train_samples}
    yield (
        "training",
        {
            "seq_length": own.seq_length,
            "seed": own.seed,
            "global_batch_size": own.global_batch_size,
            "eval_interval": own.eval_interval,
            "eval_iters": own.eval_iters,
            **counts,
        },
    )
    yield "retro", {"retro_chunk_length": own.chunk_length}
    tokenizer = own.tokenizer_options(project.path)
    files = {"vocab_file": tokenizer.vocab_file, "merge_file": tokenizer.merge_file}
    yield (
        "data",
        {
            "tokenizer_type": tokenizer.type,
            "tokenizer_model": tokenizer.model,
            **{name: None if path is None else str(path) for name, path in files.items()},
        },
    )
    if tokenizer.vocab_size is not None:
        yield "model", {"vocab_size": tokenizer.vocab_size}


def _require_same(
    settings: Settings, subject: str, values: Mapping[str, Any], project: Path
) -> None:
    """Raise UsageError for the first flag that differs from the project."""
    for name, held in values.items():
        asked = getattr(getattr(settings, subject), name)
        if name in settings.given and asked != held and name != "train_samples":
            raise UsageError(
                f"{flag_name(name)} {asked} contradicts the project {project}, which has {held}; leave the flag out"
            )


def _require_queried(settings: Settings, project: Project) -> None:
    """Raise UsageError for a run that needs more samples than have neighbors."""
    training, own = settings.training, project.settings
    needed = training.train_samples or (training.train_iters or 0) * own.global_batch_size
    if needed > own.train_samples:
        chunks = own.chunks_per_sample
        raise UsageError(
            f"{project.path}: the query made {own.train_samples * chunks:,} chunks, the run needs {needed * chunks:,}; "
            "train for fewer steps, or build the project for more"
        )
