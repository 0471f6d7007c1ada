"""One commit on the Hugging Face Hub, and the comparison of what arrived with what was sent: after the commit, size and
hash of every file are requested for that very commit.

The client is huggingface_hub 0.30 to 2.4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from formats.wording import listing
from megaconv.commands.hub_files import Hashes, arrived, hashes_of_content
from megaconv.commands.hub_weights import notice_of, old_weights, require_read
from megaconv.commands.model_card import CARD
from megaconv.errors import CheckpointError, Interrupted, ModelsDiffer
from megaconv.hub_settings import answer_seconds
from megaconv.options import PushOptions

_AT_ONCE = 500
"""Number of files per request to the Hub."""
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 300.0
"""The Hub takes minutes for a commit of many files."""


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


def apart(work: Callable[[], PushReport]) -> PushReport:
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


def commit(
    repository: str,
    files: Mapping[str, Path],
    hashes: Mapping[str, Hashes],
    made: Mapping[str, bytes],
    notices: list[str],
    options: PushOptions,
) -> PushReport:
    """Put files on the Hub in one commit on the branch's present head.

    files: path in the repository -> local file; hashes: of these. made: path -> content, for files that exist only in
    the push. A model card that the repository already has is kept, and then notices about the new one are left out.
    Raises ModelsDiffer if the Hub has other content afterwards, UsageError if old weights would hide the pushed ones,
    and the client's own errors.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api = hub_client()
    revision = options.revision
    _make_repository(api, repository, options)
    branch = api.model_info(repository, revision=revision)
    head = branch.sha
    old = old_weights([each.rfilename for each in branch.siblings or ()], files)
    if not options.replace_weights:
        require_read(repository, old, files)
    if CARD in made and api.get_paths_info(repository, [CARD], revision=head):
        # Keep the card that the repository already has.
        made = {name: content for name, content in made.items() if name != CARD}
        notices = []
    if old and not options.replace_weights:
        notices = [*notices, notice_of(repository, old)]
    removals = [CommitOperationDelete(name) for name in old if options.replace_weights]
    contents: dict[str, str | bytes] = {name: str(file) for name, file in files.items()}
    contents |= made
    hashes = dict(hashes) | {name: hashes_of_content(content) for name, content in made.items()}
    done = api.create_commit(
        repository,
        [
            *(CommitOperationAdd(name, content) for name, content in sorted(contents.items())),
            *removals,
        ],
        commit_message=options.message or "Upload with megaconv",
        revision=revision,
        create_pr=options.create_pr,
        parent_commit=head,
    )
    _require_arrived(api, repository, done.oid, hashes)
    return PushReport(
        repository,
        dict(sorted(hashes.items())),
        commit=done.oid,
        url=str(done.commit_url),
        pull_request=done.pr_url,
        changed=done.oid != head,
        notices=notices,
    )


def _make_repository(api: Any, repository: str, options: PushOptions) -> None:
    """Make the repository, and the branch that the user named, if they don't exist."""
    api.create_repo(repository, private=options.private or None, exist_ok=True)
    revision = options.revision
    is_branch = revision is not None and not revision.startswith("refs/")
    if is_branch and not options.create_pr:
        api.create_branch(repository, branch=str(revision), exist_ok=True)


def _require_arrived(api: Any, repository: str, commit: str, hashes: Mapping[str, Hashes]) -> None:
    """Raises ModelsDiffer, which names the files that differ on the Hub."""
    names = sorted(hashes)
    found: dict[str, Any] = {}
    for start in range(0, len(names), _AT_ONCE):
        paths = api.get_paths_info(repository, names[start : start + _AT_ONCE], revision=commit)
        found |= {entry.path: entry for entry in paths}
    missing = [name for name in names if name not in found]
    other = [name for name in names if name in found and not arrived(found[name], hashes[name])]
    if missing or other:
        what = [
            *([f"lacks {listing(missing)}"] if missing else []),
            *([f"has other content for {listing(other)}"] if other else []),
        ]
        raise ModelsDiffer(
            f"{repository}: the Hub {' and '.join(what)} in commit {commit}; push again, and don't use that commit"
        )


def hub_client(seconds: float = _ANSWER_SECONDS) -> Any:
    """The Hub's client, which sends no telemetry. seconds: the longest time without a byte of an answer.

    The client itself would wait for ever. Raises UsageError for settings that the client can't use.
    """
    answer_seconds()
    from huggingface_hub import HfApi, utils

    http: Any = utils  # its names aren't declared to type checkers
    session = http.get_session()
    if hasattr(session, "timeout"):  # httpx, from huggingface_hub 1.0 on
        session.timeout = seconds
    else:
        session.request = partial(session.request, timeout=seconds)
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
def hub_errors(repository: str) -> Iterator[None]:
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
