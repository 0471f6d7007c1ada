"""Random journeys of two checkpoints: averages, patches and adapters are the same from any formats and in any format."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import megaconv
from megaconv.model.config import ModelConfig
from tests.engine.journeys import (
    Options,
    attempt,
    keys_of,
    moved,
    ordinary,
    other_weights,
    run_in_temporary_directory,
    target,
    write_lora,
    write_possible,
)
from tests.engine.test_chains import check_same_weights
from tests.engine.test_journeys import files_beside

FAMILIES = (
    *("cohere2", "deepseek_v3", "exaone4", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "nemotron"),
    *("olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm"),
)  # fmt: skip
"""Families with linear layers under usual names."""
METHODS: tuple[Options, ...] = (
    {},
    {"method": "slerp"},
    {"method": "ties", "density": 0.3},
    {"method": "dare", "density": 0.3, "seed": 3},
)


class Pair:
    """A model with what is combined with it, each at home and in another format."""

    def __init__(self, number: int, folder: Path) -> None:
        self.folder, self.random = folder, Random(number)
        self.source = folder / "source"
        self.config: ModelConfig = write_possible(FAMILIES, self.source, self.random, ordinary)
        self.elsewhere = self.moved(self.source)

    def moved(self, at: Path) -> Path:
        """A checkpoint in another format."""
        return moved(at, self.folder / f"{at.name} elsewhere", self.config, self.random)

    def require_same(self, made: Path, direct: Path) -> None:
        """Both are the same Hugging Face directory."""
        back = self.folder / "back"
        megaconv.convert(made, back, saver="hf")
        check_same_weights(back, direct, [])
        assert keys_of(back) == keys_of(direct)
        assert files_beside(back) == files_beside(direct)
        assert megaconv.verify(made).same


def run_average(number: int, folder: Path) -> None:
    """Average two models, at home and elsewhere."""
    pair = Pair(number, folder)
    other = other_weights(pair.source, folder / "other", pair.random)
    method = pair.random.choice(METHODS)
    direct, made = folder / "direct", folder / "made"
    megaconv.average([pair.source, other], direct, **method)
    asked = {**target(pair.config, pair.random), **method, "average": [pair.moved(other)]}
    if attempt(folder, megaconv.convert, pair.elsewhere, made, **asked):
        pair.require_same(made, direct)


def run_patch(number: int, folder: Path) -> None:
    """Make a patch of two models elsewhere, and apply it to the older one in any format."""
    pytest.importorskip("zstandard")
    pair = Pair(number, folder)
    other = other_weights(pair.source, folder / "other", pair.random)
    direct, patch, made = folder / "direct", folder / "patch", folder / "made"
    megaconv.convert(other, direct, saver="hf")
    megaconv.delta(pair.elsewhere, pair.moved(other), patch)
    base = pair.random.choice((pair.source, pair.elsewhere))
    megaconv.apply(base, patch, made, saver=pair.random.choice((None, "hf", "dcp", "deepspeed")))
    pair.require_same(made, direct)


def run_adapter(number: int, folder: Path) -> None:
    """Merge an adapter, at home and elsewhere, and translate it for Megatron-Bridge, back, and again."""
    pair = Pair(number, folder)
    adapter = write_lora(folder / "adapter", pair.source, pair.random)
    direct, made = folder / "direct", folder / "made"
    megaconv.merge(pair.source, adapter, direct)
    asked = {**target(pair.config, pair.random), "adapters": [adapter]}
    if attempt(folder, megaconv.convert, pair.elsewhere, made, **asked):
        pair.require_same(made, direct)
    bridge, again = folder / "bridge", folder / "again"
    of_base = {"config": pair.source}
    from_peft = {**of_base, "loader": "peft", "saver": "core", "ckpt_format": "torch_dist"}
    if not attempt(folder, megaconv.convert, adapter, bridge, **from_peft, tp=2):
        return
    megaconv.convert(bridge, folder / "peft", saver="peft", **of_base)
    megaconv.convert(folder / "peft", again, **from_peft)
    expected = megaconv.fingerprint(bridge, **of_base)
    assert megaconv.fingerprint(again, **of_base) == expected
    assert megaconv.verify(folder / "peft", loader="peft", **of_base).same


RUNS = (run_adapter, run_average, run_patch)


@given(st.integers(0, 1 << 30))
@settings(max_examples=1, phases=[Phase.generate])
def test_two_checkpoints_are_combined_from_everywhere(number: int) -> None:
    for run in RUNS:
        run_in_temporary_directory(run, number)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("number", range(150))
def test_many_checkpoints_are_combined_from_everywhere(
    run: Callable[[int, Path], None], number: int
) -> None:
    run_in_temporary_directory(run, number)
