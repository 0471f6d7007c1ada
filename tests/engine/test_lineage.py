"""Provenance: an output says of which inputs it was made, by which version and with which options, and nothing secret."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.engine.lineage import public_name
from megaconv.engine.record import with_provenance
from megaconv.errors import CorruptCheckpoint
from megaconv.signatures.bundle import read_bundle
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.package.test_plugins import install
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


def test_an_input_whose_record_cannot_be_read_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output without the fingerprint of its input would look like one of an input without a record."""
    megaconv.seal(model)

    def fail(place: Path) -> None:
        cause = OSError(errno.EIO, "Input/output error")
        raise CorruptCheckpoint(f"{place}/megaconv.json: can't be read") from cause

    monkeypatch.setattr("megaconv.engine.lineage.find_record", fail)
    with pytest.raises(CorruptCheckpoint, match=r"megaconv\.json: can't be read"):
        megaconv.convert(model, tmp_path / "ckpt", saver="core")
    assert not (tmp_path / "ckpt").exists()


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
def test_changed_provenance_is_left_out_with_a_notice(
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
        said = record(place)["provenance"] | {"note": "x" * 70_000}
        change(place / "megaconv.json", **with_provenance(said))
    megaconv.convert(place, tmp_path / "out", saver="hf")
    (found,) = record(tmp_path / "out")["provenance"]["inputs"]
    assert found["provenance"] == {"omitted": "too long"}


def generations(provenance: Any) -> int:
    """The number of conversions that a provenance tells of. Earlier ones are left out."""
    count = 0
    while "inputs" in provenance:
        count += 1
        provenance = provenance["inputs"][0]["provenance"]
    assert provenance == {"omitted": "too long"}
    return count


def test_the_output_of_a_long_chain_is_read_like_others(model: Path, tmp_path: Path) -> None:
    """JSON of more than 100 levels is refused, and each conversion adds three."""
    megaconv.convert(model, tmp_path / "ckpt", saver="hf")
    said: Any = {}
    for _ in range(32):
        said = {"inputs": [{"provenance": said}]}
    change(tmp_path / "ckpt" / "megaconv.json", **with_provenance(said))
    megaconv.convert(tmp_path / "ckpt", tmp_path / "out", saver="hf")
    assert megaconv.verify(tmp_path / "out").same
    assert generations(record(tmp_path / "out")["provenance"]) == 21


@pytest.mark.slow
def test_the_output_of_forty_conversions_is_read_like_the_first(tmp_path: Path) -> None:
    place = write_llama(tmp_path / "model", layers=1)
    for number in range(40):
        megaconv.convert(place, tmp_path / str(number), saver="hf")
        place = tmp_path / str(number)
    assert megaconv.verify(place).same
    assert generations(record(place)["provenance"]) == 21


def test_a_deep_provenance_of_another_program_is_left_out(model: Path, tmp_path: Path) -> None:
    megaconv.convert(model, tmp_path / "ckpt", saver="hf")
    deep: Any = []
    for _ in range(80):
        deep = [deep]
    change(tmp_path / "ckpt" / "megaconv.json", **with_provenance({"deep": deep}))
    megaconv.convert(tmp_path / "ckpt", tmp_path / "out", saver="hf")
    assert megaconv.verify(tmp_path / "out").same
    (found,) = record(tmp_path / "out")["provenance"]["inputs"]
    assert found["provenance"] == {"omitted": "too long"}


def test_the_layers_of_stages_keep_their_order(tmp_path: Path) -> None:
    model, out = write_llama(tmp_path / "model", layers=12), tmp_path / "out"
    outcome = run("convert", model, out, "--saver", "core", "--pp", 2, "--layer-split", "10,2")
    assert outcome.status == 0, outcome.err
    assert record(out)["provenance"]["options"]["--layer-split"] == [10, 2]


def test_a_base_with_a_colon_in_its_name_is_one_checkpoint(model: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(model, tmp_path / "a:b"))
    new = write_llama(tmp_path / "new", layers=2, seed=5)
    assert run("delta", base, new, "--save-dir", tmp_path / "patch").status == 0
    assert run("apply", base, tmp_path / "patch", "--save-dir", tmp_path / "again").status == 0
    inputs = record(tmp_path / "again")["provenance"]["inputs"]
    assert [each["name"] for each in inputs] == ["patch", "a:b"]


VAULT = """
from dataclasses import replace
from savers.hf import SAVER as HF
SAVER = replace(HF, name="vault", description="a vault", options={"base": "a place", "token": "a secret"})
"""


def test_options_of_another_package_are_named_and_their_values_are_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value may be a secret. An option that has the name of one of ours means something else there."""
    site = tmp_path / "site-packages"
    install(site, "vault", {"vault_saver.py": VAULT}, {"savers": {"vault": "vault_saver"}})
    monkeypatch.syspath_prepend(site)
    words = ("--option", "token=hunter2", "--option", f"base={tmp_path}/private")
    outcome = run("convert", model, tmp_path / "out", "--saver", "vault", *words)
    assert outcome.status == 0, outcome.err
    found = record(tmp_path / "out")["provenance"]
    assert found["options"] == {"--option": {"base": None, "token": None}, "--saver": "vault"}
    assert [each["as"] for each in found["inputs"]] == ["input"]


def test_the_seal_of_a_run_is_that_of_its_iteration(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FIXTURES / "core-llama-tp2pp2" / "checkpoint", tmp_path / "run"))
    sealed = megaconv.seal(source, key=write_keys(tmp_path / "keys").private)
    (iteration,) = source.glob("iter_*")
    megaconv.convert(iteration, tmp_path / "out", saver="hf")
    (found,) = record(tmp_path / "out")["provenance"]["inputs"]
    assert (found["fingerprint"], found["seal"]) == (sealed.fingerprint, sealed.digest)


def test_a_patch_tells_the_notices_of_its_inputs(model: Path, tmp_path: Path) -> None:
    megaconv.convert(model, tmp_path / "ckpt", saver="hf")
    change(tmp_path / "ckpt" / "megaconv.json", provenance={"inputs": []})
    words = ("delta", model, tmp_path / "ckpt", "--save-dir", tmp_path / "patch")
    assert "not carried on" in run(*words).err
    assert "not carried on" in json.loads(run(*words, "--overwrite", "--json").out)["notices"][0]
    report = megaconv.delta(model, tmp_path / "ckpt", tmp_path / "patch", overwrite=True)
    assert "not carried on" in report.notices[0]


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
