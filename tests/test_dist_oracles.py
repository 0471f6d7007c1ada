"""torch_dist and plain DCP against the real software: Megatron core's dist_checkpointing, and PyTorch's own DCP."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import megaconv
from tests.megatron_oracle import Megatron
from tests.transformers_oracle import MIXTURES, VARIANTS, VOCAB, compute, create, load

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.oracle

TOLERANCE, DIVISOR = 1e-4, 8


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    with Megatron(tmp_path_factory.mktemp("megatron")) as running:
        yield running


def to_dist(source: Path, target: Path, **options: Any) -> Path:
    settings = {"transformer_impl": "local", "vocab_divisor": DIVISOR, "ckpt_format": "torch_dist", **options}
    megaconv.convert(source, target, saver="core", **settings)
    return target


def tokens() -> "torch.Tensor":
    import torch

    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("variant", "layouts"),
    [
        ("llama", ({"tp": 1, "pp": 1}, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "vpp": 2}, {"tp": 1, "pp": 2, "layer_split": (1, 3)})),
        ("gpt2", ({"tp": 2, "pp": 2},)),
        ("qwen3", ({"tp": 2, "pp": 1},)),
        ("mixtral", ({"tp": 1, "pp": 1, "ep": 2}, {"tp": 2, "pp": 1, "ep": 2}, {"tp": 2, "pp": 1, "ep": 4, "etp": 1})),
        ("glm4_moe", ({"tp": 1, "pp": 2, "ep": 2},)),
    ],
)  # fmt: skip
def test_megatron_loads_torch_dist_and_computes_what_transformers_computes(
    variant: str, layouts: tuple[dict[str, Any], ...], megatron: Megatron, tmp_path: Path
) -> None:
    """Strictly: every key of the model is in the checkpoint, and the other way round."""
    create({**VARIANTS, **MIXTURES}[variant], tmp_path / "model")
    expected = compute(load(tmp_path / "model"), tokens())
    for number, layout in enumerate(layouts):
        checkpoint = to_dist(tmp_path / "model", tmp_path / f"dist-{number}", **layout)
        found = megatron.logits(checkpoint, tokens())[..., :VOCAB]
        assert (found - expected).abs().max().item() <= TOLERANCE, layout
