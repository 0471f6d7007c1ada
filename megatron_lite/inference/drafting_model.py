"""A model in any layout that drafts tokens with its first MTP layer (speculative decoding, arXiv 2211.17192).

The last stage keeps its output for the tokens of each slot's last turn. When rank 0 knows the tokens that follow, the MTP
layer computes these pairs, extends its own cache by them, and predicts the token behind. For further tokens it takes its
own output and its own token, as vLLM does with a model that has one MTP layer. Drafts are always the likeliest tokens.

States (Mamba, delta nets) can't drop the tokens of wrong drafts. Therefore they are saved before each check. After a wrong
draft, the next check begins with the saved states and the tokens of the last one.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megaconv.model.predicting import predicting_kinds
from megatron_lite.engine import Engine
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.rows_together import padded
from megatron_lite.inference.slots import DraftCounts, Feed, require_known
from megatron_lite.inference.turns import Turn, feeds_of, words_of_feeds
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.network_interface import Network


class DraftingModel(EngineModel):
    """A Drafter (slots.py) on rank 0. Other ranks only call `follow`."""

    def __init__(self, engine: Engine, slots: int, length: int, drafts: int) -> None:
        """drafts: number of tokens to draft in each step. Collective. Raises UsageError if the model can't draft."""
        self.drafts, self.counts = drafts, DraftCounts()
        self._fed: dict[int, Tensor] = {}
        """On the last stage: its output [tokens, hidden] for the tokens of each own slot's last turn."""
        if not engine.config.mtp_layers:
            raise UsageError(
                f"--draft-tokens: this {engine.config.family} has no MTP layers, which draft; leave it out"
            )
        super().__init__(engine, slots, length)

    @property
    def _is_last(self) -> bool:
        return self.grid.pp_rank == self.grid.layout.pp - 1

    def _cached_layers(self) -> list[int]:
        first = self.engine.config.layer_count
        inside = range(first, first + len(predicting_kinds(self.engine.config)))
        return [*super()._cached_layers(), *(inside if self._is_last else ())]

    # Called on rank 0.

    def verify(self, feeds: Sequence[Feed]) -> Tensor:
        """See Drafter.verify."""
        again = [
            feed.slot for feed in feeds if self.recurrent and feed.start < self._used[feed.slot]
        ]
        for feed in feeds:
            require_known(feed.tokens, self.vocab)
            self._used[feed.slot] = feed.start + len(feed.tokens)
        found = self._take([Turn.VERIFY, len(again), *again, *words_of_feeds(feeds)])
        assert found is not None, "rank 0 collects the results of all ranks"
        return found

    def draft(self, feeds: Sequence[Feed], count: int) -> list[tuple[int, ...]]:
        """See Drafter.draft."""
        found = self._take([Turn.DRAFT, count, *words_of_feeds(feeds)])
        assert found is not None, "rank 0 collects the results of all ranks"
        return [tuple(row) for row in found.tolist()]

    # Called on all ranks.

    def _do(self, words: list[int]) -> Tensor | None:
        turn, rest = words[0], words[1:]
        if turn not in (Turn.VERIFY, Turn.DRAFT):
            return super()._do(words)
        with torch.inference_mode():
            if turn == Turn.VERIFY:
                count, numbers = rest[0], rest[1:]
                return self._verify(feeds_of(numbers[count:]), again=numbers[:count])
            return self._draft(feeds_of(rest[1:]), count=rest[0])

    def _verify(self, feeds: list[Feed], again: list[int]) -> Tensor:
        """Return the logits after all tokens. again: slots that begin with their saved states."""
        if self.recurrent:
            self.cache.restore(self._own(again))
            self.cache.save(self._own([feed.slot for feed in feeds]))
        counts = [len(feed.tokens) for feed in feeds]
        return self._shared_out(feeds, counts, self._no_logits, self._all_logits)

    def _own(self, slots: Sequence[int]) -> list[int]:
        """Return the numbers of this replica's slots among slots of the model."""
        dp, dp_rank = self.grid.dp, self.grid.dp_rank
        return [slot // dp for slot in slots if slot % dp == dp_rank]

    def _all_logits(self, feeds: Sequence[Feed]) -> Tensor:
        """Return the logits after every token of feeds."""
        places = [
            (row, token) for row, feed in enumerate(feeds) for token in range(len(feed.tokens))
        ]
        return self._logits_at(feeds, places)

    def _hidden(self, feeds: Sequence[Feed]) -> tuple[Network, Tensor] | None:
        last = super()._hidden(feeds)
        if last is not None:
            _, hidden = last
            for row, feed in enumerate(feeds):
                self._fed[feed.slot] = hidden[:, row]
        return last

    def _draft(self, feeds: list[Feed], count: int) -> Tensor:
        """Return int64 [feeds, count]; valid at least on rank 0."""
        zeros = partial(self._no_drafts, width=count)
        return self._shared_out(feeds, [1] * len(feeds), zeros, partial(self._drafted, count=count))

    def _no_drafts(self, count: int, width: int) -> Tensor:
        return torch.zeros(count, width, dtype=torch.int64, device=self.grid.device)

    def _drafted(self, feeds: Sequence[Feed], count: int) -> Tensor:
        """Return int64 [feeds, count]: the drafts on the last stage, zeros on others."""
        if not self._is_last:
            return self._no_drafts(len(feeds), count)
        device = self.grid.device
        slots = [feed.slot for feed in feeds]
        starts = [feed.start for feed in feeds]
        lengths = [len(feed.tokens) for feed in feeds]
        tokens = padded([feed.tokens for feed in feeds]).to(device)
        hidden = self._kept(feeds, tokens.shape[1])
        counts = torch.tensor(lengths, device=device)
        positions = self.cache.select(slots, starts, tokens.shape[1], device, keeps_states=True)
        hidden, drafts = self._predicted(hidden, tokens, positions, counts - 1)
        found = [drafts]
        end = max(start + length for start, length in zip(starts, lengths, strict=True))
        # From here on, each row has one token, its own draft. Positions stay on the device: a copy would wait for the draft before.
        positions = positions[:, :1] + counts.unsqueeze(1)
        first = torch.zeros_like(counts)
        while len(found) < count:
            end += 1
            self.cache.select_next(positions, end)
            hidden, drafts = self._predicted(hidden, drafts.unsqueeze(1), positions, first)
            found.append(drafts)
            positions = positions + 1
        return torch.stack(found, 1)

    def _predicted(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, last_tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (the MTP layer's output [1, rows, hidden], the likeliest next tokens [rows]) at each row's last token.

        hidden: [tokens, rows, hidden] of the tokens before. tokens: [rows, tokens].
        """
        chunk = self.engine.chunks[-1]
        assert isinstance(chunk, ModelChunk), "other networks have no MTP layers"
        batch = Microbatch(tokens, tokens, positions=positions)
        made = chunk.predicted(hidden, self.engine.make_pass(batch, self.cache))
        rows = torch.arange(len(tokens), device=tokens.device)
        last = made[last_tokens, rows].unsqueeze(0)
        logits = chunk.logits((last,))
        return last, logits[:, 0].argmax(-1)

    def _kept(self, feeds: Sequence[Feed], longest: int) -> Tensor:
        """Return [longest, feeds, hidden]: the last stage's output for the tokens before those of the feeds.

        Padding is the output of a token that is there, because it has to be finite.
        """
        kept = []
        for feed in feeds:
            count = len(feed.tokens)
            own = self._fed.get(feed.slot)
            if own is None:  # a dummy row
                own = self._no_hidden(count)
            kept.append(torch.cat((own[:count], own[:1].expand(longest - count, -1))))
        return torch.stack(kept, 1)

    def _no_hidden(self, count: int) -> Tensor:
        width = self.engine.config.hidden
        return torch.zeros(count, width, dtype=self.engine.dtype, device=self.grid.device)
