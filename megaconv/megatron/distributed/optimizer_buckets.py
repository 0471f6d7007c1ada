"""Reads the optimizer of a distributed Megatron checkpoint whose tensors are in buckets.

There are buffers of the distributed optimizer of each model-parallel rank (dp_reshardable, fully_sharded_bucket_space),
or one object with everything that such a rank would have in distrib_optim.pt (dp_zero_gather_scatter):

    [chained_0.]optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
    [chained_0.]optimizer.distributed.dp_group_idx_0.param_state/shard_0_1

Source: distrib_optimizer.py and optimizer.py in megatron/core/optimizer, core 0.6 to 0.19.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from formats.chunked import ChunkedTensor
from formats.pickle_records import TorchDtype
from megaconv.megatron.arguments.sparse import INDEXER_ORDER
from megaconv.megatron.distributed.saved_ranks import SavedRanks
from megaconv.megatron.optimizer.rank import read
from megaconv.megatron.optimizer.source import Optimizers
from megaconv.megatron.states.ranks import RankId
from megaconv.model.assembled import Placed
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.naming import Naming, core_naming
from megaconv.model.training import EXP_AVG

_BUCKET = re.compile(
    r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.(\w+)\)\.bucket_idx_(\d+)\.(\w+)"
)
OBJECT = re.compile(
    r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(\w+)/shard_0_1"
)
"""Matches the name of an object of one data-parallel group: (prefix of the optimizer, group, what it holds)."""


class Directory(Protocol):
    """An opened directory of either format."""

    def tensors(self) -> Mapping[str, ChunkedTensor]: ...

    def objects(self) -> list[str]: ...

    def read_object(self, name: str) -> object:
        """An object, without the list of one item that Megatron may wrap it in."""
        ...


@dataclass(frozen=True)
class Buckets:
    """The optimizer's buckets in one opened directory."""

    where: str
    directory: Directory
    tensors: Mapping[str, ChunkedTensor]
    args: Namespace
    common: Mapping[str, Any]
    """Everything that isn't sharded."""

    def open(
        self, config: ModelConfig, layout: Layout, padded: int, placed: Sequence[Placed]
    ) -> tuple[Optimizers, list[Placed]]:
        """The tensors of every rank of the run that saved them, at their places. layout: the layout of that run.

        placed: the weights, which show the parameters' dtypes. Raises TensorMismatch if the buffers don't fit.
        """
        dtypes = {name: item.tensor.dtype for item in placed for name in item.native.parts}
        ranks = SavedRanks(config, layout, padded, self._naming(config), dtypes)
        by_rank, made = {}, []
        for rank in ranks.numbers():
            natives = ranks.natives(rank)
            found = [parameter for parameter, _ in natives]
            where = f"{self.where} (tensor rank {rank.tp}, pipeline rank {rank.pp}, expert rank {rank.ep})"
            with well_formed(f"{where}: its optimizer"):
                optimizer, buffers = self._of_rank(rank, layout)
                result = read(optimizer, buffers, found, self.args, rank.pp, where)
            by_rank[rank] = result
            for parameter, native in natives:
                key = parameter.chunk, parameter.name
                if key in result.slots:
                    tensor = result.slots[key][EXP_AVG]
                    made.append(
                        Placed(native, tensor, where, result.slots[key], result.group_of[key])
                    )
        return Optimizers(by_rank), made

    def _naming(self, config: ModelConfig) -> Naming:
        engine = (
            getattr(self.args, "transformer_impl", "transformer_engine") == "transformer_engine"
        )
        experts = ""
        if config.experts.count and getattr(self.args, "moe_grouped_gemm", False):
            legacy = getattr(self.args, "moe_use_legacy_grouped_gemm", False) or not engine
            experts = "legacy_grouped" if legacy else "grouped"
        return core_naming(
            "transformer_engine" if engine else "local",
            experts,
            rope_last=hasattr(self.args, INDEXER_ORDER),
        )

    def _of_rank(self, rank: RankId, layout: Layout) -> tuple[Any, Any]:
        """(optimizers, buffers) as in the rank's own files; None for buffers that another rank has."""
        matches = [OBJECT.fullmatch(name) for name in self.directory.objects()]
        prefixes = sorted({match[1] for match in matches if match})
        # If several ranks have the same dense parameters, the rank with ep 0 has the state.
        dense_group = rank.pp * layout.tp + rank.tp if rank.ep == 0 else None
        if len(prefixes) == 1:
            return self._part(prefixes[0], dense_group)
        dense_optimizer, dense_buffers = self._part(prefixes[0], dense_group)
        expert_optimizer, expert_buffers = self._part(prefixes[1], self._expert_group(rank, layout))
        return [dense_optimizer, expert_optimizer], [dense_buffers, expert_buffers]

    def _expert_group(self, rank: RankId, layout: Layout) -> int | None:
        """The number of the data-parallel group of a rank's experts; None if another rank has their state."""
        etp_rank = rank.tp % layout.etp
        if rank.tp != etp_rank:
            return None
        if self._numbers_experts_by_stage():
            return (rank.pp * layout.ep + rank.ep) * layout.etp + etp_rank
        return (rank.ep * layout.pp + rank.pp) * layout.tp + rank.tp

    def _numbers_experts_by_stage(self) -> bool:
        """True since core 0.12, which was the first to save these arguments."""
        return "content_metadata" in self.common or "rerun_state_machine" in self.common

    def _part(self, prefix: str, group: int | None) -> tuple[Any, Any]:
        """(optimizer, buffers) of one data-parallel group. group None: only its settings."""
        base = f"{prefix}optimizer.distributed.dp_group_idx_{group or 0}."
        settings = self.directory.read_object(f"{base}optimizer/shard_0_1")
        optimizer = {"optimizer": settings}
        if group is None:
            return optimizer, None
        gathered = f"{base}param_state/shard_0_1"
        if gathered in self.directory.objects():
            return optimizer, self.directory.read_object(gathered)
        return optimizer, self._buckets(prefix, group, base)

    def _buckets(self, prefix: str, group: int, base: str) -> dict[Any, Any]:
        """The buckets as older releases have them in distrib_optim.pt: one tensor per bucket."""
        unpadded = "per_bucket_numel_unpadded"
        made: dict[Any, Any] = {unpadded: self.directory.read_object(f"{base}{unpadded}/shard_0_1")}
        for (index, dtype, gradients, slot), numbered in self._numbered(prefix, group).items():
            dtypes = TorchDtype(dtype), TorchDtype(gradients)
            buffer = made.setdefault(index, {})
            entry = buffer.setdefault(dtypes, {})
            entry[slot] = [numbered[bucket] for bucket in range(len(numbered))]
        return made

    def _numbered(
        self, prefix: str, group: int
    ) -> dict[tuple[int, str, str, str], dict[int, ChunkedTensor]]:
        """(buffer, dtype, dtype of gradients, slot) -> the tensors by number of their bucket."""
        buckets: dict[tuple[int, str, str, str], dict[int, ChunkedTensor]] = {}
        for name, tensor in self.tensors.items():
            found = _BUCKET.fullmatch(name)
            if found and (found[1], int(found[2])) == (prefix, group):
                key = int(found[3]), found[4], found[5], found[7]
                buckets.setdefault(key, {})[int(found[6])] = tensor
        return buckets
