"""The places of tensors, and of runs of their elements, in a torch_dist checkpoint."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaconv.model.fields import changed, fields_of, from_fields
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megaconv.model.naming import CORE, CORE_LOCAL, Naming
from megatron_lite.checkpoint.placement import flat_shards, places, shards
from tests.trainer.parallel.small import MODELS

CONFIG = from_fields(
    "llama",
    {
        "layers.count": 4,
        "hidden": 8,
        "attention.heads": 4,
        "attention.kv_heads": 2,
        "attention.head_dim": 4,
        "mlp.ffn": 12,
        "vocab": 30,
        "max_positions": 16,
        "norm.epsilon": 1e-5,
        "positions.theta": 1e4,
    },
)

EXPERT = "1.mlp.experts.local_experts.1.linear_fc2"


@pytest.mark.parametrize(
    ("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 4, 1)]
)
@pytest.mark.parametrize("naming", [CORE, CORE_LOCAL])
def test_all_ranks_together_cover_every_tensor_exactly_once(
    tp: int, pp: int, vpp: int, naming: Naming
) -> None:
    """Each rank's own cut comes from megaconv's regions, not from the places that are tested."""
    layout = Layout(tp, pp, vpp, stage_layers=split_layers(4, pp, vpp, LayerSplit()))
    covered: dict[str, torch.Tensor] = {}
    for chunk in layout.chunks():
        for tp_rank in range(tp):
            for place in places(CONFIG, layout, tp_rank, chunk, 32, naming).values():
                if place.native.replicated and tp_rank:
                    continue
                for shard in shards(place, torch.zeros(place.local)):
                    count = covered.setdefault(shard.key, torch.zeros(shard.global_shape))
                    index = tuple(
                        slice(o, o + s)
                        for o, s in zip(shard.offset, shard.tensor.shape, strict=True)
                    )
                    assert shard.global_shape == tuple(count.shape)
                    count[index] += 1
    assert all(bool((count == 1).all()) for count in covered.values())
    assert covered["decoder.layers.mlp.linear_fc1.weight"].shape == (4, 24, 8)
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in covered


def test_gate_and_up_are_two_runs_and_an_interleaved_qkv_is_one() -> None:
    layout = Layout(2, 1, stage_layers=(4,))
    (chunk,) = layout.chunks()
    found = places(CONFIG, layout, 1, chunk, 32, CORE_LOCAL)
    fc1 = found["decoder.layers.2.mlp.linear_fc1.weight"]
    assert [(run.row, run.rows, run.whole_row) for run in fc1.runs] == [(0, 6, 6), (6, 6, 18)]
    qkv = found["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert [(run.row, run.rows, run.whole_row) for run in qkv.runs] == [(0, 16, 16)]
    down = found["decoder.layers.2.mlp.linear_fc2.weight"]
    assert (down.runs[0].whole_col, down.stacked, down.key) == (
        6,
        ((2, 4),),
        "decoder.layers.mlp.linear_fc2.weight",
    )
    assert found["decoder.layers.0.input_layernorm.weight"].key.endswith(
        "linear_qkv.layer_norm_weight"
    )


def test_layers_that_differ_have_keys_of_their_own_and_only_experts_are_stacked() -> None:
    mixed = {
        "layers.mlp": ("dense", "experts", "dense", "experts"),
        "experts.count": 4,
        "experts.per_token": 2,
        "experts.ffn": 6,
    }
    config = from_fields("qwen3_moe", fields_of(CONFIG) | mixed)
    layout = Layout(1, 2, 1, 2, stage_layers=(2, 2))
    _, behind = layout.chunks()
    found = places(config, layout, 0, behind, 32, CORE, ep_rank=1)
    dense, expert = (
        found[f"decoder.layers.{name}.weight"] for name in ("0.mlp.linear_fc2", EXPERT)
    )
    assert (dense.key, dense.stacked) == ("decoder.layers.2.mlp.linear_fc2.weight", ())
    assert (expert.key, expert.stacked) == (
        "decoder.layers.3.mlp.experts.experts.linear_fc2.weight",
        ((3, 4),),
    )


def test_the_parts_of_mixers_with_a_state_have_keys_of_their_own() -> None:
    for name, projection in (("hybrid", "mixer.in_proj"), ("delta nets", "self_attention.in_proj")):
        config = MODELS[name]
        covered: dict[str, torch.Tensor] = {}
        layout = Layout(2, 1, stage_layers=(4,))
        (chunk,) = layout.chunks()
        for tp_rank in range(2):
            place = places(config, layout, tp_rank, chunk, 64, CORE)[
                f"decoder.layers.0.{projection}.weight"
            ]
            for shard in shards(place, torch.zeros(place.local)):
                rows, count = shard.offset[0], shard.tensor.shape[0]
                covered.setdefault(shard.key, torch.zeros(shard.global_shape))[
                    rows : rows + count
                ] += 1
        heads = {"z": 24, "x": 24, "B": 10, "C": 10, "dt": 4}
        parts = {"query": 8, "key": 8, "value": 24, "z": 24, "beta": 4, "alpha": 4}
        wanted = heads if name == "hybrid" else parts
        prefix = f"decoder.layers.0.{projection}.weight."
        assert {key.removeprefix(prefix): len(count) for key, count in covered.items()} == wanted
        assert all(bool((count == 1).all()) for count in covered.values())


@settings(deadline=None)  # a busy machine is no failure
@given(st.data())
def test_runs_of_elements_become_blocks_that_hold_the_same_elements(data: st.DataObject) -> None:
    layout = Layout(2, 1, stage_layers=(4,))
    (chunk,) = layout.chunks()
    found = places(
        changed(CONFIG, {"layers.count": 4}),
        layout,
        data.draw(st.sampled_from([0, 1])),
        chunk,
        32,
        CORE_LOCAL,
    )
    place = found[data.draw(st.sampled_from(sorted(found)))]
    count = int(np.prod(place.local))
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    local = torch.arange(count, dtype=torch.float64)
    expected = torch.full(place.global_shape(""), -1.0, dtype=torch.float64)
    for shard in shards(place, local.view(place.local)):
        expected[
            tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.tensor.shape, strict=True))
        ] = shard.tensor
    found_blocks = torch.full_like(expected, -1.0)
    for start, end in pairwise(cuts):
        for shard in flat_shards(place, place.key, local[start:end], start, end):
            index = tuple(
                slice(o, o + s) for o, s in zip(shard.offset, shard.tensor.shape, strict=True)
            )
            assert (found_blocks[index] == -1).all()
            found_blocks[index] = shard.tensor
    assert torch.equal(found_blocks, expected)
    assert int((expected >= 0).sum()) == count
