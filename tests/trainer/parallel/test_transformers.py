"""transformers and megatron_lite compute the same logits, losses and gradients from the same files."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from formats.tensor import matrix_shape
from megaconv.checkpoint import open_checkpoint
from megaconv.families import families
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import CORE, HF
from megaconv.model.natives import native_tensors
from megaconv.model.regions import Region
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.trainable import TRAINED
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from megatron_lite.settings.sizes import check_sizes
from tests.trainer.parallel.worlds import World
from tests.transformers_oracle import VARIANTS, VOCAB, create, family_of, load

pytestmark = pytest.mark.oracle
TOLERANCE = 2e-5
"""Relative; 2e-6 is what is found in most models. In those whose weights magnify rounding transformers strays further in float32 itself."""

Computed = tuple[torch.Tensor, float, dict[str, torch.Tensor]]
"""Logits, loss, and gradients by their parameters' names."""


def batch() -> Microbatch:
    """32 tokens, longer than any window; without the padding token, which gets no gradient in transformers."""
    tokens = torch.randint(7, VOCAB, (2, 33), generator=torch.Generator().manual_seed(3))
    return Microbatch(tokens[:, :-1], tokens[:, 1:])


def engine_for(directory: Path, tp: int, options: ModelOptions) -> Engine:
    checkpoint = open_checkpoint(directory)
    layout = Layout(tp, 1, 1, stage_layers=(checkpoint.config.layer_count,))
    dp = check_sizes(
        checkpoint.config, layout, world=tp, options=options, sequence=32, microbatches=1
    )
    engine = Engine(
        checkpoint.config,
        make_grid(layout, dp, torch.device("cpu")),
        options,
        OptimizerOptions(clip_grad=0),
    )
    load_weights(engine, checkpoint.tensors)
    return engine


def step(_rank: int, directory: Path, tp: int, options: ModelOptions) -> Computed:
    """Compute one step on this rank."""
    engine = engine_for(directory, tp, options)
    assert engine.optimizer is not None
    logits = engine.logits(batch())
    assert logits is not None
    loss = engine.train_step([batch()], lr=0.0).loss
    gradients = {
        item.name: item.gradient.view(item.shape).clone() for item in engine.optimizer.ranges()
    }
    engine.finish()
    engine.grid.close()
    return logits, loss, gradients


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, against the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def first_row(region: Region) -> int:
    """The first row of a region in the canonical tensor."""
    return region.box.row0


def taken(matrix: torch.Tensor, region: Region) -> torch.Tensor:
    """The rows of a canonical tensor that a rectangle of a native one holds."""
    sizes = region.box.rows, region.box.cols
    height, width = reversed(sizes) if region.transposed else sizes
    piece = matrix[region.row : region.row + height, region.col : region.col + width]
    return piece.T if region.transposed else piece


def expected_gradients(directory: Path, tp: int, tp_rank: int, dtype: torch.dtype) -> Computed:
    """transformers', cut and fused by the table."""
    model = load(directory).to(dtype)
    config = open_checkpoint(directory).config
    rows = families()[config.family].rows
    # EXAONE's class has Llama's names, and its files have others.
    of_class = families()["llama"].rows if config.family == "exaone" else rows
    logits = model(input_ids=batch().tokens).logits
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), batch().labels.reshape(-1))
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs["embed_out.weight"] = theirs.get("lm_head.weight")  # GPT-NeoX's name in files
    chunk = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    whole: dict[str, torch.Tensor] = {}
    for native in native_tensors(of_class, config, HF, Layout(), 0, chunk, VOCAB):
        if native.copy:
            continue
        gradient = theirs[native.name]
        assert gradient is not None
        matrix = gradient.reshape(matrix_shape(native.shape))
        for name, regions in native.parts.items():
            pieces = [taken(matrix, region) for region in sorted(regions, key=first_row)]
            whole[name] = torch.cat(pieces)  # several where heads of q, k and v alternate
    layout = Layout(tp, 1, 1, stage_layers=(config.layer_count,))
    cut = {}
    for native in native_tensors(
        rows, config, CORE, layout, tp_rank, chunk, -(-VOCAB // (128 * tp)) * 128 * tp
    ):
        if native.copy:
            continue
        matrix = torch.zeros(matrix_shape(native.shape), dtype=dtype)
        for name, regions in native.parts.items():
            for region in regions:
                box = region.box
                matrix[region.row : region.row + box.rows] = whole[name][
                    box.row0 : box.row1, box.col0 : box.col1
                ]
        cut[native.name] = matrix.view(native.shape)
    return logits.detach(), loss.item(), cut


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, variant in VARIANTS.items()
        if family_of(variant) in TRAINED
        and family_of(variant) not in ("mamba2", "nemotron_h", "qwen3_5")
    ],
)
def test_logits_loss_and_every_gradient_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    """Rows of the loss at a time: fewer than tokens, so that it is done in several pieces."""
    create(VARIANTS[name], tmp_path)
    compare(step(0, tmp_path, 1, ModelOptions(dtype="float32", loss_rows=20)), tmp_path, 1, 0)


def compare(found: Computed, directory: Path, tp: int, tp_rank: int) -> None:
    """Compare with float64. Our float32 may differ from it twice as much as transformers' float32 does at worst."""
    exact, rounded = (
        expected_gradients(directory, tp, tp_rank, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert found[1] == pytest.approx(exact[1], rel=TOLERANCE)
    assert set(found[2]) == set(exact[2])
    ours, expected, theirs = ({"logits": each[0], **each[2]} for each in (found, exact, rounded))
    allowed = max(
        TOLERANCE, *(2 * distance(theirs[name], value) for name, value in expected.items())
    )
    strays = {name: distance(ours[name], value) for name, value in expected.items()}
    assert {name: far for name, far in strays.items() if far > allowed} == {}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "llama, all biases",
        "mistral",
        "qwen2, tied",
        "qwen3",
        "gpt2",
        "gemma2",
        "gemma3_text",
        "glm4",
        "olmo2",
        "olmo3",
        "exaone4",
    ],
)
def test_two_tensor_ranks_compute_what_transformers_does(
    name: str, sequence_parallel: bool, tmp_path: Path, world: World
) -> None:
    """The whole gradient of every rank's share: what is replicated, both ranks have it whole."""
    create(VARIANTS[name], tmp_path)
    options = ModelOptions(dtype="float32", sequence_parallel=sequence_parallel)
    for tp_rank, found in enumerate(world.run(2, step, tmp_path, 2, options)):
        compare(found, tmp_path, 2, tp_rank)
