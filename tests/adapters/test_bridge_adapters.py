"""Megatron-Bridge's own code loads our adapters and our checkpoints, at several ranks too, and computes what merged models do.

It needs the environment of test_bridge_loads.py. Cases of NEWER need Bridge 0.5.1 or later, and are skipped with an earlier one.
Grouped layers of experts are Transformer Engine's: a stand-in has the place of the layer below the adapter (bridge_grouped.py).
"""

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import megaconv
from tests.adapters.test_adapter_translation import CONV1D, EXPERTS, LINEAR, dora, edited
from tests.bridge_oracle import REPLY
from tests.bridge_process import ENVIRONMENT, NEEDS_BRIDGE, PYTHON, ROOT
from tests.megatron.test_oracles import TOLERANCE

pytestmark = NEEDS_BRIDGE
TOKENS = [[5, 17, 42, 3, 98, 0, 61, 7], [1, 2, 3, 90, 80, 70, 60, 50]]


def of_each_expert(_: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an adapter of experts that are separate layers, as peft saves it."""
    import torch

    generator = torch.Generator().manual_seed(11)
    sizes = {"w1": (56, 32), "w2": (32, 56), "w3": (56, 32)}
    name = "base_model.model.model.layers.{}.block_sparse_moe.experts.{}.{}.lora_{}.weight"
    return {
        name.format(layer, expert, word, which): torch.randn(*shape, generator=generator) / 3
        for layer, expert, (word, (out, ins)) in product(range(2), range(4), sizes.items())
        for which, shape in (("A", (4, ins)), ("B", (out, 4)))
    }


def of_all_experts(_: Mapping[str, Any]) -> dict[str, Any]:
    """The same adapter for all experts of a layer, with one A for gate and up."""
    found = of_each_expert(_)
    first = {name: re.sub(r"experts\.\d", "experts.0", name) for name in found}
    return {name: found[first[name].replace("w3.lora_A", "w1.lora_A")] for name in found}


def of_some(tensors: Mapping[str, Any]) -> dict[str, Any]:
    wanted = ("layers.1.self_attn.q_proj", "layers.1.mlp.up_proj")
    return {
        name: tensor for name, tensor in tensors.items() if any(word in name for word in wanted)
    }


class Case(NamedTuple):
    """An adapter, how it is written, and at which sizes Bridge loads it."""

    base: Path
    change: tuple[dict[str, Any], Callable[[Any], Any]] = ({}, dict)
    options: Mapping[str, Any] = {}
    sizes: Mapping[str, int] = {}
    adapter: bool = True
    grouped: bool = False


FUSED = {"options": {"lora": "fused"}}
GROUPED = {"moe_grouped_gemm": True}
OF_EACH = ({"r": 4, "target_parameters": None}, of_each_expert)
OF_ALL = ({"r": 4, "target_parameters": None}, of_all_experts)
CASES: Mapping[str, Case] = {
    "LoRA of all linear layers": Case(LINEAR),
    "at tp 2": Case(LINEAR, options={"tp": 2}, sizes={"tp": 2}),
    "at pp 2": Case(LINEAR, sizes={"pp": 2}),
    "fused": Case(LINEAR, options=FUSED),
    "fused, at tp 2": Case(LINEAR, options={**FUSED, "tp": 2}, sizes={"tp": 2}),
    "some layers and modules": Case(LINEAR, ({}, of_some), {"tp": 2}, {"tp": 2}),
    "DoRA": Case(LINEAR, ({"use_dora": True}, dora)),
    "Conv1D, no gate": Case(CONV1D, options={"tp": 2}, sizes={"tp": 2}),
    "experts as one parameter": Case(EXPERTS),
    "each expert": Case(EXPERTS, OF_EACH),
    "each expert, fused, at tp 2": Case(
        EXPERTS,
        OF_EACH,
        {**FUSED, "tp": 2},
        {"tp": 2, "etp": 1},
    ),
    "each expert at ep 2": Case(EXPERTS, OF_EACH, sizes={"ep": 2, "etp": 1}),
    "grouped, one for all": Case(EXPERTS, OF_ALL, GROUPED, grouped=True),
    "grouped, one for all, at ep 2": Case(
        EXPERTS, OF_ALL, GROUPED, {"ep": 2, "etp": 1}, grouped=True
    ),
    "grouped, each expert": Case(EXPERTS, options=GROUPED, grouped=True),
    "grouped, each expert, at ep 2": Case(
        EXPERTS, OF_EACH, {**FUSED, "moe_grouped_gemm": True}, {"ep": 2, "etp": 1}, grouped=True
    ),
    "no adapter, at tp 2": Case(LINEAR, sizes={"tp": 2}, adapter=False),
    "no adapter, at pp 2": Case(LINEAR, sizes={"pp": 2}, adapter=False),
    "no adapter, at ep 2": Case(EXPERTS, sizes={"ep": 2}, adapter=False),
}
DORA_AT_TWO_RANKS = "DoRA at tp 2"
NEWER = ("Conv1D, no gate", "each expert at ep 2", "grouped", "a rank by the number")
"""Beginnings of the names of cases that Bridge 0.3.1 can't load, or computes otherwise."""
NOT_POSSIBLE: Mapping[str, Case] = {
    DORA_AT_TWO_RANKS: Case(LINEAR, ({"use_dora": True}, dora), sizes={"tp": 2}),
}


class Saved(NamedTuple):
    """An adapter with random values that Bridge saves."""

    base: Path
    kind: str
    settings: Mapping[str, Any] = {}
    sizes: Mapping[str, int] = {}
    grouped: bool = False


EP_2 = {"ep": 2, "etp": 1}
SAVED: Mapping[str, Saved] = {
    "LoRA at tp 2": Saved(LINEAR, "lora.LoRA", sizes={"tp": 2}),
    "CanonicalLoRA at tp 2": Saved(LINEAR, "canonical_lora.CanonicalLoRA", sizes={"tp": 2}),
    "no gate, at tp 2": Saved(CONV1D, "lora.LoRA", sizes={"tp": 2}),
    "DoRA": Saved(LINEAR, "dora.DoRA"),
    "a rank by the number of chosen experts": Saved(
        EXPERTS, "lora.LoRA", {"normalize_moe_lora": True}
    ),
    "grouped, one for all": Saved(EXPERTS, "lora.LoRA", {}, EP_2, grouped=True),
    "grouped, each expert": Saved(
        EXPERTS, "lora.LoRA", {"share_expert_adapters": False}, EP_2, grouped=True
    ),
    "grouped, each expert, canonical": Saved(
        EXPERTS,
        "canonical_lora.CanonicalLoRA",
        {"share_expert_adapters": False},
        EP_2,
        grouped=True,
    ),
}


@cache
def release() -> tuple[int, ...]:
    """The version of Bridge."""
    words = "from importlib.metadata import version; print(version('megatron-bridge'))"
    found = subprocess.run([PYTHON, "-c", words], capture_output=True, text=True, check=True)
    return tuple(map(int, found.stdout.split(".")[:3]))


def is_too_new(name: str) -> bool:
    return name.startswith(NEWER) and release() < (0, 5, 1)


def skip_if_too_new(name: str) -> None:
    if is_too_new(name):
        pytest.skip(f"needs Megatron-Bridge 0.5.1: {name}")


class Answer(NamedTuple):
    """The answer of Megatron-Bridge to one case."""

    reply: dict[str, Any]
    logits: Any
    expected: Any


def ask(jobs: Sequence[dict[str, Any]], world: int, folder: Path) -> list[dict[str, Any]]:
    """The answers of rank 0 to the jobs. If another rank fails in a job, its answer stands there."""
    (folder / f"jobs-{world}.json").write_text(json.dumps(jobs))
    command = [PYTHON, "-W", "ignore", "-m", "tests.bridge_ranks"]
    words = [str(world), str(folder / f"meet-{world}"), str(folder / f"jobs-{world}.json")]
    logs = [(folder / f"rank-{rank}-of-{world}").open("w+") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *words], cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    for rank in ranks:
        rank.wait(timeout=1200)
    replies: dict[int, dict[str, Any]] = {}
    for log in logs:
        log.seek(0)
        for line in log.read().splitlines():
            if line.startswith(REPLY):
                reply = json.loads(line.removeprefix(REPLY))
                if "Connection closed by peer" not in reply.get("failed", ""):
                    replies.setdefault(reply["job"], reply)
        log.close()
    return [replies[number] for number in range(len(jobs))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Adapters that Bridge saves, and models into which megaconv merges them."""
    import numpy as np

    folder = tmp_path_factory.mktemp("saved")
    np.save(folder / "tokens.npy", np.array(TOKENS))
    jobs: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}}
    cases = {name: case for name, case in SAVED.items() if not is_too_new(name)}
    for number, (name, case) in enumerate(cases.items()):
        peft = {"_target_": f"megatron.bridge.peft.{case.kind}", "dim": 4, "alpha": 6}
        job = {
            "base": str(core_of(case.base, folder)),
            "peft": peft | dict(case.settings),
            "save": str(folder / f"adapter-{number}"),
            "tokens": str(folder / "tokens.npy"),
            "logits": str(folder / f"{number}.npy"),
            "grouped": case.grouped,
        }
        jobs[max(1, *case.sizes.values()) if case.sizes else 1][name] = job | dict(case.sizes)
    said = {name: reply for world, asked in jobs.items()
            for name, reply in zip(asked, ask(list(asked.values()), world, folder), strict=True)}  # fmt: skip
    found = {}
    for asked in jobs.values():
        for name, job in asked.items():
            assert "failed" not in said[name], (name, said[name]["trace"])
            merged = folder / f"merged-{Path(job['save']).name}"
            read_and_merge(Path(job["save"]), SAVED[name].base / "base", merged)
            found[name] = Answer(said[name], np.load(job["logits"]), logits_of(merged))
    return found


def read_and_merge(adapter: Path, base: Path, target: Path) -> None:
    peft = target.with_name(f"{target.name}-peft")
    megaconv.convert(adapter, peft, config=base, saver="peft")
    megaconv.convert(base, target, saver="hf", dtype="fp32", adapters=[str(peft)])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The answers to all cases. Each rank is one process for all of them, because the import of Bridge takes
    longest."""
    import numpy as np

    folder = tmp_path_factory.mktemp("bridge")
    np.save(folder / "tokens.npy", np.array(TOKENS))
    jobs: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}}
    models = {}
    for number, (name, case) in enumerate((CASES | NOT_POSSIBLE).items()):
        base, job = core_of(case.base, folder), {"adapter": None}
        models[name] = case.base / "base"
        if case.adapter:
            adapter = edited(case.base / "adapter", folder / f"peft-{number}", *case.change)
            how: dict[str, Any] = {
                "saver": "core",
                "loader": "peft",
                "ckpt_format": "torch_dist",
                **case.options,
            }
            megaconv.convert(
                adapter, folder / f"adapter-{number}", config=case.base / "base", **how
            )
            models[name] = folder / f"merged-{number}"
            megaconv.convert(
                case.base / "base", models[name], saver="hf", dtype="fp32", adapters=[str(adapter)]
            )
            job["adapter"] = str(folder / f"adapter-{number}")
        job["grouped"] = case.grouped
        job |= {
            "base": str(base),
            "tokens": str(folder / "tokens.npy"),
            "logits": str(folder / f"{number}.npy"),
        }
        jobs[max(1, *case.sizes.values()) if case.sizes else 1][name] = job | dict(case.sizes)
    said = {name: reply for world, asked in jobs.items()
            for name, reply in zip(asked, ask(list(asked.values()), world, folder), strict=True)}  # fmt: skip
    files = {name: Path(job["logits"]) for asked in jobs.values() for name, job in asked.items()}
    logits = {name: np.load(file) if file.is_file() else None for name, file in files.items()}
    return {name: Answer(said[name], logits[name], logits_of(models[name])) for name in models}


def core_of(case: Path, folder: Path) -> Path:
    """Bridge's checkpoint of a base, written once."""
    target = folder / case.name
    if not target.exists():
        how: dict[str, Any] = {
            "ckpt_format": "torch_dist",
            "options": {"for": "megatron-bridge"},
            "dtype": "fp32",
        }
        megaconv.convert(case / "base", target, saver="core", transformer_impl="local", **how)
    return target


def logits_of(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return made(torch.tensor(TOKENS)).logits.numpy()


def keys_of(adapter: Path) -> dict[str, list[int]]:
    import torch.distributed.checkpoint as dcp

    metadata = (
        dcp.FileSystemReader(next(adapter.glob("iter_*"))).read_metadata().state_dict_metadata
    )
    return {name: list(each.size) for name, each in metadata.items() if hasattr(each, "size")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_megatron_bridge_computes_with_an_adapter_what_the_merged_model_does(
    name: str, answers: dict[str, Answer]
) -> None:
    skip_if_too_new(name)
    reply, logits, expected = answers[name]
    assert "failed" not in reply, reply["trace"]
    assert abs(logits[..., : expected.shape[-1]] - expected).max() < TOLERANCE


@pytest.mark.slow
def test_an_adapter_moves_the_logits_by_more_than_the_tolerance(answers: dict[str, Answer]) -> None:
    base = answers["no adapter, at tp 2"].expected
    assert abs(answers["some layers and modules"].expected - base).max() > 100 * TOLERANCE


@pytest.mark.slow
def test_dora_of_rows_that_ranks_share_is_another_function_in_megatron_bridge(
    answers: dict[str, Answer],
) -> None:
    """Why it is refused: see require_dora_fits."""
    reply, logits, expected = answers[DORA_AT_TWO_RANKS]
    assert "failed" not in reply, reply["trace"]
    assert abs(logits[..., : expected.shape[-1]] - expected).max() > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_an_adapter_that_bridge_saved_is_read_as_bridge_computes_it(
    name: str, saved: dict[str, Answer]
) -> None:
    skip_if_too_new(name)
    _, logits, expected = saved[name]
    assert abs(logits[..., : expected.shape[-1]] - expected).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in SAVED.items() if case.grouped])
def test_matrices_of_grouped_experts_have_an_axis_for_them(
    name: str, saved: dict[str, Answer]
) -> None:
    skip_if_too_new(name)
    shapes = {key: shape for key, shape in saved[name].reply["keys"].items() if "experts" in key}
    stem = "decoder.layers.mlp.experts.experts.linear_fc"
    assert shapes == {
        f"{stem}1.adapter.linear_in.weight": [2, 4, 4, 32],
        f"{stem}1.adapter.linear_out.weight": [2, 4, 112, 4],
        f"{stem}2.adapter.linear_in.weight": [2, 4, 4, 56],
        f"{stem}2.adapter.linear_out.weight": [2, 4, 32, 4],
    }
