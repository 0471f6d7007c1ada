"""Opens a biencoder for embedding: each process holds the whole model, and computes rows of its own."""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import megaconv
from megaconv.errors import UsageError
from megaconv.model.fields import changed
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.loop.tokenizer import make_tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.biencoder import Biencoder, Tower
from megatron_lite.parallel.grid import Grid
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Data
from megatron_lite.settings.options import ModelOptions

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]
_TOKENIZER_FLAGS = "tokenizer_type", "tokenizer_model", "vocab_file"


@dataclass(frozen=True)
class OpenedTowers:
    """The towers of a biencoder on one process."""

    engine: Engine
    tokenizer: Tokenizer
    fingerprint: str
    """Of the weights."""

    @property
    def width(self) -> int:
        """Elements of an embedding."""
        config = self.engine.config
        return config.retriever.projection or config.hidden

    @property
    def seq_length(self) -> int:
        """The most tokens of a row."""
        return self.engine.config.max_positions

    def query(self, ids: Ids) -> Vectors:
        """Return float32 [rows, width]: embeddings of queries. ids: int64 [rows, tokens]; 0 is padding."""
        return self._embedded(self._towers[0], ids)

    def context(self, ids: Ids) -> Vectors:
        """Return float32 [rows, width]: embeddings of contexts. ids: as in query."""
        return self._embedded(self._towers[1], ids)

    @property
    def _towers(self) -> tuple[Tower, Tower]:
        (network,) = self.engine.chunks
        assert isinstance(network, Biencoder)
        return network.towers

    def _embedded(self, tower: Tower, ids: Ids) -> Vectors:
        tokens = torch.from_numpy(ids).to(self.engine.grid.device)
        types = torch.zeros_like(tokens)
        run = self.engine.make_pass(Microbatch(tokens, tokens, types=types, visible=tokens > 0))
        with torch.no_grad():
            found = tower.embeddings(tower(None, run))
        return found.float().cpu().numpy()


def open_towers(
    load: str, given: argparse.Namespace, device: torch.device | None = None
) -> OpenedTowers:
    """Open a biencoder in any format that megaconv reads.

    given: may have the tokenizer's flags (tokenizer_type, tokenizer_model, vocab_file). Raises CheckpointError, and
    UsageError for a model that is no biencoder.
    """
    start = open_weights(load)
    if start.config.family != "biencoder":
        raise UsageError(
            f"{load}: is a {start.config.family}; texts are embedded by a biencoder, which pretrain --model-type biencoder trains"
        )
    flags: dict[str, Any] = {name: getattr(given, name, None) for name in _TOKENIZER_FLAGS}
    tokenizer = make_tokenizer(Settings(data=Data(**flags)), start, 0)
    config = changed(start.config, {"dtype": "float32"})
    layout = Layout(stage_layers=(config.layer_count,))
    grid = Grid(layout, 1, 0, device or torch.device("cpu"))
    options = ModelOptions("float32", trains=False)
    engine = Engine(config, grid, options, None)
    load_weights(engine, {key.name: tensor for key, tensor in start.tensors.items()})
    weights = megaconv.fingerprint(load, optimizer=False).weights
    return OpenedTowers(engine, tokenizer, weights)
