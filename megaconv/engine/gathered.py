"""Values that ranks exchange at the end of a conversion: fingerprints, and zip entries that nobody has compared."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from formats.entry_check import Entry
from formats.opened import OpenedFiles
from megaconv.engine.ranks import Ranks
from megaconv.engine.shares import Share
from megaconv.model.ir import Key

_DIGEST_LETTERS = 64
"""Length of a tensor's fingerprint in hexadecimal digits."""


def entries_left_to(ranks: Ranks, opened: OpenedFiles) -> set[Entry] | None:
    """Zip entries whose checksum this rank has to compare; None if there is only one rank, which compares all.

    These are entries that no rank has read completely, and that this rank is the first to have read in part.
    """
    if ranks.size == 1:
        return None
    begun = opened.begun_entries()
    begun_here = [_placed(entry) for entry in begun]
    compared_here = [_placed(entry) for entry in opened.compared_entries()]
    of_ranks = [json.loads(text) for text in ranks.gather(json.dumps([begun_here, compared_here]))]
    first_rank: dict[str, int] = {}
    compared = set[str]()
    for rank, (begun_there, compared_there) in enumerate(of_ranks):
        compared.update(compared_there)
        for name in begun_there:
            first_rank.setdefault(name, rank)
    left = {name for name, rank in first_rank.items() if rank == ranks.rank} - compared
    return {entry for entry in begun if _placed(entry) in left}


def _placed(entry: Entry) -> str:
    """A name of the entry that is equal on all ranks, even if they mounted the source at different paths."""
    return f"{'/'.join(Path(entry.path).parts[-3:])}:{entry.start}"


def gather_digests(
    ranks: Ranks, shares: Sequence[Share], digests: Mapping[Key, str]
) -> dict[Key, str]:
    """The fingerprints of all tensors, share by share, each share in the manifest's order. Waits for all ranks."""
    own_share = shares[ranks.rank]
    texts = ranks.gather("".join(digests[key] for key in own_share.hashed))
    found = dict[Key, str]()
    for share, text in zip(shares, texts, strict=True):
        for index, key in enumerate(share.hashed):
            start = index * _DIGEST_LETTERS
            found[key] = text[start : start + _DIGEST_LETTERS]
    return found
