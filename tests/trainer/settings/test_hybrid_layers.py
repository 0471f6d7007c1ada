"""The layers of hybrids from flags: Megatron's patterns, ratios and frequencies, and the refusals."""

import json
from pathlib import Path

import pytest

from megaconv.errors import NotExpressible, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.pattern import pattern_of
from megatron_lite.settings.architecture import check_against, model_from_flags
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.hybrid_layers import allocated

PLAIN = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --normalization RMSNorm --disable-bias-linear --hidden-dropout 0"
HYBRID = f"{PLAIN} --position-embedding-type none --mamba-head-dim 8 --mamba-num-groups 2"
DELTA_NETS = (
    f"{PLAIN} --experimental-attention-variant gated_delta_net --attention-output-gate --qk-layernorm --apply-layernorm-1p --swiglu "
    "--position-embedding-type rope --linear-num-key-heads 2 --linear-num-value-heads 4"
)


def model(words: str) -> ModelConfig:
    settings, _ = parse("pretrain", words.split())
    return model_from_flags(settings, 64)


def test_flags_of_parts_that_a_model_lacks_contradict_nothing() -> None:
    """A checkpoint of Mamba layers alone keeps no sizes of attention and of MLPs. Its run goes on with the same flags."""
    lacking = "--group-query-attention --num-query-groups 2 --ffn-hidden-size 48 --squared-relu"
    words = f"{HYBRID} --num-layers 2 --hybrid-override-pattern MM {lacking}"
    settings, _ = parse("pretrain", words.split())
    pure = changed(model(words), {"attention.heads": 8, "attention.kv_heads": 8, "mlp.ffn": 128})
    check_against(settings, pure, {}, "ckpt")
    with_attention = words.replace("MM", "M*")
    other, _ = parse("pretrain", with_attention.replace("query-groups 2", "query-groups 4").split())
    with pytest.raises(UsageError, match="num-query-groups 4 contradicts"):
        check_against(other, model(with_attention), {}, "ckpt")


def test_ratios_give_the_patterns_of_megatron_core() -> None:
    cases = json.loads(
        (Path(__file__).parents[1] / "fixtures" / "state-hybrid" / "allocation.json").read_text()
    )
    assert len(cases) == 12
    for case in cases:
        assert allocated(case["layers"], case["attention"], case["mlp"]) == case["pattern"]


def test_a_pattern_and_ratios_describe_a_hybrid() -> None:
    found = model(f"{HYBRID} --num-layers 4 --hybrid-override-pattern M*M- --squared-relu")
    assert (found.family, pattern_of(found)) == ("nemotron_h", "M*M-")
    mamba = found.mamba
    assert (mamba.heads, mamba.head_dim, mamba.groups, mamba.state) == (8, 8, 2, 128)
    assert mamba.least_time_step is None, "Megatron has no limit"
    by_ratio = model(
        f"{HYBRID} --num-layers 10 --hybrid-attention-ratio 0.3 --hybrid-mlp-ratio 0.3 "
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    )
    assert pattern_of(by_ratio) == "M-*MM*-*M-"
    assert by_ratio.mlp.activation == "gelu"
    assert pattern_of(model(f"{HYBRID} --num-layers 2 --is-hybrid-model")) == "MM"


@pytest.mark.parametrize("said", ["4", "[1]*3+[0]*1", "[1,1,1,0]"])
def test_a_frequency_describes_delta_nets_between_attention(said: str) -> None:
    found = model(f"{DELTA_NETS} --num-layers 4 --linear-attention-freq {said}")
    assert [kind.mixer for kind in found.layers] == ["linear"] * 3 + ["attention"]
    assert (found.family, found.linear.key_heads, found.linear.key_dim) == ("qwen3_5", 2, 128)
    assert found.attention.output_gate


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{HYBRID} --num-layers 3 --hybrid-override-pattern M*M-", "has 4 layers, --num-layers says 3"),
        (f"{HYBRID} --num-layers 4 --hybrid-override-pattern M*M- --hybrid-mlp-ratio 0.5", "leave the ratios out"),
        (f"{HYBRID} --num-layers 2 --hybrid-override-pattern ME", "give --num-experts"),
        (f"{HYBRID} --hybrid-layer-pattern M*|M-", "leave out the layers' `|`, and give --pipeline-model"),
        (f"{HYBRID} --hybrid-layer-pattern M*M-/M", "leave out the layers' `/`, and give --load"),
        (f"{HYBRID} --num-layers 4 --hybrid-mlp-ratio 1.5", "together at most 1"),
        (f"{HYBRID} --num-layers 2 --spec my.layers my_spec", "give megatron.core.models.mamba"),
        (f"{HYBRID} --num-layers 2 --is-hybrid-model --mamba-head-dim 6", "give --mamba-num-heads"),
        (f"{HYBRID} --num-layers 2 --is-hybrid-model --mamba-num-groups 3", "can't be divided into --mamba-num-groups 3"),
        (f"{DELTA_NETS} --num-layers 4 --linear-attention-freq [1]*3", r"as many 0 and 1 as layers \(4\)"),
        (f"{DELTA_NETS} --num-layers 4", "is missing"),
        (f"{PLAIN} --num-layers 2 --attention-output-gate", "give --experimental-attention-variant"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_the_flag(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        model(words)


def test_an_unknown_symbol_is_refused() -> None:
    with pytest.raises(NotExpressible, match="--hybrid-override-pattern has 'X'"):
        model(f"{HYBRID} --num-layers 2 --hybrid-override-pattern MX")
