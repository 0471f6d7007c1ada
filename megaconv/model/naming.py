"""Naming schemes: how a checkpoint calls its tensors, and the keys under which a table's rows spell them.

    Naming("core", ("grouped",))    looks for a spelling under core_grouped, then under core

hf        transformers' names. `stacked`: all experts of a layer in one tensor, as transformers 5 holds them in memory, and
          writes them when its option says not to keep the older form; `stacked_transposed`: each expert in it transposed;
          `mtp_stacked`: those of a layer for multi-token prediction, whatever the others are (Qwen 3.6).
core      Megatron core with Transformer Engine's layers. `local`: with Megatron's own; `local_keys`: these under the names
          that the others have, as distributed checkpoints call them. Experts are modules of their own;
          `grouped`: one tensor an expert in a grouped layer of Transformer Engine; `legacy_grouped`: all of a rank's in one.
          `rope_last`: indexers as core 0.16 to 0.18 has them (families/parts/indexer.py).
legacy    Megatron's models before core, their nested dictionaries flattened to names with dots.
meta      Meta's own files and Mistral's. Llama 1 and 2 shard the embedding along another axis than the head; `rows` is
          Llama 3, where both are sharded by rows.
gguf      llama.cpp's; spelled for all families at once, in families/parts/gguf_names.py.
"""

from dataclasses import dataclass

KEYS = (
    *("hf", "hf_stacked", "hf_stacked_transposed", "hf_mtp_stacked"),
    *("core", "core_local", "core_local_keys", "core_grouped", "core_legacy_grouped", "core_rope_last"),
    *("legacy", "meta", "meta_rows", "gguf"),
)
"""What a row may spell its tensors under. A new naming scheme is a new key here."""


@dataclass(frozen=True)
class Naming:
    """A scheme of names, and where it departs from the scheme's usual ones."""

    scheme: str
    variants: tuple[str, ...] = ()
    """The most specific first: where a row spells several, the first one holds."""

    def __post_init__(self) -> None:
        unknown = [key for key in self.keys if key not in KEYS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a key of a naming scheme; known: {', '.join(KEYS)}")

    @property
    def keys(self) -> tuple[str, ...]:
        """Where to look for a row's spelling, in this order."""
        return (*(f"{self.scheme}_{variant}" for variant in self.variants), self.scheme)

    def __str__(self) -> str:
        return " ".join((self.scheme, *self.variants))


HF = Naming("hf")
HF_STACKED = Naming("hf", ("stacked",))
HF_STACKED_TRANSPOSED = Naming("hf", ("stacked_transposed", "stacked"))
CORE = Naming("core")
CORE_LOCAL = Naming("core", ("local",))
CORE_LOCAL_KEYS = Naming("core", ("local_keys",))
CORE_GROUPED = Naming("core", ("grouped",))
CORE_LEGACY_GROUPED = Naming("core", ("legacy_grouped",))
CORE_LOCAL_LEGACY_GROUPED = Naming("core", ("legacy_grouped", "local"))
CORE_ROPE_LAST = Naming("core", ("rope_last",))
LEGACY = Naming("legacy")
META = Naming("meta")
META_ROWS = Naming("meta", ("rows",))
GGUF = Naming("gguf")

NAMINGS = (
    *(HF, HF_STACKED, HF_STACKED_TRANSPOSED),
    *(CORE, CORE_LOCAL, CORE_GROUPED, CORE_LEGACY_GROUPED, CORE_LOCAL_LEGACY_GROUPED, CORE_ROPE_LAST),
    *(LEGACY, META, META_ROWS),
)
"""All that are in use."""

TRANSFORMER_IMPLS = ("transformer_engine", "local")
"""Megatron's --transformer-impl: whose layers a core model is built of."""


def core_naming(transformer_impl: str, experts: str = "", *, rope_last: bool = False) -> Naming:
    """Of a Megatron core model. experts: how they are stored, `grouped`, `legacy_grouped`, or each as a module of its own."""
    if transformer_impl not in TRANSFORMER_IMPLS:
        raise ValueError(f"transformer_impl {transformer_impl!r} is not one of {', '.join(TRANSFORMER_IMPLS)}")
    local = transformer_impl == "local"
    found = Naming("core", (*([experts] if experts else []), *(["local"] if local else [])))
    return with_rope_last(found) if rope_last else found


def with_mtp_stacked(naming: Naming) -> Naming:
    """The same where experts of a layer for multi-token prediction are in one tensor."""
    return Naming(naming.scheme, ("mtp_stacked", *naming.variants))


def with_rope_last(naming: Naming) -> Naming:
    """The same of a checkpoint whose indexers are those of core 0.16 to 0.18."""
    return Naming(naming.scheme, (*naming.variants, "rope_last"))
