"""`megaconv verify`: what was written is distinguished from what has changed since, to the last bit."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import megaconv
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

SOURCE = FIXTURES / "core-bert-tp2pp2" / "checkpoint"


def written(directory: Path, saver: str) -> Path:
    megaconv.convert(SOURCE, directory, saver=saver, workers=2, allow_lossy=("activation",))
    return directory


@pytest.mark.parametrize("saver", ["hf", "core", "legacy"])
def test_verify_finds_an_output_as_written(saver: str, tmp_path: Path) -> None:
    out = written(tmp_path / "out", saver)
    outcome = run("verify", out)
    files = " and 1 other file" if saver == "hf" else ""
    assert (outcome.status, outcome.out) == (
        0,
        f"as written: 46 tensors{files}, fingerprint {megaconv.fingerprint(out).weights}\n",
    )
    assert json.loads(run("verify", out, "--json").out)["same"] is True
    assert megaconv.verify(out).same


def flip_in_a_tensor(out: Path, file: str) -> None:
    """One bit of encoder.layers.1.attn.o.weight."""
    weight = megaconv.open(SOURCE).load("encoder.layers.1.attn.o.weight").numpy()[-1, -8:].tobytes()
    content = bytearray((out / file).read_bytes())
    assert content.count(weight) == 1
    content[content.index(weight)] ^= 1
    (out / file).write_bytes(content)


def test_one_flipped_bit_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    out = written(tmp_path / "out", "hf")
    flip_in_a_tensor(out, "model.safetensors")
    outcome = run("verify", out)
    assert outcome.status == 4
    assert outcome.out.splitlines()[1:] == ["  encoder.layers.1.attn.o.weight  changed"]
    document = run("verify", out, "--json")
    assert (document.status, json.loads(document.out)["differences"]) == (
        4,
        {"encoder.layers.1.attn.o.weight": "changed"},
    )


def test_one_flipped_bit_in_a_file_with_checksums_is_found_while_it_is_read(tmp_path: Path) -> None:
    out, file = written(tmp_path / "out", "core"), "iter_0000005/mp_rank_01_001/model_optim_rng.pt"
    flip_in_a_tensor(out, file)
    outcome = run("verify", out)
    assert outcome.status == 3
    assert f"{out / file}: the checksum of the tensor at byte" in outcome.err


def test_added_and_missing_tensors_are_reported_separately(tmp_path: Path) -> None:
    megaconv.convert(write_llama(tmp_path / "three", layers=3), tmp_path / "out", saver="hf")
    write_llama(tmp_path / "two", layers=2)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "out" / name).write_bytes((tmp_path / "two" / name).read_bytes())
    found = megaconv.verify(tmp_path / "out")
    assert found.differences["layers.2.attn.q.weight"] == "missing"
    record = tmp_path / "out" / "megaconv.json"
    said = json.loads(record.read_text())
    del said["tensors"]["embed.weight"]
    record.write_text(json.dumps(said))
    assert megaconv.verify(tmp_path / "out").differences["embed.weight"] == "added"


def test_a_fingerprint_that_was_changed_itself_does_not_verify(tmp_path: Path) -> None:
    record = written(tmp_path / "out", "hf") / "megaconv.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"fingerprint": "0" * 64}))
    assert run("verify", tmp_path / "out").status == 4


def test_a_changed_small_file_leaves_the_weights_as_written(tmp_path: Path) -> None:
    config = written(tmp_path / "out", "hf") / "config.json"
    config.write_text(config.read_text() + "\n")
    outcome = run("verify", tmp_path / "out")
    first, second = outcome.out.splitlines()
    fingerprint = megaconv.fingerprint(tmp_path / "out").weights
    assert first == f"different, though the weights are as written, fingerprint {fingerprint}"
    assert (second, outcome.status) == ("  config.json  changed", 4)


def test_another_container_of_the_same_weights_verifies(tmp_path: Path) -> None:
    out = written(tmp_path / "out", "hf")
    tensors = load_file(out / "model.safetensors")
    save_file(
        dict(reversed(tensors.items())), out / "model.safetensors", metadata={"saved": "again"}
    )
    assert megaconv.verify(out).same


def test_without_a_record_there_is_nothing_to_verify_against() -> None:
    assert_refused(
        run("verify", SOURCE), 3, "has no megaconv.json", "megaconv seal DIR", "megaconv diff"
    )


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"fingerprint": 1, "tensors": {}}', "\x00"])
def test_a_record_that_is_none_is_refused(record: str, tmp_path: Path) -> None:
    out = written(tmp_path / "out", "hf")
    (out / "megaconv.json").write_text(record)
    assert_refused(run("verify", out), 3, "megaconv.json")


def test_a_path_that_is_not_there_is_not_one_without_a_record(tmp_path: Path) -> None:
    assert_refused(run("verify", tmp_path / "nothing"), 2, "no such file or directory")
