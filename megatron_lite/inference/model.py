"""A model at any layout as generation asks for it: rank 0 decides on every turn, all ranks compute it.

A turn is a few numbers that rank 0 sends to all others: which slots get which tokens. Logits come back from the last stage.
Data-parallel ranks share the rows: slot s is the (s // dp)th of replica s % dp. Where experts lie on several of them, all make
the same number of passes, some with a row that nobody asked for.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from megaconv.errors import LayoutError
from megatron_lite.engine import Engine
from megatron_lite.inference.cache import SlotCache
from megatron_lite.inference.slots import Feed, Scored, judge
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.network import Network
from megatron_lite.parallel import comm

_HEAD = 256
"""Numbers of a turn that are sent at once; the rest, of a long prompt say, follows."""
IDLE_S = 20.0
"""How long other ranks wait for a turn before they hear that there is none."""
SCORED_TOKENS = 8192
"""Of rows that are scored in one pass, padding included."""
_BLOCK = 512
"""Tokens whose logits exist at one time."""


class Turn(IntEnum):
    END = 0
    EXTEND = 1
    COPY = 2
    SCORE = 3
    IDLE = 4
    FORGET = 5


class EngineModel:
    """A LanguageModel (slots.py) on rank 0, where `close` has to be called at the end. Other ranks call `follow`, nothing else."""

    def __init__(self, engine: Engine, slots: int, length: int) -> None:
        """Collective. Takes the memory of all slots. slots: of each data-parallel rank.

        Raises LayoutError for context parallelism, which shares out the tokens of a row.
        """
        if engine.grid.cp > 1:
            raise LayoutError(
                "a model at context parallelism can't be used to generate or score; load it at another layout"
            )
        self.engine, self.slots, self.length = engine, slots * engine.grid.dp, length
        self.grid, self.vocab = engine.grid, engine.config.vocab
        self.copied = range(0, self.slots, self.grid.dp)
        self._joint = self.grid.layout.ep > 1 and self.grid.dp > 1
        """Whether passes of data-parallel ranks need each other."""
        self.cache = SlotCache(slots + self._joint, length)
        self._idle = Feed(slots, 0, (0,))
        self._used = [0] * self.slots
        with torch.inference_mode():
            self._pass([Feed(0, 0, (0,))])  # makes the cache

    # What rank 0 calls.

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        words = [len(feeds)]
        for feed in feeds:
            words += [feed.slot, feed.start, len(feed.tokens)]
            self._used[feed.slot] = feed.start + len(feed.tokens)
        found = self._take([Turn.EXTEND, *words, *(token for feed in feeds for token in feed.tokens)])
        assert found is not None, "rank 0 gets what all ranks computed"
        return found

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        used = [self._used[source] for source in sources]
        if list(sources) != list(targets):
            self._take([Turn.COPY, max(used), *sources, *targets])
        for target, length in zip(targets, used, strict=True):
            self._used[target] = length

    def forget(self, slots: Sequence[int]) -> None:
        self._take([Turn.FORGET, *slots])

    def score(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[Scored]:
        lengths = [len(row) for row in rows]
        found = self._take([Turn.SCORE, top, len(rows), *lengths, *(token for row in rows for token in row)])
        assert found is not None, "rank 0 gets what all ranks computed"
        return [
            Scored(part[:, 0].float(), part[:, 1] > 0, part[:, 2 : 2 + top].long(), part[:, 2 + top :].float())
            for part in torch.split(found, [max(length - 1, 0) for length in lengths])
        ]

    def idle(self) -> None:
        """So that other ranks don't give up waiting for a turn."""
        self._take([Turn.IDLE])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While rank 0 waits for something else, a user say, for however long; nothing else may be asked of the model meanwhile."""
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
        """The end for all ranks."""
        self._take([Turn.END])

    # What the other ranks call.

    def follow(self) -> None:
        """Computes what rank 0 decides, until it closes."""
        while (words := self._receive())[0] != Turn.END:
            self._do(words)

    def _take(self, words: list[int]) -> Tensor | None:
        self._send(words)
        return self._do(words)

    def _send(self, words: list[int]) -> None:
        world, device = self.grid.group("world"), self.grid.device
        if world is None:
            return
        head = torch.zeros(_HEAD, dtype=torch.int64)
        head[: min(len(words), _HEAD - 1) + 1] = torch.tensor([len(words), *words[: _HEAD - 1]])
        comm.broadcast(head.to(device), 0, world)
        if len(words) >= _HEAD:
            comm.broadcast(torch.tensor(words[_HEAD - 1 :], device=device), 0, world)

    def _receive(self) -> list[int]:
        world, device = self.grid.group("world"), self.grid.device
        head = torch.empty(_HEAD, dtype=torch.int64, device=device)
        comm.broadcast(head, 0, world)
        count, *words = head.tolist()
        if count >= _HEAD:
            rest = torch.empty(count - _HEAD + 1, dtype=torch.int64, device=device)
            comm.broadcast(rest, 0, world)
            words += rest.tolist()
        return words[:count]

    def _do(self, words: list[int]) -> Tensor | None:
        """Collective: the same on every rank."""
        turn, rest = words[0], words[1:]
        with torch.inference_mode():
            if turn == Turn.EXTEND:
                return self._extend(_feeds(rest))
            if turn == Turn.SCORE:
                top, count = rest[:2]
                rows = _split(rest[2 + count :], rest[2 : 2 + count])
                return self._score(rows, top)
            if turn == Turn.COPY:
                used = rest[0]
                if self.grid.dp_rank == 0:  # on which all slots of `copied` are
                    sources, targets = ([slot // self.grid.dp for slot in part] for part in _halves(rest[1:]))
                    self.cache.copy(sources, targets, used)
            if turn == Turn.FORGET:
                self.cache.forget([slot // self.grid.dp for slot in rest if slot % self.grid.dp == self.grid.dp_rank])
        return None

    def _extend(self, feeds: list[Feed]) -> Tensor:
        """float32 [feeds, vocabulary]; on rank 0 at least."""
        dp = self.grid.dp
        shares = [[number for number, feed in enumerate(feeds) if feed.slot % dp == replica] for replica in range(dp)]
        groups = [list(_fitting([feeds[number] for number in share], self.length)) for share in shares]
        mine = [Feed(feed.slot // dp, feed.start, feed.tokens) for feed in feeds]
        own = shares[self.grid.dp_rank]
        numbers = [[own[place] for place in group] for group in groups[self.grid.dp_rank]]
        made = [self._pass([mine[number] for number in group]) for group in numbers]
        for _ in self._others(groups):
            self._pass([self._idle])
        if len(own) == len(feeds) and len(made) == 1:
            return self._to_first(made[0])
        found = torch.zeros(len(feeds), self.vocab, device=self.grid.device)
        for group, logits in zip(numbers, made, strict=True):
            found[group] = logits
        return self._to_first(found)

    def _others(self, passes: Sequence[Sequence[object]]) -> range:
        """How many passes this rank makes for others alone; passes: of all data-parallel ranks."""
        most = max(map(len, passes)) if self._joint else 0
        return range(len(passes[self.grid.dp_rank]), most)

    def _pass(self, feeds: Sequence[Feed]) -> Tensor:
        """float32 [feeds, vocabulary] on the last stage, zeros on others: logits behind the last token of each."""
        device, counts = self.grid.device, [len(feed.tokens) for feed in feeds]
        tokens = _padded([feed.tokens for feed in feeds]).to(device)
        slots, starts = [feed.slot for feed in feeds], [feed.start for feed in feeds]
        positions = self.cache.select(slots, starts, tokens.shape[1], device)
        last = self.engine.last_stage(Microbatch(tokens, tokens, positions=positions), self.cache)
        if last is None:
            return torch.zeros(len(feeds), self.vocab, device=device)
        chunk, hidden = last
        picked = hidden[torch.tensor(counts, device=device) - 1, torch.arange(len(feeds), device=device)]
        return chunk.logits((picked.unsqueeze(0),))[:, 0].contiguous()

    def _score(self, rows: list[list[int]], top: int) -> Tensor:
        """float64 [tokens, 2 + 2 top]: of all rows one after the other, as score takes it apart."""
        dp = self.grid.dp
        found = [torch.zeros(max(len(row) - 1, 0), 2 + 2 * top, dtype=torch.float64) for row in rows]
        shares = [range(replica, len(rows), dp) for replica in range(dp)]
        groups = [list(_batches([len(rows[number]) - 1 for number in share], SCORED_TOKENS)) for share in shares]
        own = shares[self.grid.dp_rank]
        for group in groups[self.grid.dp_rank]:
            numbers = [own[place] for place in group]
            tokens = _padded([rows[number][:-1] for number in numbers]).to(self.grid.device)
            last = self.engine.last_stage(Microbatch(tokens, tokens))
            for place, number in enumerate(numbers):
                if last is not None:
                    self._judge(*last, place, rows[number], found[number])
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self.grid.device)
        for _ in self._others(groups):
            self.engine.last_stage(Microbatch(nothing, nothing))
        return self._to_first(torch.cat(found).to(self.grid.device))

    def _judge(self, chunk: Network, hidden: Tensor, place: int, row: list[int], into: Tensor) -> None:
        """One row of a batch, so many tokens at a time that their logits have room."""
        tokens = torch.tensor(row[1:], device=hidden.device)
        for first in range(0, len(tokens), _BLOCK):
            part = slice(first, min(first + _BLOCK, len(tokens)))
            found = judge(chunk.logits((hidden[part, place : place + 1],))[0], tokens[part], len(into[0]) // 2 - 1)
            columns = (found.log_probs.unsqueeze(1), found.greedy.unsqueeze(1), found.top_ids, found.top_log_probs)
            into[part] = torch.cat([column.double() for column in columns], 1).cpu()

    def _to_first(self, made: Tensor) -> Tensor:
        """What the last stages of all replicas have, zeros where another has it, on rank 0 too; on the CPU."""
        grid = self.grid
        if grid.dp > 1:
            gives = grid.pp_rank == grid.layout.pp - 1 and grid.tp_rank == 0
            made = made if gives else torch.zeros_like(made)
            comm.all_reduce(made, grid.group("world"))
            return made.cpu()
        ends = grid.group("ends")
        if ends is not None and grid.pp_rank in (0, grid.layout.pp - 1):
            comm.broadcast(made, grid.rank_of_stage(grid.layout.pp - 1), ends)
        return made.cpu()


def _halves(words: list[int]) -> tuple[list[int], list[int]]:
    return words[: len(words) // 2], words[len(words) // 2 :]


def _feeds(words: list[int]) -> list[Feed]:
    count = words[0]
    slots, starts, counts = (words[1 + which : 1 + 3 * count : 3] for which in range(3))
    rows = _split(words[1 + 3 * count :], counts)
    return [Feed(slot, start, tuple(row)) for slot, start, row in zip(slots, starts, rows, strict=True)]


def _split(words: list[int], counts: Sequence[int]) -> list[list[int]]:
    parts = iter(words)
    return [[next(parts) for _ in range(count)] for count in counts]


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """int64 [rows, longest]; padding lies behind all else, where nothing looks at it.

    It repeats a row's own last token: another one's numbers, if they are none, would be in the row's sums.
    """
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows])


def _fitting(feeds: Sequence[Feed], length: int) -> Iterator[list[int]]:
    """Numbers of feeds that go through the model together: all, where padding has room in every slot; else those of one size."""
    if not feeds:
        return
    longest = max(len(feed.tokens) for feed in feeds)
    if all(feed.start + longest <= length for feed in feeds):
        yield list(range(len(feeds)))
        return
    for size in sorted({len(feed.tokens) for feed in feeds}):
        yield [number for number, feed in enumerate(feeds) if len(feed.tokens) == size]


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of rows, of like length side by side, so many at a time that padded they have at most so many tokens."""
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if group and (len(group) + 1) * lengths[number] > most:
            yield group
            group = []
        if lengths[number] > 0:
            group.append(number)
    if group:
        yield group
