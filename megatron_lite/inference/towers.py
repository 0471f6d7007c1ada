"""The two towers of a biencoder as embedders: each rank has the whole model and embeds other texts."""

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.plan import default_workers
from megaconv.errors import UsageError
from megaconv.model.fields import changed
from megaconv.model.ir import OpenedSource
from megatron_lite.checkpoint.restore import Start, open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.opening import make_engine
from megatron_lite.loop.tokenizer import make_tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.processes import launch
from megatron_lite.processes.failure import all_or_none
from megatron_lite.settings.architecture import check_against
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Data
from megatron_lite.settings.parallel import Parallel

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]


class EngineTowers:
    """See retrieval.towers.Towers. On a CPU it computes in float32, on a GPU in the checkpoint's dtype."""

    def __init__(self, engine: Engine, fingerprint: str, tokenizer: Tokenizer) -> None:
        """engine: of one rank's whole model. fingerprint: of its weights."""
        self._engine = engine
        (chunk,) = engine.chunks
        stage: Any = chunk
        self._query, self._context = stage.towers
        config = engine.config
        self.width = config.retriever.projection or config.hidden
        self.tokenizer = tokenizer
        self.seq_length = config.max_positions
        self.fingerprint = fingerprint

    def query(self, ids: Ids) -> Vectors:
        return self._embed(self._query, ids)

    def context(self, ids: Ids) -> Vectors:
        return self._embed(self._context, ids)

    def _embed(self, tower: Any, ids: Ids) -> Vectors:
        tokens = torch.from_numpy(ids).to(self._engine.grid.device)
        types = torch.zeros_like(tokens)
        batch = Microbatch(tokens, tokens, types=types, visible=tokens > 0)
        with torch.no_grad():
            hidden = tower(None, self._engine.make_pass(batch))
            found: Vectors = tower.embeddings(hidden).float().cpu().numpy()
        return found


def open_towers(given: argparse.Namespace, load: str, place: launch.Place | None) -> EngineTowers:
    """Open a biencoder. Collective. given: the flags of the tokenizer and of the model. place: None for a single process.

    Raises UsageError for another model, CheckpointError for a broken one.
    """
    here = place or launch.start(Parallel())
    return towers_of(given, all_or_none(lambda: open_weights(load)), load, here)


def towers_of(
    given: argparse.Namespace, start: Start, load: str, here: launch.Place
) -> EngineTowers:
    """Return the towers of an opened biencoder. Collective. load: its path. See open_towers."""
    config = start.config
    if config.family != "biencoder":
        raise UsageError(
            f"--load {load}: is a {config.family}; a biencoder was expected. --embedder takes other encoders"
        )
    if given.training is not None:
        check_against(given.training, config, {}, load)
    tokenizer = all_or_none(lambda: tokenizer_of(given, start))
    on_cpu = here.device.type == "cpu"
    dtype = "float32" if on_cpu else config.dtype
    engine = make_engine(changed(config, {"dtype": dtype}), Parallel(), here, config.max_positions)
    load_weights(engine, {key.name: tensor for key, tensor in start.tensors.items()})
    return EngineTowers(engine, fingerprint_of(start), tokenizer)


def fingerprint_of(start: Start) -> str:
    """Return the fingerprint of the weights, which are read once."""
    source = OpenedSource(start.header, start.tensors)
    workers = default_workers(writing=False)
    return fingerprint_source(source, workers, only=frozenset(start.tensors)).weights


def tokenizer_of(given: argparse.Namespace, start: Start) -> Tokenizer:
    """Return the tokenizer of the flags, or of the checkpoint."""
    vocabulary, merges = (
        None if path is None else str(path) for path in (given.vocab_file, given.merge_file)
    )
    data = Data(
        tokenizer_type=given.tokenizer_type,
        tokenizer_model=given.tokenizer_model,
        vocab_file=vocabulary,
        merge_file=merges,
    )
    return make_tokenizer(Settings(data=data), start, 0)
