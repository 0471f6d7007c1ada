"""Statistics of streamed tensors, against numpy's of the whole tensor in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaconv.engine import statistics
from megaconv.engine.statistics import Statistics, all_statistics, tensor_statistics
from megaconv.engine.stream import as_lazy
from tests.conftest import FIXTURES
from tests.runs import run


def found(tensor: torch.Tensor) -> Statistics:
    return tensor_statistics(as_lazy(tensor))


def expected(tensor: torch.Tensor) -> dict[str, Any]:
    values = tensor.double().numpy().reshape(-1)
    finite = values[np.isfinite(values)]
    return {
        "mean": finite.mean() if finite.size else 0.0,
        "std": finite.std() if finite.size else 0.0,
        "minimum": finite.min() if finite.size else 0.0,
        "maximum": finite.max() if finite.size else 0.0,
        "zeros": int((values == 0).sum()),
        "nan": int(np.isnan(values).sum()),
        "infinite": int(np.isinf(values).sum()),
    }


def assert_right(tensor: torch.Tensor) -> None:
    stats, right = found(tensor), expected(tensor)
    for name in ("zeros", "nan", "infinite", "minimum", "maximum"):
        assert getattr(stats, name) == right[name], name
    scale = max(abs(right["minimum"]), abs(right["maximum"]))
    assert stats.mean == pytest.approx(right["mean"], rel=1e-4, abs=1e-6 * scale + 1e-40)
    assert stats.std == pytest.approx(right["std"], rel=1e-4, abs=1e-6 * scale + 1e-40)
    assert stats.elements == tensor.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 1000), (7,), (1,), ()])
def test_statistics_are_those_of_the_whole_tensor(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    assert_right((torch.randn(shape) * 0.02).to(dtype))


def test_a_deviation_far_below_the_mean_is_not_lost() -> None:
    torch.manual_seed(0)
    assert_right(1000 + torch.randn(400_000) * 1e-2)


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_nan_infinities_and_very_large_numbers_are_counted(values: list[float]) -> None:
    assert_right(torch.tensor(values, dtype=torch.float32))


def test_a_histogram_counts_equal_steps_from_the_smallest_to_the_largest() -> None:
    stats = found(torch.linspace(-1, 1, 32_000))
    assert sum(stats.histogram) == stats.sampled == 32_000
    assert max(stats.histogram) - min(stats.histogram) <= 1


def test_the_sample_of_a_large_tensor_is_taken_at_equal_distances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "_SAMPLED", 1000)
    stats = found(torch.arange(300_000, dtype=torch.float32))
    assert stats.sampled == -(-300_000 // 301)
    assert max(stats.histogram) - min(stats.histogram) <= 1


def test_integers_have_statistics_and_eight_bit_floats_have_none() -> None:
    tensors = [
        ("a", as_lazy(torch.tensor([1, 2, 3]))),
        ("b", as_lazy(torch.zeros(3).to(torch.float8_e4m3fn))),
    ]
    stats = all_statistics(tensors, workers=2)
    assert set(stats) == {"a"}
    assert stats["a"].mean == 2


def test_inspect_shows_a_line_for_each_tensor() -> None:
    outcome = run("inspect", FIXTURES / "core-llama-tp2pp2" / "checkpoint", "--stats")
    assert outcome.status == 0
    assert len(outcome.out.splitlines()) == 1 + 39
    rank_file = next((FIXTURES / "core-llama-tp2pp2" / "checkpoint").rglob("mp_rank_00_000/*.pt"))
    assert "embedding.word_embeddings.weight" in run("inspect", rank_file, "--stats").out
