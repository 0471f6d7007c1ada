"""Keys of config.json for mixtures of experts in DeepSeek's manner: routed ones, shared ones, dense layers between.

In each function the numbers count where keys are missing: they are the defaults of an architecture's configuration class.
"""

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, need_size, size
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer


def routed_experts(
    *,
    count: int | None,
    per_token: int | None = 8,
    width: int,
    count_key: str = "n_routed_experts",
    per_token_key: str = "num_experts_per_tok",
) -> tuple[Keys, ...]:
    """count, per_token: None where there has to be a number."""
    return (
        size(count_key, "experts.count", count),
        size(per_token_key, "experts.per_token", per_token),
        size("moe_intermediate_size", "experts.ffn", width),
    )


def shared_experts(*, count: int, width: int, key: str = "n_shared_experts") -> Keys:
    """As many as the key says, as one that is so many times as wide; width: of a routed one."""

    def read(raw: Raw) -> Fields:
        experts = raw.get(key, count) or 0
        return {"experts.shared_ffn": experts * need_size(raw, "moe_intermediate_size", width)}

    return Keys((key,), read, lambda config: {key: config.experts.shared_ffn // max(1, config.experts.ffn)})


def first_dense(layers: int) -> Keys:
    """first_k_dense_replace: so many layers, then experts in all others."""

    def read(raw: Raw) -> Fields:
        first, count = raw.get("first_k_dense_replace", layers), need_size(raw, "num_hidden_layers")
        return {"layers.mlp": per_layer(range(first, count), count, "experts", "dense")}

    def write(config: ModelConfig) -> Raw:
        return {"first_k_dense_replace": min(config.layers_with("moe"), default=config.layer_count)}

    return Keys(("first_k_dense_replace",), read, write)


def mlp_layer_types(*, dense: int, older: str | None = None) -> Keys:
    """A word for each layer, `dense` or `sparse`. older: the key that counts the dense first ones where mlp_layer_types is missing."""
    keys = ("mlp_layer_types", *([older] if older else []))

    def read(raw: Raw) -> Fields:
        count, first = need_size(raw, "num_hidden_layers"), raw.get(older, dense) if older else dense
        kinds = raw.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in range(count)]
        others = [kind for kind in kinds if kind not in ("dense", "sparse")]
        if others:
            raise NotExpressible(f"{CONFIG_NAME}: mlp_layer_types has {others[0]!r}, which is not known")
        if len(kinds) != count:
            raise CorruptCheckpoint(f"{CONFIG_NAME}: mlp_layer_types lists {len(kinds)} layers, the model has {count}")
        chosen = [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
        return {"layers.mlp": per_layer(chosen, count, "experts", "dense")}

    def write(config: ModelConfig) -> Raw:
        kinds = ["sparse" if config.has("moe", layer) else "dense" for layer in range(config.layer_count)]
        first = min(config.layers_with("moe"), default=config.layer_count)
        return {"mlp_layer_types": kinds} | ({older: first} if older else {})

    return Keys(keys, read, write)


def sigmoid_routing(*, scale: float, groups: int, group_topk: int, renormalize: bool = True) -> tuple[Keys, ...]:
    """How DeepSeek-V3 chooses experts."""

    def read(raw: Raw) -> Fields:
        given = {"n_group": groups, "topk_group": group_topk, **raw}
        counts = {key: None if given[key] is None else need_size(given, key) for key in ("n_group", "topk_group")}
        found = {"experts.groups": counts["n_group"], "experts.group_topk": counts["topk_group"]}
        return found | {"experts.scale": raw.get("routed_scaling_factor", scale)}

    def write(config: ModelConfig) -> Raw:
        experts = config.experts
        written = {"n_group": experts.groups or 1, "topk_group": experts.group_topk or 1}
        return written | {"routed_scaling_factor": experts.scale or 1.0}

    return (
        Keys(("n_group", "topk_group", "routed_scaling_factor"), read, write),
        flags("norm_topk_prob", ("experts.renormalize",), default=renormalize),
    )
