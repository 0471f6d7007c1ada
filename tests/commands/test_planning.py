"""Planning very large models: what ranks, layers and experts have in common is worked out once, and stays right."""

import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import megaconv
from formats.torch_zip import NumberedLayout, TorchZipLayout
from megaconv.errors import CorruptCheckpoint, LayoutError, TensorMismatch
from megaconv.families import families
from megaconv.model.check import same_names
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Key, TensorInfo
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE, CORE_GROUPED, CORE_LEGACY_GROUPED, Naming
from megaconv.model.natives import RankTensors, native_tensors
from megaconv.model.table import canonical_shapes
from megaconv.options import SaveOptions
from megaconv.registry import saver
from tests.model.test_table import everything
from tests.models import write_llama

FAMILY = "qwen3_moe"


def header_of(dtypes: dict[str, str]) -> Header:
    """A model with four experts in its second layer. dtypes: of tensors that aren't bfloat16."""
    # Megatron has no argument for a bias of these norms.
    config = changed(replace(everything(FAMILY), family=FAMILY), {"attention.qk_norm_bias": False})
    shapes = canonical_shapes(families()[FAMILY].rows, config)
    return Header(
        config,
        {
            Key(name): TensorInfo(shape, dtypes.get(name, "bfloat16"))
            for name, shape in shapes.items()
        },
    )


def layouts_of(header: Header) -> dict[str, TorchZipLayout]:
    files = saver("core").plan(header, SaveOptions(tp=2, pp=2, ep=4, vocab_divisor=1)).files
    return {
        name: layout.shared for name, layout in files.items() if isinstance(layout, NumberedLayout)
    }


def test_rank_files_of_the_same_tensors_share_one_layout() -> None:
    layouts = layouts_of(header_of({}))
    assert len(layouts) == 8  # each stage on four ranks
    # The dense stage has one layout, the stage with experts another.
    assert len({id(layout) for layout in layouts.values()}) == 2


def test_rank_files_whose_tensors_are_of_other_dtypes_do_not() -> None:
    expert = "layers.1.mlp.experts.3."
    layouts = layouts_of(
        header_of({f"{expert}{word}.weight": "float32" for word in ("gate", "up", "down")})
    )
    sizes = {name: layout.size for name, layout in layouts.items() if "_001_" in name}
    assert len({id(layout) for layout in layouts.values()}) == 3
    assert {name for name, size in sizes.items() if size == max(sizes.values())} == {
        name for name in sizes if "_001_003/" in name
    }


@pytest.mark.parametrize("naming", [CORE, CORE_GROUPED, CORE_LEGACY_GROUPED])
def test_ranks_that_are_worked_out_together_hold_what_each_holds_alone(naming: Naming) -> None:
    config, rows = everything(FAMILY), families()[FAMILY].rows
    layout = Layout(tp=2, pp=2, ep=2, etp=2, stage_layers=(1, 1))
    together = RankTensors(rows, config, naming, layout, 16)
    for chunk, tp_rank, ep_rank in product(layout.chunks(), range(2), range(2)):
        alone = native_tensors(rows, config, naming, layout, tp_rank, chunk, 16, ep_rank)
        assert list(together.of(tp_rank, chunk, ep_rank)) == list(alone)


def test_names_of_a_very_large_model_are_compared_in_no_time() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.weight"
        for layer in range(200)
        for expert in range(256)
    ]
    started = time.process_time()
    same_names(names, dict.fromkeys(names), "here")
    with pytest.raises(
        TensorMismatch,
        match=r"1 tensor is missing: model\.layers\.199\.mlp\.experts\.255\.weight$",
    ):
        same_names(names, dict.fromkeys(names[:-1]), "here")
    assert time.process_time() - started < 2


@pytest.mark.parametrize("form", ["hf", "core"])
def test_sizes_that_cannot_be_sharded_are_refused_before_any_tensor_is_looked_up(
    form: str, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "hf")
    if form == "core":
        megaconv.convert(source, tmp_path / "core", saver="core", tp=2)
        source = tmp_path / "core"
    for weights in [*source.rglob("*.safetensors"), *source.rglob("*.pt")]:
        weights.write_bytes(b"no checkpoint at all")
    with pytest.raises(LayoutError, match="heads = 8 can't be divided"):
        megaconv.convert(source, tmp_path / "out", saver="core", tp=3)
    with pytest.raises(CorruptCheckpoint):
        megaconv.convert(source, tmp_path / "out", saver="core", tp=4)
