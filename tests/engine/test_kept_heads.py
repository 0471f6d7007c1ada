"""`convert --keep-channels`: models without some heads of attention, Mamba and linear attention."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megaconv
from megaconv.engine.kept_places import HEADS, places_of
from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.table import canonical_axes
from tests import transformers_oracle as oracle
from tests.engine.test_kept_channels import ALL, family_in, fingerprint
from tests.engine.test_kept_experts import kept_file, weights
from tests.models import write_llama
from tests.runs import assert_refused, run

QUICK = ("qwen3", "deepseek_v3", "gpt_oss", "qwen3_5", "falcon_h1", "gpt2")
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ALL]
Kept = Mapping[str, Sequence[int]]


def mixers(config: ModelConfig, fields: Collection[str] = tuple(HEADS)) -> dict[str, str]:
    """The mixers with heads -> the field of their number."""
    places = places_of(canonical_axes(family(config.family).rows, config))
    return {name: field for name, field in places.items() if field in fields}


def some_heads(
    random: Random, config: ModelConfig, field: str, *, all_groups: bool = False, whole_groups: bool = False
) -> dict[str, list[int]]:  # fmt: skip
    """Half of the heads of half of the groups, others in each mixer. all_groups: some heads of each. whole_groups: all heads of some."""
    found = mixers(config, [field])
    if not found:
        return {}
    heads, groups = (value_of(config, each) for each in (field, HEADS[field].group_field))
    of_group = heads // groups
    stay = groups if all_groups else max(1, groups // 2)
    of_each = of_group if whole_groups else max(1, of_group // 2)
    return {
        name: sorted(
            group * of_group + head
            for group in random.sample(range(groups), stay)
            for head in random.sample(range(of_group), of_each)
        )
        for name in found
    }


def silence(model: nn.Module, source: Path, kept: Kept) -> None:
    """Make the columns of the heads that don't stay 0 in the last matrix of each mixer of transformers' model."""
    config, canonical = megaconv.open(source).config, weights(source)
    fields = mixers(config)
    for mixer, heads in kept.items():
        last = canonical[f"{mixer}.{'out' if mixer.endswith('mamba') else 'o'}.weight"]
        width = last.shape[1] // value_of(config, fields[mixer])
        left_out = [n for n in range(last.shape[1]) if n // width not in heads]
        silenced = [_with_zeros(parameter.data, last, left_out) for parameter in model.parameters()]
        assert any(silenced), mixer


def _with_zeros(found: Tensor, matrix: Tensor, columns: Sequence[int]) -> bool:
    """Make columns 0 if this is the matrix, or its transpose as in Conv1D of GPT-2."""
    for each in (found, found.t()) if found.dim() == 2 else ():
        if each.shape == matrix.shape and torch.equal(each, matrix.to(each.dtype)):
            each[:, columns] = 0
            return True
    return False


FOLLOW_THE_STATES = frozenset((
    "biogpt", "bitnet", "bloom", "codegen", "cohere", "ctrl", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gptj", "helium", "jamba", "modernbert_decoder", "mpt", "olmo", "olmoe", "openai_gpt", "opt",
    "persimmon", "phi", "recurrent_gemma", "stablelm", "xglm", "zamba2", "phimoe, longrope", "bloom, heads that are no power of two",
))  # fmt: skip
"""Families and variants whose heads are as wide as the hidden states together."""
OWN_SIZES = frozenset(
    (
        "gemma4_text",
        "gemma4_unified_text",
        "laguna",
        "mimo_v2_flash",
        "nemotron_nas",
        "step3p5",
        "inkling_text",
    )
)
"""Families whose layers have heads of other numbers or sizes."""
OTHERWISE = frozenset(("deepseek_v4", "diffllama", "minimax", "zaya"))
"""Families whose heads depend on one another, or on their numbers."""
ALL_GROUPS = frozenset(("doge", "gemma3n_text", "minimax_m3_vl_text"))
"""Families whose groups of heads all stay."""
ALIKE = frozenset(("inkling_text, without windows",))
"""Variants of the families above whose heads can leave."""
OVER_ALL = frozenset(("flex_olmo", "minimax_m2", "molmo2_text", "olmo2", "olmo3", "olmo_hybrid"))
"""Families with norms over the queries of all heads, and over all keys: those of fewer heads are other numbers."""


def is_refused(name: str, field: str) -> bool:
    refused = FOLLOW_THE_STATES | OWN_SIZES | OTHERWISE if field == "attention.heads" else ()
    return bool({name, family_in(name)} & set(refused)) and name not in ALIKE


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_transformers_computes_each_family_without_some_heads(name: str, tmp_path: Path) -> None:
    """The same as the whole model whose last matrices have columns of zeros for these heads."""
    source = tmp_path / "hf"
    oracle.create(ALL[name], source)
    config = megaconv.open(source).config
    for field in HEADS:
        kept = some_heads(
            Random(name),
            config,
            field,
            all_groups=family_in(name) in ALL_GROUPS,
            whole_groups=field == "mamba.heads",  # norms of Mamba 2 are over a group
        )
        if not kept:
            continue
        output = tmp_path / field
        words: dict[str, Any] = {"saver": "hf", "keep_channels": kept, "verify": True, "workers": 1}
        if is_refused(name, field):
            with pytest.raises(NotExpressible, match="--keep-channels"):
                megaconv.convert(source, output, **words)
            continue
        made = megaconv.convert(source, output, **words)
        assert made.changes.channels is not None
        assert made.changes.channels.after[field] == len(next(iter(kept.values())))
        tokens = torch.randint(7, 120, (1, 12))
        found = oracle.compute(oracle.load(output), tokens)
        if field == "attention.heads" and family_in(name) in OVER_ALL:
            continue
        whole = oracle.load(source)
        silence(whole, source, kept)
        expected = oracle.compute(whole, tokens)
        # Sums of float32 in another order: their error follows the largest logits.
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["olmo2", "minimax_m2"])
def test_norms_over_all_heads_have_those_that_stay(name: str, tmp_path: Path) -> None:
    """The same as the whole model whose other queries and keys are 0, with a factor on norms for their smaller number."""
    source = tmp_path / "hf"
    oracle.create(ALL[name], source, rms_norm_eps=1e-12)
    config, canonical = megaconv.open(source).config, weights(source)
    kept = some_heads(Random(name), config, "attention.heads")
    megaconv.convert(source, tmp_path / "out", saver="hf", keep_channels=kept)
    whole = oracle.load(source)
    silence(whole, source, kept)
    of_group = config.attention.heads // config.attention.kv_heads
    for mixer, heads in kept.items():
        groups = {head // of_group for head in heads}
        for part, stay in (("q", heads), ("k", groups)):
            matrix = canonical[f"{mixer}.{part}.weight"]
            count = len(matrix) // config.attention.head_dim
            others = [n for n in range(len(matrix)) if n // config.attention.head_dim not in stay]
            rows = [p.data.t() for p in whole.parameters() if p.dim() == 2]
            assert sum(_with_zeros(each, matrix.t(), others) for each in rows)
            layer = mixer.split(".")[1]
            norm = whole.get_parameter(f"model.layers.{layer}.self_attn.{part}_norm.weight")
            norm.data.mul_((len(stay) / count) ** 0.5)
    tokens = torch.randint(7, 120, (1, 12))
    found, expected = (
        oracle.compute(each, tokens) for each in (oracle.load(tmp_path / "out"), whole)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated delta nets and attention, with experts."""
    place = tmp_path_factory.mktemp("hybrid") / "hf"
    oracle.create(ALL["qwen3_next"], place)
    return place


@pytest.fixture(scope="module")
def chosen(hybrid: Path) -> dict[str, list[int]]:
    config, random = megaconv.open(hybrid).config, Random(5)
    heads: dict[str, list[int]] = {}
    for field in ("attention.heads", "linear.value_heads"):
        heads |= some_heads(random, config, field)
    return {"hidden": list(range(0, config.hidden, 2)), **heads}


@pytest.mark.oracle
@pytest.mark.parametrize(
    "layout",
    [["--tp", "2"], ["--tp", "2", "--ep", "2", "--ckpt-format", "torch_dist"], ["--pp", "2"]],
    ids=" ".join,
)
def test_heads_are_kept_between_all_formats(
    layout: list[str], hybrid: Path, chosen: dict[str, list[int]], tmp_path: Path
) -> None:
    megaconv.convert(hybrid, tmp_path / "hf", saver="hf", keep_channels=chosen)
    assert run("convert", hybrid, tmp_path / "core", "--saver", "core", *layout).status == 0
    file = kept_file(tmp_path / "kept.json", chosen)
    words = ["convert", tmp_path / "core", tmp_path / "out", "--keep-channels", file, "--verify"]
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    attention = megaconv.open(hybrid).config.attention
    stay = megaconv.open(tmp_path / "out").config.attention
    assert f"{stay.heads} of {attention.heads} heads of each attention" in outcome.err
    assert f"{stay.kv_heads} of {attention.kv_heads} key/value heads" in outcome.err
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "hf")


def test_rows_and_columns_are_those_of_the_heads_and_of_their_groups(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "llama", layers=1)
    config = megaconv.open(model).config
    of_group = config.attention.heads // config.attention.kv_heads
    heads = [of_group + head for head in range(of_group)]
    megaconv.convert(model, tmp_path / "out", saver="hf", keep_channels={"layers.0.attn": heads})
    whole, found = weights(model), weights(tmp_path / "out")
    size = config.attention.head_dim
    queries, keys = slice(of_group * size, 2 * of_group * size), slice(size, 2 * size)
    attention = "layers.0.attn"
    assert torch.equal(found[f"{attention}.q.weight"], whole[f"{attention}.q.weight"][queries])
    assert torch.equal(found[f"{attention}.k.weight"], whole[f"{attention}.k.weight"][keys])
    assert torch.equal(found[f"{attention}.v.weight"], whole[f"{attention}.v.weight"][keys])
    assert torch.equal(found[f"{attention}.o.weight"], whole[f"{attention}.o.weight"][:, queries])
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["num_attention_heads"] == of_group
    assert made["num_key_value_heads"] == 1
    assert made["head_dim"] == size


TWO = ("layers.0.attn", "layers.1.attn")
WRONG: list[tuple[Any, str]] = [
    ({each: [0, 1, 2] for each in TWO}, "layers.0.attn keeps 1 head of group 1 and 2 of group 0; each 2 heads in a row are a group"),
    ({TWO[0]: [0, 1], TWO[1]: [0, 2]}, "layers.0.attn keeps 1 group and layers.1.attn 2; all must keep the same number"),
    ({TWO[0]: [0, 1], TWO[1]: [0, 9]}, "layers.1.attn of {} has no head 9; its heads are 0 to 7"),
    ({TWO[0]: [0, 1]}, "says nothing of layers.1.attn, which has as many heads in {}"),
    ({"layers.0.mamba": [0]}, "{} has no layers.0.mamba"),
    ({each: [0, 2, 4] for each in TWO}, "the model's attention.heads is 3, and its class needs a number that divides hidden, found 32"),
]  # fmt: skip


@pytest.mark.parametrize(("keep", "message"), WRONG)
def test_wrong_heads_are_refused(keep: Any, message: str, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "llama", layers=2, heads=8, kv_heads=4)
    file = kept_file(tmp_path / "kept.json", keep)
    outcome = run("convert", model, tmp_path / "out", "--saver", "hf", "--keep-channels", file)
    assert_refused(outcome, outcome.status, message.format(model))
    assert outcome.status != 0
    assert not (tmp_path / "out").exists()
