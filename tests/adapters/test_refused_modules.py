"""Refusals of adapters name their cause."""

import json
from pathlib import Path
from random import Random

from safetensors.torch import load_file

from tests.adapters.test_adapters import DORA
from tests.engine.journeys import ordinary
from tests.engine.test_chains import write_model
from tests.families.test_own_names import write_adapter
from tests.runs import assert_refused, run


def test_copies_and_further_layers_are_refused_by_their_cause(tmp_path: Path) -> None:
    """A DeepSeek V3 with a layer for multi-token prediction, which has a copy of the head."""
    base = write_model("deepseek_v3", tmp_path / "base", Random(1), {}, ordinary)
    held = load_file(base / "model.safetensors")
    layer = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    head, down = (
        f"model.layers.{layer}.shared_head.head",
        f"model.layers.{layer}.mlp.experts.0.down_proj",
    )
    for name, module in (("copy", head), ("layer", down)):
        write_adapter(tmp_path / name, {module: held[f"{module}.weight"]})
    outcome = run("merge", base, tmp_path / "copy", "--save-dir", tmp_path / "out")
    assert_refused(outcome, 2, f"{head}.weight, a copy of lm_head.weight", "and of no other copy")
    place = ("--config", base, "--saver", "core", "--ckpt-format", "torch_dist")
    words = ("convert", "--loader", "peft", tmp_path / "layer", tmp_path / "out", *place)
    assert_refused(run(*words), 3, down, "multi-token prediction are not translated")


def test_dora_has_no_weight(tmp_path: Path) -> None:
    words = ("merge", DORA / "base", f"{DORA / 'adapter'}:0.5", "--save-dir", tmp_path / "out")
    assert_refused(run(*words), 2, "DoRA is merged whole", "without the weight 0.5")
