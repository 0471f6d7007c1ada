"""Groups of tests that one process of `pytest -n` runs in sequence, because they share fixtures that start slowly.

A unit is a file, or several files whose tests use the same session fixture. So these fixtures start once, not once in every process.
Long units come first, so that all processes end at about the same time.
"""

from collections import OrderedDict

from xdist.scheduler import LoadScopeScheduling

WORLDS = "ranks of the parallel core"
RUNS = "runs of the trainer"
MEGATRON = "megatron-core"
PRETENDED = "a pretended CUDA device"
STORES = "stores"

UNITS = {
    "tests/trainer/parallel/": WORLDS,
    "tests/trainer/planning/": WORLDS,
    "tests/trainer/checkpoint/": WORLDS,
    "tests/trainer/inference/test_engine_model.py": WORLDS,
    "tests/trainer/inference/test_weights.py": WORLDS,
    "tests/trainer/loop/test_node.py": WORLDS,
    "tests/trainer/loop/": RUNS,
    "tests/trainer/objectives/": RUNS,
    "tests/trainer/settings/": RUNS,
    "tests/trainer/inference/": RUNS,
    "tests/trainer/pretended_cuda/": PRETENDED,
    "tests/megatron/test_oracles.py": MEGATRON,
    "tests/megatron/test_scores.py": MEGATRON,
    "tests/families/test_delta_nets.py": MEGATRON,
    "tests/families/test_mamba.py": MEGATRON,
    "tests/families/test_hf_encoders.py": MEGATRON,
    "tests/families/test_encoders.py": MEGATRON,
    "tests/families/test_mtp.py": MEGATRON,
    "tests/stores/test_trainer.py": RUNS,
    "tests/stores/": STORES,
}
"""The unit of a test by the beginning of its path. The first that fits counts."""

FIRST = (WORLDS, RUNS, MEGATRON, PRETENDED, STORES, "tests/trust/test_trust.py")
"""The longest units. The rest comes by name: the tests of `tests/values` are short."""


def unit(nodeid: str) -> str:
    """The unit of a test: a name of UNITS, or the file of the test."""
    for beginning, name in UNITS.items():
        if nodeid.startswith(beginning):
            return name
    return nodeid.partition("::")[0]


def order(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


class UnitScheduling(LoadScopeScheduling):
    """Sends whole units to processes, the longest units first."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _assign_work_unit(self, node: object) -> None:
        self.workqueue = OrderedDict(
            sorted(self.workqueue.items(), key=lambda item: order(item[0]))
        )
        super()._assign_work_unit(node)
