"""The content of a Retro project, for people and as JSON: its counts, and samples with their neighbours."""

from collections.abc import Iterator
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.data.corpora import SPLITS
from megatron_lite.retrieval.retro.project import Project

LINE = 100
"""Characters of a text in a line of the table."""


def summary(project: Project) -> dict[str, Any]:
    """Return the counts of a project."""
    settings = project.settings
    infos = project.infos()
    splits = {}
    for split in SPLITS:
        near = project.neighbors(split)
        if near is not None:
            splits[split] = {"samples": len(near), "chunks": near.chunks, "saved": near.saved}
    return {
        "format": settings.format,
        "seq_length": settings.seq_length,
        "chunk_length": settings.chunk_length,
        "embedder": settings.own.get("embedder"),
        "index": settings.own.get("index"),
        "datasets": infos,
        "chunks": {
            "train": sum(info["n_chunks_train"] for info in infos),
            "valid": sum(info["n_chunks"] - info["n_chunks_train"] for info in infos),
            "without tokens": sum(info["n_chunks_invalid"] for info in infos),
        },
        "queried": splits,
    }


def summary_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a summary."""
    yield f"samples     of {found['seq_length']} tokens, in chunks of {found['chunk_length']}"
    yield f"embedder    {found['embedder'] or 'not recorded'}"
    yield f"index       {found['index'] or 'not recorded'}"
    for info in found["datasets"]:
        yield (
            f"dataset     {info['prefix']}: {info['n_docs']:,} documents, {info['n_chunks']:,} chunks, "
            f"{info['n_chunks_train']:,} of them can be retrieved"
        )
    for split, one in found["queried"].items():
        yield (
            f"neighbours  {split}: {one['samples']:,} samples, {one['chunks']:,} chunks, {one['saved']} neighbours each"
        )


def sample(
    project: Project, split: str, number: int, count: int, chunks: int, *, megatron: bool
) -> dict[str, Any]:
    """Return a sample: its chunks and the neighbours of each. Raises UsageError for a number that isn't there."""
    near = project.neighbors(split)
    windows = project.windows(split)
    if near is None or windows is None:
        raise UsageError(f"{project.path}: has no neighbours for {split}")
    if not 0 <= number < len(near):
        raise UsageError(f"--sample {number}: {split} has samples 0 to {len(near) - 1:,}")
    database = project.database(project.eod())
    rows = near.of_sample(number, count)
    retrieved = database.retrieved(rows, chunks, megatron=megatron)
    window = windows[number]
    size = project.settings.chunk_length
    text = project.tokenizer.detokenize

    def neighbor(row: int, tokens: list[int]) -> dict[str, Any]:
        """Describe a neighbour. row: its chunk in the database; negative if there is none."""
        is_there = row >= 0
        return {
            "chunk": row,
            "dataset": int(database.chunks[row, 0]) if is_there else None,
            "document": int(database.chunks[row, 1]) if is_there else None,
            "tokens": tokens,
            "text": text(tokens),
        }

    described: list[dict[str, Any]] = []
    for place in range(project.settings.chunks_per_sample):
        tokens = window.tokens[place * size : (place + 1) * size].tolist()
        pairs = zip(rows[place], retrieved[place], strict=True)
        neighbors = [neighbor(int(row), near_tokens.tolist()) for row, near_tokens in pairs]
        described.append({"tokens": tokens, "text": text(tokens), "neighbors": neighbors})
    return {
        "split": split,
        "sample": number,
        "dataset": window.dataset,
        "documents": window.documents.tolist(),
        "chunks": described,
    }


def sample_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a sample: each chunk, and its neighbours below it."""
    yield f"{found['split']} sample {found['sample']}, dataset {found['dataset']}, documents {found['documents']}"
    for number, chunk in enumerate(found["chunks"]):
        yield f"chunk {number}: {_short(chunk['text'])}"
        for neighbor in chunk["neighbors"]:
            place = f"{neighbor['dataset']}/{neighbor['document']}"
            where = "none" if neighbor["chunk"] < 0 else f"{neighbor['chunk']} ({place})"
            yield f"    {where}: {_short(neighbor['text'])}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LINE else f"{line[:LINE]}…"
