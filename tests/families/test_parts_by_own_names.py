"""Multimodal models whose parts one checkpoint knows (Hugging Face, Megatron), and another by the names of its files (DCP)."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

import megaconv
from megaconv.errors import CorruptCheckpoint
from tests.conftest import FIXTURES
from tests.families.test_own_names import assert_equal, weights, write_adapter
from tests.runs import assert_refused, run


def test_a_multimodal_output_is_known_by_its_parts_and_by_the_names_of_its_files(
    tmp_path: Path,
) -> None:
    """DCP has the names of the files. The record of an hf output has the parts."""
    hf, dcp = tmp_path / "hf", tmp_path / "dcp"
    megaconv.convert(FIXTURES / "whole-qwen2_5_vl", hf, saver="hf")
    megaconv.convert(hf, dcp, saver="dcp")
    assert megaconv.diff(hf, dcp).same
    assert megaconv.diff(dcp, hf, metadata=True).same
    megaconv.average([dcp, hf], tmp_path / "averaged", saver="dcp")
    assert megaconv.fingerprint(tmp_path / "averaged") == megaconv.fingerprint(dcp)
    held = weights(hf)
    damaged = held | {"visual.merger.ln_q.weight": held["visual.merger.ln_q.weight"] + 1}
    save_file(damaged, hf / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=r"other values than were written: .*merger\.ln_q"):
        megaconv.convert(hf, tmp_path / "other", saver="dcp")
    assert not (tmp_path / "other").exists()


def test_an_adapter_is_merged_into_a_multimodal_output(tmp_path: Path) -> None:
    hf, adapter = tmp_path / "hf", tmp_path / "adapter"
    megaconv.convert(FIXTURES / "whole-qwen2_5_vl", hf, saver="hf")
    held = weights(hf)
    name = "model.layers.0.mlp.down_proj"
    merged = write_adapter(adapter, {name: held[f"{name}.weight"]})
    megaconv.merge(hf, adapter, tmp_path / "out")
    assert_equal(weights(tmp_path / "out"), held | {f"{name}.weight": merged[name]})


def test_a_patch_of_a_multimodal_model_has_the_names_that_both_sides_have(tmp_path: Path) -> None:
    hf, dcp, patch = tmp_path / "hf", tmp_path / "dcp", tmp_path / "patch"
    megaconv.convert(FIXTURES / "whole-qwen2_5_vl", hf, saver="hf")
    megaconv.convert(hf, dcp, saver="dcp")
    megaconv.delta(hf, dcp, patch)
    for base in (hf, dcp):
        megaconv.apply(base, patch, tmp_path / f"by {base.name}")
        assert megaconv.diff(tmp_path / f"by {base.name}", hf).same


def test_parts_in_megatron_are_not_compared_with_the_names_of_files(tmp_path: Path) -> None:
    source, core, dcp = FIXTURES / "whole-qwen2_5_vl", tmp_path / "core", tmp_path / "dcp"
    megaconv.convert(source, core, saver="core")
    megaconv.convert(source, dcp, saver="dcp")
    words = ("under the names of its files", "with --saver hf first")
    assert_refused(run("diff", core, dcp), 3, "B holds", "A holds it in parts", *words)
    outcome = run("delta", dcp, core, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, "OLD holds", "NEW holds it in parts", *words)
    outcome = run("average", core, dcp, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, "dcp holds", "core holds it in parts", *words)
    outcome = run("convert", dcp, tmp_path / "out", "--saver", "core")
    assert_refused(outcome, 3, "is a multimodal model", "with --saver hf first")


def test_refusals_name_the_way_by_hugging_face(tmp_path: Path) -> None:
    source, core = FIXTURES / "whole-qwen2_5_vl", tmp_path / "core"
    megaconv.convert(source, core, saver="core")
    to_dcp = (tmp_path / "out", "--saver", "dcp")
    assert_refused(run("convert", core, *to_dcp), 2, "--saver dcp", "with --saver hf first")
    outcome = run("convert", source, *to_dcp, "--vocab-size", 200)
    assert_refused(outcome, 3, "--vocab-size", "a multimodal model; convert it with --saver hf")
