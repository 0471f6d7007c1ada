"""A model in any layout for generation: rank 0 decides each turn, and all ranks compute it.

For a turn, rank 0 broadcasts a few numbers: the slots and their tokens. The last stage returns the logits.
Data-parallel ranks share the rows: slot s is slot s // dp of replica s % dp. If experts are spread over several
replicas, all make the same number of passes, some with a dummy row.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from megaconv.errors import LayoutError
from megatron_lite.engine import Engine
from megatron_lite.inference.adapters import BASE, AdapterBank
from megatron_lite.inference.cache import SlotCache
from megatron_lite.inference.image_tokens import without_images
from megatron_lite.inference.row_vectors import row_vectors
from megatron_lite.inference.rows_together import TOKENS, batches, fitting, padded
from megatron_lite.inference.shown_images import Seen, ShownImages
from megatron_lite.inference.slots import Feed, Scored, judge, require_known
from megatron_lite.inference.turns import (
    Turn,
    feeds_of,
    receive,
    rows_of,
    send,
    words_of_feeds,
    words_of_rows,
)
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.mixers.declaration import PerRow
from megatron_lite.models.network_interface import Network
from megatron_lite.models.purposes import refuse_embedding
from megatron_lite.parallel import comm
from megatron_lite.settings.embedding import POOLINGS

IDLE_S = 20.0
"""Seconds that other ranks wait for a turn until rank 0 sends an empty turn."""
_BLOCK = 512
"""Tokens whose logits exist at a time."""


class EngineModel:
    """A LanguageModel (slots.py) on rank 0, which must call `close` at the end. Other ranks only call `follow`."""

    def __init__(
        self, engine: Engine, slots: int, length: int, adapters: AdapterBank | None = None
    ) -> None:
        """Allocate the memory of all slots. Collective. slots: of each data-parallel rank.

        Raises LayoutError for context parallelism, which divides the tokens of a row.
        """
        if engine.grid.cp > 1:
            raise LayoutError(
                "a model at context parallelism can't be used to generate or score; load it at another layout"
            )
        self.engine, self.slots, self.length = engine, slots * engine.grid.dp, length
        self.grid, self.vocab = engine.grid, engine.config.vocab
        self.adapters = adapters
        self.images: ShownImages | None = None
        """The images of rows, on every rank of a multimodal model."""
        self.copied = range(0, self.slots, self.grid.dp)
        self._joint = self.grid.layout.ep > 1 and self.grid.dp > 1
        """True if data-parallel ranks must make their passes together."""
        self._idle = Feed(slots, 0, (0,))
        self._used = [0] * self.slots
        parts = [
            part for layer in range(engine.config.layer_count) for part in engine.cache_of(layer)
        ]
        self.recurrent = any(isinstance(part, PerRow) for part in parts)
        """True if any stage keeps states, which every token changes, also a token of padding."""
        with torch.inference_mode():
            self.cache = self._make_cache(slots + self._joint)

    def _make_cache(self, slots: int) -> SlotCache:
        """Allocate the cache of this rank's layers."""
        declared = {layer: self.engine.cache_of(layer) for layer in self._cached_layers()}
        return SlotCache(declared, slots, self.length, self.engine.dtype, self.grid.device)

    def _cached_layers(self) -> list[int]:
        """Return the numbers of the layers with a cache on this rank."""
        return [
            layer
            for chunk in self.grid.chunks()
            for layer in range(chunk.first_layer, chunk.first_layer + chunk.layers)
        ]

    # Called on rank 0.

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        """See LanguageModel.extend.

        Like `score`, it raises UsageError for a token outside the vocabulary before any rank computes.
        """
        wanted = [self._adapter(feed.adapter) for feed in feeds]
        if len(set(wanted)) > 1:
            return self._extend_by_adapter(feeds, wanted)
        for feed in feeds:
            tokens = feed.tokens if self.images is None else without_images(feed.tokens)
            require_known(tokens, self.vocab)
            continues = feed.start in (0, self._used[feed.slot])
            assert continues or not self.recurrent, "a state can't drop its last tokens"
        self._adapt(wanted[0])
        if self.images is not None:
            self.images.show_missing(feeds)
        for feed in feeds:
            self._used[feed.slot] = feed.start + len(feed.tokens)
        found = self._take([Turn.EXTEND, *words_of_feeds(feeds)])
        assert found is not None, "rank 0 collects the results of all ranks"
        return found

    def _extend_by_adapter(self, feeds: Sequence[Feed], wanted: Sequence[int]) -> Tensor:
        """Extend the feeds of each adapter in a turn of its own."""
        found = torch.zeros(len(feeds), self.vocab, dtype=torch.float32)
        for adapter in sorted(set(wanted)):
            numbers = [number for number, own in enumerate(wanted) if own == adapter]
            found[numbers] = self.extend([feeds[number] for number in numbers])
        return found

    def _adapter(self, asked: int | None) -> int:
        """Return the number of an adapter: by default the first one, or 0 without adapters."""
        default = 1 if self.adapters is not None else BASE
        return default if asked is None else asked

    def _adapt(self, adapter: int) -> None:
        """Let all ranks compute another adapter, if it is not the current one."""
        if self.adapters is not None and self.adapters.current != adapter:
            self._take([Turn.ADAPT, adapter])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See LanguageModel.copy."""
        used = [self._used[source] for source in sources]
        if list(sources) != list(targets):
            self._take([Turn.COPY, max(used), *sources, *targets])
        for target, length in zip(targets, used, strict=True):
            self._used[target] = length

    def forget(self, slots: Sequence[int]) -> None:
        """See LanguageModel.forget."""
        self._take([Turn.FORGET, *slots])

    def score(
        self, rows: Sequence[Sequence[int]], top: int = 0, adapter: int | None = None
    ) -> list[Scored]:
        """See LanguageModel.score."""
        self._adapt(self._adapter(adapter))
        for row in rows:
            require_known(row, self.vocab)
        found = self._take([Turn.SCORE, top, *words_of_rows(rows)])
        assert found is not None, "rank 0 collects the results of all ranks"
        predicted = [max(len(row) - 1, 0) for row in rows]
        first_log_prob = 2 + top
        scores = []
        for part in torch.split(found, predicted):
            scored = Scored(
                log_probs=part[:, 0].float(),
                greedy=part[:, 1] > 0,
                top_ids=part[:, 2:first_log_prob].long(),
                top_log_probs=part[:, first_log_prob:].float(),
            )
            scores.append(scored)
        return scores

    def embed(
        self, rows: Sequence[Sequence[int]], pooling: str, adapter: int | None = None
    ) -> Tensor:
        """See VectorModel.embed."""
        refuse_embedding(self.engine.config, "this model")
        self._adapt(self._adapter(adapter))
        for row in rows:
            require_known(row, self.vocab)
        found = self._take([Turn.EMBED, POOLINGS.index(pooling), *words_of_rows(rows)])
        assert found is not None, "rank 0 collects the results of all ranks"
        return found

    def idle(self) -> None:
        """Send an empty turn, so that other ranks don't time out."""
        self._take([Turn.IDLE])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep other ranks waiting while rank 0 waits for something else, such as a user. Don't use the model meanwhile."""
        if self.grid.world == 1:
            yield
            return
        over = threading.Event()

        def keep_awake() -> None:
            while not over.wait(IDLE_S):
                self.idle()

        thread = threading.Thread(target=keep_awake, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """End all ranks."""
        self._take([Turn.END])

    # Called on the other ranks.

    def follow(self) -> None:
        """Compute the turns of rank 0 until it closes."""
        while (words := receive(self.grid))[0] != Turn.END:
            self._do(words)

    def _take(self, words: list[int]) -> Tensor | None:
        send(words, self.grid)
        return self._do(words)

    def _do(self, words: list[int]) -> Tensor | None:
        """Compute a turn. Collective: the same turn on every rank."""
        turn, rest = words[0], words[1:]
        with torch.inference_mode():
            if turn == Turn.EXTEND:
                feeds = feeds_of(rest)
                if self.images is not None:
                    self.images.drop_others(feeds)
                return self._extend(feeds)
            if turn == Turn.SCORE:
                return self._score(rows_of(rest[1:]), top=rest[0])
            if turn == Turn.EMBED:
                return self._embed(rows_of(rest[1:]), POOLINGS[rest[0]])
            if turn == Turn.COPY:
                self._copy(rest[1:], used=rest[0])
            if turn == Turn.ADAPT:
                assert self.adapters is not None
                self.adapters.select(rest[0])
            if turn == Turn.FORGET:
                self._forget(rest)
            if turn == Turn.SHOW:
                assert self.images is not None
                self.images.receive(*rest)
        return None

    def _copy(self, slots: list[int], used: int) -> None:
        """Copy `used` tokens between slots of `copied`. slots: the sources, then the targets."""
        if self.grid.dp_rank != 0:  # the first replica holds all slots of `copied`
            return
        own = [slot // self.grid.dp for slot in slots]
        count = len(own) // 2
        self.cache.copy(own[:count], own[count:], used)
        if self.images is not None:
            self.images.copy(own[:count], own[count:])

    def _forget(self, slots: list[int]) -> None:
        dp, dp_rank = self.grid.dp, self.grid.dp_rank
        own = [slot // dp for slot in slots if slot % dp == dp_rank]
        self.cache.forget(own)

    def _extend(self, feeds: list[Feed]) -> Tensor:
        """Return float32 [feeds, vocabulary]; valid at least on rank 0."""
        return self._shared_out(feeds, [1] * len(feeds), self._no_logits, self._pass)

    def _no_logits(self, count: int) -> Tensor:
        """Return zeros in place of logits that another rank has."""
        return torch.zeros(count, self.vocab, dtype=torch.float32, device=self.grid.device)

    def _shared_out(
        self,
        feeds: list[Feed],
        counts: Sequence[int],
        zeros: Callable[[int], Tensor],
        compute: Callable[[Sequence[Feed]], Tensor],
    ) -> Tensor:
        """Compute the feeds on the replicas that have their slots, and return all results; valid at least on rank 0.

        counts: number of rows of each feed's result. zeros: returns zeros in place of this number of rows. compute: returns
        the results of feeds that fit into one pass, one after the other.
        """
        dp = self.grid.dp
        shares: list[list[int]] = [[] for _ in range(dp)]
        for number, feed in enumerate(feeds):
            shares[feed.slot % dp].append(number)
        groups = []
        for share in shares:
            its_feeds = [feeds[number] for number in share]
            groups.append(list(fitting(its_feeds, self.length, pads=not self.recurrent)))
        # Slot s of the model is slot s // dp of replica s % dp.
        mine = [Feed(feed.slot // dp, feed.start, feed.tokens) for feed in feeds]
        own = shares[self.grid.dp_rank]
        numbers = [[own[place] for place in group] for group in groups[self.grid.dp_rank]]
        made = [compute([mine[number] for number in group]) for group in numbers]
        for _ in self._others(groups):
            # A dummy pass: other replicas need this replica's experts.
            compute([self._idle])
        if len(own) == len(feeds) and len(made) == 1:
            return self._to_first(made[0])
        found = zeros(sum(counts))
        ends = list(accumulate(counts))
        for group, result in zip(numbers, made, strict=True):
            rows = [
                row
                for number in group
                for row in range(ends[number] - counts[number], ends[number])
            ]
            found[rows] = result
        return self._to_first(found)

    def _others(self, passes: Sequence[Sequence[object]]) -> range:
        """Return a range with one entry per dummy pass of this rank. passes: of all data-parallel ranks."""
        most = max(map(len, passes)) if self._joint else 0
        return range(len(passes[self.grid.dp_rank]), most)

    def _pass(self, feeds: Sequence[Feed]) -> Tensor:
        """Return the logits after the last token of each feed.

        float32 [feeds, vocabulary] on the last stage, zeros on others.
        """
        return self._logits_at(
            feeds, [(row, len(feed.tokens) - 1) for row, feed in enumerate(feeds)]
        )

    def _logits_at(self, feeds: Sequence[Feed], places: Sequence[tuple[int, int]]) -> Tensor:
        """Return the logits of (row, token) places of the feeds.

        float32 [places, vocabulary] on the last stage, zeros on others.
        """
        device = self.grid.device
        # This copy to a GPU comes before the layers: it waits for them.
        rows, tokens = torch.tensor(places, device=device).unbind(1)
        last = self._hidden(feeds)
        if last is None:
            return self._no_logits(len(places))
        chunk, hidden = last
        picked = hidden[tokens, rows].unsqueeze(0)
        logits = chunk.logits((picked,))
        return logits[:, 0].contiguous()

    def _hidden(self, feeds: Sequence[Feed]) -> tuple[Network, Tensor] | None:
        """Return (the last chunk, activations [tokens, feeds, hidden] after its final norm) on the last stage, None on others."""
        device = self.grid.device
        tokens = padded([feed.tokens for feed in feeds])
        seen = Seen(tokens.to(device)) if self.images is None else self.images.see(feeds, tokens)
        slots = [feed.slot for feed in feeds]
        starts = [feed.start for feed in feeds]
        positions = self.cache.select(slots, starts, tokens.shape[1], device)
        return self.engine.last_stage(seen.microbatch(positions), self.cache)

    def _score(self, rows: list[list[int]], top: int) -> Tensor:
        """Return float64 [tokens, 2 + 2 top] of all rows, concatenated; `score` splits it."""
        device = self.grid.device
        predicted = [len(row) - 1 for row in rows]
        found: list[Tensor] = []
        for count in predicted:
            found.append(torch.zeros(max(count, 0), 2 + 2 * top, dtype=torch.float64))

        def compute(numbers: Sequence[int]) -> None:
            # No logits after a row's last token are needed.
            tokens = padded([rows[number][:-1] for number in numbers]).to(device)
            last = self.engine.last_stage(Microbatch(tokens, tokens))
            if last is not None:
                for place, number in enumerate(numbers):
                    self._judge(*last, place, rows[number], found[number])

        self._in_batches(predicted, compute)
        together = torch.cat(found).to(device)
        return self._to_first(together)

    def _embed(self, rows: list[list[int]], pooling: str) -> Tensor:
        """Return float32 [rows, hidden]; valid at least on rank 0."""
        width, device = self.engine.config.hidden, self.grid.device
        found = torch.zeros(len(rows), width, dtype=torch.float32, device=device)

        def compute(numbers: Sequence[int]) -> None:
            made = row_vectors(self.engine, [rows[number] for number in numbers], pooling)
            if made is not None:
                found[list(numbers)] = made

        self._in_batches([len(row) for row in rows], compute)
        return self._to_first(found)

    def _in_batches(self, lengths: Sequence[int], compute: Callable[[Sequence[int]], None]) -> None:
        """Let each replica compute its share of rows, in batches of similar lengths. Collective.

        lengths: tokens of each row that are computed. compute: computes the rows of these numbers.
        """
        dp, dp_rank = self.grid.dp, self.grid.dp_rank
        shares = [range(replica, len(lengths), dp) for replica in range(dp)]
        groups: list[list[list[int]]] = []
        for share in shares:
            counts = [lengths[number] for number in share]
            groups.append(list(batches(counts, TOKENS)))
        own = shares[dp_rank]
        for group in groups[dp_rank]:
            compute([own[place] for place in group])
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self.grid.device)
        for _ in self._others(groups):
            self.engine.last_stage(Microbatch(nothing, nothing))

    def _judge(
        self, chunk: Network, hidden: Tensor, place: int, row: list[int], into: Tensor
    ) -> None:
        """Score one row of a batch, in blocks of tokens whose logits fit into memory."""
        tokens = torch.tensor(row[1:], device=hidden.device)
        top = len(into[0]) // 2 - 1
        for first in range(0, len(tokens), _BLOCK):
            part = slice(first, min(first + _BLOCK, len(tokens)))
            own = hidden[part, place : place + 1]
            logits = chunk.logits((own,))[0]
            found = judge(logits, tokens[part], top)
            columns = (
                found.log_probs.unsqueeze(1),
                found.greedy.unsqueeze(1),
                found.top_ids,
                found.top_log_probs,
            )
            in_doubles = [column.double() for column in columns]
            into[part] = torch.cat(in_doubles, 1).cpu()

    def _to_first(self, made: Tensor) -> Tensor:
        """Return the result of the replicas' last stages, on rank 0 too and on the CPU.

        made: zeros for the rows of other replicas.
        """
        grid = self.grid
        last_stage = grid.layout.pp - 1
        if grid.dp > 1:
            gives = grid.pp_rank == last_stage and grid.tp_rank == 0
            if not gives:
                made = torch.zeros_like(made)
            comm.all_reduce(made, grid.group("world"))
            return made.cpu()
        ends = grid.group("ends")
        if ends is not None and grid.pp_rank in (0, last_stage):
            comm.broadcast(made, grid.rank_of_stage(last_stage), ends)
        return made.cpu()
