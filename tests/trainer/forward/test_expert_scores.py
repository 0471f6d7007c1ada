"""The scores of experts are those computed from the inputs of transformers' experts; layers of further tokens see training's inputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron_lite.engine import Engine
from megatron_lite.forward.counted_passes import Counted
from megatron_lite.forward.expert_scores import ExpertScores, _watched, measure
from megatron_lite.forward.rows import batches
from megatron_lite.models.batch import Microbatch
from tests import transformers_oracle as oracle
from tests.trainer.forward.test_streaming import streamed, weights_of
from tests.trainer.parallel.small import Case, make_engine

ALL = {**oracle.VARIANTS, **oracle.MIXTURES, **oracle.BEYOND_MEGATRON}
ROWS = [tuple(range(7, 19)), tuple(range(30, 37)), (9, 50, 3)]
"""Texts of several lengths, so that passes of several rows have padding."""


def passes(
    engine: Engine, together: int, rows: Sequence[tuple[int, ...]] = ROWS
) -> list[Microbatch]:
    return list(batches(engine.config, rows, together))


def of_transformers(
    directory: Path, rows: Sequence[tuple[int, ...]]
) -> list[dict[str, torch.Tensor]]:
    """For each layer with experts: tokens and score of each expert. Each text but its last token is computed."""
    model: Any = oracle.load(directory)
    layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
    seen: dict[Any, list[Any]] = {layer: [] for layer in layers}
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, given: seen[module].append(given))
    for row in rows:
        oracle.compute(model, torch.tensor([row[:-1]]))
    return [_scores(layer, seen[layer]) for layer in layers]


def _scores(experts: Any, calls: list[Any]) -> dict[str, torch.Tensor]:
    count = len(experts.down_proj)
    tokens, sums = torch.zeros(count), torch.zeros(count)
    for x, chosen, weights in calls:
        for expert in range(count):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], experts.gate_up_proj[expert]).chunk(2, -1)
            made = F.linear(experts.act_fn(gate) * up, experts.down_proj[expert])
            sums[expert] += (made * weights[token, place].unsqueeze(1)).norm(dim=-1).sum()
            tokens[expert] += len(token)
    return {"tokens": tokens, "scores": sums / tokens.clamp(min=1)}


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "deepseek_v3" else [pytest.mark.slow])
        for name in ("deepseek_v3", "mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "olmoe")
    ],
)
def test_scores_are_those_of_transformers_experts(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path)
    expected = of_transformers(tmp_path, ROWS)
    for together in (1, len(ROWS)):
        engine = streamed(*weights_of(tmp_path))
        found = measure(engine, passes(engine, together))
        assert found.tokens == sum(len(row) - 1 for row in ROWS)
        of_layers = [each for layer, each in found.layers.items() if layer.startswith("layers.")]
        assert len(of_layers) == len(expected) > 0
        for ours, theirs in zip(of_layers, expected, strict=True):
            assert list(ours.tokens) == theirs["tokens"].tolist()
            torch.testing.assert_close(
                torch.tensor(ours.scores), theirs["scores"], rtol=1e-4, atol=1e-5
            )


MODELS = ("mixtral", "gpt_oss", "llama4", "gemma4", "hybrid", "laguna", "beam")


@pytest.mark.parametrize("model", MODELS)
def test_padding_and_other_passes_change_no_score(model: str) -> None:
    """Biases of experts, weights on their input, norms of their own, experts in a latent width."""
    one, together = (_measured(model, rows) for rows in (1, len(ROWS)))
    assert list(one.layers) == list(together.layers)
    for layer, found in one.layers.items():
        assert found.tokens == together.layers[layer].tokens
        assert sum(found.tokens) == one.tokens * make_engine(Case(model)).config.experts.per_token
        scores = torch.tensor([found.scores, together.layers[layer].scores])
        torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-6)


def _measured(model: str, together: int) -> ExpertScores:
    engine = make_engine(Case(model))
    return measure(engine, passes(engine, together))


@pytest.mark.parametrize(
    "model", ["further tokens", "delta nets, experts", "hybrid, further tokens"]
)
def test_layers_of_further_tokens_see_the_inputs_of_training(model: str) -> None:
    row = ROWS[0]
    engine = make_engine(Case(model))
    found = measure(engine, passes(engine, 1, [row]))
    depths = engine.config.mtp_layers
    assert [layer for layer in found.layers if layer.startswith("mtp.")] == [
        f"mtp.{n}" for n in range(depths)
    ]
    for depth in range(depths):
        counted = Counted(torch.arange(len(row)).unsqueeze(1) < len(row) - 2 - depth)
        expected = _in_training(make_engine(Case(model)), row, counted)
        layer = f"mtp.{depth}"
        assert found.layers[layer].tokens == expected.layers[layer].tokens
        torch.testing.assert_close(
            torch.tensor(found.layers[layer].scores), torch.tensor(expected.layers[layer].scores)
        )


def _in_training(engine: Engine, row: tuple[int, ...], counted: Counted) -> ExpertScores:
    """The scores of the tokens that count, in a pass with the losses of all layers."""
    watched = dict(_watched(engine, counted))
    (batch,) = passes(engine, 1, [row])
    (chunk,) = engine.chunks
    with torch.enable_grad():
        run = engine.make_pass(batch)
        chunk.loss(chunk((), run), run)
    return ExpertScores({layer: watch.scores(layer) for layer, watch in watched.items()}, len(row))
