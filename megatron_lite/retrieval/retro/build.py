"""Builds a Retro project: its directory and settings, then the tasks in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.corpora import SPLITS, parse_corpora, parse_split
from megatron_lite.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_lite.retrieval.embedder import TextEmbedder
from megatron_lite.retrieval.faiss_index import make_index
from megatron_lite.retrieval.retro.block_tasks import BlockTask
from megatron_lite.retrieval.retro.chunking import chunk_tasks
from megatron_lite.retrieval.retro.indexing import add_to_index, train_index
from megatron_lite.retrieval.retro.merging import merge
from megatron_lite.retrieval.retro.plan import MOST_TOKENS, BuildPlan, IndexPlan
from megatron_lite.retrieval.retro.project import Project, data_record
from megatron_lite.retrieval.retro.project_settings import (
    CONFIG,
    ProjectSettings,
    read_settings,
    require_whole_chunks,
    write_settings,
)
from megatron_lite.retrieval.retro.querying import query_tasks
from megatron_lite.retrieval.team import Team

TASKS = ("db-build", "index-train", "index-add", "query-neighbors")
SEVERAL = {"build": TASKS, "index-build": ("index-train", "index-add")}
"""Megatron's names of several tasks."""


@dataclass(frozen=True)
class BuildRequest:
    """The flags of a build."""

    directory: Path
    settings: ProjectSettings
    """`data_path` holds the paths of the datasets."""
    index: IndexPlan
    document_block: int
    tasks: tuple[str, ...]
    validate: float | None = None
    """The fraction of stored blocks that is computed again and compared, instead of building."""
    embedded_tokens: int = MOST_TOKENS
    """Tokens of a text that the embedder reads."""


def tasks_of(word: str) -> tuple[str, ...]:
    """Return the tasks of a comma-separated list, in the order of the build. Raises UsageError."""
    wanted: set[str] = set()
    for name in word.split(","):
        if name not in (*TASKS, *SEVERAL):
            raise UsageError(f"--retro-tasks {name}: there are {', '.join((*SEVERAL, *TASKS))}")
        wanted.update(SEVERAL.get(name, (name,)))
    return tuple(task for task in TASKS if task in wanted)


def build(request: BuildRequest, embedder: TextEmbedder, team: Team) -> None:
    """Run the tasks. Collective. Raises UsageError, CorruptCheckpoint."""
    check(request)
    make_index(request.index.text, embedder.width)  # refuses a wrong string before any work
    if team.rank == 0:
        _prepare(request, embedder)
    team.wait()
    project = Project(request.directory, read_settings(request.directory))
    project.check_data()
    plan = BuildPlan(project, embedder, request.index, request.document_block, project.eod())
    for task in request.tasks:
        if request.validate is None:
            _run(task, plan, team)
        else:
            _validate(task, plan, team, request.validate)


def check(request: BuildRequest) -> None:
    """Raise UsageError for flags that contradict each other or the data."""
    settings, index = request.settings, request.index
    require_whole_chunks(settings.seq_length, settings.chunk_length, "--retro-gpt-seq-length")
    if parse_split(settings.split)[0] is None:
        raise UsageError(
            f"--retro-gpt-split {settings.split}: its first share is 0, so that nothing can be retrieved"
        )
    if index.save > index.query:
        raise UsageError(
            f"--retro-query-num-neighbors-save {index.save}: only {index.query} are searched (--retro-query-num-neighbors-query)"
        )
    for flag, fraction in (("train", index.train_fraction), ("add", index.add_fraction)):
        if not 0 < fraction <= 1:
            raise UsageError(
                f"--retro-index-{flag}-load-fraction {fraction}: give more than 0, at most 1"
            )
    if request.validate is not None and not 0 < request.validate <= 1:
        raise UsageError(f"--retro-task-validate {request.validate}: give more than 0, at most 1")


def _run(task: str, plan: BuildPlan, team: Team) -> None:
    if task == "index-train":
        train_index(plan, team)
    elif task == "index-add":
        add_to_index(plan, team)
    else:
        for blocks in _block_tasks(task, plan):
            blocks.run(plan.project.files, team)
        if task == "db-build" and team.rank == 0:
            merge(plan)
        team.wait()
    team.say(f"{task}: done")


def _validate(task: str, plan: BuildPlan, team: Team, fraction: float) -> None:
    for blocks in _block_tasks(task, plan):
        blocks.validate(plan.project.files, team, fraction)


def _block_tasks(task: str, plan: BuildPlan) -> Iterator[BlockTask]:
    """Yield the tasks whose blocks stay on disk. The blocks of an index are removed when it is complete."""
    if task == "db-build":
        yield from chunk_tasks(plan)
    elif task == "query-neighbors":
        yield from query_tasks(plan)


def _prepare(request: BuildRequest, embedder: TextEmbedder) -> None:
    """Link the datasets and write config.json; or check that an ended build had the same settings."""
    corpora = parse_corpora(request.settings.data_path, "--retro-gpt-data-path")
    prefixes = [_place(request.directory, prefix) for prefix in corpora.prefixes]
    names = _names(prefixes)
    weights = corpora.weights or [1.0] * len(names)
    words: list[str] = []
    for weight, name in zip(weights, names, strict=True):
        words += [str(weight), name]
    records: dict[str, Any] = {}
    for name, prefix in zip(names, prefixes, strict=True):
        IndexedDataset(prefix)  # refuses a damaged dataset before any work
        records[name] = data_record(prefix)
    own = _own(request, embedder) | {"data": records}
    made = replace(request.settings, data_path=tuple(words), own=own)
    made = replace(made, neighbor_dirs=_query_directories(made))
    if (request.directory / CONFIG).is_file():
        _require_same(request.directory, read_settings(request.directory), made)
    request.directory.mkdir(parents=True, exist_ok=True)
    for name, prefix in zip(names, prefixes, strict=True):
        _link(Path(prefix), request.directory / "data" / name)
    write_settings(request.directory, made)


def _own(request: BuildRequest, embedder: TextEmbedder) -> dict[str, Any]:
    index = request.index
    return {
        "format": request.settings.format,
        "embedder": embedder.name,
        "embedder_fingerprint": embedder.fingerprint,
        "width": embedder.width,
        "embedded_tokens": request.embedded_tokens,
        "document_block": request.document_block,
        "index": index.text,
        "index_train_chunks": index.train_chunks,
        "index_train_fraction": index.train_fraction,
        "index_add_fraction": index.add_fraction,
        "nprobe": index.nprobe,
        "ef_search": index.ef_search,
        "neighbors_query": index.query,
        "neighbors_save": index.save,
    }


def _place(directory: Path, prefix: str) -> str:
    """Return the path of a dataset. Megatron names datasets relative to the project's data directory."""
    inside = directory / "data" / prefix
    is_inside = idx_path(inside).is_file() and not idx_path(prefix).is_file()
    return str(inside) if is_inside else prefix


def _names(prefixes: Sequence[str]) -> list[str]:
    names = [Path(prefix).name for prefix in prefixes]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"--retro-gpt-data-path: two datasets are called {name}; link one of them under another name"
            )
    return names


def _query_directories(settings: ProjectSettings) -> dict[str, str | None]:
    """Return the directory of each split; None for a split without data or samples."""
    parts = dict(zip(SPLITS, parse_split(settings.split), strict=True))
    return {
        split: split if parts[split] is not None and settings.samples(split) else None
        for split in SPLITS
    }


def _require_same(directory: Path, before: ProjectSettings, now: ProjectSettings) -> None:
    """Raise UsageError if the project was begun with other settings."""
    if not before.own:
        raise UsageError(
            f"{directory}: is a project of Megatron, which can be read and not continued; build in another directory"
        )
    pairs = [
        (item.name, getattr(before, item.name), getattr(now, item.name)) for item in fields(now)
    ]
    recorded = [key for key in now.own if key in before.own]
    pairs += [(key, before.own[key], now.own[key]) for key in recorded]
    for name, old, new in pairs:
        if name not in ("own", "bert", "tokenizer", "data") and old != new:
            raise UsageError(
                f"{directory}: was begun with {name} {old!r}, not {new!r}; give the same flags, or another directory"
            )


def _link(source: Path, target: Path) -> None:
    """Link a dataset's two files into the project."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in (bin_path, idx_path):
        link, origin = path(target), path(source)
        if link.exists() and link.samefile(origin):
            continue
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(origin.absolute())
        except OSError as error:
            raise CorruptCheckpoint(f"{link}: can't be linked: {error.strerror}") from error
