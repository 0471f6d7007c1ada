"""Context parallelism: the ranks that share each sequence."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the tokens of every sequence, and which of them this is."""

    group: ProcessGroup
    rank: int
    size: int
