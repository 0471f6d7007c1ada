"""The page of the server: its models, with their files and facts. It needs nothing from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from urllib.parse import quote

from megaconv.commands.inspection import Inspection
from megaconv.commands.units import readable
from megaconv.serving.repository import MAIN, Repository

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
table { border-collapse: collapse } th, td { text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top }
th { font-weight: 500; white-space: nowrap } td.size { text-align: right }
"""


def page(repositories: Mapping[str, Repository]) -> str:
    """The page, as HTML."""
    body = "".join(part for each in repositories.values() for part in _model(each))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>megaconv</title><style>{_STYLE}</style><h1>Models</h1>{body}</html>"
    )


def _model(repository: Repository) -> Iterator[str]:
    revision = repository.revision(MAIN)
    assert revision is not None
    yield f"<h2>{escape(repository.name)}</h2><p>{escape(repository.path)}</p>"
    facts = Inspection(repository.path, "", revision.header).lines()
    yield _table(f"<th>{escape(label)}</th><td>{escape(text)}</td>" for label, text in facts)
    yield "<h3>Files</h3>"
    yield _table(
        f'<td><a href="/{quote(repository.name)}/resolve/{MAIN}/{quote(name)}">{escape(name)}</a></td>'
        f'<td class="size">{readable(file.size)}</td>'
        for name, file in revision.files.items()
    )
    if repository.iterations:
        yield f"<p>Revisions: {escape(', '.join((MAIN, *repository.iterations)))}</p>"


def _table(rows: Iterator[str]) -> str:
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
