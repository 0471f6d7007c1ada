"""The order of passes, as data: every layout comes to its end, and each rank does what it should."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest

from megaconv.planning.pipeline_order import Action, forward_order, order
from megatron_lite.parallel.grid import Channel, Meeting, meetings
from megatron_lite.parallel.pipeline import channel
from megatron_lite.parallel.pipeline_order import Operation, edge, last_backward, program


def simulate(orders: Sequence[Sequence[Action]], vpp: int) -> Iterator[tuple[int, Action]]:
    """(rank, action) in an order in which all of it can happen; fails when every rank waits for another.

    A receive waits for its message, a send doesn't wait.
    """
    pp = len(orders)
    at, on_the_way = [0] * pp, set[tuple[int, int, int]]()
    while any(at[rank] < len(orders[rank]) for rank in range(pp)):
        moved = False
        for rank in range(pp):
            while at[rank] < len(orders[rank]):
                action = orders[rank][at[rank]]
                needed = edge(action, pp, vpp, rank, outgoing=False)
                if needed is not None and (needed.pp_rank, rank, needed.tag) not in on_the_way:
                    break
                if needed is not None:
                    on_the_way.remove((needed.pp_rank, rank, needed.tag))
                made = edge(action, pp, vpp, rank, outgoing=True)
                if made is not None:
                    assert (rank, made.pp_rank, made.tag) not in on_the_way, (
                        "two messages with one tag"
                    )
                    on_the_way.add((rank, made.pp_rank, made.tag))
                yield rank, action
                at[rank], moved = at[rank] + 1, True
        assert moved, (
            f"every rank waits: {[orders[rank][at[rank] : at[rank] + 1] for rank in range(pp)]}"
        )
    assert not on_the_way, "messages that nobody receives"


SIZES = [
    (pp, vpp, microbatches)
    for pp in range(1, 9)
    for vpp in range(1, 5)
    for microbatches in range(1, 17)
    if vpp == 1 or (pp > 1 and microbatches % pp == 0)
]


def test_no_order_ever_gets_stuck() -> None:
    """Every chunk sees every microbatch once forward, then once backward, in the order of the microbatches."""
    for pp, vpp, microbatches in SIZES:
        orders = [order(pp, vpp, microbatches, rank) for rank in range(pp)]
        assert sum(1 for _ in simulate(orders, vpp)) == 2 * pp * vpp * microbatches
        for actions in orders:
            for chunk in range(vpp):
                for backward in (False, True):
                    own = [item.microbatch for item in actions if item[:2] == (backward, chunk)]
                    assert own == list(range(microbatches))
            place = {action: index for index, action in enumerate(actions)}
            assert all(
                place[action._replace(backward=True)] > place[action]
                for action in actions
                if not action.backward
            )


def test_no_forward_order_ever_gets_stuck() -> None:
    """Evaluation takes any number of microbatches, interleaved too."""
    for pp in range(1, 9):
        for vpp in range(1, 5):
            for microbatches in range(1, 17):
                orders = [forward_order(pp, vpp, microbatches)] * pp
                assert sum(1 for _ in simulate(orders, vpp)) == pp * vpp * microbatches


Communicator = tuple[Channel, frozenset[int]]


class Turn(NamedTuple):
    """A turn of a ring inside a pass: every rank that shares the sequence sends to the next and receives from the
    previous one."""

    action: Action
    step: int


class NCCL:
    """Ranks that walk through programs on communicators that are made lazily: the host of a rank that uses one first is blocked
    until the other comes too. Within a communicator what was sent first arrives first, whatever it is. Rank s * cp + c is the
    c-th of those that share a sequence on stage s; a turn of their ring is over when all of them have come to it.
    """

    def __init__(
        self, programs: Sequence[Sequence[Meeting | Operation | Turn]], cp: int = 1
    ) -> None:
        self.programs, self.at, self.cp = programs, [0] * len(programs), cp
        self.turns = [[item for item in each if isinstance(item, Turn)] for each in programs]
        self.begun, self.done = ([0] * len(programs) for _ in range(2))
        """Turns of each rank."""
        self.made: set[Communicator] = set()
        self.sent: dict[tuple[Communicator, int], list[int]] = defaultdict(list)
        """Tags, by communicator and receiver."""
        self.asked: dict[tuple[Communicator, int], list[int]] = defaultdict(list)

    def next(self, rank: int) -> Meeting | Operation | Turn | None:
        return (
            self.programs[rank][self.at[rank]] if self.at[rank] < len(self.programs[rank]) else None
        )

    def uses(self, rank: int) -> Communicator | None:
        """The communicator of this rank's next call; None if the call doesn't create one."""
        item = self.next(rank)
        if isinstance(item, Meeting):
            return item.channel, frozenset(self.beside(rank, stage) for stage in item.ranks)
        if not isinstance(item, Operation) or item.edge is None or item.kind == "wait":
            return None
        return channel(item.action, item.edge), frozenset(
            (rank, self.beside(rank, item.edge.pp_rank))
        )

    def beside(self, rank: int, stage: int) -> int:
        """The rank with the same tokens on another stage."""
        return stage * self.cp + rank % self.cp

    def turn(self, rank: int, item: Turn) -> bool:
        """True if the other ranks of its ring have come to the same turn, or further."""
        first, number = rank // self.cp * self.cp, self.done[rank] + 1
        ring = range(first, first + self.cp)
        self.begun[rank] = number
        assert all(self.turns[other][number - 1] == item for other in ring), (
            "not the turn that the others make"
        )
        over = all(self.begun[other] >= number for other in ring)
        self.done[rank] += over
        return over

    def step(self, rank: int) -> bool:
        """True if this rank could continue."""
        item, through = self.next(rank), self.uses(rank)
        if item is None:
            return False
        if through is not None and through not in self.made:
            (other,) = through[1] - {rank}
            if self.uses(other) != through:
                return False
            self.made.add(through)
        if isinstance(item, Turn) and not self.turn(rank, item):
            return False
        if isinstance(item, Operation) and item.edge is not None:
            other = self.beside(rank, item.edge.pp_rank)
            where = channel(item.action, item.edge), frozenset((rank, other))
            if item.kind == "post":
                self.asked[where, rank].append(item.edge.tag)
            elif item.kind == "send":
                self.sent[where, other].append(item.edge.tag)
            else:
                place = self.asked[where, rank].index(item.edge.tag)
                if len(self.sent[where, rank]) <= place:
                    return False
                assert self.sent[where, rank][place] == item.edge.tag, (
                    "another message than the one that was asked for"
                )
        self.at[rank] += 1
        return True

    def gets_stuck(self) -> bool:
        ranks = range(len(self.programs))
        while any(self.step(rank) for rank in ranks):
            pass
        return any(self.next(rank) is not None for rank in ranks)


def programs(
    orders: Sequence[Sequence[Action]], vpp: int, *, warm: bool = True, cp: int = 1
) -> list[list[Meeting | Operation | Turn]]:
    """Stage by stage, each cp times."""
    pp = len(orders)
    return [
        [
            *(meeting for meeting in meetings(pp, vpp) if warm and rank in meeting.ranks),
            *(
                step
                for operation in program(actions, pp, vpp, rank)
                for step in with_ring(operation, cp)
            ),
        ]
        for rank, actions in enumerate(orders)
        for _ in range(cp)
    ]


def with_ring(operation: Operation, cp: int) -> Iterator[Operation | Turn]:
    """A forward pass sends keys and values on cp - 1 times, a backward pass their gradients cp times more."""
    if operation.kind == "compute" and cp > 1:
        turns = 2 * cp - 1 if operation.action.backward else cp - 1
        yield from (Turn(operation.action, step) for step in range(turns))
    yield operation


def test_no_schedule_gets_stuck_where_communicators_are_made_lazily() -> None:
    for pp, vpp, microbatches in SIZES:
        orders = [order(pp, vpp, microbatches, rank) for rank in range(pp)]
        assert not NCCL(programs(orders, vpp)).gets_stuck(), (pp, vpp, microbatches)
        forward = [forward_order(pp, vpp, microbatches)] * pp
        assert not NCCL(programs(forward, vpp)).gets_stuck(), (pp, vpp, microbatches)


@pytest.mark.parametrize("cp", [2, 3])
def test_no_schedule_gets_stuck_where_ranks_share_sequences(cp: int) -> None:
    for pp, vpp, microbatches in SIZES:
        if pp <= 4 and microbatches <= 4:
            orders = [order(pp, vpp, microbatches, rank) for rank in range(pp)]
            assert not NCCL(programs(orders, vpp, cp=cp), cp).gets_stuck(), (pp, vpp, microbatches)


def test_ranks_that_share_a_sequence_but_not_its_order_would_get_stuck() -> None:
    """A ring of which one rank goes backward first."""
    orders = [order(2, 1, 4, rank) for rank in range(2)]
    late = [
        forward_order(2, 1, 4) + [item for item in actions if item.backward] for actions in orders
    ]
    mixed = programs(orders, 1, cp=2)
    mixed[0] = programs(late, 1, cp=2)[0]
    with pytest.raises(AssertionError, match="not the turn that the others make"):
        NCCL(mixed, 2).gets_stuck()


def test_one_microbatch_would_get_stuck_if_communicators_were_not_made_before() -> None:
    """Each rank would block in the message that it asks for before it sends the one that the other asks for."""
    orders = [order(2, 1, 1, rank) for rank in range(2)]
    assert NCCL(programs(orders, 1, warm=False)).gets_stuck()
    assert not NCCL(programs(orders, 1)).gets_stuck()


def test_few_activations_are_kept() -> None:
    """1F1B: never more microbatches in flight than stages behind a rank, itself included; the reason to prefer it."""
    for pp, vpp, microbatches in SIZES:
        for rank in range(pp):
            in_flight = most = 0
            for action in order(pp, vpp, microbatches, rank):
                in_flight += -1 if action.backward else 1
                most = max(most, in_flight)
            limit = pp - rank if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp + 1
            assert most <= limit


def test_the_order_of_two_ranks_word_for_word() -> None:
    written = [
        " ".join(f"{'FB'[a.backward]}{a.microbatch}" for a in order(2, 1, 3, rank))
        for rank in range(2)
    ]
    assert written == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    interleaved = " ".join(f"{'FB'[a.backward]}{a.chunk}.{a.microbatch}" for a in order(2, 2, 2, 1))
    assert interleaved == "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1"


def test_a_chunk_is_complete_with_its_last_microbatch() -> None:
    assert last_backward(order(2, 2, 4, 0)) == {Action(True, 0, 3), Action(True, 1, 3)}


def test_the_interleaved_bubble_is_smaller() -> None:
    """Time until all is done, with passes of 1 and 2 units through each layer and 8 layers in all."""
    plain, interleaved = (duration(4, vpp, 8, layers=8) for vpp in (1, 2))
    work = 8 * 2 * 3
    assert plain == work + 3 * 2 * 3  # (pp - 1) stages of 2 layers
    assert interleaved == work + 3 * 1 * 3


def duration(pp: int, vpp: int, microbatches: int, layers: int) -> int:
    orders = [order(pp, vpp, microbatches, rank) for rank in range(pp)]
    free, arrives = [0] * pp, dict[tuple[int, int, int], int]()
    each = layers // (pp * vpp)
    for rank, action in simulate(orders, vpp):
        needed = edge(action, pp, vpp, rank, outgoing=False)
        start = max(free[rank], arrives[(needed.pp_rank, rank, needed.tag)] if needed else 0)
        free[rank] = start + each * (2 if action.backward else 1)
        made = edge(action, pp, vpp, rank, outgoing=True)
        if made is not None:
            arrives[(rank, made.pp_rank, made.tag)] = free[rank]
    return max(free)


@pytest.mark.oracle
def test_interleaving_is_megatron_cores() -> None:
    """The table of (microbatch, chunk) that core's own schedule walks through."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    for pp, vpp, microbatches in SIZES:
        if vpp > 1:
            ours = [
                (action.microbatch, action.chunk) for action in forward_order(pp, vpp, microbatches)
            ]
            assert ours == get_schedule_table(microbatches, vpp, pp)


def test_neighbours_agree_on_every_message() -> None:
    for pp, vpp, microbatches in SIZES:
        for rank, after in pairwise([*range(pp), 0]):
            sent = {
                made.tag
                for action in order(pp, vpp, microbatches, rank)
                if not action.backward
                and (made := edge(action, pp, vpp, rank, outgoing=True))
                and made.pp_rank == after
            }
            received = {
                needed.tag
                for action in order(pp, vpp, microbatches, after)
                if not action.backward
                and (needed := edge(action, pp, vpp, after, outgoing=False))
                and needed.pp_rank == rank
            }
            assert sent == received
