"""The views that the user requests from `inspect`, for a checkpoint of a known or an unknown model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.tensor import LazyTensor
from formats.whole_file import write_whole
from megaconv import registry
from megaconv.commands.inspected import Inspection
from megaconv.commands.progress import Progress
from megaconv.commands.survey import Survey
from megaconv.commands.units import readable
from megaconv.commands.views import layout, megatron_args, report, stats, tensors, tree
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.engine.statistics import Statistics, all_statistics
from megaconv.errors import UsageError
from megaconv.hub import Place
from megaconv.input import Input
from megaconv.local_paths import require_page
from megaconv.model.ir import WEIGHT, Source
from megaconv.options import LoadOptions
from megaconv.values.shifted import plain

Found = Inspection | Survey


@dataclass(frozen=True)
class Asked:
    """The requested views. tensors: the glob that tensor names must match."""

    tree: bool = False
    tensors: str | None = None
    layout: bool = False
    stats: bool = False
    megatron_args: bool = False
    html: Path | None = None
    """File of the report. With `stats`, it shows the statistics too."""
    quiet: bool = False
    """Show no progress."""


class View(NamedTuple):
    name: str
    """Key in the JSON document."""
    document: Any
    lines: Iterable[str]
    notes: Sequence[str] = ()
    """Notes for stderr."""


@dataclass(frozen=True)
class Subject:
    """An inspected checkpoint, with the user's options."""

    path: str
    place: Place
    """The resolved path."""
    found: Found
    options: LoadOptions

    def known(self, view: str) -> Inspection:
        """The inspection. Raises UsageError if the model isn't known."""
        if isinstance(self.found, Survey):
            raise UsageError(
                f"{self.path}: --{view} needs a description of the model: {self.found.reason}"
            )
        return self.found

    def source(self) -> Source:
        """The source, opened with its tensors. Raises CheckpointError."""
        loader = registry.loader(self.known("tensors").loader)
        found = Input(self.path, self.place, loader)
        return open_source(found, replace(self.options, optimizer=False, metadata_only=False))

    def root(self) -> Path | None:
        return self.place if isinstance(self.place, Path) else None


def views(
    subject: Subject, asked: Asked, *, blocks: bool = True, columns: int | None = None
) -> list[View]:
    """The requested views, in a fixed order. Raises CheckpointError.

    blocks: True if the terminal can show block characters. columns: the terminal's width; None: no limit.
    """
    if asked.html is not None:
        require_page("--html", asked.html)
    makers: list[tuple[object, Callable[[], View]]] = [
        (asked.tree, lambda: _tree(subject)),
        (asked.tensors is not None, lambda: _tensors(subject, asked.tensors or "*")),
        (asked.layout, lambda: _layout(subject, blocks)),
        (asked.stats and asked.html is None, lambda: _stats(subject, asked, blocks, columns)),
        (asked.megatron_args, lambda: _megatron_args(subject)),
        (asked.html is not None, lambda: _html(subject, asked)),
    ]
    return [make() for wanted, make in makers if wanted]


def sizes(found: Found) -> Mapping[str, tuple[int, int]]:
    """Name -> (elements, bytes) of every weight."""
    if isinstance(found, Survey):
        return {tensor.name: (prod(tensor.shape), tensor.nbytes) for tensor in found.tensors}
    return {
        key.name: (prod(info.shape), info.nbytes)
        for key, info in found.header.manifest.items()
        if key.slot == WEIGHT
    }


def _tree(subject: Subject) -> View:
    root = tree.tree(sizes(subject.found))
    return View("tree", root.to_json(), tree.lines(root))


def _tensors(subject: Subject, glob: str) -> View:
    if isinstance(subject.found, Survey):
        listed = tensors.fitting(subject.found.tensors, glob)
        _require_some(listed, glob)
        document: Any = {tensor.name: tensor.to_json() for tensor in listed}
        return View("tensors", document, tensors.stored_lines(subject.found.tensors, glob))
    found = tensors.of_source(subject.source(), subject.root(), glob)
    _require_some(found, glob)
    return View(
        "tensors", tensors.to_json(found), [line for each in found for line in each.lines()]
    )


def _require_some(listed: Sequence[object], glob: str) -> None:
    if not listed and glob != "*":
        raise UsageError(
            f"--tensors {glob!r}: fits no tensor; --tree shows the modules, --tensors alone all tensors"
        )


def _layout(subject: Subject, blocks: bool) -> View:
    picture = layout.layout_view(subject.known("layout").header)
    return View("layout", picture.to_json(), picture.lines(blocks=blocks))


def _stats(subject: Subject, asked: Asked, blocks: bool, columns: int | None) -> View:
    found = statistics_of(subject, asked)
    return View("stats", stats.to_json(found), stats.lines(found, blocks=blocks, columns=columns))


def statistics_of(subject: Subject, asked: Asked) -> dict[str, Statistics]:
    """Statistics of all weights. Reads everything."""
    with Progress("reading", shown=not asked.quiet) as progress:
        progress.expect(_weight_bytes(subject.found))
        return all_statistics(
            list(_lazy(subject)), default_workers(writing=False), progress.advance
        )


def _weight_bytes(found: Found) -> int:
    return sum(nbytes for _, nbytes in sizes(found).values())


def _lazy(subject: Subject) -> Iterator[tuple[str, LazyTensor]]:
    if isinstance(subject.found, Survey):
        yield from (
            (tensor.name, tensor.lazy)
            for tensor in subject.found.tensors
            if tensor.lazy is not None
        )
        return
    yield from (
        (key.name, plain(key, tensor))
        for key, tensor in subject.source().tensors()
        if key.slot == WEIGHT
    )


def _megatron_args(subject: Subject) -> View:
    found, notes = megatron_args.megatron_args(
        subject.known("megatron-args").header, subject.root()
    )
    return View(
        "megatron_args", megatron_args.to_json(found, notes), megatron_args.lines(found), notes
    )


def _html(subject: Subject, asked: Asked) -> View:
    assert asked.html is not None
    page = report.report(subject.found, statistics_of(subject, asked) if asked.stats else {})
    content = page.encode()
    write_whole(asked.html, content)
    return View("html", str(asked.html), [f"{asked.html}: {readable(len(content))}"])
