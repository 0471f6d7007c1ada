"""Naming schemes: how a checkpoint names its tensors, and the keys under which a table's rows spell these names.

    Naming("core", ("grouped",))    looks for a spelling under core_grouped, then under core

hf        transformers' names. `stacked`: all experts of a layer in one tensor. transformers 5 holds them so in
          memory, and writes them so if its option says not to keep the older form. `stacked_transposed`: the same,
          with each expert transposed. `mtp_stacked`: only the experts of multi-token prediction (MTP) layers are in
          one tensor (Qwen 3.6). `separate`: each expert in tensors of its own, under other names than those of
          transformers' class (MiniMax M3), or q, k and v, which published files have in one tensor (HRM-Text).
          `fused`: q, k and v in one tensor, under other names than those of transformers' class (Molmo 2).
          `fused_halved`: the same, with the embedding in two halves.
core      Megatron core with Transformer Engine's layers; each expert is a separate module. `local`: Megatron's own
          layers. `local_keys`: Megatron's own layers under Transformer Engine's names, as in distributed checkpoints.
          `grouped`: one tensor per expert in a grouped layer of Transformer Engine. `legacy_grouped`: one tensor for
          all experts of a rank. `rope_last`: indexers as in core 0.16 to 0.18 (families/parts/indexer.py).
legacy    Megatron's models before core. Their nested dictionaries are flattened to names with dots.
meta      Meta's and Mistral's own files. Llama 1 and 2 shard the embedding and the head along different axes.
          `rows`: Llama 3, which shards both by rows. `fused`: q, k and v in one tensor, as torchtitan's optimizer
          has them.
gguf      llama.cpp's names, listed once for all families in gguf/names.py.
titan     torchtitan's names of Qwen3, GPT-OSS and DeepSeek, listed once for all families in pytorch/titan_rows.py. `fused`:
          q, k and v in one tensor, as its optimizer has them. torchtitan's Llama has Meta's order of rows (`meta`).
trtllm    TensorRT-LLM's names, listed once for all families in trtllm/names.py.
mlx       MLX's names, derived from transformers' names in mlx/names.py.
"""

from dataclasses import dataclass

KEYS = (
    *("hf", "hf_stacked", "hf_stacked_transposed", "hf_mtp_stacked", "hf_separate"),
    *("hf_fused", "hf_fused_halved"),
    *(
        "core",
        "core_local",
        "core_local_keys",
        "core_grouped",
        "core_legacy_grouped",
        "core_rope_last",
    ),
    *("legacy", "meta", "meta_rows", "meta_fused", "gguf", "trtllm", "mlx"),
    *("titan", "titan_fused"),
)
"""Keys under which a row may spell its tensors. A new naming scheme is a new key here."""


@dataclass(frozen=True)
class Naming:
    """A naming scheme, with its variants."""

    scheme: str
    variants: tuple[str, ...] = ()
    """Variants, the most specific first. If a row has several spellings, the first variant counts."""

    def __post_init__(self) -> None:
        unknown = [key for key in self.keys if key not in KEYS]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is not a key of a naming scheme; known: {', '.join(KEYS)}"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a row's spelling, in the order in which they are tried."""
        return (*(f"{self.scheme}_{variant}" for variant in self.variants), self.scheme)

    def __str__(self) -> str:
        return " ".join((self.scheme, *self.variants))


HF = Naming("hf")
HF_STACKED = Naming("hf", ("stacked",))
HF_SEPARATE = Naming("hf", ("separate",))
HF_FUSED = Naming("hf", ("fused",))
HF_FUSED_HALVED = Naming("hf", ("fused_halved", "fused"))
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
META_FUSED = Naming("meta", ("fused", "rows"))
GGUF = Naming("gguf")
TRTLLM = Naming("trtllm")
MLX = Naming("mlx")
TITAN = Naming("titan")
TITAN_FUSED = Naming("titan", ("fused",))

NAMINGS = (
    *(HF, HF_STACKED, HF_STACKED_TRANSPOSED),
    *(
        CORE,
        CORE_LOCAL,
        CORE_GROUPED,
        CORE_LEGACY_GROUPED,
        CORE_LOCAL_LEGACY_GROUPED,
        CORE_ROPE_LAST,
    ),
    *(LEGACY, META, META_ROWS, META_FUSED),
)
"""All naming schemes that are in use."""

TRANSFORMER_IMPLS = ("transformer_engine", "local")
"""Megatron's --transformer-impl: the library whose layers a core model is built of."""


def core_naming(transformer_impl: str, experts: str = "", *, rope_last: bool = False) -> Naming:
    """The naming scheme of a Megatron core model.

    experts: how experts are stored: `grouped`, `legacy_grouped`, or empty for one module per expert.
    """
    if transformer_impl not in TRANSFORMER_IMPLS:
        raise ValueError(
            f"transformer_impl {transformer_impl!r} is not one of {', '.join(TRANSFORMER_IMPLS)}"
        )
    local = transformer_impl == "local"
    found = Naming("core", (*([experts] if experts else []), *(["local"] if local else [])))
    return with_rope_last(found) if rope_last else found


def with_mtp_stacked(naming: Naming) -> Naming:
    """The same naming scheme, with the experts of each MTP layer in one tensor."""
    return Naming(naming.scheme, ("mtp_stacked", *naming.variants))


def with_rope_last(naming: Naming) -> Naming:
    """The same naming scheme, for a checkpoint with the indexers of core 0.16 to 0.18."""
    return Naming(naming.scheme, (*naming.variants, "rope_last"))
