"""Provenance: an output says of which inputs it was made, by which version and with which options, and nothing secret."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.engine.lineage import public_name
from megaconv.signatures.bundle import read_bundle
from tests.models import write_llama
from tests.runs import run
from tests.signatures.made import write_keys


def record(output: Path) -> Any:
    return json.loads((output / "megaconv.json").read_bytes())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "private" / "model", layers=2)


def test_a_chain_of_conversions_carries_the_seal_of_its_first_input(
    model: Path, tmp_path: Path
) -> None:
    megaconv.seal(model, key=write_keys(tmp_path / "keys").private)
    weights, seal = record(model)["fingerprint"], read_bundle(model / "model.sig").statement().root
    megaconv.convert(model, tmp_path / "ckpt", saver="core", tp=2, workers=2)
    megaconv.convert(tmp_path / "ckpt", tmp_path / "out", saver="hf", dtype="fp32")
    last = record(tmp_path / "out")["provenance"]
    (ckpt,) = last["inputs"]
    assert last["options"] == {"--dtype": "fp32", "--saver": "hf"}
    assert (ckpt["as"], ckpt["name"], ckpt["fingerprint"]) == ("input", "ckpt", weights)
    first = ckpt["provenance"]
    assert first == record(tmp_path / "ckpt")["provenance"]
    assert first["megaconv"] == megaconv.__version__
    assert first["options"] == {"--saver": "core", "--tp": 2}
    assert first["inputs"] == [
        {"as": "input", "name": "model", "fingerprint": weights, "seal": seal}
    ]
    assert str(tmp_path) not in json.dumps(last)


def test_a_patch_and_what_it_makes_name_both_checkpoints(model: Path, tmp_path: Path) -> None:
    new = write_llama(tmp_path / "new", layers=2, seed=5)
    megaconv.seal(model)
    assert run("delta", model, new, "--save-dir", tmp_path / "patch").status == 0
    assert run("apply", model, tmp_path / "patch", "--save-dir", tmp_path / "again").status == 0
    found = record(tmp_path / "again")["provenance"]
    of_patch, of_base = found["inputs"]
    assert (of_patch["as"], of_patch["name"]) == ("input", "patch")
    assert of_patch["fingerprint"] == megaconv.fingerprint(new).weights
    assert (of_base["as"], of_base["fingerprint"]) == ("base", megaconv.fingerprint(model).weights)
    roles = [each["as"] for each in of_patch["provenance"]["inputs"]]
    assert roles == ["base", "input"]
    assert str(tmp_path) not in json.dumps(found)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values))


@pytest.mark.parametrize("what", ["provenance", "fingerprint", "seal"])
def test_what_was_changed_is_not_carried_on_and_a_notice_says_so(
    what: str, model: Path, tmp_path: Path
) -> None:
    ckpt = tmp_path / "ckpt"
    megaconv.convert(model, ckpt, saver="core")
    if what == "provenance":
        change(ckpt / "megaconv.json", provenance={"inputs": []})
        assert run("verify", ckpt).status == 4
    elif what == "fingerprint":
        change(ckpt / "megaconv.json", fingerprint="0" * 64)
    else:
        (ckpt / "model.sig").write_text("{}")
    outcome = run("convert", ckpt, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0
    assert "not carried on" in outcome.err
    (found,) = record(tmp_path / "out")["provenance"]["inputs"]
    assert what not in found


def test_the_same_conversion_has_the_same_record_however_it_runs(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    megaconv.convert(model, out, saver="core")
    first = (out / "megaconv.json").read_bytes()
    arguments = ("--overwrite", "--verify", "--resume", "--workers", "3", "--max-memory", "1GiB")
    assert run("convert", model, out, "--saver", "core", *arguments).status == 0
    assert (out / "megaconv.json").read_bytes() == first


def test_an_original_is_named(model: Path, tmp_path: Path) -> None:
    megaconv.convert(model, tmp_path / "out", saver="hf", base=model)
    inputs = record(tmp_path / "out")["provenance"]["inputs"]
    assert [each["as"] for each in inputs] == ["input", "original"]


def test_a_long_history_is_left_out(model: Path, tmp_path: Path) -> None:
    place = model
    for number in range(3):
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
        megaconv.convert(place, tmp_path / str(number), saver="hf")
        place = tmp_path / str(number)
        from megaconv.engine.record import with_provenance

        said = record(place)["provenance"] | {"note": "x" * 70_000}
        change(place / "megaconv.json", **with_provenance(said))
    megaconv.convert(place, tmp_path / "out", saver="hf")
    (found,) = record(tmp_path / "out")["provenance"]["inputs"]
    assert found["provenance"] == {"omitted": "too long"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hf://org/model@main", "hf://org/model@main"),
        ("org/model", "org/model"),
        ("s3://key:secret@bucket/run?token=abc#x", "s3://bucket/run"),
        ("https://user:pass@example.org/a/b?X-Amz-Signature=1", "https://example.org/a/b"),
        ("/home/somebody/secret-project/run", "run"),
        ("../run", "run"),
    ],
)
def test_names_have_no_directories_and_no_credentials(given: str, expected: str) -> None:
    assert public_name(given) == expected
