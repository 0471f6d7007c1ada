"""Adapters are planned as the trainer makes them: the same parameters, and the activations that autograd keeps for them."""

import pytest

from megaconv.errors import NotExpressible
from megaconv.planning.activations import activations
from megatron_lite.models.lora.whole import EMBEDDING, HEAD
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.planning.stages import Described
from megatron_lite.settings.options import LoRA, Recompute
from tests.trainer.parallel.worlds import World
from tests.trainer.planning.recorded import MODELS, Planned, bytes_of_a_pass, make_engine

DECODERS = [name for name, config in MODELS.items() if config.family not in ("bert", "t5", "dbrx")]
ALL = LoRA(4, 8.0)
DORA = LoRA(4, 8.0, dora=True)
WHOLE = LoRA(4, 8.0, whole=(EMBEDDING, HEAD))
QUERIES_AND_VALUES = LoRA(4, 8.0, ("q_proj", "v_proj"))
Facts = tuple[object, ...]


def facts(info: ParameterInfo) -> Facts:
    """Everything that decides memory and traffic of a parameter."""
    return info.name, info.native.shape, str(info.native.parts), info.reduced_over, info.partial


def made(_rank: int, planned: Planned) -> tuple[int, list[Facts]]:
    """(tensor rank, the adapters of a rank's first chunk in the trainer)."""
    engine = make_engine(planned)
    found = sorted(facts(info) for info in engine.adapters[0])
    rank = engine.grid.tp_rank
    engine.grid.close()
    return rank, found


def of_plan(run: Described) -> list[Facts]:
    (chunk,) = run.run.chunks(0)
    return sorted(facts(info) for adapter in run.adapters(0, chunk) for info in adapter.infos)


@pytest.mark.parametrize("model", DECODERS)
def test_adapters_are_those_that_the_trainer_adds(model: str) -> None:
    planned = Planned(model, lora=ALL)
    found = of_plan(planned.described())
    assert found
    assert (0, found) == made(0, planned)


def test_magnitudes_are_those_that_the_trainer_adds() -> None:
    planned = Planned("qwen3", lora=DORA)
    found = of_plan(planned.described())
    assert (0, found) == made(0, planned)
    magnitudes = [fact for fact in found if str(fact[0]).endswith(".magnitude")]
    assert 3 * len(magnitudes) == len(found)
    with pytest.raises(NotExpressible, match="belongs to experts, for which peft has no DoRA"):
        of_plan(Planned("mixtral", lora=DORA).described())


def test_an_adapter_that_all_experts_would_share_is_refused_as_in_the_trainer() -> None:
    with pytest.raises(NotExpressible, match="one matrix for all experts of a layer"):
        of_plan(Planned("dbrx", lora=ALL).described())
    planned = Planned("dbrx", lora=LoRA(4, 8.0, ("Wqkv", "out_proj")))
    assert (0, of_plan(planned.described())) == made(0, planned)


@pytest.mark.parametrize("model", ["qwen3", "mixture", "deepseek_v3", "falcon h1", "kimi"])
def test_shards_of_adapters_are_those_of_a_tensor_rank(model: str, world: World) -> None:
    planned = Planned(model, tp=2, sequence=True, lora=DORA if model == "qwen3" else ALL)
    found = dict(world.run(2, made, planned))
    assert of_plan(planned.described()) == found[0]


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("qwen3", ALL),
        ("qwen3", QUERIES_AND_VALUES),
        ("qwen3", LoRA(4, 8.0, dropout=0.1)),
        ("qwen3", DORA),
        ("gpt2", DORA),
        ("lfm3", LoRA(4, 8.0, dropout=0.1, dora=True)),
        ("gpt2", ALL),
        ("llama, scores", ALL),
        ("lfm3", ALL),
        ("mixture", ALL),
        ("mixture", QUERIES_AND_VALUES),
        ("deepseek_v3", ALL),
        ("qwen3", WHOLE),
        ("gpt2", WHOLE),
        ("qwen3", LoRA(4, 8.0, rows=((EMBEDDING, (3, 5)), (HEAD, (3, 5))))),
        ("qwen3", LoRA(4, 8.0, whole=(EMBEDDING,))),
        ("qwen3", LoRA(4, 8.0, whole=(HEAD,))),
    ],
)
def test_activations_beside_frozen_weights_are_those_that_autograd_keeps(
    model: str, lora: LoRA
) -> None:
    planned = Planned(model, wider=4, microbatches=1, lora=lora)
    planned_bytes = activations(planned.described().run, 0)
    assert bytes_of_a_pass(planned) == pytest.approx(planned_bytes, rel=0.1)


@pytest.mark.parametrize("lora", [ALL, QUERIES_AND_VALUES, LoRA(4, 8.0, dropout=0.1)])
def test_selective_recomputation_beside_frozen_weights_is_counted(lora: LoRA) -> None:
    planned = Planned("qwen3", wider=4, microbatches=1, lora=lora, recompute=Recompute("selective"))
    planned_bytes = activations(planned.described().run, 0)
    assert bytes_of_a_pass(planned) == pytest.approx(planned_bytes, rel=0.1)


def test_inputs_of_frozen_matrices_without_adapters_are_not_kept() -> None:
    """The MLP's inputs take most of the difference: the normed hidden states, and what the second matrix reads."""
    every, some = (
        activations(Planned("qwen3", lora=lora).described().run, 0)
        for lora in (ALL, QUERIES_AND_VALUES)
    )
    assert some < 0.9 * every
