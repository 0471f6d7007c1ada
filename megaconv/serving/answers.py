"""The answers to requests, as the Hub's clients expect them. Nothing here knows sockets.

    /                                               a page that lists models and files
    /diff?a=OWNER/MODEL@REVISION&b=…                a page that compares all tensors of two of them
    /api/models                                     the models
    /api/models/OWNER/MODEL[/revision/REVISION]     what `model_info` returns
    /api/models/OWNER/MODEL/tree/REVISION[/PATH]    what `list_repo_tree` returns
    /api/models/OWNER/MODEL/refs                    the revisions
    /OWNER/MODEL/resolve/REVISION/FILE              a file, or a range of it

Names of small errors (`X-Error-Code`) are the Hub's: its clients tell a missing file from a missing model by them. No
hash of contents is sent, because none was computed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from megaconv.serving.page import compared, page
from megaconv.serving.ranges import NotSatisfiable, asked_range
from megaconv.serving.repository import MAIN, Repository, Revision

WINDOW = 4 << 20
"""Bytes of a file that are computed at once."""
Query = Mapping[str, list[str]]
_NAME = r"([^/]+/[^/]+)"
_WHEN = "1970-01-01T00:00:00.000Z"
"""A time for clients that parse one. A checkpoint has no such time."""


@dataclass(frozen=True)
class Answer:
    """An answer to a request."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int = 0
    """Bytes of the body."""
    body: Callable[[], Iterator[bytes | bytearray]] = lambda: iter(())
    """Computes the body, piece by piece."""


@dataclass(frozen=True)
class Request:
    """The headers and the query of a request."""

    range: str | None
    """The header Range."""
    if_range: str | None
    """The header If-Range: the ETag of the file whose range is wanted. None: of any."""
    query: Query


def _whole(status: int, content: bytes, kind: str, headers: Mapping[str, str] = {}) -> Answer:
    return Answer(status, {"Content-Type": kind, **headers}, len(content), lambda: iter((content,)))


def document(value: Any, status: int = 200, **headers: str) -> Answer:
    """A JSON document."""
    sent = {name.replace("_", "-"): text for name, text in headers.items()}
    return _whole(status, json.dumps(value).encode(), "application/json", sent)


def refusal(status: int, message: str, code: str = "") -> Answer:
    """An error, with the Hub's own name for it if it has one."""
    named = {"X_Error_Code": code} if code else {}
    return document({"error": message}, status, X_Error_Message=message, **named)


def answer(
    repositories: Mapping[str, Repository],
    target: str,
    asked: str | None = None,
    if_range: str | None = None,
) -> Answer:
    """The answer to a GET request.

    target: path and query of the request. asked, if_range: its headers Range and If-Range.
    """
    parts = urlsplit(target)
    path, query = unquote(parts.path), parse_qs(parts.query)
    if path == "/":
        return _whole(200, page(repositories).encode(), "text/html; charset=utf-8")
    if path == "/diff":
        return _diff(repositories, query)
    if path.rstrip("/") == "/api/models":
        return document([_listed(each) for each in repositories.values()])
    for pattern, handle in _ROUTES:
        found = re.fullmatch(pattern, path)
        if found is None:
            continue
        name, *rest = found.groups()
        repository = repositories.get(name)
        if repository is None:
            return refusal(404, f"{name} is not served here", "RepoNotFound")
        return handle(repository, *rest, Request(asked, if_range, query))
    return refusal(404, f"nothing is served at {path}")


def _diff(repositories: Mapping[str, Repository], query: Query) -> Answer:
    """A page that compares two revisions. It reads all tensors of both."""
    pair = [_found(repositories, query.get(side, [""])[0]) for side in ("a", "b")]
    left, right = pair
    if left is None or right is None:
        return refusal(404, "/diff?a=OWNER/MODEL@REVISION&b=OWNER/MODEL@REVISION: no such revision")
    report = compared(query["a"][0], query["b"][0], left, right)
    return _whole(200, report.encode(), "text/html; charset=utf-8")


def _found(repositories: Mapping[str, Repository], place: str) -> Revision | None:
    name, _, revision = place.partition("@")
    repository = repositories.get(name)
    return None if repository is None else repository.revision(revision or MAIN)


def _listed(repository: Repository) -> dict[str, Any]:
    return {"id": repository.name, "modelId": repository.name, "private": False}


def _with_revision(handle: Callable[..., Answer]) -> Callable[..., Answer]:
    """Let a handler take the revision itself in place of its name."""

    def named(
        repository: Repository, revision: str | None, rest: str | None, asked: Request
    ) -> Answer:
        name = revision or MAIN
        found = repository.revision(name)
        if found is None:
            return refusal(404, f"{repository.name} has no revision {name}", "RevisionNotFound")
        return handle(repository, found, rest, asked)

    return named


@_with_revision
def _info(repository: Repository, revision: Revision, _rest: str | None, asked: Request) -> Answer:
    with_sizes = "blobs" in asked.query
    siblings = [
        {"rfilename": name} | ({"size": file.size} if with_sizes else {})
        for name, file in revision.files.items()
    ]
    size = {"parameters": {}, "total": revision.header.parameters}
    return document(
        {
            **_listed(repository),
            "_id": revision.sha[:24], "sha": revision.sha, "author": repository.name.partition("/")[0], "gated": False, "disabled": False,
            "downloads": 0, "likes": 0, "tags": ["safetensors"], "library_name": "transformers", "createdAt": _WHEN, "lastModified": _WHEN,
            "siblings": siblings, "safetensors": size,
        }
    )  # fmt: skip


@_with_revision
def _tree(repository: Repository, revision: Revision, below: str | None, _asked: Request) -> Answer:
    prefix = f"{below.strip('/')}/" if below and below.strip("/") else ""
    entries = [
        {"type": "file", "path": name, "size": file.size, "oid": revision.tag(name)}
        for name, file in revision.files.items()
        if name.startswith(prefix)
    ]
    if prefix and not entries:
        return refusal(404, f"{repository.name} has no {below}", "EntryNotFound")
    return document(entries)


def _refs(repository: Repository, _asked: Request) -> Answer:
    branches = []
    for name in (MAIN, *repository.iterations):
        found = repository.revision(name)
        assert found is not None
        branches.append({"name": name, "ref": f"refs/heads/{name}", "targetCommit": found.sha})
    return document({"branches": branches, "converts": [], "tags": []})


@_with_revision
def _resolve(repository: Repository, revision: Revision, name: str, asked: Request) -> Answer:
    file = revision.files.get(name)
    if file is None:
        return refusal(404, f"{repository.name} has no {name}", "EntryNotFound")
    tag = f'"{revision.tag(name)}"'
    # A client that continues a download of an earlier file needs the whole new one.
    is_same = asked.if_range is None or asked.if_range.strip() == tag
    headers = {
        "ETag": tag,
        "X-Repo-Commit": revision.sha,
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    try:
        part = asked_range(asked.range if is_same else None, file.size)
    except NotSatisfiable:
        return Answer(416, {**headers, "Content-Range": f"bytes */{file.size}"})
    status, wanted = (200, range(file.size)) if part is None else (206, part)
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{file.size}"

    def body() -> Iterator[bytearray]:
        for start in range(wanted.start, wanted.stop, WINDOW):
            yield revision.read(name, start, min(start + WINDOW, wanted.stop))

    return Answer(status, headers, len(wanted), body)


_ROUTES: tuple[tuple[str, Callable[..., Answer]], ...] = (
    (rf"/api/models/{_NAME}/refs", _refs),
    (rf"/api/models/{_NAME}/tree/([^/]+)(/.*)?", _tree),
    (rf"/api/models/{_NAME}(?:/revision/([^/]+))?()", _info),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _resolve),
)
