"""Models on the Hugging Face Hub: ids, revisions, what is downloaded, and what happens when the Hub isn't there."""

import json
import socket
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from megaconv.engine.conversion import fingerprint
from megaconv.errors import UsageError
from megaconv.input import find_input
from tests.forks import start
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, finish, on_a_terminal, run

Files = dict[str, bytes]

COMMITS = {"main": "a" * 40, "v2": "b" * 40, "refs/pr/1": "c" * 40}


class Hub(ThreadingHTTPServer):
    """Enough of the Hub for huggingface_hub: one repository, org/name, with a commit for each revision."""

    daemon_threads = True

    def __init__(self, commits: dict[str, Files]) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.commits = commits
        self.downloaded: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        path = path.replace("/api/models/old", "/api/models/org/name").replace(
            "/old/resolve", "/org/name/resolve"
        )
        if path.startswith("/api/models/org/name"):
            self.describe(path.removeprefix("/api/models/org/name"))
        elif path.startswith("/org/name/resolve/"):
            self.send_file(path.removeprefix("/org/name/resolve/"))
        else:
            self.refuse("RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def describe(self, path: str) -> None:
        kind, _, revision = path.removeprefix("/").partition("/")
        commit = COMMITS.get(revision or "main", revision)
        if commit not in self.server.commits:
            self.refuse("RevisionNotFound")
            return
        files = self.server.commits[commit]
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            self.answer(json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": name} for name in files]
            self.answer(
                json.dumps(
                    {"id": "org/name", "modelId": "org/name", "sha": commit, "siblings": siblings}
                ).encode()
            )

    def send_file(self, path: str) -> None:
        commit, _, name = path.partition("/")
        content = self.server.commits[COMMITS.get(commit, commit)][name]
        if self.command == "GET":
            self.server.downloaded.append(name)
        self.answer(
            content, {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMITS.get(commit, commit)}
        )

    def answer(
        self, content: bytes, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, code: str) -> None:
        self.answer(b"{}", {"X-Error-Code": code}, 404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def etag(content: bytes) -> str:
    return sha1(content).hexdigest()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each commit."""
    root = tmp_path_factory.mktemp("models")
    return {
        commit: write_llama(root / revision.replace("/", "-"), layers=1, seed=seed)
        for seed, (revision, commit) in enumerate(COMMITS.items())
    }


@pytest.fixture
def hub(models: dict[str, Path]) -> Iterator[Hub]:
    more = {
        "pytorch_model.bin": b"the same weights again",
        "original/consolidated.00.pth": b"and again",
        "modeling_custom.py": b"import os",
        "picture.png": b"",
        "tokenizer.json": b"{}",
        ".gitattributes": b"",
    }
    commits = {
        commit: {path.name: path.read_bytes() for path in model.iterdir()} | more
        for commit, model in models.items()
    }
    with Hub(commits) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def online(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The environment of a machine whose Hub is this one."""
    prepare(monkeypatch, hub.address, tmp_path)
    return hub


def prepare(monkeypatch: pytest.MonkeyPatch, address: str, home: Path) -> None:
    for name in (
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HF_HUB_DOWNLOAD_TIMEOUT",
        "HF_HUB_ETAG_TIMEOUT",
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HF_ENDPOINT": address,
        "HF_HOME": str(home / "hf-home"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)


def megaconv(*arguments: object, seconds: float = 60) -> Outcome:
    """Run the command in a fork, because huggingface_hub reads its environment at import."""
    return finish(start(*arguments), seconds)


@pytest.mark.parametrize(
    ("place", "revision"),
    [
        ("hf://org/name", "main"),
        ("org/name", "main"),
        ("hf://org/name@v2", "v2"),
        ("org/name@v2", "v2"),
        ("org/name@refs/pr/1", "refs/pr/1"),
        (f"hf://org/name@{COMMITS['v2']}", "v2"),
        ("old", "main"),
        ("hf://old@v2", "v2"),
        ("{hub}/org/name", "main"),
        ("{hub}/org/name/tree/v2", "v2"),
        ("{hub}/org/name/tree/refs%2Fpr%2F1", "refs/pr/1"),
        ("{hub}/org/name/blob/v2/config.json", "v2"),
    ],
)
def test_a_model_is_read_from_the_hub(
    online: Hub, models: dict[str, Path], place: str, revision: str
) -> None:
    outcome = megaconv("fingerprint", place.format(hub=online.address))
    assert (outcome.status, outcome.out) == (
        0,
        fingerprint(models[COMMITS[revision]]).weights + "\n",
    ), outcome.err


def test_only_what_is_needed_is_downloaded(online: Hub) -> None:
    assert megaconv("fingerprint", "hf://org/name", "--cache").status == 0
    assert sorted(online.downloaded) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_downloaded_model_is_not_downloaded_again(online: Hub) -> None:
    first = megaconv("fingerprint", "org/name", "--cache")
    downloads = len(online.downloaded)
    assert megaconv("fingerprint", "org/name").out == first.out
    assert megaconv("inspect", "org/name").status == 0
    assert len(online.downloaded) == downloads


def test_a_model_is_converted_from_the_hub(
    online: Hub, models: dict[str, Path], tmp_path: Path
) -> None:
    outcome = megaconv(
        "convert",
        "--load-dir",
        "org/name@v2",
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--tp",
        2,
        "--verify",
    )
    assert outcome.status == 0, outcome.err
    assert fingerprint(tmp_path / "out") == fingerprint(models[COMMITS["v2"]])
    assert (tmp_path / "out" / "hf" / "tokenizer.json").read_bytes() == b"{}"


def test_stdout_holds_nothing_of_the_download(online: Hub) -> None:
    assert json.loads(megaconv("inspect", "org/name", "--json").out)["family"] == "llama"


@pytest.mark.parametrize("command", ["fingerprint", "inspect", "plan", "scan"])
def test_the_clients_bars_are_for_terminals_alone(
    online: Hub, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    assert "%|" not in megaconv(command, "org/name").err
    monkeypatch.setenv("HF_HOME", str(tmp_path / "once more"))
    assert "%|" not in on_a_terminal(command, "org/name", "--quiet")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "a third time"))
    assert "%|" in on_a_terminal(command, "org/name")


def test_a_local_path_goes_before_the_hub(
    online: Hub, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(models[COMMITS["v2"]])
    monkeypatch.chdir(tmp_path)
    assert (
        megaconv("fingerprint", "org/name").out.strip()
        == fingerprint(models[COMMITS["v2"]]).weights
    )
    assert (
        megaconv("fingerprint", "hf://org/name").out.strip()
        == fingerprint(models[COMMITS["main"]]).weights
    )


@pytest.mark.parametrize("place", ["hf://org/name@v9", "hf://org/other"])
def test_a_model_that_the_hub_does_not_have_is_an_error_in_one_line(
    online: Hub, place: str
) -> None:
    assert_refused(megaconv("inspect", place), 1, place, "Hugging Face Hub")


def test_a_name_that_is_neither_local_nor_on_the_hub_is_reported(online: Hub) -> None:
    looked_for = f"looked for {Path.cwd() / 'org/other'}"
    assert_refused(
        megaconv("inspect", "org/other"),
        2,
        "no such file or directory",
        looked_for,
        "Hugging Face Hub",
    )


@pytest.mark.parametrize("place", ["hf://", "hf://a/b/c", "hf://org/na me"])
def test_an_invalid_hub_id_is_refused_without_a_request(online: Hub, place: str) -> None:
    assert_refused(
        megaconv("inspect", place), 2, "is not a Hub id; expected hf://organisation/name"
    )


@pytest.mark.parametrize("place", ["org/name", "hf://org/name"])
def test_an_unreachable_hub_is_reported_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    port = closed_port()
    prepare(monkeypatch, f"http://127.0.0.1:{port}", tmp_path)
    outcome = megaconv("inspect", place, seconds=15)
    status, readings = (2, ["no such file or directory"]) if place == "org/name" else (1, [])
    reached = f"http://127.0.0.1:{port} can't be reached"
    assert_refused(outcome, status, f"{place}: ", *readings, "Hugging Face Hub", reached)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def test_a_silent_hub_is_reported_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        prepare(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "2")
        outcome = megaconv("inspect", "org/name", seconds=15)
    assert_refused(outcome, 2, "no such file or directory", "Hugging Face Hub")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_HUB_ETAG_TIMEOUT", "0.5"),
        ("HF_HUB_ETAG_TIMEOUT", "soon"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", ""),
        ("HF_ENDPOINT", "localhost:8700"),
        ("HF_ENDPOINT", ""),
        ("HF_TOKEN", "hf_ä"),
    ],
)
@pytest.mark.parametrize("words", ["inspect org/name", "push {model} org/name"])
def test_a_setting_that_the_client_cannot_use_is_named(
    online: Hub,
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    command = words.format(model=models[COMMITS["main"]]).split()
    outcome = megaconv(*command)
    assert_refused(outcome, 2, name)
    assert "hf_ä" not in outcome.err


def test_without_the_hub_a_model_that_was_downloaded_before_is_used(
    online: Hub, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = megaconv("fingerprint", "org/name", "--cache").out
    assert wanted.strip() == fingerprint(models[COMMITS["main"]]).weights
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    outcome = megaconv("fingerprint", "org/name")
    assert (outcome.out, "using the earlier download" in outcome.err) == (wanted, True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert megaconv("fingerprint", "org/name").out == wanted


def test_offline_mode_is_reported(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(megaconv("inspect", "org/name"), 2, "no such file or directory", "offline")


def test_a_misspelled_path_is_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "Llama-2-7b").mkdir()
    for word in ("llama-2-7b", "Llama2-7b"):
        outcome = megaconv("inspect", tmp_path / word)
        assert_refused(outcome, 2, f"did you mean {tmp_path}/Llama-2-7b?")


@pytest.mark.parametrize("place", ["nowhere", "./nowhere", "some/nowhere", "a/b/nowhere"])
def test_a_wrong_path_says_where_it_was_looked_for_whatever_it_looks_like(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(
        megaconv("inspect", place),
        2,
        "no such file or directory",
        f"looked for {Path.cwd() / place}",
    )


def test_a_path_of_python_is_never_a_hub_id() -> None:
    with pytest.raises(UsageError) as refused:
        find_input(Path("org/name"))
    assert (refused.value.code, "Hub" in str(refused.value)) == ("no-such-input", False)


def test_a_page_that_is_no_models_is_refused() -> None:
    assert_refused(
        run("inspect", "https://huggingface.co/datasets/org/name"), 2, "not a model's page"
    )


def test_a_repository_in_the_cache_stands_for_its_branch_main(online: Hub, tmp_path: Path) -> None:
    for place in ("org/name@v2", "org/name"):
        assert megaconv("fingerprint", place).status == 0
    cached = tmp_path / "hf-home" / "hub" / "models--org--name"
    assert run("fingerprint", cached).out == megaconv("fingerprint", "org/name").out
    (cached / "refs" / "main").unlink()
    assert_refused(run("fingerprint", cached), 2, "2 snapshots", str(cached))


@pytest.mark.parametrize(
    ("others", "skipped"),
    [
        (
            (
                "consolidated.safetensors",
                "model.fp16.safetensors",
                "model-00001-of-00002.safetensors",
            ),
            True,
        ),
        (("adapter_config.json",), False),
    ],
)
def test_one_set_of_weights_is_downloaded(
    online: Hub, others: tuple[str, ...], skipped: bool
) -> None:
    online.commits[COMMITS["main"]] |= dict.fromkeys(others, b'{"of": "its own"}')
    assert megaconv("fingerprint", "org/name").status == 0
    assert [name in online.downloaded for name in others] == [not skipped] * len(others)


@pytest.mark.parametrize("file", ["model-Q4_K_M.gguf", "README.md"])
def test_a_repository_without_a_model_is_reported_with_its_files(online: Hub, file: str) -> None:
    online.commits[COMMITS["main"]] = {file: b"GGUF"}
    outcome = megaconv("inspect", "hf://org/name")
    assert_refused(outcome, 3, "hf://org/name", file, "org/name@BRANCH", "hf download org/name")


def test_a_run_of_megatron_in_a_repository_is_not_read_as_a_model(online: Hub) -> None:
    """`push --as-is` puts it there."""
    tracker = "latest_checkpointed_iteration.txt"
    files = (tracker, "megaconv.json", "hf/config.json", "release/mp_rank_00/model_optim_rng.pt")
    online.commits[COMMITS["main"]] = dict.fromkeys(files, b"{}")
    outcome = megaconv("inspect", "hf://org/name")
    assert_refused(outcome, 3, "hf://org/name", tracker, "hf download org/name")
