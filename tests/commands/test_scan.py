"""`megaconv scan`: everything that would run code is found and nothing runs; faults of all files in one go."""

import gzip
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch

from formats.pickle_scan import NAMED, ORDINARY, UNSAFE, scan_file, scan_pickle
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import Outcome, run, unchanged, unreadable
from tests.trust.gadgets import _FORMS, CALLS

DATA = {
    "builtins.bytearray", "builtins.list", "builtins.range", "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",
    "numpy.dtype", "collections.Counter", "argparse.Namespace", "_codecs.encode", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter", "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_device_tensor_from_numpy",
    "pathlib.PosixPath", "datetime.datetime", "copyreg._reconstructor",
}  # fmt: skip
"""Calls that only make data. Wrong arguments of them are no worse than a fault of a file."""


class Program:
    """A call that torch.load would execute."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def as_json(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome.out)
    return found


@pytest.mark.parametrize("form", range(len(_FORMS)), ids=[name for name, _ in _FORMS])
def test_every_call_that_would_run_something_is_unsafe_in_every_form(form: int) -> None:
    form_name, build = _FORMS[form]
    missed = []
    for module, name, arguments in CALLS:
        if form_name == "alone" and name == "ndarray":
            continue  # every array is made of these
        found = scan_pickle(b"\x80\x04" + build(module, name, arguments) + b".")
        wanted = NAMED if form_name == "alone" else UNSAFE
        if wanted not in found.names.values() and f"{module}.{name}" not in DATA:
            missed.append(f"{module}.{name}")
    assert missed == []


def test_a_name_that_is_never_called_is_only_reported() -> None:
    assert scan_pickle(b"\x80\x02cmycode\nConfig\n.").names == {"mycode.Config": NAMED}
    assert scan_pickle(b"\x80\x02ctorch\nSize\n(tR.").names == {"torch.Size": ORDINARY}


def test_scan_examines_the_instructions_after_an_unsafe_call() -> None:
    found = scan_pickle(
        b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00xtR0cposix\nsystem\n(X\x01\x00\x00\x00xtR."
    )
    assert found.names == {"os.system": UNSAFE, "posix.system": UNSAFE}


@pytest.mark.parametrize("kind", ["zip", "before torch 1.6", "plain pickle"])
def test_a_program_in_a_file_of_weights_ends_with_status_6_and_does_not_run(
    kind: str, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model")
    content = {"weight": torch.zeros(2), "more": Program(tmp_path / "executed")}
    if kind == "plain pickle":
        (model / "optimizer.pkl").write_bytes(
            pickle.dumps({"more": Program(tmp_path / "executed")})
        )
    else:
        torch.save(content, model / "extra.pt", _use_new_zipfile_serialization=kind == "zip")
    with unchanged(tmp_path):
        outcome = run("scan", model)
        found = as_json(run("scan", model, "--json"))
    assert outcome.status == 6
    assert "posix.system" in outcome.out
    assert [each["name"] for each in found["globals"] if each["judgement"] == "unsafe"] == [
        "posix.system"
    ]
    assert (found["safe"], found["intact"]) == (False, True)


def _hidden(form: str, path: Path, program: Program) -> None:
    """A program where torch, numpy or pickle would run it, and no protocol's mark or plain archive shows it."""
    array = np.array([program], dtype=object)
    if form.startswith("protocol"):
        path.write_bytes(pickle.dumps({"more": program}, int(form[-1])))
    elif form == "an instance":
        path.write_bytes(f"(S'touch {program.mark}'\nios\nsystem\n.".encode())
    elif form == "behind a harmless one":
        path.write_bytes(pickle.dumps(1, 0) + pickle.dumps(program, 0))
    elif form == "compressed archive":
        with ZipFile(path, "w", ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"more": program}, 2))
    elif form == "array":
        with path.open("wb") as file:
            np.save(file, array, allow_pickle=True)
    elif form == "arrays":
        with path.open("wb") as file:
            np.savez(file, a=array)
    elif form == "compressed arrays":
        with path.open("wb") as file:
            np.savez_compressed(file, a=array)
    else:
        (path.parent / "program").write_bytes(pickle.dumps(program, 1))
        with tarfile.open(path, "w") as tar:
            tar.add(path.parent / "program", "weights.ckpt")
        (path.parent / "program").unlink()


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("protocol 0", "training_state.pkl"),
        ("protocol 1", "optimizer.pt"),
        ("protocol 0", "without_suffix"),
        ("an instance", "args.bin"),
        ("behind a harmless one", "state.pkl"),
        ("compressed archive", "model.pt"),
        ("array", "means.npy"),
        ("arrays", "means.npz"),
        ("compressed arrays", "means.npz"),
        ("tar", "model.nemo"),
        ("tar", "model.tar"),
    ],
)
def test_a_program_is_found_whatever_it_is_wrapped_in(form: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    _hidden(form, tmp_path / "dir" / name, Program(tmp_path / "executed"))
    with unchanged(tmp_path):
        outcome = run("scan", tmp_path / "dir")
    assert outcome.status == 6, outcome
    assert (
        f"unsafe   {name}: calls {'os' if form == 'an instance' else 'posix'}.system" in outcome.out
    )


@pytest.mark.parametrize(
    "content",
    [
        b"code and notes\nabout it\nRead me.\n", b"(in the\n\n.", b"cat\ndog\nRun\n", b"I am text\n.", bytes(range(0x80, 0x90)) * 9,
        b"\x82\x01.", b"[PAD]\nhello\n", b"N.", b"(I1\n.",
    ],
)  # fmt: skip
def test_text_and_numbers_are_not_taken_for_pickles(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    assert run("scan", tmp_path).status == 0


def test_a_row_of_pickles_without_end_is_a_fault(tmp_path: Path) -> None:
    """A file of a gigabyte would otherwise take an hour."""
    for name, one in (("marked.bin", b"\x80\2N."), ("unmarked.bin", b"N.")):
        (tmp_path / name).write_bytes(one * 100_001)
        *_, last = scan_file(tmp_path / name)
        assert (
            last.fault
            == "more than 100,000 pickles in a row, of which the others were not looked at"
        )
        (tmp_path / name).write_bytes(one * 100_000)
        assert not any(found.fault for found in scan_file(tmp_path / name))


def test_scan_reports_compressed_files_as_not_checked(tmp_path: Path) -> None:
    (tmp_path / "state.pkl.gz").write_bytes(
        gzip.compress(pickle.dumps(Program(tmp_path / "executed")))
    )
    outcome = run("scan", tmp_path)
    assert outcome.status == 0
    assert "remark   state.pkl.gz: is compressed, so its content was not checked" in outcome.out


@pytest.mark.parametrize(
    "name",
    [
        "core-te-llama-optim-tp2pp1",
        "dist-llama-optim-dp2-dp_zero_gather_scatter",
        "zarr-llama-optim-tp2pp2",
        "dcp-hf-writer",
    ],
)
def test_scan_finds_files_of_megatron_and_torch_safe(name: str) -> None:
    outcome = run("scan", FIXTURES / name, "--json")
    found = as_json(outcome)
    assert outcome.status == 0, outcome
    assert {each["judgement"] for each in found["globals"]} <= {"ordinary"}
    assert bool(found["globals"]) == (name != "dcp-hf-writer") or found["files"] > 0


def test_a_distributed_checkpoint_is_looked_into_archive_by_archive() -> None:
    found = as_json(run("scan", FIXTURES / "dist-llama-tp2pp2", "--json"))
    assert sum(each["file"].endswith(".distcp") for each in found["globals"]) > 100


def test_code_that_a_configuration_names_is_unsafe_and_other_code_is_a_remark(
    tmp_path: Path,
) -> None:
    model = write_llama(tmp_path / "model")
    (model / "modeling_own.py").write_text("raise SystemExit('executed')")
    outcome = run("scan", model)
    assert outcome.status == 0
    assert "modeling_own.py: is code" in outcome.out
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.Model"}})
    )
    outcome = run("scan", model)
    assert outcome.status == 6
    assert "config.json: its auto_map has transformers run" in outcome.out


def test_a_kernel_of_the_hub_in_a_configuration_is_unsafe(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"_attn_implementation": "sdpa"}))
    assert run("scan", model).status == 0
    inner = {"text_config": {"_attn_implementation": "somebody/kernel"}}
    (model / "config.json").write_text(json.dumps(config | inner))
    outcome = run("scan", model)
    assert outcome.status == 6
    assert "fetch the kernel 'somebody/kernel' from the Hub" in outcome.out


def test_all_faults_are_listed_in_one_go(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", shards=3)
    shards = sorted(model.glob("model-*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    shards[1].unlink()
    (model / "tokenizer.json").write_text("{")
    torch.save({"a": torch.zeros(99)}, model / "extra.pt")
    (model / "extra.pt").write_bytes((model / "extra.pt").read_bytes()[:-30])
    (model / "other.bin").symlink_to("/etc/hostname")
    outcome = run("scan", model, "--json")
    found = as_json(outcome)
    assert outcome.status == 6
    assert [each["file"] for each in found["faults"]] == [
        "extra.pt", shards[0].name, "model.safetensors.index.json", "tokenizer.json"
    ]  # fmt: skip
    assert [each["file"] for each in found["code"]] == ["other.bin"]
    (model / "other.bin").unlink()
    assert run("scan", model).status == 3


@pytest.mark.parametrize("name", ["weights.bin", "pytorch_model.bin", "optimizer.pt", "model.gguf"])
def test_random_bytes_are_not_called_a_sound_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(np.random.default_rng(3).bytes(4096))
    for place in (tmp_path, tmp_path / name):
        outcome = run("scan", place)
        assert outcome.status == 3, outcome
        assert f"fault    {name}: is " in outcome.out


def test_a_damaged_gguf_file_is_a_fault(tmp_path: Path) -> None:
    case = next((FIXTURES / "gguf-llama-spm").glob("*.gguf"))
    (tmp_path / "model.gguf").write_bytes(case.read_bytes())
    assert run("scan", tmp_path).status == 0
    (tmp_path / "model.gguf").write_bytes(case.read_bytes()[:-40])
    assert run("scan", tmp_path).status == 3


def test_a_link_to_its_own_directory_leads_nowhere_else(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    (model / "self").symlink_to(".")
    (model / "named").symlink_to(model)
    assert run("scan", model).status == 0
    (model / "above").symlink_to("..")
    outcome = run("scan", model)
    assert outcome.status == 6
    assert f"above: is a link to {tmp_path}, outside of its directory" in outcome.out


def test_a_directory_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    (model / "inside").mkdir()
    with unreadable(model / "inside"):
        outcome = run("scan", model)
    assert outcome.status == 3
    assert "fault    inside: can't be read: Permission denied" in outcome.out


def test_a_single_file_and_one_that_is_not_there(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    assert run("scan", model / "model.safetensors").status == 0
    assert run("scan", model / "model.safetensors").out.startswith(
        f"{model / 'model.safetensors'}: 1 file: "
    )
    assert run("scan", tmp_path / "nothing").status == 2
