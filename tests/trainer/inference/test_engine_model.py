"""A model at any layout generates what transformers does: with its cache, in a running batch, by beams."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.batching import Request, generate
from megatron_lite.inference.beams import Beam, BeamSettings, beam_search
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import Scored
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.inference.models import EOS, LENGTH, slots_of, tiny
from tests.trainer.parallel.worlds import World

pytestmark = pytest.mark.oracle

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral, a window": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt2": ("gpt2", {}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 4,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "intermediate_size": 24,
        },
    ),
}
PROMPTS = [(3, 17, 90, 6, 22), (3, 60), (3, *range(40, 60)), (8, 9, 8)]
BEAMS = BeamSettings(3, 7, [EOS, 20], 0.8)
WANTED = [Request(prompt, 6 + 3 * number, Sampling(0), frozenset([EOS])) for number, prompt in enumerate(PROMPTS)]


def run(rank: int, directory: Path, tp: int, pp: int, dp: int, ep: int, vpp: int) -> Any:
    """(tokens of all requests in a running batch, beams, scores, one beside another in padding) on rank 0."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    layers = split_layers(config.layer_count, pp, vpp, LayerSplit())
    grid = make_grid(
        Layout(tp, pp, vpp, ep, stage_layers=layers), dp, torch.device("cpu"), experts=config.experts.count > 0
    )
    engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
    load_weights(engine, checkpoint.tensors)
    model = EngineModel(engine, 3, LENGTH)
    if rank:
        model.follow()
        grid.close()
        return None
    answers = [answer.tokens for answer in generate(model, WANTED)]
    beams = beam_search(model, PROMPTS[0], BEAMS)
    scores = model.score(PROMPTS, 2)
    model.close()
    grid.close()
    return answers, beams, scores


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    kind, settings = MODELS[request.param]
    model, directory = tiny(kind, **settings), tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return request.param, directory, expected(model)


def expected(model: Any) -> tuple[list[list[int]], list[Beam], list[Scored]]:
    greedy = []
    for wanted in WANTED:
        found = model.generate(
            torch.tensor([wanted.prompt]), attention_mask=torch.ones(1, len(wanted.prompt)), do_sample=False,
            max_new_tokens=wanted.max_tokens, pad_token_id=0,
        )  # fmt: skip
        greedy.append(found[0, len(wanted.prompt) :].tolist())
    return greedy, beam_search(slots_of(model), PROMPTS[0], BEAMS), slots_of(model).score(PROMPTS, 2)


def compare(found: Any, wanted: tuple[list[list[int]], list[Beam], list[Scored]]) -> None:
    answers, beams, scores = found
    assert answers == wanted[0]
    assert [beam.tokens for beam in beams] == [beam.tokens for beam in wanted[1]]
    assert [beam.score for beam in beams] == pytest.approx([beam.score for beam in wanted[1]], abs=1e-4)
    for mine, theirs in zip(scores, wanted[2], strict=True):
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.top_log_probs, theirs.top_log_probs, atol=1e-4, rtol=1e-4)
        assert torch.equal(mine.greedy, theirs.greedy)
        assert torch.equal(mine.top_ids, theirs.top_ids)


def test_one_process_generates_what_transformers_does(saved: tuple[str, Path, Any]) -> None:
    _, directory, wanted = saved
    compare(run(0, directory, 1, 1, 1, 1, 1), wanted)


LAYOUTS = {
    "tp2": (2, 1, 1, 1, 1), "pp2": (1, 2, 1, 1, 1), "tp2 pp2": (2, 2, 1, 1, 1), "pp2 vpp2": (1, 2, 1, 1, 2),
    "dp2": (1, 1, 2, 1, 1), "ep2": (1, 1, 2, 2, 1), "tp2 ep2": (2, 1, 1, 2, 1),
}  # fmt: skip
WITH_EXPERTS = ("mixtral", "deepseek_v3", "gpt_oss")
FITTING = [
    (name, layout) for name in MODELS for layout, sizes in LAYOUTS.items() if sizes[3] == 1 or name in WITH_EXPERTS
]
"""Experts are shared out where there are any."""
QUICK = {("qwen3", "tp2 pp2"), ("mixtral", "tp2 ep2")}


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "layout"), FITTING, indirect=["saved"])
def test_every_layout_generates_what_transformers_does(layout: str, saved: tuple[str, Path, Any], world: World) -> None:
    _, directory, wanted = saved
    sizes = LAYOUTS[layout]
    compare(world.run(sizes[0] * sizes[1] * sizes[2], run, directory, *sizes)[0], wanted)


@pytest.mark.parametrize(("name", "layout"), sorted(QUICK))
def test_sharded_models_generate_what_transformers_does(name: str, layout: str, tmp_path: Path, world: World) -> None:
    kind, settings = MODELS[name]
    model = tiny(kind, **settings)
    model.save_pretrained(tmp_path)
    sizes = LAYOUTS[layout]
    compare(world.run(sizes[0] * sizes[1] * sizes[2], run, tmp_path, *sizes)[0], expected(model))
