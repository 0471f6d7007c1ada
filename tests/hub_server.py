"""A server that speaks as much of the Hugging Face Hub's HTTP API as pushing, listing and downloading take."""

import base64
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE = 4096
"""Files from this size on go by LFS; the real Hub also looks at what is in them."""


class File(NamedTuple):
    content: bytes
    lfs: bool


class Hub(ThreadingHTTPServer):
    """Repositories in memory, and what may go wrong with them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.branches: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, File]] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        """Hashes of the large files that came in, in this order."""
        self.requests: list[str] = []
        self.visibility: dict[str, str] = {}
        self.corrupted: set[str] = set()
        """Paths whose content the server spoils."""
        self.dropped: set[str] = set()
        """Paths that its rules leave out without a word."""
        self.refuses_after_uploads: int | None = None
        self._counting = threading.Lock()
        self.hanging = threading.Event()
        """Set while an upload is waited with, as long as `hangs`."""
        self.hangs = False
        self.dies_at_commit = False
        self.answers: dict[str, int] = {}
        """Status by a part of the path: what the server refuses."""
        self.refuses: Callable[[str], tuple[int, dict[str, str]] | None] = lambda path: None
        """(status, headers) for a path whose request is refused now."""
        self.has_ranges = True
        self.served: dict[str, int] = {}
        """Bytes that went out by the name of the file."""
        self.after_first_range: Callable[[], None] = lambda: None
        """Called once a range has gone out."""
        self.redirects = False
        """True if another host serves large files, as on the real Hub."""
        self.tokens_elsewhere: list[str] = []
        """The tokens that the other host received."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A killed client closes its connection. The traceback would reach a later test's stderr."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def accepts(self, upload: str) -> bool:
        """Note an upload, unless it is to be refused. Several threads may ask at once."""
        with self._counting:
            most = self.refuses_after_uploads
            if most is not None and len(self.uploads) >= most:
                return False
            self.uploads.append(upload)
            return True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        return {
            name: file.content
            for name, file in self.commits[self.branches[repository][branch]].items()
        }

    def commit(self, repository: str, branch: str, files: dict[str, File]) -> str:
        listed = {name: sha256(file.content).hexdigest() for name, file in sorted(files.items())}
        oid = sha1(json.dumps([repository, len(self.commits), listed]).encode()).hexdigest()
        self.commits[oid] = files
        self.branches.setdefault(repository, {})[branch] = oid
        return oid


@contextmanager
def running() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def prepare_client(monkeypatch: pytest.MonkeyPatch, address: str, home: Path) -> None:
    """The environment of a machine whose Hub this is."""
    for name in (
        "HF_HUB_OFFLINE",
        "HF_HUB_CACHE",
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_x",
        "HF_HOME": str(home / "hf-home"),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)


def git_id(content: bytes) -> str:
    return sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class _Request(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.handle_it()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def handle_it(self) -> None:
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        self.server.requests.append(f"{self.command} {path}")
        self.body = self.read_body()
        refused = self.server.refuses(path)
        if refused is not None:
            self.answer({"error": "no"}, *refused)
            return
        for part, status in self.server.answers.items():
            if part in path:
                self.answer({"error": "no"}, status)
                return
        for pattern, method in _ROUTES.items():
            if match := re.fullmatch(pattern, path):
                getattr(self, method)(
                    *match.groups(), **({"query": query} if method == "commit" else {})
                )
                return
        self.answer({"error": f"no route for {path}"}, 404)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(
        self, document: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def die(self) -> None:
        self.close_connection = True
        self.connection.close()

    # Who asks, and repositories.

    def whoami(self) -> None:
        if not self.headers.get("Authorization"):
            self.answer({"error": "no token"}, 401)
            return
        self.answer(
            {"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        )

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.server.address}/{name}"}
        if name in self.server.branches:
            self.answer(url, 409)
            return
        self.server.visibility[name] = asked.get("visibility") or (
            "private" if asked.get("private") else "public"
        )
        self.server.commit(name, "main", {".gitattributes": File(b"*.bin lfs\n", False)})
        self.answer(url)

    def branch(self, repository: str, name: str) -> None:
        branches = self.server.branches[repository]
        if name in branches:
            self.answer({}, 409)
            return
        branches[name] = branches["main"]
        self.answer({})

    def info(self, repository: str, revision: str | None) -> None:
        oid = self.oid(repository, revision)
        if oid is not None:
            names = [{"rfilename": name} for name in self.server.commits[oid]]
            self.answer(
                {
                    "id": repository,
                    "modelId": repository,
                    "sha": oid,
                    "private": False,
                    "siblings": names,
                }
            )

    def oid(self, repository: str, revision: str | None) -> str | None:
        branches = self.server.branches.get(repository, {})
        found = branches.get(
            revision or "main", revision if revision in self.server.commits else None
        )
        if found is None:
            self.answer(
                {}, 404, {"X-Error-Code": "RevisionNotFound" if branches else "RepoNotFound"}
            )
        return found

    # What they hold.

    def listing(self, repository: str, revision: str) -> None:
        oid = self.oid(repository, revision)
        if oid is not None:
            self.answer([_entry(name, file) for name, file in self.server.commits[oid].items()])

    def paths_info(self, repository: str, revision: str) -> None:
        oid = self.oid(repository, revision)
        if oid is not None:
            held = self.server.commits[oid]
            asked = parse_qs(self.body.decode())["paths"]
            self.answer([_entry(name, held[name]) for name in asked if name in held])

    def resolve(self, repository: str, revision: str, name: str) -> None:
        oid = self.oid(repository, revision)
        if oid is None:
            return
        if name not in self.server.commits[oid]:
            self.answer({}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        file, commit = self.server.commits[oid][name], {"X-Repo-Commit": oid}
        if file.lfs and self.server.redirects:
            where = f"http://localhost:{self.server.server_port}/stored/{oid}/{name}"
            self.answer(
                b"", 302, commit | {"Location": where, "X-Linked-Size": str(len(file.content))}
            )
        else:
            self.send(name, file.content, commit)

    def stored(self, oid: str, name: str) -> None:
        self.server.tokens_elsewhere += self.headers.get_all("Authorization", [])
        self.send(name, self.server.commits[oid][name].content, {})

    def send(self, name: str, content: bytes, headers: dict[str, str]) -> None:
        headers = headers | {"ETag": f'"{sha256(content).hexdigest()}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.server.has_ranges:
            self.serve(name, content, 200, headers)
        elif int(asked[1]) >= len(content):
            self.serve(name, b"", 416, headers | {"Content-Range": f"bytes */{len(content)}"})
        else:
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            told = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            self.serve(name, content[first : last + 1], 206, headers | told)
            self.server.after_first_range()

    def serve(self, name: str, content: bytes, status: int, headers: dict[str, str]) -> None:
        if self.command == "GET":
            self.server.served[name] = self.server.served.get(name, 0) + len(content)
        self.answer(content, status, headers)

    # Uploading.

    def validate(self) -> None:
        self.answer({"errors": [], "warnings": []})

    def preupload(self, repository: str, revision: str) -> None:
        held = self.server.commits[self.server.branches[repository].get(revision) or revision]

        def entry(file: dict[str, Any]) -> dict[str, Any]:
            name, lfs = file["path"], file["size"] >= LARGE
            there = (
                {"oid": _entry(name, held[name]).get("lfs", _entry(name, held[name]))["oid"]}
                if name in held
                else {}
            )
            ignored = name in self.server.dropped
            return {
                "path": name,
                "uploadMode": "lfs" if lfs else "regular",
                "shouldIgnore": ignored,
                **there,
            }

        self.answer({"files": [entry(file) for file in json.loads(self.body)["files"]]})

    def batch(self, repository: str) -> None:
        def entry(asked: dict[str, Any]) -> dict[str, Any]:
            if asked["oid"] in self.server.objects:
                return asked
            return {
                **asked,
                "actions": {"upload": {"href": f"{self.server.address}/upload/{asked['oid']}"}},
            }

        objects = [entry(asked) for asked in json.loads(self.body)["objects"]]
        kind = {"Content-Type": "application/vnd.git-lfs+json"}
        self.answer({"transfer": "basic", "objects": objects}, headers=kind)

    def upload(self, oid: str) -> None:
        if self.server.hangs:
            self.server.hanging.set()
            time.sleep(60)
        if not self.server.accepts(oid):
            self.answer({}, 403)
            return
        assert sha256(self.body).hexdigest() == oid
        self.server.objects[oid] = self.body
        self.answer({})

    def commit(self, repository: str, revision: str, query: dict[str, list[str]]) -> None:
        if self.server.dies_at_commit:
            self.die()
            return
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        branch = (
            f"refs/pr/{len(self.server.branches[repository])}"
            if query.get("create_pr")
            else revision
        )
        head = self.server.branches[repository][revision]
        files = dict(self.server.commits[head])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, head):
                self.answer({"error": "the branch has moved"}, 412)
                return
            if line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                files[value["path"]] = File(self.server.objects[value["oid"]], True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        for name in self.server.corrupted & files.keys():
            files[name] = files[name]._replace(content=files[name].content[:-1] + b"?")
        oid = self.server.commit(repository, branch, files)
        url = f"{self.server.address}/{repository}"
        pull = {"pullRequestUrl": f"{url}/discussions/1"} if query.get("create_pr") else {}
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", **pull})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


_REPOSITORY = r"([\w.-]+/[\w.-]+)"
_ROUTES = {
    r"/api/whoami-v2": "whoami",
    r"/api/repos/create": "create",
    r"/api/validate-yaml": "validate",
    rf"/api/models/{_REPOSITORY}/branch/(.+)": "branch",
    rf"/api/models/{_REPOSITORY}/preupload/(.+)": "preupload",
    rf"/api/models/{_REPOSITORY}/commit/(.+)": "commit",
    rf"/api/models/{_REPOSITORY}/tree/(.+)": "listing",
    rf"/api/models/{_REPOSITORY}/paths-info/(.+)": "paths_info",
    rf"/api/models/{_REPOSITORY}(?:/revision/(.+))?": "info",
    rf"/{_REPOSITORY}\.git/info/lfs/objects/batch": "batch",
    rf"/{_REPOSITORY}/resolve/([^/]+)/(.+)": "resolve",
    r"/upload/(\w+)": "upload",
    r"/stored/(\w+)/(.+)": "stored",
}
"""The routes. The first that fits is taken."""


def _entry(name: str, file: File) -> dict[str, Any]:
    found = {"type": "file", "path": name, "size": len(file.content), "oid": git_id(file.content)}
    if file.lfs:
        found["lfs"] = {
            "oid": sha256(file.content).hexdigest(),
            "size": len(file.content),
            "pointerSize": 130,
        }
    return found
