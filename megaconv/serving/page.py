"""The page of the server: its models, with their files and facts. It needs nothing from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from urllib.parse import quote

from megaconv.commands.comparison import diff_sources
from megaconv.commands.inspected import Inspection
from megaconv.commands.movement import movement
from megaconv.commands.units import readable
from megaconv.commands.views.look import still_page
from megaconv.commands.views.report import movement_report
from megaconv.engine.plan import default_workers
from megaconv.serving.repository import MAIN, Repository, Revision


def page(repositories: Mapping[str, Repository]) -> str:
    """The page, as HTML."""
    body = "".join(part for each in repositories.values() for part in _model(each))
    body += "".join(_comparison(repositories))
    return still_page("Models", body)


def _model(repository: Repository) -> Iterator[str]:
    revision = repository.revision(MAIN)
    assert revision is not None
    yield f"<h2>{escape(repository.name)}</h2><p>{escape(repository.path)}</p>"
    facts = Inspection(repository.path, "", revision.header).lines()
    yield _table(f"<th>{escape(label)}</th><td>{escape(text)}</td>" for label, text in facts)
    yield "<h3>Files</h3>"
    yield _table(
        f'<td><a href="/{quote(repository.name)}/resolve/{MAIN}/{quote(name)}">{escape(name)}</a></td>'
        f'<td class="n">{readable(file.size)}</td>'
        for name, file in revision.files.items()
    )
    if repository.iterations:
        yield f"<p>Revisions: {escape(', '.join((MAIN, *repository.iterations)))}</p>"


def _table(rows: Iterator[str]) -> str:
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table>{lines}</table></div>'


def _comparison(repositories: Mapping[str, Repository]) -> Iterator[str]:
    """A form that compares two revisions."""
    places = [
        f"{each.name}@{revision}"
        for each in repositories.values()
        for revision in (MAIN, *each.iterations)
    ]
    if len(places) < 2:
        return
    options = "".join(f"<option>{escape(place)}</option>" for place in places)
    yield "<h2>Compare</h2><form class=controls action=/diff>"
    yield "".join(
        f'<label>{side.upper()} <select name="{side}">{options}</select></label> ' for side in "ab"
    )
    yield "<button>Compare all tensors</button></form>"


def compared(a: str, b: str, left: Revision, right: Revision) -> str:
    """The report of `megaconv diff --html` for two revisions, as HTML. Reads all tensors of both.

    a, b: their names. Raises CheckpointError.
    """
    workers = default_workers(writing=False)
    found = diff_sources(left.source, right.source, workers)
    moved = movement(left.source, right.source, workers)
    return movement_report(a, b, left.header, found, moved)
