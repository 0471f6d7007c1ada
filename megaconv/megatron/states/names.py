"""Names in Megatron core's state dictionaries that aren't parameters, and the order of its modules."""

from collections.abc import Collection, Iterator
from functools import cache

from megaconv.megatron.states.order import Exceptions, ModuleOrder
from megaconv.model.naming import Naming, core_naming
from megaconv.model.table import Row

EXTRA_STATE = "._extra_state"
"""Transformer Engine's FP8 bookkeeping. Every linear layer has such an entry, which is empty without FP8."""

NOT_PARAMETERS = ("rotary_pos_emb.inv_freq",)
_KEPT = (".expert_bias", ".layer_scalar", ".activation_func.beta", ".activation_func.eps")
BUFFERS = (*NOT_PARAMETERS, *_KEPT, "tokens_per_expert")
"""Suffixes of a model's tensors that no optimizer trains."""

_OF_RETRIEVAL = (".cross_attention.", ".pre_cross_attn_layernorm.")
"""Parts of the names of a Retro's parameters that the GPT inside it lacks."""


def is_of_retrieval(name: str) -> bool:
    """True if a Retro with a gate of 0 is trained without this parameter. name: of a Retro's tensor."""
    return any(part in name for part in _OF_RETRIEVAL)


_EXCEPTIONS = Exceptions(
    # Attention first creates the modules that all of its kinds have; norms of heads and of latent vectors come last.
    # Retro's cross attention holds its attention in `attn`.
    first=dict.fromkeys(
        ("self_attention", "cross_attention", "attn"), ("core_attention", "linear_proj")
    ),
    # A local layer with Mamba 2 creates its norm after the mixer.
    last={
        "self_attention": ("q_layernorm", "k_layernorm", "kv_layernorm"),
        "layers": ("norm",),
    },
)


@cache
def core_order(rows: tuple[Row, ...], naming: Naming) -> ModuleOrder:
    """Sorts names in the order of a core model's own state_dict."""
    return ModuleOrder(rows, naming, _EXCEPTIONS)


def naming_of(names: Collection[str]) -> Naming:
    """The naming scheme of a core model: the implementation of its layers, and how its experts are stored."""
    fused: tuple[str, ...] = (
        "linear_qkv.layer_norm_weight",
        "linear_kv_up_proj.layer_norm_weight",
        "in_proj.layer_norm_weight",
    )
    if any(".side_by_side." in name for name in names):
        # The only matrix after a norm. In local layers with experts, the norm before these has such a name too.
        fused = (*fused, "mlp.linear_fc1.layer_norm_weight")
    impl = "transformer_engine" if any(name.endswith(fused) for name in names) else "local"
    experts = ""
    if any(name.endswith(".experts.weight1") for name in names):
        experts = "legacy_grouped"
    elif any(name.endswith(".experts.linear_fc1.weight0") for name in names):
        experts = "grouped"
    return core_naming(impl, experts)


def describe_naming(naming: Naming) -> str:
    """A naming scheme for people: `Transformer Engine names, grouped experts`."""
    engine = "local" if "local" in naming.variants else "Transformer Engine"
    experts = [variant.replace("_", " ") for variant in naming.variants if variant != "local"]
    return f"{engine} names" + (f", {experts[0]} experts" if experts else "")


_POST_NORM = ".post_layernorm.weight"
"""The suffix of a norm in the linear layer before it."""
_FINAL_NORMS = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")
"""Only the last pipeline stage has one of these."""
_NORMS = tuple(
    f"{name}.weight"
    for name in (
        *(
            "input_layernorm",
            "pre_cross_attn_layernorm",
            "pre_mlp_layernorm",
            "pre_mlp_layernorm.norm",
            "post_layernorm",
            "final_layernorm",
        ),
        *("enorm", "hnorm", "out_norm", "final_norm", "patch_norm"),
    )
)
"""Norms that are separate modules even in Transformer Engine's layers."""


def is_of_linear_layer(name: str) -> bool:
    """True if the name is in one of Megatron's linear layers, column or row parallel."""
    return any(
        word in name
        for word in (".linear_", ".eh_proj.", ".in_proj.", ".out_proj.", "_latent_proj.")
    )


def extra_states(
    names: Collection[str], naming: Naming | None = None, *, has_scores: bool = False
) -> dict[str, bool]:
    """The `_extra_state` entries of a model with these parameters: name -> True for an empty tensor, False for None.

    naming: the naming scheme; None: it is recognised from the names. has_scores: True if the model has a head of
    scores, which is torch's own linear layer and has no such entry.
    """
    has_engine = "local" not in (naming or naming_of(names)).variants
    modules = _linear_modules(names, has_engine)
    found = {module + EXTRA_STATE: has_engine for module in modules}
    if has_engine:
        others = [*_attention_modules(modules, names), *_norm_modules(names)]
        found |= {module + EXTRA_STATE: True for module in others}
    for head in () if has_scores else _heads(names):
        found[head + EXTRA_STATE] = False
    return found


def _linear_modules(names: Collection[str], has_engine: bool) -> list[str]:
    """Modules of the linear layers that have an extra state, in the order of the names."""
    found = dict[str, None]()
    for name in names:
        if not is_of_linear_layer(name) or name.endswith(_POST_NORM):
            continue
        # Core has no local linear layer that every rank holds whole, as indexers and latent experts need.
        if not has_engine and (".indexer." in name or "_latent_proj." in name):
            continue
        found[name.rpartition(".")[0]] = None
    return list(found)


def _attention_modules(linear_modules: Collection[str], names: Collection[str]) -> Iterator[str]:
    """Modules of Transformer Engine's attention. Sparse attention isn't one of its layers."""
    sparse = {name.partition(".indexer.")[0] for name in names if ".indexer." in name}
    for module in linear_modules:
        attention = module.replace("linear_proj", "core_attention")
        if module.endswith("linear_proj") and attention not in sparse:
            yield attention


def _norm_modules(names: Collection[str]) -> list[str]:
    return [name.removesuffix(".weight") for name in names if name.endswith(_NORMS)]


def _heads(names: Collection[str]) -> list[str]:
    """The modules of the output layers in a chunk with these parameters."""
    heads = [
        head
        for head in ("lm_head.output_layer", "output_layer")
        if any(name.startswith(f"{head}.") for name in names)
    ]
    ends_the_model = any(name in names for name in _FINAL_NORMS)
    # A tied head has no parameters.
    return heads or (["output_layer"] if ends_the_model else [])
