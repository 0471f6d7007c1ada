"""Translates between Megatron's arguments of scaled rope and the configuration: linear, Llama 3's and yarn.

Source: GPTModel and rotary_pos_embedding of megatron-core 0.12 to 0.16; rope parameters of transformers 4 and 5.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible, UnknownFamily
from megaconv.model.config import ModelConfig

LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The numbers that Megatron's use_rope_scaling implies, besides the factor."""

YARN = {
    "factor": "yarn_rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
"""Keys of config.json -> names of the attributes that GPTModel of core 0.16 reads from its configuration."""
YARN_TRUNCATE = "yarn_correction_range_round_to_int"
_OF_YARN = {"rope_type", "truncate", *YARN}


def write_scaling(config: ModelConfig, allow_lossy: bool, *, legacy: bool) -> dict[str, Any]:
    scaling, two = config.positions.scaling, config.has("two_ropes")
    unscaled: dict[str, Any] = {"rope_scaling_factor": 1.0} if two else {}
    if scaling is None:
        return unscaled
    kind = scaling["rope_type"]
    if kind == "linear":
        return {
            "rope_scaling_factor" if two else "rotary_seq_len_interpolation_factor": scaling[
                "factor"
            ]
        }
    if kind == "llama3" and all(
        float(scaling[name]) == value for name, value in LLAMA3_SCALING.items()
    ):
        return {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    if has_yarn(config) and not legacy:
        return _yarn(scaling, config.max_positions)
    if allow_lossy:
        return unscaled
    raise NotExpressible(
        f"{_cause(config, legacy=legacy)}; --allow-lossy rope_scaling writes the output without scaling (its hf/config.json keeps it, "
        "so that converting back loses nothing)"
    )


def _cause(config: ModelConfig, *, legacy: bool) -> str:
    """The number or the kind of scaling that Megatron doesn't support, and the supported one, for messages."""
    scaling = config.positions.scaling or {}
    kind = scaling["rope_type"]
    if kind == "llama3":
        others = [name for name, value in LLAMA3_SCALING.items() if float(scaling[name]) != value]
        found = " and ".join(f"{name} = {scaling[name]}" for name in others)
        had = " and ".join(f"{LLAMA3_SCALING[name]:g}" for name in others)
        return f"the model's rope scaling (llama3) has {found}; Megatron core's --use-rope-scaling has {had}, which no argument changes"
    if kind != "yarn":
        return f"the model's rope scaling ({kind}) has no equivalent in Megatron core, which has linear, llama3 and yarn"
    if legacy:
        return "the model's rope scaling is yarn, which Megatron's legacy models don't have: choose --saver core"
    positions = config.positions
    unknown = sorted(
        name for name, value in scaling.items() if value is not None and name not in _OF_YARN
    )
    if unknown:
        return f"the model's rope scaling (yarn) has {', '.join(unknown)}, which Megatron core's yarn has no argument for"
    if positions.rotary_percent != 1.0:
        return f"the model's yarn scales {positions.rotary_percent:g} of a head; Megatron core's scales whole heads (1)"
    return "the model's yarn rotates neighbouring elements; Megatron core's rotates halves"


def has_yarn(config: ModelConfig) -> bool:
    """True if GPTModel's own yarn can scale this model's positions: whole heads that rotate by halves."""
    scaling = config.positions.scaling or {}
    others = {name for name, value in scaling.items() if value is not None} - _OF_YARN
    if scaling.get("rope_type") != "yarn" or others:
        return False
    rotates_whole_heads = config.positions.rotary_percent == 1.0 and not config.latent.kv_rank
    return rotates_whole_heads and not config.positions.interleaved


def _yarn(scaling: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """The arguments of yarn, with the values that transformers assumes for missing keys.

    If only one mscale is given, transformers and Megatron ignore it.
    """
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": max_positions}
    given = usual | {name: value for name, value in scaling.items() if value is not None}
    if not (given.get("mscale") and given.get("mscale_all_dim")):
        given |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    arguments = {argument: given[name] for name, argument in YARN.items()}
    return {
        "position_embedding_type": "yarn",
        **arguments,
        YARN_TRUNCATE: bool(given.get("truncate", True)),
    }


def read_scaling(args: Namespace) -> dict[str, Any] | None:
    interpolation = getattr(args, "rotary_seq_len_interpolation_factor", None)
    if getattr(args, "use_rope_scaling", False):
        if interpolation not in (None, 1):
            raise UnknownFamily(
                f"the checkpoint has use_rope_scaling and rotary_seq_len_interpolation_factor {interpolation}: Megatron scales by both, "
                "and no family does"
            )
        return {
            "rope_type": "llama3",
            "factor": float(getattr(args, "rope_scaling_factor", 8.0)),
            **LLAMA3_SCALING,
        }
    if getattr(args, "position_embedding_type", "rope") == "yarn" or getattr(
        args, "enable_gpt_oss", False
    ):
        return _read_yarn(args)
    factor = interpolation
    if isinstance(getattr(args, "rotary_base", None), (list, tuple)):
        # Only Megatron-Bridge's Gemma 3 has this form.
        factor = None if args.rope_scaling_factor == 1 else args.rope_scaling_factor
    return {"rope_type": "linear", "factor": float(factor)} if factor else None


def _read_yarn(args: Namespace) -> dict[str, Any]:
    mscales = {name: getattr(args, YARN[name], None) for name in ("mscale", "mscale_all_dim")}
    if not all(mscales.values()):
        if mscales["mscale_all_dim"] or mscales["mscale"] not in (None, 1.0):
            raise UnknownFamily(
                f"the checkpoint's yarn has one mscale and not the other ({mscales}); no family has that"
            )
        mscales = {}
    others = {
        name: _given(args, argument)
        for name, argument in YARN.items()
        if not name.startswith("mscale")
    }
    found = {"rope_type": "yarn", **others, **mscales}
    if not getattr(args, YARN_TRUNCATE, True):
        found["truncate"] = False
    return found


def _given(args: Namespace, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise CorruptCheckpoint(
            f"the checkpoint's args don't say {name}; give --config with the Hugging Face directory of the model"
        )
    return value
