"""MTP layers, which predict further tokens: what Megatron computes with them, and where they come from and go to."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

import megaconv
from tests.megatron_oracle import Megatron
from tests.runs import run
from tests.transformers_oracle import LAYERS, MIXTURES, VOCAB, create, load

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.oracle

SEQUENCE = 12
FIRST = f"model.layers.{LAYERS}."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 with such a layer, as DeepSeek ships it: under the number after the last, with copies of its ends."""
    import torch

    path = tmp_path_factory.mktemp("mtp") / "model"
    create(MIXTURES["deepseek_v3"], path)
    tensors = load_file(path / "model.safetensors")
    torch.manual_seed(7)
    last = f"model.layers.{LAYERS - 1}."
    own = {
        FIRST + name.removeprefix(last): tensor
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    own = {name: torch.randn_like(tensor) * 0.2 + ("norm" in name) for name, tensor in own.items()}
    hidden = tensors["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{FIRST}{name}.weight"] = torch.randn(hidden) * 0.2 + 1
    own[FIRST + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    own[FIRST + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own[FIRST + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **own}, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    with Megatron(tmp_path_factory.mktemp("megatron")) as running:
        yield running


def one_more_layer(path: Path, directory: Path) -> Any:
    """A transformers model of one more layer, which the weights of the further one are in."""
    shutil.copytree(path, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS + 1}))
    return load(directory)


def further_logits(path: Path, tokens: "torch.Tensor", directory: Path) -> "torch.Tensor":
    """The logits of the token after the next one, as DeepSeek's report defines them, by transformers' modules."""
    import torch

    model, own = one_more_layer(path, directory), load_file(path / "model.safetensors")

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            values, values.shape[-1:], own[f"{FIRST}{name}.weight"], eps=1e-6
        )

    with torch.no_grad():
        main = load(path).model(input_ids=tokens).last_hidden_state
        following = tokens.roll(-1, 1)
        following[:, -1] = 0  # Megatron puts 0 after the end
        both = torch.cat(
            [norm(model.model.embed_tokens(following), "enorm"), norm(main, "hnorm")], -1
        )
        joined = both @ own[FIRST + "eh_proj.weight"].T
        positions = torch.arange(tokens.shape[1])[None]
        mask = torch.full((SEQUENCE, SEQUENCE), float("-inf")).triu(1)[None, None]
        rotary = model.model.rotary_emb(joined, positions)
        output = model.model.layers[LAYERS](
            joined, attention_mask=mask, position_ids=positions, position_embeddings=rotary
        )
        logits: torch.Tensor = norm(output, "shared_head.norm") @ own["lm_head.weight"].T
    return logits


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"tp": 2, "ep": 2}, marks=pytest.mark.slow), {"tp": 1, "pp": 2, "ep": 2}],
    ids=str,
)
@pytest.mark.slow
def test_megatron_predicts_the_token_after_the_next_as_transformers_modules_do(
    sizes: dict[str, int], model: Path, megatron: Megatron, tmp_path: Path
) -> None:
    import torch

    tokens = torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(4))
    core = tmp_path / "core"
    megaconv.convert(
        model, core, saver="core", transformer_impl="local", make_vocab_size_divisible_by=8, **sizes
    )
    logits = megatron.logits(core, tokens, further=True)[..., :VOCAB]
    main, further = logits[:, :SEQUENCE], logits[:, SEQUENCE:]
    assert (main - load(model)(input_ids=tokens).logits).abs().max() < 1e-4
    assert (further - further_logits(model, tokens, tmp_path / "longer")).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "pp": 2, "ep": 2},
        {"pp": 2, "vpp": 2, "layer_split": (1, 1, 2, 0)},
        {"moe_grouped_gemm": True, "ep": 4},
    ],
    ids=str,
)
def test_further_layers_come_back_bit_for_bit_without_a_config(
    options: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    import torch

    megaconv.convert(model, tmp_path / "core", saver="core", **options)
    shutil.rmtree(tmp_path / "core" / "hf")
    megaconv.convert(tmp_path / "core", tmp_path / "hf", saver="hf")
    found, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", model))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert (
        json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    )


def test_missing_mtp_layers_give_a_warning_and_come_back_from_the_original(
    model: Path, tmp_path: Path
) -> None:
    """A run that trained without multi-token prediction leaves such a checkpoint."""
    import torch

    short = tmp_path / "short"
    shutil.copytree(model, short)
    wanted = load_file(model / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in wanted.items() if not name.startswith(FIRST)},
        short / "model.safetensors",
    )
    megaconv.convert(short, tmp_path / "core", saver="core", tp=2)
    bare = run(
        "convert", "--load-dir", tmp_path / "core", "--saver", "hf", "--save-dir", tmp_path / "bare"
    )
    assert bare.status == 0
    assert FIRST not in "".join(load_file(tmp_path / "bare" / "model.safetensors"))
    (model / "extra.txt").write_text("kept")
    arguments = (
        "--load-dir",
        tmp_path / "core",
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "whole",
        "--base",
        model,
    )
    taken = {name for name in wanted if name.startswith(FIRST)}
    planned = run("convert", *arguments, "--dry-run", "--json")
    assert set(json.loads(planned.out)["from_base"]) == taken | {"extra.txt"}
    done = run("convert", *arguments, "--verify")
    assert done.status == 0, done.err
    counts = f"from the original: {len(taken)} tensors and 1 file: "
    assert [line for line in done.out.splitlines() if line.startswith(counts)]
    assert done.out.count("from the original") == 1
    found = {
        name: tensor
        for path in (tmp_path / "whole").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert (tmp_path / "whole" / "extra.txt").read_text() == "kept"
    # The tensors of the original have no fingerprints, and all others do.
    assert run("verify", tmp_path / "whole").status == 0
    name = "model.norm.weight"
    files = (tmp_path / "whole").glob("*.safetensors")
    file = next(path for path in files if name in load_file(path))
    held = load_file(file)
    save_file(held | {name: held[name] + 1}, file, metadata={"format": "pt"})
    outcome = run("verify", tmp_path / "whole")
    assert (outcome.status, outcome.out.count("changed")) == (4, 1)
