"""Models on the Hub of which only headers are read: the real client against a server that counts what it serves."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats import safetensors
from formats.tensor import read_tensor
from megaconv.engine.conversion import fingerprint
from tests import hub_server
from tests.forks import start
from tests.hub_server import File, Hub
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, finish, run

NAME = "org/name"
FIRST_BYTES = 16 << 10
MEGABYTE = 10**6


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some megabytes in four files."""
    return write_llama(
        tmp_path_factory.mktemp("models") / "sharded", layers=2, hidden=256, vocab=8192, shards=4
    )


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, with a header longer than what is asked for at first."""
    path = write_llama(tmp_path_factory.mktemp("models") / "deep", layers=24)
    assert int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little") > FIRST_BYTES
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server.running() as server:
        hub_server.prepare_client(monkeypatch, server.address, tmp_path)
        (tmp_path / "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        yield server
        assert list((tmp_path / "tmp").iterdir()) == []


def put(hub: Hub, model: Path, branch: str = "main") -> str:
    """The commit."""
    files = {
        file.name: File(file.read_bytes(), file.suffix == ".safetensors")
        for file in model.iterdir()
    }
    return hub.commit(NAME, branch, files)


def megaconv(*arguments: object) -> Outcome:
    """Run the command in a fork, because huggingface_hub reads its environment at import."""
    return finish(start(*arguments), 60)


def weights_of(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def test_a_sharded_model_is_inspected_for_less_than_a_megabyte(hub: Hub, sharded: Path) -> None:
    put(hub, sharded)
    assert sum(file.stat().st_size for file in weights_of(sharded)) > 8 * MEGABYTE
    outcome = megaconv("inspect", f"hf://{NAME}", "--json")
    assert outcome.status == 0, outcome.err
    expected = json.loads(run("inspect", sharded, "--json").out)
    assert json.loads(outcome.out) == expected | {"path": f"hf://{NAME}"}
    assert {name: hub.served[name] for name in hub.served if name.endswith(".safetensors")} == {
        file.name: FIRST_BYTES for file in weights_of(sharded)
    }
    assert sum(hub.served.values()) < MEGABYTE


def test_a_dry_run_and_a_diff_of_metadata_download_no_weights(
    hub: Hub, sharded: Path, tmp_path: Path
) -> None:
    put(hub, sharded)
    arguments = ("--saver", "core", "--save-dir", tmp_path / "out", "--tp", 2, "--dry-run")
    outcome = megaconv("convert", "--load-dir", NAME, *arguments)
    assert outcome.status == 0, outcome.err
    planned = run("convert", "--load-dir", sharded, *arguments).out.splitlines()
    assert [line for line in outcome.out.splitlines() if "mp_rank" in line] == [
        line for line in planned if "mp_rank" in line
    ]
    diff = megaconv("diff", "--metadata", NAME, sharded)
    assert (diff.status, diff.out.startswith("the same")) == (0, True), diff
    assert sum(hub.served.values()) < MEGABYTE


def test_the_host_that_stores_large_files_is_followed_without_the_token(
    hub: Hub, deep: Path
) -> None:
    put(hub, deep)
    hub.redirects = True
    outcome = megaconv("inspect", NAME)
    assert (outcome.status, "24 layers" in outcome.out) == (0, True), outcome.err
    assert (hub.served["model.safetensors"] < 1 << 16, hub.tokens_elsewhere) == (True, [])


def test_weights_are_read_by_ranges_and_are_not_kept(
    hub: Hub, sharded: Path, tmp_path: Path
) -> None:
    put(hub, sharded)
    words = ("--saver", "core", "--tp", 2, "--verify")
    outcome = megaconv("convert", NAME, tmp_path / "out", *words)
    assert outcome.status == 0, outcome.err
    assert fingerprint(tmp_path / "out") == fingerprint(sharded)
    weights = {name for name in hub.served if name.endswith(".safetensors")}
    nbytes = sum(file.stat().st_size for file in weights_of(sharded))
    assert nbytes <= sum(hub.served[name] for name in weights) < 1.2 * nbytes
    kept = [file for file in (tmp_path / "hf-home").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in kept) < MEGABYTE


def test_files_are_kept_on_demand(hub: Hub, sharded: Path) -> None:
    put(hub, sharded)
    assert megaconv("fingerprint", NAME, "--cache").out.strip() == fingerprint(sharded).weights
    served = dict(hub.served)
    assert megaconv("inspect", NAME, "--stats").status == 0
    assert hub.served == served  # it is in the cache by now


def test_a_branch_that_moves_meanwhile_does_not_mix_two_models(
    hub: Hub, sharded: Path, deep: Path
) -> None:
    put(hub, sharded)

    def move() -> None:
        hub.after_first_range = lambda: None
        put(hub, deep)

    hub.after_first_range = move
    outcome = megaconv("inspect", NAME, "--json")
    assert outcome.status == 0, outcome.err
    expected = json.loads(run("inspect", sharded, "--json").out)
    assert json.loads(outcome.out)["tensors"] == expected["tensors"]
    assert len(hub.branches[NAME]) == 1
    assert hub.branches[NAME]["main"] != next(iter(hub.commits))  # it did move


def test_a_long_header_takes_a_second_request_and_both_have_to_be_of_the_same_file(
    hub: Hub, deep: Path
) -> None:
    commit = put(hub, deep)
    assert megaconv("inspect", NAME, "--tensors", "layers.0.*").status == 0
    content = (deep / "model.safetensors").read_bytes()
    assert hub.served["model.safetensors"] == 8 + int.from_bytes(content[:8], "little")

    def change() -> None:
        hub.commits[commit]["model.safetensors"] = File(content[:-1] + b"?", False)

    hub.after_first_range = change
    assert_refused(
        megaconv("inspect", f"hf://{NAME}"), 1, NAME, "changed on the Hub while it was read"
    )


@pytest.mark.parametrize("length", [100 << 20, (1 << 64) - 1])
def test_no_header_is_asked_for_that_no_file_has(hub: Hub, deep: Path, length: int) -> None:
    commit = put(hub, deep)
    content = length.to_bytes(8, "little") + (deep / "model.safetensors").read_bytes()[8:]
    hub.commits[commit]["model.safetensors"] = File(content, False)
    assert_refused(
        megaconv("inspect", NAME), 3, "model.safetensors", f"a header of {length} bytes is declared"
    )
    assert hub.served["model.safetensors"] == FIRST_BYTES


def test_an_empty_file_is_what_it_is_on_the_disk(hub: Hub, deep: Path) -> None:
    commit = put(hub, deep)
    hub.commits[commit]["model.safetensors"] = File(b"", False)
    assert_refused(megaconv("inspect", NAME), 3, "model.safetensors", "the file has 0")


_READ_AFTER_ALL = f"""
from formats.tensor import read_tensor
from megaconv.engine.opening import open_source
from megaconv.input import find_input
from megaconv.options import LoadOptions
options = LoadOptions(metadata_only=True)
source = open_source(find_input("{NAME}", options=options), options)
print(next(read_tensor(tensor).tobytes().hex() for key, tensor in source.tensors() if key.name == "final_norm.weight"))
"""


def test_values_that_are_read_after_all_are_fetched(hub: Hub, deep: Path) -> None:
    put(hub, deep)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", _READ_AFTER_ALL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    tensors = safetensors.read(deep / "model.safetensors")
    assert done.stdout.strip() == read_tensor(tensors["model.norm.weight"]).tobytes().hex(), (
        done.stderr
    )


def test_a_hub_without_ranges_gives_a_download_and_a_notice(hub: Hub, sharded: Path) -> None:
    put(hub, sharded)
    hub.has_ranges = False
    outcome = megaconv("inspect", NAME)
    assert (outcome.status, "no range requests" in outcome.err) == (0, True), outcome.err


def test_torch_files_are_read_by_ranges_too(hub: Hub, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "bin", layers=4, hidden=512, format="bin")
    put(hub, model)
    outcome = megaconv("inspect", NAME)
    assert outcome.status == 0, outcome.err
    assert hub.served["pytorch_model.bin"] < (model / "pytorch_model.bin").stat().st_size / 2
    assert megaconv("fingerprint", NAME).out.strip() == fingerprint(model).weights


@pytest.mark.parametrize(
    ("part", "status", "words"),
    [
        (f"/api/models/{NAME}", 401, "hf auth login"),
        ("/model-00002-of", 403, "ask for it on the model's page"),
        ("/model-00002-of", 404, "404"),
    ],
)
def test_errors_of_the_hub_are_reported_in_one_line(
    hub: Hub, sharded: Path, part: str, status: int, words: str
) -> None:
    put(hub, sharded)
    hub.answers[part] = status
    assert_refused(megaconv("inspect", f"hf://{NAME}"), 1, NAME, words)


def test_a_hub_that_limits_requests_is_asked_again_when_it_says(hub: Hub, sharded: Path) -> None:
    """At the first request for weights, and again in the middle of them. No other pause is longer than some milliseconds."""
    put(hub, sharded)
    no_pause = "from formats.stores import patience\npatience._FIRST_PAUSE = 0.0001\n"
    moments, ends = [1, 6], [0.0]
    answered: list[str] = []

    def limit(path: str) -> tuple[int, dict[str, str]] | None:
        if not path.endswith(".safetensors"):
            return None
        if len(answered) in moments:
            moments.remove(len(answered))
            ends[0] = time.monotonic() + 1
        if time.monotonic() < ends[0]:
            return 429, {"RateLimit": '"resolvers";r=0;t=1'}
        answered.append(path)
        return None

    hub.refuses = limit
    outcome = finish(start("fingerprint", f"hf://{NAME}", before=no_pause), 60)
    assert outcome.status == 0, outcome.err
    assert outcome.out.strip() == fingerprint(sharded).weights
    assert not moments
