"""Checkpoints read from a store: the same as from the disk, with few requests. moto is the store."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from formats import partial_files
from formats.stores import windows
from megaconv.best_iteration import with_best
from megaconv.engine.conversion import fingerprint
from megaconv.options import LoadOptions
from megaconv.store_inputs import stand_in
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run
from tests.stores.conftest import BUCKET, KEY, SECRET, put
from tests.stores.proxy import Proxy

LLAMA = FIXTURES / "peft-llama-all-linear/base"
FORMATS = {
    "hf": "peft-llama-all-linear/base",
    "core": "core-llama-tp2pp2/checkpoint",
    "legacy": "legacy-llama-tp2pp2/checkpoint",
    "torch_dist": "dist-llama-tp2pp2",
    "zarr": "zarr-llama-tp2pp2/checkpoint",
    "fsdp": "fsdp-verl-dp3",
    "deepspeed": "deepspeed-zero2-llama-tied-groups-dp2/checkpoint",
    "universal": "universal-zero2-llama-tied-groups-dp2",
    "gguf": "gguf-qwen3moe-bpe/qwen3moe-bpe-bf16.gguf",
    "whole": "whole-qwen2_5_vl",
}
"""Checkpoints of the formats' own software, which need no further options."""


def same_from_the_store(store: Proxy, source: Path, options: LoadOptions | None = None) -> None:
    uri = put(store, source, f"run/{source.name}")
    assert fingerprint(uri, options) == fingerprint(source, options)
    assert store.of("PUT") == store.of("DELETE") == []


@pytest.mark.parametrize("name", ["core", "gguf"])
def test_a_format_reads_from_a_store_as_from_the_disk(store: Proxy, name: str) -> None:
    same_from_the_store(store, FIXTURES / FORMATS[name])


def test_the_best_iteration_of_a_run_is_read(store: Proxy, tmp_path: Path) -> None:
    source = FIXTURES / FORMATS["core"]
    (version,) = source.glob("iter_*")
    root = put(store, source, "run")
    record = tmp_path / "best_checkpointed_iteration.txt"
    message = f"{root}/best: there is no {root}/{record.name}, which a run with --keep-best writes"
    assert_refused(run("inspect", f"{root}/best"), 2, message)
    for word, found in (
        (version.name[5:], version.name),
        ("11", None),
        ("x", None),
        ("5" * 999, None),
    ):
        record.write_text(word)
        put(store, record, f"run/{record.name}")
        if found is None:
            assert_refused(run("inspect", f"{root}/best"), 3, f"{root}/{record.name}: ")
        else:
            assert with_best(f"{root}/best/") == f"{root}/{found}"
            assert fingerprint(f"{root}/best") == fingerprint(version)


def test_a_model_with_the_name_of_the_best_iteration_is_read(store: Proxy) -> None:
    assert fingerprint(put(store, LLAMA, "run/best")) == fingerprint(LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_from_a_store_as_from_the_disk(store: Proxy, name: str) -> None:
    same_from_the_store(store, FIXTURES / FORMATS[name])


@pytest.mark.slow
def test_orbax_reads_from_a_store_as_from_the_disk(store: Proxy) -> None:
    options = LoadOptions(config=LLAMA, extra={"maxtext_rope": "split"})
    same_from_the_store(store, FIXTURES / "orbax-maxtext-scan-bf16/checkpoint", options)


@pytest.mark.slow
def test_dcp_reads_from_a_store_as_from_the_disk(store: Proxy, tmp_path: Path) -> None:
    source = tmp_path / "dcp"
    assert run("convert", LLAMA, source, "--saver", "dcp", "--dist-files", 2).status == 0
    same_from_the_store(store, source, LoadOptions(config=LLAMA))


@pytest.mark.parametrize("kind", ["bin", "legacy_bin"])
def test_torch_files_read_from_a_store_as_from_the_disk(
    store: Proxy, tmp_path: Path, kind: str
) -> None:
    same_from_the_store(store, write_llama(tmp_path / "model", layers=1, format=kind))


def test_headers_of_a_large_model_take_kilobytes(store: Proxy, tmp_path: Path) -> None:
    sizes = {"layers": 4, "hidden": 256, "vocab": 16384}
    source = write_llama(tmp_path / "model", **sizes, shards=2)
    uri = put(store, source, "model")
    local, remote = run("inspect", source, "--json"), run("inspect", uri, "--json")
    assert (remote.status, remote.err) == (0, "")
    same = ("format", "family", "parameters")
    both = [json.loads(each.out) for each in (local, remote)]
    assert [both[0].get(key) for key in same] == [both[1].get(key) for key in same]
    listings = [each for each in store.requests if not each.key]
    reads = [each for each in store.requests if each.key]
    assert len(listings) <= 2
    assert len(reads) <= 2 * 2 + 4
    assert sum(each.sent for each in reads) < 300_000
    assert sum(each.stat().st_size for each in source.iterdir()) > 15_000_000


def test_entries_of_a_torch_file_are_looked_up_together(store: Proxy, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", layers=24, hidden=64, vocab=8192, format="bin")
    uri = put(store, source, "model")
    assert run("inspect", uri).status == 0
    reads = [each for each in store.requests if each.key.endswith(".bin")]
    assert len(reads) < 20  # there are 218 entries with separate headers
    assert sum(each.sent for each in reads) < (source / "pytorch_model.bin").stat().st_size / 2


def test_a_conversion_fetches_each_byte_about_once_in_large_windows(
    store: Proxy, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "model", layers=2, hidden=512, vocab=32768, shards=2)
    uri = put(store, source, "model")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert run("convert", uri, ours, "--saver", "core", "--tp", 2).status == 0
    requests = store.requests
    assert run("convert", source, theirs, "--saver", "core", "--tp", 2).status == 0
    assert content(ours) == content(theirs)
    weights = [each for each in requests if each.key.endswith(".safetensors")]
    nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert sum(each.sent for each in weights) < 1.1 * nbytes + 200_000
    assert len(weights) <= 1.1 * nbytes / windows.WINDOW + 8


def content(directory: Path) -> dict[str, bytes]:
    """All files but the record, which names the source."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in files
        if file.name != "megaconv.json"
    }


def test_windows_in_memory_stay_within_their_budget(
    store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_llama(tmp_path / "model", layers=2, hidden=512, vocab=32768)
    uri = put(store, source, "model")
    monkeypatch.setattr(windows, "BUDGET", 2 * windows.WINDOW)
    largest = 0
    add = windows._Shared.add

    def noted(shared: windows._Shared, *arguments: object) -> None:
        nonlocal largest
        add(shared, *arguments)  # type: ignore[arg-type]
        largest = max(largest, shared._nbytes)

    monkeypatch.setattr(windows._Shared, "add", noted)
    assert fingerprint(uri, workers=2) == fingerprint(source)
    assert 0 < largest <= windows.BUDGET + 2 * windows.WINDOW


def test_commands_take_a_uri_as_they_take_a_path(store: Proxy, tmp_path: Path) -> None:
    source = tmp_path / "written"
    assert run("convert", LLAMA, source, "--saver", "core", "--tp", 2).status == 0
    uri = put(store, source, "run/core")
    for words in (
        ["verify", uri],
        ["diff", uri, source],
        ["diff", uri, source, "--metadata"],
        ["scan", uri],
        ["fingerprint", uri],
        ["inspect", uri],
        ["plan", uri, "--gpus", 2],
        ["convert", uri, tmp_path / "out", "--saver", "hf", "--dry-run"],
    ):
        outcome = run(*words)
        assert outcome.status == 0, (words, outcome.err)
        assert "megaconv-" not in outcome.out, words
    assert run("convert", uri, tmp_path / "out", "--saver", "hf").status == 0
    assert json.loads((tmp_path / "out/megaconv.json").read_text())["source"]["path"] == uri


def test_an_iteration_finds_what_lies_beside_it(store: Proxy, tmp_path: Path) -> None:
    source = tmp_path / "written"
    assert run("convert", LLAMA, source, "--saver", "core").status == 0
    uri = put(store, source, "run")
    assert fingerprint(f"{uri}/release") == fingerprint(source)
    assert fingerprint(f"{uri}/release").weights == fingerprint(LLAMA).weights


def test_a_nemo_archive_reads_in_place(store: Proxy, tmp_path: Path) -> None:
    core, parts = tmp_path / "core", tmp_path / "parts"
    assert run("convert", LLAMA, core, "--saver", "core").status == 0
    file = next(core.rglob("model_optim_rng.pt"))
    model = torch.load(file, map_location="cpu", weights_only=False)["model"]
    parts.mkdir()
    named = {f"model.{name}": value for name, value in model.items()}
    torch.save(named, parts / "model_weights.ckpt")
    (parts / "model_config.yaml").write_text("mcore_gpt: true\n")
    with tarfile.open(tmp_path / "model.nemo", "w") as archive:
        archive.add(parts, arcname=".")
    same_from_the_store(store, tmp_path / "model.nemo", LoadOptions(config=LLAMA))


def test_uris_of_two_inputs_in_one_bucket_lead_to_their_own_stand_ins(store: Proxy) -> None:
    """A journal names objects by URI, and a run that resumes finds their files again."""
    for uri in (put(store, LLAMA, "one"), put(store, LLAMA, "two")):
        weights = str(stand_in(uri) / "model.safetensors")
        assert partial_files.displayed(weights) == f"{uri}/model.safetensors"
        assert partial_files.local(f"{uri}/model.safetensors") == weights


def test_a_copied_file_of_a_stand_in_has_no_holes(store: Proxy) -> None:
    """Code that opens a path itself asks for the whole file first."""
    from formats.regular_files import read_small
    from megaconv.hub import resolve

    place = Path(resolve(put(store, LLAMA, "model")))
    for file in LLAMA.iterdir():
        assert read_small(place / file.name, 1 << 30) == file.read_bytes()
        assert partial_files.find(place / file.name) is not None


def test_the_credentials_are_shown_nowhere(
    store: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = put(store, LLAMA, "model")
    shown = [run("convert", uri, tmp_path / "out", "--saver", "hf")]
    shown.append(run("inspect", f"{uri}/nothing"))
    shown.append(run("inspect", f"s3://{KEY}:{SECRET}@{BUCKET}/model"))
    texts = [text for outcome in shown for text in (outcome.out, outcome.err)] + [caplog.text]
    texts += [text.decode("utf-8", "replace") for text in content(tmp_path).values()]
    assert any(KEY in headers for headers in store.headers), "requests were not signed"
    assert not [text for text in texts if SECRET in text or KEY in text]


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        (f"s3://{BUCKET}/nothing", "no object has this name"),
        ("s3://no-such-bucket-here/run", "no such bucket"),
        ("s3://b/run", "is no bucket's name"),
        ("s3:///run", "is no bucket's name"),
        ("s3://name:password@models/run", "must not hold credentials"),
        (f"s3://{BUCKET}/run?X-Amz-Signature=0", "must not hold credentials"),
        (f"s3://{BUCKET}/caf\udce9", "is not UTF-8"),
    ],
)
def test_a_uri_at_which_nothing_can_be_is_refused(store: Proxy, uri: str, words: str) -> None:
    outcome = run("inspect", uri)
    assert outcome.status in (1, 2)
    assert words in outcome.err
    assert "password" not in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("key", ["run/../x.json", "run//x.json", "run/a\\b", "run/" + "x" * 300])
def test_names_that_are_no_paths_are_refused(store: Proxy, key: str) -> None:
    from tests.stores.conftest import plain_client

    plain_client(store).put_object(Bucket=BUCKET, Key=key, Body=b"{}")
    assert_refused(run("inspect", f"s3://{BUCKET}/run"), 6, "can't be a path")


def test_without_credentials_requests_are_not_signed(
    store: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = put(store, LLAMA, "model", public=True)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    outcome = run("fingerprint", uri)
    assert (outcome.status, "not signed" in caplog.text) == (0, True), outcome.err
    assert not [headers for headers in store.headers if "Authorization" in headers]


def test_readers_pay_only_if_the_uri_says_so(store: Proxy) -> None:
    put(store, LLAMA, "model")
    assert run("inspect", f"s3://{BUCKET}/model").status == 0
    assert not [headers for headers in store.headers if "request-payer" in headers.lower()]
    assert run("inspect", f"s3://requester-pays@{BUCKET}/model").status == 0
    assert [headers for headers in store.headers if "request-payer" in headers.lower()]
