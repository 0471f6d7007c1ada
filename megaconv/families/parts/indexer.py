"""Sparse attention as in DeepSeek: an indexer with its own small heads selects the positions that each token attends
to.

    hf      model.layers.{l}.self_attn.indexer.{wq_b, wk, k_norm, weights_proj}
    core    decoder.layers.{l}.self_attention.core_attention.indexer.{linear_wq_b, linear_wk, k_norm, linear_weights_proj}

Every tensor-parallel rank holds the whole indexer. In files, in transformers and in Megatron core from 0.19 on, the
rotating elements of an indexer's head come first. In core 0.16 to 0.18 they come last, as pairs of neighbours
(`rope_last`). Those releases normalize latent vectors in Transformer Engine's next linear layer. From 0.19 on, both
norms are separate modules, since the indexer needs their outputs. Source: modeling_deepseek_v32.py and
modeling_glm_moe_dsa.py of transformers 5; dsa.py and experimental_attention_variant_module_specs.py of Megatron core,
tags core_v0.16.1 to core_v0.19.0 and main at d98e8a64ddf3.
"""

from megaconv.errors import NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, size
from megaconv.families.parts.latent_attention import LATENT_ATTENTION, one_epsilon
from megaconv.model.config import ModelConfig
from megaconv.model.table import RopeLast, Row

_HF = "model.layers.{l}.self_attn.indexer."
_CORE = "decoder.layers.{l}.self_attention.core_attention.indexer."
_NORMS = {
    "layers.{l}.attn.q_latent_norm.weight": "q_layernorm",
    "layers.{l}.attn.kv_latent_norm.weight": "kv_layernorm",
}


def _normed_apart(row: Row) -> Row:
    if row.canonical not in _NORMS:
        return row
    module = f"decoder.layers.{{l}}.self_attention.{_NORMS[row.canonical]}.weight"
    return row.renamed(core=module, core_rope_last=row.names["core"])


def sparse_attention(*, halves: bool) -> tuple[Row, ...]:
    """The rows of latent attention with an indexer.

    halves: True if an element of the indexer rotates with the element half the rotating part further on. False if it
    rotates with its neighbour.
    """
    return (
        *(_normed_apart(row) for row in LATENT_ATTENTION if row.when != "q_direct"),
        Row("layers.{l}.attn.indexer.q.weight", ("index_heads*index_dim q_rank",),
            hf=_HF + "wq_b.weight",
            core=_CORE + "linear_wq_b.weight",
            core_rope_last=RopeLast(_CORE + "linear_wq_b.weight", halves=halves)),
        Row("layers.{l}.attn.indexer.k.weight", ("index_dim hidden",),
            hf=_HF + "wk.weight",
            core=_CORE + "linear_wk.weight",
            core_rope_last=RopeLast(_CORE + "linear_wk.weight", halves=halves)),
        Row("layers.{l}.attn.indexer.k_norm.{weight|bias}", ("index_dim", "index_dim"),
            hf=_HF + "k_norm.{weight|bias}",
            core=_CORE + "k_norm.{weight|bias}",
            core_rope_last=RopeLast(_CORE + "k_norm.{weight|bias}", halves=halves)),
        Row("layers.{l}.attn.indexer.scale.weight", ("index_heads hidden",),
            hf=_HF + "weights_proj.weight",
            core=_CORE + "linear_weights_proj.weight"),
    )  # fmt: skip


_OLDER_TYPE = "deepseek_sparse_attention"
"""The word of older files, which transformers reads as `indexed_attention`."""


def _read_layers(raw: Raw) -> Fields:
    others = {*(raw.get("layer_types") or ())} - {"indexed_attention", _OLDER_TYPE}
    if others:
        raise NotExpressible(
            f"{CONFIG_NAME}: layer_types has {min(others)!r}, which this architecture doesn't support"
        )
    return {}


def indexer_keys(*, heads: int) -> tuple[Keys, ...]:
    """The keys of an indexer. heads: the default for a missing key."""
    return (
        size("index_n_heads", "indexer.heads", heads),
        size("index_head_dim", "indexer.head_dim", 128),
        size("index_topk", "indexer.topk", 2048),
        Keys(
            ("layer_types",),
            _read_layers,
            lambda config: {"layer_types": ["indexed_attention"] * config.layer_count},
        ),
    )


def sparse_notices(config: ModelConfig) -> tuple[str, ...]:
    """Notices for a model with an indexer, if Megatron is on either side of a conversion."""
    return (
        *one_epsilon(config),
        "the elements of an indexer's heads are in the order of Megatron core 0.19 and later; core 0.16 to 0.18 has another one, which "
        "--option indexer_for=0.16 writes and --option indexer_from=0.16 reads (that of another release is computed without an "
        "error, and wrong beyond index_topk tokens)",
    )
