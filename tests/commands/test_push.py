"""Pushing to the Hub: the real client against a server that speaks the Hub's API, and what happens when it fails half-way."""

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import megaconv
from megaconv.commands.model_card import CARD
from tests import hub_server
from tests.conftest import FIXTURES
from tests.forks import start
from tests.hub_server import Hub
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, finish, run, unreadable
from tests.signatures.made import write_keys

NAME = "org/tuned"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded model."""
    root = tmp_path_factory.mktemp("models")
    source = write_llama(root / "source", layers=1)
    (source / "tokenizer.json").write_text("{}")
    megaconv.convert(source, root / "core", saver="core", tp=2)
    return root / "core"


@pytest.fixture(scope="module")
def model(core: Path) -> Path:
    """A Hugging Face directory of ours, its weights in several files."""
    megaconv.convert(core, core.parent / "hf", saver="hf", max_shard_size=20_000)
    return core.parent / "hf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server.running() as server:
        hub_server.prepare_client(monkeypatch, server.address, tmp_path)
        yield server


def push(*arguments: object) -> Outcome:
    """Run the command in a fork, because huggingface_hub reads its environment at import."""
    return finish(start("push", *arguments), 60)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_push_uploads_every_byte_and_a_second_push_does_nothing(hub: Hub, model: Path) -> None:
    outcome = push(model, NAME, "--private", "--json")
    assert outcome.status == 0, outcome.err
    report = json.loads(outcome.out)
    assert report["commit"] == hub.branches[NAME]["main"]
    there = hub.files(NAME)
    card = there.pop("README.md").decode()
    record, ours = (
        json.loads(there.pop("megaconv.json")),
        json.loads((model / "megaconv.json").read_text()),
    )
    assert (record["source"]["path"], ours["source"]["path"]) == (
        "core",
        str(model.parent / "core"),
    )
    assert record | {"source": ours["source"]} == ours
    assert there | {"megaconv.json": contents(model)["megaconv.json"]} == contents(model) | {
        ".gitattributes": there[".gitattributes"]
    }
    assert hub.visibility[NAME] == "private"
    metadata = yaml.safe_load(card.split("---")[1])
    assert (metadata["library_name"], "license" in metadata) == ("transformers", False)
    assert json.loads((model / "megaconv.json").read_text())["fingerprint"] in card
    assert "no licence" in report["notices"][0]
    again = push(model, NAME)
    assert (again.status, "nothing to do" in again.out) == (0, True), again.err
    assert "No files have been modified" not in again.err
    assert len(hub.commits) == 2  # the one that made the repository, and ours


def test_an_interrupted_push_leaves_the_branch_alone_and_goes_on_where_it_stopped(
    hub: Hub, model: Path
) -> None:
    hub.refuses_after_uploads = 1
    assert push(model, NAME).status == 1
    assert list(hub.files(NAME)) == [".gitattributes"]
    hub.refuses_after_uploads, hub.dies_at_commit = None, True
    assert_refused(push(model, NAME), 1, NAME, "the same command uploads the remaining files")
    assert list(hub.files(NAME)) == [".gitattributes"]
    hub.dies_at_commit = False
    assert push(model, NAME).status == 0
    assert len(hub.uploads) == len(set(hub.uploads)) > 1  # nothing twice
    assert hub.files(NAME).keys() >= contents(model).keys()


def test_ctrl_c_says_how_to_go_on(hub: Hub, model: Path) -> None:
    hub.hangs = True
    process = start("push", model, NAME)
    assert hub.hanging.wait(30)
    process.send_signal(signal.SIGINT)
    outcome = finish(process, 20)
    assert (outcome.status, "the same command uploads the remaining files" in outcome.err) == (
        130,
        True,
    ), outcome
    assert list(hub.files(NAME)) == [".gitattributes"]


def test_push_finds_files_that_the_hub_damaged_or_dropped(hub: Hub, model: Path) -> None:
    weights = next(name for name in contents(model) if name.startswith("model-00001"))
    hub.corrupted = {weights}
    hub.dropped = {"generation_config.json", "config.json"}
    outcome = push(model, NAME)
    assert_refused(outcome, 4, NAME, weights, "config.json", hub.branches[NAME]["main"])


def test_old_weights_never_hide_the_pushed_ones(hub: Hub, model: Path, tmp_path: Path) -> None:
    """transformers reads a single file first, then an index of shards."""
    single = write_llama(tmp_path / "single", layers=1, seed=5)
    (single / "tokenizer.json").write_text("{}")
    assert push(single, NAME).status == 0
    before = hub.branches[NAME]["main"]
    outcome = push(model, NAME)
    assert_refused(outcome, 2, NAME, "model.safetensors", "--replace-weights")
    assert hub.branches[NAME]["main"] == before
    assert push(model, NAME, "--replace-weights").status == 0
    shards = {name for name in contents(model) if "safetensors" in name}
    assert {name for name in hub.files(NAME) if "safetensors" in name} == shards

    outcome = push(single, NAME, "--json")
    assert outcome.status == 0
    (notice,) = json.loads(outcome.out)["notices"]
    assert all(name in notice for name in (*shards, "--replace-weights"))
    assert hub.files(NAME).keys() >= {*shards, "model.safetensors"}
    assert push(single, NAME, "--include", "*.json").status == 0


def test_a_pull_request_or_a_branch_leaves_main_as_it_is(hub: Hub, model: Path) -> None:
    assert (
        push(
            model, NAME, "--revision", "v2", "--include", "*.json", "--exclude", "megaconv*"
        ).status
        == 0
    )
    assert set(hub.files(NAME, "v2")) == {".gitattributes", "README.md", "config.json", *(
        name for name in contents(model) if name.endswith(".json") and not name.startswith("megaconv")
    )}  # fmt: skip
    outcome = push(model, NAME, "--create-pr", "--no-card")
    assert (outcome.status, "discussions" in outcome.out) == (0, True), outcome.err
    assert list(hub.files(NAME)) == [".gitattributes"]


def test_a_card_that_is_there_stays_and_one_of_the_source_is_where_the_licence_comes_from(
    hub: Hub, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "source", layers=1)
    (source / "README.md").write_text(
        "---\nlicense: apache-2.0\nbase_model: org/base\ntags: [tiny]\n---\n# Hello\n"
    )
    target = tmp_path / "out"
    outcome = finish(
        start(
            "convert", "--load-dir", source, "--save-dir", target, "--saver", "hf", "--push", NAME
        ),
        60,
    )
    assert outcome.status == 0, outcome.err
    metadata = yaml.safe_load(hub.files(NAME)["README.md"].decode().split("---")[1])
    assert (metadata["license"], metadata["base_model"], metadata["tags"]) == (
        "apache-2.0",
        "org/base",
        ["megaconv", "tiny"],
    )
    (target / "more.txt").write_text("more")
    before = hub.files(NAME)["README.md"]
    hub.commit(
        NAME,
        "main",
        hub.commits[hub.branches[NAME]["main"]] | {"README.md": hub_server.File(b"mine", False)},
    )
    assert push(target, NAME).status == 0
    assert (hub.files(NAME)["README.md"], before != b"mine") == (b"mine", True)


@pytest.mark.parametrize(
    ("has_card", "choice"),
    [
        (False, ("--exclude", CARD)),
        (True, ("--exclude", CARD)),
        (True, ("--include", "*.json")),
    ],
)
def test_a_card_that_is_left_out_has_no_other_in_its_place(
    model: Path, tmp_path: Path, has_card: bool, choice: tuple[str, str]
) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    if has_card:
        (own / CARD).write_text("mine")
    outcome = run("push", own, NAME, "--dry-run", "--json", *choice)
    assert outcome.status == 0, outcome.err
    assert CARD not in json.loads(outcome.out)["files"]


def test_a_megatron_checkpoint_is_converted_or_pushed_as_it_is(hub: Hub, core: Path) -> None:
    assert push(core, NAME).status == 0
    assert "model.safetensors" in hub.files(NAME)
    assert sorted(path.name for path in core.parent.glob(".*")) == []
    assert push(core, "org/megatron", "--as-is").status == 0
    assert hub.files("org/megatron").keys() >= contents(core).keys()


def test_the_best_iteration_of_a_run_is_pushed(hub: Hub, tmp_path: Path) -> None:
    """A checkpoint of Megatron is converted."""
    run_directory = tmp_path / "run"
    shutil.copytree(FIXTURES / "core-llama-tp2pp2/checkpoint", run_directory)
    number = (run_directory / "latest_checkpointed_iteration.txt").read_text()
    (run_directory / "best_checkpointed_iteration.txt").write_text(number)
    assert push(run_directory / "best", NAME).status == 0
    assert "model.safetensors" in hub.files(NAME)


@pytest.mark.parametrize(
    ("part", "status", "words"),
    [
        ("/api/repos/create", 403, "may not write there"),
        ("/commit/", 412, "the branch has changed"),
        ("/commit/", 429, "fewer requests"),
    ],
)
def test_errors_of_the_hub_are_reported_in_one_line(
    hub: Hub, model: Path, part: str, status: int, words: str
) -> None:
    hub.answers[part] = status
    assert_refused(push(model, NAME), 1, NAME, words)


def test_without_a_token_nothing_is_read_or_sent(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert_refused(push(model, NAME), 1, "HF_TOKEN")
    assert {request for request in hub.requests if "whoami" not in request} == set()


def test_a_silent_hub_ends_a_push_within_seconds(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
        outcome = finish(start("push", model, NAME), 15)
    assert_refused(outcome, 1, NAME, "timed out")


def test_a_hub_that_becomes_silent_ends_a_push(hub: Hub, model: Path) -> None:
    half_a_second = (
        "from megaconv.commands.hub_commit import hub_client\nhub_client.__defaults__ = (0.5,)\n"
    )
    over = threading.Event()

    def wait(path: str) -> None:
        if path.endswith("create"):
            over.wait(20)

    hub.refuses = wait
    outcome = finish(start("push", model, NAME, before=half_a_second), 15)
    over.set()
    assert_refused(outcome, 1, NAME, "timed out")


def test_a_dry_run_of_push_lists_the_files_without_a_request(model: Path) -> None:
    outcome = run("push", model, NAME, "--dry-run", "--json")
    assert outcome.status == 0
    assert json.loads(outcome.out)["files"].keys() == contents(model).keys() | {"README.md"}


@pytest.mark.parametrize(
    "name",
    ["org", "org/", "a/b/c", "-x/y", "org/na me", "org/né", "o/a--b", "o/a.git", f"o/{'x' * 97}"],
)
def test_an_invalid_repository_name_is_refused(model: Path, name: str) -> None:
    assert_refused(run("push", model, "--dry-run", "--", name), 2, "organisation/name")


def test_links_out_of_the_directory_and_directories_without_a_model_are_not_pushed(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert run("push", tmp_path / "empty", NAME, "--dry-run").status == 3
    (model / "secret.txt").symlink_to("/etc/hostname")
    try:
        refused = run("push", model, NAME, "--dry-run")
        assert_refused(refused, 6, "secret.txt", "/etc/hostname", "or --exclude it")
    finally:
        (model / "secret.txt").unlink()


def test_no_directory_is_left_out_of_a_push_without_a_word(model: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    shutil.copytree(model, ours)
    (ours / "inside").mkdir()
    (ours / "inside" / "more.txt").write_text("more")
    (ours / "linked").symlink_to("inside")
    command = ("push", ours, NAME, "--dry-run")
    assert_refused(run(*command), 2, "linked: is a link to a directory", "--exclude it")
    assert run(*command, "--exclude", "linked").status == 0
    (ours / "linked").unlink()
    with unreadable(ours / "inside"):
        assert_refused(run(*command), 2, "inside: can't be read: Permission denied")


def test_a_name_that_is_not_utf_8_is_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    ours = Path(shutil.copytree(model, tmp_path / "model"))
    try:
        (ours / os.fsdecode(b"notes-\xff.txt")).write_text("notes")
    except OSError:
        pytest.skip("this file system has UTF-8 names alone")
    assert_refused(push(ours, NAME), 2, "notes-", "is not UTF-8", "--exclude it")
    assert NAME not in hub.branches
    assert run("push", ours, NAME, "--dry-run", "--exclude", "notes-*").status == 0


def test_a_model_without_a_tokenizer_is_not_pushed_without_a_word(
    hub: Hub, model: Path, core: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(core, tmp_path / "bare"))
    shutil.rmtree(bare / "hf")
    said = push(bare, "org/converted", "--json")
    assert said.status == 0
    assert "no tokenizer" in said.err
    assert "--config ORIGINAL" in said.err
    assert "tokenizer" in json.loads(said.out)["missing"]
    finished = Path(shutil.copytree(model, tmp_path / "finished"))
    (finished / "tokenizer.json").unlink()
    assert "has no tokenizer" in push(finished, NAME, "--dry-run").err
    whole = push(model, NAME, "--dry-run", "--json")
    assert "tokenizer" not in whole.err
    assert json.loads(whole.out)["missing"] == []


def test_a_model_that_differs_from_its_record_is_not_published(model: Path, tmp_path: Path) -> None:
    """Another program has trained it in place. The card would name the fingerprint of the old weights."""
    megaconv.convert(model, tmp_path / "out", saver="hf")
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    outcome = run("push", tmp_path / "out", NAME, "--dry-run")
    assert_refused(outcome, 3, "other values than were written", "remove megaconv.json")
    (tmp_path / "out" / "megaconv.json").unlink()
    assert run("push", tmp_path / "out", NAME, "--dry-run").status == 0


def test_a_sealed_model_is_pushed_as_it_was_signed(hub: Hub, model: Path, tmp_path: Path) -> None:
    sealed = Path(shutil.copytree(model, tmp_path / "sealed"))
    megaconv.seal(sealed, key=write_keys(tmp_path / "keys").private)
    outcome = push(sealed, NAME)
    assert outcome.status == 0, outcome.err
    there = hub.files(NAME)
    there.pop(".gitattributes")
    assert there == contents(sealed)
    (sealed / "notes.txt").write_text("added later")
    refused = push(sealed, NAME)
    assert_refused(refused, 4, "is not as it was signed: notes.txt")


@pytest.fixture
def adapter_run(tmp_path: Path, model: Path) -> Path:
    """A run of the trainer that has saved an adapter."""
    version = tmp_path / "run" / "iter_0000003"
    version.mkdir(parents=True)
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        (version / name).write_text(name)
    described = {"peft_type": "LORA", "base_model_name_or_path": str(model)}
    (version / "adapter_config.json").write_text(json.dumps(described))
    (version.parent / "latest_checkpointed_iteration.txt").write_text("3")
    return version.parent


ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


def test_a_run_that_trains_an_adapter_is_pushed_without_its_optimizer(
    hub: Hub, adapter_run: Path, model: Path
) -> None:
    outcome = push(adapter_run, NAME)
    assert outcome.status == 0, outcome.err
    assert sorted(hub.files(NAME)) == [".gitattributes", *ADAPTER]
    assert f"names the base model {model}, a path of this machine" in outcome.err
    assert "iter_0000003: left out optimizer.safetensors, trainer_state.json" in outcome.err


def test_all_files_of_an_adapter_are_pushed_as_they_are(hub: Hub, adapter_run: Path) -> None:
    version = adapter_run / "iter_0000003"
    assert push(version, NAME, "--as-is").status == 0
    files = hub.files(NAME)
    assert {name: files[name] for name in files if name != ".gitattributes"} == contents(version)
