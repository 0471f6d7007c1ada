"""Puts a model on the Hugging Face Hub in one commit, and compares what arrived with what was sent.

Large files are uploaded before the commit and change no branch. An interrupted push therefore leaves the repository
unchanged, and the same command then sends only the files that the Hub doesn't have yet. The Hub refuses the commit if
the branch has moved since the push began. After the commit, size and hash of every file are requested for that very
commit:

    LFS or xet      lfs.sha256 is the file's SHA-256, lfs.size its size
    others          blob_id is git's SHA-1: over `blob SIZE`, a zero byte, and the content

The client is huggingface_hub 0.30 to 2.4.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from formats.ceilings import RECORD_BYTES
from formats.partial_files import fetch_whole
from formats.regular_files import read_small
from megaconv import registry
from megaconv.commands.model_card import CARD, describe, published_record
from megaconv.commands.recorded import require_recorded
from megaconv.engine.completeness import TOKENIZER, has_tokenizer
from megaconv.engine.conversion import convert
from megaconv.engine.preparation import open_source
from megaconv.engine.record import RECORD_NAME, find_record
from megaconv.engine.report import Report
from megaconv.errors import CheckpointError, Interrupted, ModelsDiffer, UnsafeContent, UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.hub import nothing_at
from megaconv.input import Input
from megaconv.local_paths import local_path
from megaconv.model.check import listing
from megaconv.options import ConvertOptions, LoadOptions, PushOptions
from megaconv.signatures.bundle import SIGNATURE_NAME, read_bundle
from megaconv.store_inputs import is_store, stand_in

_log = logging.getLogger("megaconv")

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_AT_ONCE = 500
"""Number of files per request to the Hub."""
_READ = 8 << 20
_POLL_SECONDS = 0.2
_ADAPTER = "adapter_config.json"


class Hashes(NamedTuple):
    """Size and hashes of a file to be pushed."""

    size: int
    sha256: str
    blob_id: str
    """git's hash of the file."""


@dataclass(frozen=True, repr=False)
class PushReport:
    """The result of a push; for a planned push, the expected result."""

    repository: str
    files: Mapping[str, Hashes]
    """Hashes by path in the repository."""
    commit: str | None = None
    url: str | None = None
    pull_request: str | None = None
    changed: bool = True
    """False if the Hub had all files already."""
    notices: Sequence[str] = field(default_factory=tuple)
    missing: Sequence[str] = ()
    """Parts that the model lacks: `tokenizer`, as in a conversion's report."""

    def __repr__(self) -> str:
        done = "planned" if self.commit is None else f"commit {self.commit}"
        return f"<PushReport: {self.repository}, {self.nbytes:,} bytes in {len(self.files)} files, {done}>"

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "repository": self.repository,
            "commit": self.commit,
            "url": self.url,
            "pull_request": self.pull_request,
            "changed": self.changed,
            "files": {
                name: {"size": file.size, "sha256": file.sha256}
                for name, file in self.files.items()
            },
            "notices": list(self.notices),
            "missing": list(self.missing),
        }


def push(
    directory: str | Path, repository: str, options: PushOptions, *, dry_run: bool = False
) -> PushReport:
    """Push a finished output.

    Raises CheckpointError: UsageError for a directory that can't be pushed, ModelsDiffer if the Hub has other content
    afterwards.
    """
    require_repository(repository)
    is_stored = is_store(str(directory))
    path = stand_in(str(directory)) if is_stored else local_path(directory)
    kind = _kind(path)
    if not dry_run:
        require_token(repository)
    if kind in ("hf", "peft") or options.as_is:
        return _push_files(path, kind, repository, options, dry_run, _missing(path, kind))
    if dry_run:
        raise UsageError(
            f"--dry-run: {directory} would be converted to hf first; convert it, then push that, or add --as-is"
        )
    # A directory beside the source most likely has enough space for a second copy.
    beside = None if is_stored else path.resolve().parent
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.push-", dir=beside) as room:
        made = Path(room) / "hf"
        done = convert(
            path, made, "hf", ConvertOptions(load=LoadOptions(options.config)), planned=_warn
        )
        return _push_files(made, "hf", repository, options, dry_run, done.missing)


def _warn(planned: Report) -> None:
    """Log the notices before the copy and the uploads, which take long: for example, which parts will be missing."""
    for notice in planned.notices:
        _log.warning("%s", notice)


def require_repository(name: str) -> None:
    """Raises UsageError if the name isn't a repository's."""
    if not _REPOSITORY.fullmatch(name):
        raise UsageError(f"{name}: is not the name of a repository; expected organisation/name")


def require_token(repository: str) -> None:
    """Raises CheckpointError if the Hub doesn't recognise the user's token. Called before anything is read or sent."""
    with _hub_errors(repository):
        _api().whoami()


def _kind(path: Path) -> str:
    """The loader's name for a finished model; `peft` for an adapter."""
    if not path.exists():
        raise nothing_at(path)
    if not path.is_dir():
        raise UsageError(f"{path}: is not a directory; push takes a finished output")
    if (path / _ADAPTER).is_file() and not (path / CONFIG_NAME).is_file():
        return "peft"
    return registry.detect(path).name


def _missing(path: Path, kind: str) -> tuple[str, ...]:
    """The parts that a finished Hugging Face directory lacks. A warning names them before anything is sent."""
    if kind != "hf" or has_tokenizer(file.name for file in path.iterdir()):
        return ()
    _log.warning(
        "%s: has no tokenizer, and so won't the repository; the original's files belong there first",
        path,
    )
    return (TOKENIZER,)


def _push_files(
    path: Path,
    kind: str,
    repository: str,
    options: PushOptions,
    dry_run: bool,
    missing: Sequence[str],
) -> PushReport:
    files = _files(path, options)
    fetch_whole(files.values())  # files of a store: the Hub wants hashes before the content
    notices = list[str]()
    made: dict[str, bytes] = {}
    is_signed = SIGNATURE_NAME in files
    if kind != "peft":
        found = Input(str(path), path, registry.loader(kind))
        source = open_source(
            found,
            LoadOptions(options.config, metadata_only=True, optimizer=False, own_names=True),
        )
        require_recorded(found, source, options.config, is_signed=is_signed)
        if options.card and CARD not in files and not is_signed:
            made[CARD], notices = describe(path, repository, source.header, find_record(path))
        if RECORD_NAME in files and find_record(path) is not None and not is_signed:
            made[RECORD_NAME] = published_record(read_small(files.pop(RECORD_NAME), RECORD_BYTES))
    hashes = {name: _hashes(file) for name, file in files.items()}
    if is_signed:
        notices += _signed_notices(path, hashes)
    if dry_run:
        hashes |= {name: _hashes_of(content) for name, content in made.items()}
        return PushReport(
            repository, dict(sorted(hashes.items())), notices=notices, missing=missing
        )
    with _hub_errors(repository):
        report = _beside(lambda: _commit(repository, files, hashes, made, notices, options))
    return replace(report, missing=missing)


def _signed_notices(path: Path, hashes: Mapping[str, Hashes]) -> list[str]:
    """Notices about a sealed directory, which is pushed as it was signed, without a model card.

    Raises ModelsDiffer (`changed-since-signed`) if a file was changed or added since.
    """
    statement = read_bundle(path / SIGNATURE_NAME).statement()
    if (statement.method.name, statement.method.hash_type) != ("files", "sha256"):
        return [f"{SIGNATURE_NAME}: was not compared with the files; megaconv verify does it"]
    ignored = {*statement.method.ignore_paths, SIGNATURE_NAME}
    other = [
        name
        for name, each in hashes.items()
        if name.partition("/")[0] not in ignored
        and name not in ignored
        and statement.digests.get(name) != each.sha256
    ]
    if other:
        raise ModelsDiffer(
            f"{path}: is not as it was signed: {listing(other)}; seal it again with --overwrite, or remove {SIGNATURE_NAME}",
            code="changed-since-signed",
        )
    absent = [name for name in statement.digests if name not in hashes]
    if absent:
        return [f"the signature is about files that are not pushed: {listing(absent)}"]
    return []


def _beside(work: Callable[[], PushReport]) -> PushReport:
    """The result of work in a separate thread.

    An interruption doesn't wait for it; the client would wait for its uploads.
    """
    done: Future[PushReport] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, name="push", daemon=True).start()
    while True:
        try:
            return done.result(_POLL_SECONDS)
        except FutureTimeout:
            if done.done():  # it is the work's own timeout
                raise


def _files(path: Path, options: PushOptions) -> dict[str, Path]:
    """All files below a directory that are to be pushed.

    Raises UnsafeContent for a link that leads out of the directory.
    """
    found: dict[str, Path] = {}
    top = path.resolve()
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".git") and name != ".cache"
        )
        for name in sorted(names):
            file = Path(folder) / name
            below = file.relative_to(path).as_posix()
            if not _is_asked_for(below, options):
                continue
            real = file.resolve()
            if top not in real.parents and real.parent.name != "blobs":
                # Links to `blobs` are those of the Hub's own cache.
                raise UnsafeContent(
                    f"{file}: is a link to {real}, outside of the directory that is pushed"
                )
            if not real.is_file():
                raise UsageError(f"{file}: is not a regular file")
            found[below] = file
    if not found:
        raise UsageError(f"{path}: has no file that --include and --exclude leave to push")
    return found


def _is_asked_for(name: str, options: PushOptions) -> bool:
    included = not options.include or any(fnmatch(name, pattern) for pattern in options.include)
    return included and not any(fnmatch(name, pattern) for pattern in options.exclude)


def _hashes(file: Path) -> Hashes:
    size = file.stat().st_size
    sha256, blob = hashlib.sha256(), _git_hash(size)
    with file.open("rb") as content:
        while block := content.read(_READ):
            sha256.update(block)
            blob.update(block)
    return Hashes(size, sha256.hexdigest(), blob.hexdigest())


def _hashes_of(content: bytes) -> Hashes:
    blob = _git_hash(len(content))
    blob.update(content)
    return Hashes(len(content), hashlib.sha256(content).hexdigest(), blob.hexdigest())


def _git_hash(size: int) -> Any:
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


def _commit(
    repository: str,
    files: Mapping[str, Path],
    hashes: Mapping[str, Hashes],
    made: Mapping[str, bytes],
    notices: list[str],
    options: PushOptions,
) -> PushReport:
    from huggingface_hub import CommitOperationAdd

    api = _api()
    api.create_repo(repository, private=options.private or None, exist_ok=True)
    revision = options.revision
    is_branch = revision is not None and not revision.startswith("refs/")
    if is_branch and not options.create_pr:
        api.create_branch(repository, branch=str(revision), exist_ok=True)
    head = api.model_info(repository, revision=revision).sha
    if CARD in made and api.get_paths_info(repository, [CARD], revision=head):
        # Keep the card that the repository already has.
        made = {name: content for name, content in made.items() if name != CARD}
        notices = []
    contents: dict[str, str | bytes] = {name: str(file) for name, file in files.items()}
    contents |= made
    hashes = dict(hashes) | {name: _hashes_of(content) for name, content in made.items()}
    commit = api.create_commit(
        repository,
        [CommitOperationAdd(name, content) for name, content in sorted(contents.items())],
        commit_message=options.message or "Upload with megaconv",
        revision=revision,
        create_pr=options.create_pr,
        parent_commit=head,
    )
    _require_arrived(api, repository, commit.oid, hashes)
    return PushReport(
        repository, dict(sorted(hashes.items())), commit.oid, str(commit.commit_url), commit.pr_url, commit.oid != head, notices
    )  # fmt: skip


def _require_arrived(api: Any, repository: str, commit: str, hashes: Mapping[str, Hashes]) -> None:
    """Raises ModelsDiffer, which names the files that differ on the Hub."""
    names = sorted(hashes)
    found: dict[str, Any] = {}
    for start in range(0, len(names), _AT_ONCE):
        paths = api.get_paths_info(repository, names[start : start + _AT_ONCE], revision=commit)
        found |= {entry.path: entry for entry in paths}
    missing = [name for name in names if name not in found]
    other = [name for name in names if name in found and not _same(found[name], hashes[name])]
    if missing or other:
        what = [
            *([f"lacks {listing(missing)}"] if missing else []),
            *([f"has other content for {listing(other)}"] if other else []),
        ]
        raise ModelsDiffer(
            f"{repository}: the Hub {' and '.join(what)} in commit {commit}; push again, and don't use that commit"
        )


def _same(entry: Any, hashes: Hashes) -> bool:
    if entry.lfs is not None:
        return (entry.lfs.sha256, entry.lfs.size) == (hashes.sha256, hashes.size)
    return (entry.blob_id, entry.size) == (hashes.blob_id, hashes.size)


def _api() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi

    return HfApi()


_REASONS = {
    401: "the Hub doesn't know who is pushing; run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there, or the repository's page must grant access first",
    404: "there is no such repository or revision, or the token may not see it",
    409: "this name exists already, or another push ran at the same time; push again",
    412: "the branch has changed since the push began; look at the new commits, then push again",
    413: "a file is larger than the Hub takes",
    429: "the Hub asks for fewer requests; wait, then push again",
}


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Turn the client's errors into one-line errors. An interruption says how to continue."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            "the repository is unchanged; the same command uploads the remaining files"
        ) from None
    except CheckpointError:
        raise
    except LocalTokenNotFoundError as error:
        raise CheckpointError(f"{repository}: {_REASONS[401]}", code="hub-refused") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        reason = _REASONS.get(status, _first_line(error))
        raise CheckpointError(
            f"{repository}: the Hub refused ({status}): {reason}", code="hub-refused"
        ) from error
    except (
        Exception
    ) as error:  # the client's network errors have no common class, and some are of other packages
        raise CheckpointError(
            f"{repository}: the push did not complete: {_first_line(error)}; the same command uploads the remaining files",
            code="hub-unreachable",
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
