"""The ranks along each axis."""

from itertools import product

import pytest

from megaconv.model.layout import Layout
from megatron_lite.parallel.mesh import Mesh, dense_mesh, expert_mesh

SMALL = (1, 2, 3)


def test_every_rank_is_in_one_group_along_any_axes() -> None:
    mesh = Mesh((("a", 2), ("b", 3), ("c", 4)))
    assert [mesh.rank(mesh.place(rank)) for rank in range(24)] == list(range(24))
    for names in (("a",), ("b",), ("a", "c"), ("a", "b", "c"), ()):
        groups = mesh.groups(*names)
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for group in groups:
            fixed = [
                {name: at for name, at in mesh.place(rank).items() if name not in names}
                for rank in group
            ]
            assert all(place == fixed[0] for place in fixed)


def test_eight_ranks_word_for_word() -> None:
    dense = dense_mesh(Layout(tp=2, pp=2), 2)
    expert = expert_mesh(Layout(tp=2, pp=2, ep=2, etp=1), 2)
    assert dense.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dense.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dense.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert dense.groups("tp", "dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert expert.groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert expert.groups("edp") == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.oracle
def test_groups_are_megatron_cores() -> None:
    from megatron.core.parallel_state import RankGenerator

    for tp, dp, pp in product(SMALL, repeat=3):
        for cp in SMALL:
            theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
            ours = dense_mesh(Layout(tp=tp, pp=pp), dp, cp)
            for axis in ("tp", "cp", "dp", "pp"):
                assert ours.groups(axis) == theirs.get_ranks(axis)
            assert ours.groups("cp", "dp") == theirs.get_ranks("dp-cp")
    for etp, ep, edp, pp in product((1, 2), repeat=4):
        experts = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
        ours = expert_mesh(Layout(tp=etp, pp=pp, ep=ep, etp=etp), ep * edp)
        for axis, name in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp")):
            assert ours.groups(axis) == experts.get_ranks(name)
