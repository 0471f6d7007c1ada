"""Names that are made to deceive whoever reads the terminal, and calls that are hidden in a valid pickle."""

import io
import json
import logging
import os
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats.pickle_guard import load
from formats.pickle_records import Opaque
from formats.pickle_writer import dumps
from megaconv.terminal import LONGEST, log_to_stderr, one_line, show
from tests.models import write_llama
from tests.runs import assert_refused, finish, run, start

EVIL = "w\x1b[2J\x1b]0;x\x07\r\nmegaconv: all is well\u202e\u2028\x9b1m\x00"
"""Clears the screen, sets the title, begins a line of its own, turns the direction of writing."""
ESCAPED = r"w\x1b[2J\x1b]0;x\x07\r\nmegaconv: all is well\u202e\u2028\x9b1m\x00"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (EVIL, ESCAPED),
        ("a\\nb é 日本 🙂", "a\\nb é 日本 🙂"),
        ("\udcff\ud800", r"\udcff\ud800"),
        ("", ""),
        ("x" * (LONGEST + 7), "x" * LONGEST + " ... (7 more characters)"),
    ],
)
def test_only_what_can_be_seen_is_printed(text: str, seen: str) -> None:
    assert one_line(text) == seen
    assert one_line(text).isprintable()


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [("ascii", rb"\xe9 \u65e5"), ("latin-1", b"\xe9 \\u65e5"), ("utf-8", "é 日".encode())],
)
def test_characters_that_a_terminal_lacks_are_escaped(encoding: str, printed: bytes) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show("é 日", stream)
    stream.flush()
    assert stream.buffer.getvalue() == printed + b"\n"  # type: ignore[attr-defined]


def evil_model(path: Path) -> Path:
    model = write_llama(path, layers=1)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {EVIL: torch.zeros(3)}, model / "model.safetensors", {"format": "pt"})
    return model


def test_a_tensors_name_in_an_error_is_escaped(tmp_path: Path) -> None:
    model = evil_model(tmp_path / "model")
    for arguments in (
        ("inspect", model),
        ("convert", "--load-dir", model, "--saver", "hf", "--save-dir", tmp_path / "out"),
        ("diff", model, model),
    ):
        outcome = run(*arguments)
        assert_refused(outcome, 3, ESCAPED)
        assert outcome.err.rstrip("\n").isprintable()


def test_a_name_in_an_index_or_in_a_record_is_escaped(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1, shards=2)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"][EVIL] = index["weight_map"]["lm_head.weight"]
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(run("inspect", model), 3, ESCAPED)
    megaconv.convert(write_llama(tmp_path / "other", layers=1), tmp_path / "out", saver="hf")
    said = json.loads((tmp_path / "out" / "megaconv.json").read_text())
    said["tensors"][EVIL] = "0"
    (tmp_path / "out" / "megaconv.json").write_text(json.dumps(said))
    for command in ("verify", "inspect"):
        outcome = run(command, tmp_path / "out")
        assert ESCAPED in outcome.out
        assert all(line.isprintable() for line in outcome.out.split("\n"))


def test_names_of_files_and_directories_are_escaped(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "a\x1b[31m\nb", layers=1)
    (model / "tokenizer\x1b[2J\n.json").write_text("{}")
    (model / os.fsdecode(b"tokenizer-\xff.json")).write_text("{}")
    outcome = run("inspect", model)
    assert r"tokenizer\x1b[2J\n.json" in outcome.out
    assert r"tokenizer-\udcff.json" in outcome.out
    outcome = run(
        "convert",
        "--load-dir",
        model,
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "out\n",
        "--dry-run",
    )
    assert outcome.status == 0
    assert all(line.isprintable() for line in outcome.out.split("\n"))
    (model / "config.json").write_text("{")
    assert_refused(run("inspect", model), 3, r"a\x1b[31m\nb/config.json")


def test_a_stdout_that_knows_ascii_alone_is_no_traceback(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "modèle", layers=1)
    (model / "tokenizer-é.json").write_text("{}")
    before = "import sys; sys.stdout.reconfigure(encoding='ascii')"
    outcome = finish(start("inspect", model, before=before))
    assert (outcome.status, outcome.err) == (0, "")
    assert r"tokenizer-\xe9.json" in outcome.out


def test_names_in_warnings_are_escaped_and_each_warning_appears_once() -> None:
    root, stream = logging.getLogger(), io.StringIO()
    handlers, root.handlers = root.handlers, []
    try:
        log_to_stderr("megaconv")
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(stream)
        for _ in range(3):
            logging.getLogger("megaconv").warning("%s is left out", EVIL)
    finally:
        root.handlers = handlers
    assert stream.getvalue() == f"megaconv: warning: {ESCAPED} is left out\n"


# Calls under torch's or numpy's names.

GADGETS = (
    "numpy.testing._private.utils.runstring", "numpy.f2py.crackfortran.getlincoef", "numpy.f2py.diagnose.run_command", "numpy.core.load",
    "torch.hub.load", "torch.load", "torch.serialization.load", "torch.utils.collect_env.run",
    "torch.jit.unsupported_tensor_ops.execWrapper",
    "torch._dynamo.guards.GuardBuilder.get", "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler", "torch._inductor.codecache.compile_file",
    "torch.storage._load_from_bytes", "torch.distributed.checkpoint.filesystem.open", "torch.nn.Linear.forward", "torch.optim.os.system",
)  # fmt: skip
ORDINARY = (
    "torch.device", "torch.Generator", "torch._utils._rebuild_device_tensor_from_numpy", "torch.nn.modules.linear.Linear",
    "torch.optim.lr_scheduler.LambdaLR", "torch.distributed.checkpoint.metadata.Metadata", "numpy.random._pickle.__randomstate_ctor",
    "numpy.dtypes.Float32DType", "torch.distributed._shard.sharded_tensor.api.ShardedTensor", "megatron.core.enums.ModelType",
)  # fmt: skip


def hidden(name: str) -> Opaque:
    module, _, function = name.rpartition(".")
    return Opaque(module, function, ("/tmp/never",))


@pytest.mark.parametrize("name", GADGETS)
def test_a_call_of_torchs_or_numpys_in_a_valid_pickle_stays_inert_and_is_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = load(dumps({"weight": 1, "hidden": hidden(name)})[0], source="x.pt")
    assert isinstance(value, dict)
    assert isinstance(value["hidden"], Opaque)
    (warning,) = caplog.messages
    assert (
        warning.startswith(f"x.pt: asks to call {name.replace('numpy.core', 'numpy')}")
        or "numpy.core" in name
    )
    assert "no checkpoint needs" in warning


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_globals_of_checkpoints_are_read_without_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    load(dumps({"ordinary": hidden(name)})[0], source="x.pt")
    assert not caplog.messages


class Saves:
    """Would write a file if anybody called what it asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return torch.save, ({}, str(self.path))


def test_a_checkpoint_with_a_hidden_call_is_converted_with_one_warning(tmp_path: Path) -> None:
    megaconv.convert(write_llama(tmp_path / "hf", layers=1), tmp_path / "core", saver="core")
    copytree(tmp_path / "core", tmp_path / "evil")
    (file,) = (tmp_path / "evil").rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    torch.save(state | {"opt_param_scheduler_extra": [Saves(tmp_path / "called")]}, file)
    outcome = finish(
        start(
            "convert",
            "--load-dir",
            tmp_path / "evil",
            "--saver",
            "hf",
            "--save-dir",
            tmp_path / "out",
        )
    )
    assert outcome.status == 0, outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert (
        "model_optim_rng.pt: asks to call torch.serialization.save, which no checkpoint needs; it was not called"
        in outcome.err
    )
    assert not (tmp_path / "called").exists()
    assert megaconv.diff(tmp_path / "out", tmp_path / "hf").same
