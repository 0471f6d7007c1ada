"""Plans of models whose layers have sizes of their own, or that only Hugging Face's files hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaconv.families import family_of_hf
from megaconv.model.config import ModelConfig
from megaconv.planning.cache import cache_bytes
from megaconv.planning.mixers import ATTENTION, in_layer
from tests.conftest import FIXTURES
from tests.runs import run

NOTICE = "Gemma3nForCausalLM: only Hugging Face's files hold this model; the layouts are an estimate for software that has it"
OF_THE_TRAINER = "Gemma4ForCausalLM: Megatron has no such model; the layouts are for megatron-lite, and an estimate for other software"

SEARCH = (
    "--gpu",
    "h100",
    "--seq-length",
    "4096",
    "--global-batch-size",
    "8",
    "--tp",
    "1",
    "--pp",
    "1",
)


def published(name: str) -> dict[str, Any]:
    every = json.loads((FIXTURES / "published_models.json").read_text())
    found: dict[str, Any] = next(each["config"] for each in every if each["model"] == name)
    return found


@pytest.fixture
def gemma() -> ModelConfig:
    raw = published("google/gemma-4-26B-A4B")
    return family_of_hf(raw, "config.json").read_hf(raw)


def test_a_cache_has_each_layers_own_heads(gemma: ModelConfig) -> None:
    """Layers with a window have 8 key/value heads of 256, all others 2 of 512."""
    kept = {
        kind.window is not None: cache_bytes(gemma, kind, 1, tp=1, cached=2, itemsize=2)
        for kind in gemma.layers
    }
    assert kept == {True: 2 * 8 * 256 * 2, False: 2 * 2 * 512 * 2}


def test_a_layer_that_shares_keys_and_values_caches_none() -> None:
    raw = published("google/gemma-4-E2B")
    config = family_of_hf(raw, "config.json").read_hf(raw)
    found = [cache_bytes(config, kind, 9, tp=1, cached=2, itemsize=2) for kind in config.layers]
    sharing = [kind.shares_kv for kind in config.layers]
    assert any(sharing)
    assert [size == 0 for size in found] == sharing


def test_attention_costs_what_the_layers_own_heads_cost(gemma: ModelConfig) -> None:
    costs = {
        kind.head_dim or gemma.attention.head_dim: ATTENTION.operations(in_layer(gemma, kind), 100)
        for kind in gemma.layers
    }
    assert costs == {size: 12 * 16 * size * 100 for size in (256, 512)}


@pytest.mark.parametrize(
    ("model", "notice", "words"),
    [
        ("google/gemma-3n-E2B", NOTICE, ()),
        ("google/gemma-4-26B-A4B", OF_THE_TRAINER, ()),
        pytest.param("google/gemma-4-26B-A4B", OF_THE_TRAINER, SEARCH, marks=pytest.mark.slow),
        ("google/gemma-4-26B-A4B", OF_THE_TRAINER, ("--gpu", "h100", "--for", "infer", "--tp", "8")),
    ],
)  # fmt: skip
def test_a_plan_says_once_that_megatron_does_not_have_the_model(
    model: str, notice: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(model)))
    asked = ("plan", tmp_path, "--gpus", "8", *words)
    assert run(*asked).out.count(notice) == 1
    assert json.loads(run(*asked, "--json").out)["notices"] == [notice]


def test_a_plan_of_a_model_that_megatron_has_says_nothing_of_the_kind(tmp_path: Path) -> None:
    raw = published("allenai/Molmo2-8B (its language model)")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    outcome = run("plan", tmp_path, "--gpus", "8", "--json")
    assert json.loads(outcome.out)["notices"] == []
