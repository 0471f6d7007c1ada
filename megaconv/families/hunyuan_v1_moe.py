"""Hunyuan A13B: Hunyuan 1 with experts and a shared expert of their width in every layer."""

from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families.hunyuan_v1_dense import FAMILY as DENSE
from megaconv.families.hunyuan_v1_dense import FIXED, KEYS, MODULES
from megaconv.families.parts.decoder_keys import SILU
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS, shared_expert_rows
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size
from megaconv.families.parts.row_changes import in_all_forms, in_core, with_modules
from megaconv.model.config import ModelConfig

_SHARED = shared_expert_rows(
    "mlp.shared_mlp.{gate_proj|up_proj}.weight", "mlp.shared_mlp.down_proj.weight"
)
_ROUTER = {"layers.{l}.mlp.router.weight": "model.layers.{l}.mlp.gate.wg.weight"}
_EXPERTS = (*in_all_forms(QWEN_EXPERTS[:1], _ROUTER), *QWEN_EXPERTS[1:], *_SHARED)
_ROWS = (EMBEDDING, *ATTENTION, MOE_NORM, *_EXPERTS, *HEAD)
_COUNT, _CHOSEN = "num_experts", "moe_topk"


def _same_in_all_layers(raw: Raw, key: str) -> int:
    """The number of a key, which may be a list with one number for each layer."""
    stated = raw.get(key, 1)
    values = set(stated) if isinstance(stated, list) else {stated}
    if len(values) != 1:
        raise NotExpressible(
            f"{CONFIG_NAME}: {key} differs by layer ({stated}), which is not supported"
        )
    return need_size({key: values.pop()}, key)


def _read(raw: Raw) -> Fields:
    width = need_size(raw, "intermediate_size")
    sizes = {"mlp.ffn": width, "experts.ffn": width, "experts.shared_ffn": width}
    count, chosen = _same_in_all_layers(raw, _COUNT), _same_in_all_layers(raw, _CHOSEN)
    return {**sizes, "experts.count": count, "experts.per_token": chosen}


def _write(config: ModelConfig) -> Raw:
    experts = config.experts
    return {"intermediate_size": experts.ffn, _COUNT: experts.count, _CHOSEN: experts.per_token}


FAMILY = replace(
    DENSE, name="hunyuan_v1_moe", architectures=("HunYuanMoEV1ForCausalLM",), model_type="hunyuan_v1_moe",
    rows=in_core(with_modules(_ROWS, MODULES)), fixed={**FIXED, "layers.mlp": "experts"}, only=SILU,
    keys=(*(each for each in KEYS if each.names != ("intermediate_size",)), Keys(("intermediate_size", _COUNT, _CHOSEN), _read, _write)),
    aliases={"num_experts_per_tok": _CHOSEN, "num_local_experts": _COUNT},
)  # fmt: skip
