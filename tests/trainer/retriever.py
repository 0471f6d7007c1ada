"""Shared parts of the tests of retrievers: the models and samples for which Megatron's own code ran
(fixtures/retriever).

Megatron's weights follow from the names of its tensors: torch.randn, seeded by each name's CRC-32, times 0.2; norms are
1 + 0.1 * randn.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from formats.tensor import matrix_shape
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, from_fields
from megaconv.model.naming import LEGACY
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.model.table import canonical_shapes
from megatron_lite.models.batch import Microbatch

FIXTURES = Path(__file__).parent / "fixtures"
SAMPLES = np.load(FIXTURES / "blocks" / "expected.npz")
STEP_SAMPLES = 8
_SEPARATE = from_fields(
    "biencoder",
    {
        "layers.count": 2, "hidden": 32, "attention.heads": 4, "attention.kv_heads": 4, "attention.head_dim": 8, "mlp.ffn": 64,
        "mlp.activation": "gelu", "mlp.bias": True, "attention.qkv_bias": True, "attention.o_bias": True, "norm.kind": "LayerNorm",
        "norm.epsilon": 1e-5, "mlp.gated": False, "vocab": 176, "max_positions": 64, "positions.kind": "learned", "token_types": 2,
        "retriever.towers": "separate", "retriever.projection": 16,
    },
)  # fmt: skip
MODELS = {
    "separate": _SEPARATE,
    "shared": changed(_SEPARATE, {"retriever.towers": "shared", "retriever.projection": 0}),
    "plain": changed(_SEPARATE, {"retriever.projection": 0}),
    "pooler": changed(_SEPARATE, {"retriever.pooler": True}),
}
SCALED = ("separate",)
"""The models whose scores are divided by the root of the hidden size."""


def expected(name: str) -> Any:
    return json.loads((FIXTURES / "retriever" / f"{name}.json").read_text())


def natives(config: ModelConfig) -> list[NativeTensor]:
    rows = family(config.family).rows
    return list(unsharded_tensors(rows, config, LEGACY))


def megatrons_name(name: str, model: str) -> str:
    """The name of a legacy tensor in the module that was run."""
    if model == "pooler":
        name = name.replace("query_model.", "question_model.")
        return name.replace(".projection_enc.", ".ict_head.")
    return name.replace("shared_model.", "model.")


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    is_norm = "norm" in name and name.endswith("weight")
    return 1 + 0.1 * drawn if is_norm else 0.2 * drawn


def weights(model: str) -> dict[str, NDArray[np.float32]]:
    """Canonical tensors by name."""
    config = MODELS[model]
    tensors = {
        native.name: _drawn(megatrons_name(native.name, model), native.shape).numpy()
        for native in natives(config)
    }
    return canonical(config, tensors)


def canonical(
    config: ModelConfig, tensors: dict[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Canonical tensors of whole legacy tensors by name."""
    shapes = canonical_shapes(family(config.family).rows, config)
    found = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for native in natives(config):
        whole = tensors[native.name].reshape(matrix_shape(native.shape))
        for name, regions in native.parts.items():
            matrix = found[name].reshape(matrix_shape(found[name].shape))
            for region in regions:
                box = region.box
                rows = whole[region.row : region.row + box.rows, :]
                matrix[box.row0 : box.row1] = rows
    return found


def microbatch(queries: Tensor, contexts: Tensor, index: int) -> Microbatch:
    return Microbatch(
        queries,
        queries,
        types=torch.zeros_like(queries),
        visible=queries > 0,
        source=contexts,
        source_visible=contexts > 0,
        index=index,
    )


def microbatches(step: int, count: int) -> list[Microbatch]:
    """The microbatches of a step."""
    each = STEP_SAMPLES // count
    found = []
    for index in range(count):
        first = step * STEP_SAMPLES + index * each
        queries, contexts = (
            torch.from_numpy(SAMPLES[f"train/{name}"][first : first + each].astype(np.int64))
            for name in ("query", "context")
        )
        found.append(microbatch(queries, contexts, index))
    return found
