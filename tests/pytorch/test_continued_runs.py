"""PyTorch's FSDP2, torchtitan and DeepSpeed go on from what megaconv makes of their checkpoints, as runs that were never
interrupted.

DeepSpeed and torchtitan need environments of their own (docs/optimizer.md has the commands), whose Python DEEPSPEED_PYTHON and
TORCHTITAN_PYTHON name.
"""

import os
import sys
from pathlib import Path

import pytest

from tests import torch_runs
from tests.models import write_llama

PYTHON = os.environ.get("DEEPSPEED_PYTHON", "")
CONVERSIONS = """\
import megaconv, sys
from pathlib import Path
root = Path(__file__).parent.joinpath(*sys.argv[1:])
model = Path({model!r})
"""
THROUGH_MEGATRON = """\
options = {"global_batch_size": "4"}
megaconv.convert(root / "checkpoint", root / "core", saver="core", config=model, options=options, optimizer=True, tp=2)
megaconv.convert(root / "core", root / "universal", saver="deepspeed", dtype="bf16", optimizer=True)
megaconv.convert(root / "universal", root / "made", saver="dcp", optimizer=True)
"""
THROUGH_FSDP = """\
options = {"weight_decay": "megatron"}
megaconv.convert(root / "checkpoint", root / "core", saver="core", config=model, options=options, optimizer=True, tp=2)
megaconv.convert(root / "core", root / "dcp", saver="dcp", optimizer=True)
megaconv.convert(root / "dcp", root / "made", saver="deepspeed", dtype="bf16", optimizer=True)
"""
TITAN = os.environ.get("TORCHTITAN_PYTHON", "")
THROUGH_CORE = """\
options = {{"global_batch_size": "4"}}
megaconv.convert(root / "checkpoint/step-3", root / "core", saver="core", config=model, options=options, optimizer=True, tp=2)
names = {{"names": {names!r}}}
megaconv.convert(root / "core", root / "made/step-3", saver="dcp", options=names, optimizer=True)
"""


def prepared(path: Path, steps: str) -> tuple[Path, Path]:
    """(the model's directory, the directory of the runs)."""
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 40}
    model = write_llama(path / "model", dtype="float32", **sizes)  # type: ignore[arg-type]
    runs = path / "runs"
    runs.mkdir()
    (runs / "convert.py").write_text(CONVERSIONS.format(model=str(model)) + steps)
    return model, runs


@pytest.mark.slow
def test_fsdp2_goes_on_after_megatron_and_deepspeed_as_if_uninterrupted(tmp_path: Path) -> None:
    model, runs = prepared(tmp_path, THROUGH_MEGATRON)
    torch_runs.launch(sys.executable, "tests.fsdp_oracle", model, runs)
    assert torch_runs.same(runs / "continued", runs / "uninterrupted")


@pytest.mark.deepspeed
@pytest.mark.skipif(not PYTHON, reason="DEEPSPEED_PYTHON names no Python with deepspeed")
def test_deepspeed_goes_on_at_every_stage_after_megatron_and_fsdp2_as_if_uninterrupted(
    tmp_path: Path,
) -> None:
    model, runs = prepared(tmp_path, THROUGH_FSDP)
    torch_runs.launch(PYTHON, "tests.deepspeed_oracle", model, runs, "1", "2", "3")
    for stage in ("1", "2", "3"):
        assert torch_runs.same(runs / stage / "continued", runs / stage / "uninterrupted"), stage


@pytest.mark.torchtitan
@pytest.mark.skipif(not TITAN, reason="TORCHTITAN_PYTHON names no Python with torchtitan 0.3.0")
@pytest.mark.parametrize(
    ("qkv", "names"), [("fused", "torchtitan-0.3"), ("separate", "torchtitan-0.3-separate")]
)
def test_torchtitans_own_checkpointer_goes_on_after_megatron_as_if_uninterrupted(
    tmp_path: Path, qkv: str, names: str
) -> None:
    model, runs = prepared(tmp_path, THROUGH_CORE.format(names=names))
    torch_runs.launch(TITAN, "tests.titan_oracle", model, runs, qkv)
    assert torch_runs.same(runs / "continued", runs / "uninterrupted")
