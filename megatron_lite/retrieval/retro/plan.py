"""The inputs of a build of a Retro project: the project, the embedder, the index and the sizes of the work."""

from dataclasses import dataclass
from pathlib import Path

from megatron_lite.retrieval.embedder import TextEmbedder
from megatron_lite.retrieval.retro.project import Project

END_OF_TEXT = "<|endoftext|>"
BATCH = 4096
"""Texts in memory at once, with their vectors."""
MOST_TOKENS = 256
"""Tokens of a text that are embedded, unless a flag says otherwise."""


@dataclass(frozen=True)
class IndexPlan:
    """The flags of the index and of the search."""

    text: str
    """faiss' index string."""
    train_chunks: int | None
    """Chunks that train the index; None: as many as the ratios of the blend allow, at most a million."""
    train_fraction: float = 1.0
    add_fraction: float = 1.0
    nprobe: int = 65536
    ef_search: int = 256
    query: int = 200
    """Neighbours that are searched."""
    save: int = 20
    """Neighbours that remain after those of the sample's documents are left out."""


@dataclass(frozen=True)
class BuildPlan:
    """A build. All processes have the same one."""

    project: Project
    embedder: TextEmbedder
    index: IndexPlan
    document_block: int
    """Documents of each block of the database."""
    eod: int

    @property
    def index_directory(self) -> Path:
        return self.project.path / "index" / "faiss-par-add" / self.index.text

    @property
    def empty_index(self) -> Path:
        """The trained index without vectors."""
        return self.index_directory / f"empty_{self.index.train_fraction:.3f}.faissindex"

    @property
    def added_index(self) -> Path:
        """The complete index."""
        fractions = f"{self.index.train_fraction:.3f}_{self.index.add_fraction:.3f}"
        return self.index_directory / f"added_{fractions}.faissindex"

    def text_of(self, tokens: list[int]) -> str:
        """Return the text of a chunk as it is embedded."""
        return self.project.tokenizer.detokenize(tokens).replace(END_OF_TEXT, "")
