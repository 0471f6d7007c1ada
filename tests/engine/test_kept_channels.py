"""`convert --keep-channels`: narrower models, in all formats; and what is refused."""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import megaconv
from megaconv.engine.kept_places import WIDTHS, places_of
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.table import canonical_axes
from megaconv.options.kept_channels import kept_channels
from tests import transformers_oracle as oracle
from tests.conftest import FIXTURES
from tests.engine.averaged_models import weights as stored
from tests.engine.test_interrupted import KILL
from tests.engine.test_kept_experts import kept_file, weights
from tests.families.test_families import write_model
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run

ALL = {**oracle.VARIANTS, **oracle.MIXTURES, **oracle.BEYOND_MEGATRON, **oracle.CONVERTED}
QUICK = ("qwen3", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "deepseek_v4")
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ALL]
OTHER_NAMES = ("hrm_text", "longcat_flash", "zamba")
"""Families whose MLPs have other names in transformers, or are shared."""
TWO_IN_ONE = ("bamba",)
"""Families with one layer in transformers for a mixer and an MLP, which are two layers here."""
Kept = Mapping[str, Sequence[int]]


def sizes_of_mlps(config: ModelConfig) -> dict[str, int]:
    """The names of all MLPs -> their widths."""
    found = places_of(canonical_axes(family(config.family).rows, config))
    return {
        name: value_of(config, field) for name, field in found.items() if field in WIDTHS.values()
    }


def some(random: Random, count: int, unit: int | None = None) -> list[int]:
    """About three quarters of the channels, a multiple of 8: transformers' grouped products need one.

    unit: channels of which three quarters stay too, if these are a multiple of them.
    """
    unit = unit if unit and count % unit == 0 else count
    stay = unit * 3 // 4
    stay = stay // 8 * 8 or stay
    return sorted(random.sample(range(count), stay * (count // unit)))


class Sliced:
    """The logits of transformers' model with the rows and columns of these channels, taken from its own state dictionary."""

    def __init__(self, source: Path, kept: Kept) -> None:
        self.source, self.kept = source, kept
        self.config = megaconv.open(source).config

    def logits(self, output: Path, tokens: Tensor) -> Tensor:
        whole, small = oracle.load(self.source), oracle.load(output)
        shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
        small.load_state_dict(
            {
                name: self._tensor(name, tensor, shapes[name])
                for name, tensor in whole.state_dict().items()
            }
        )
        return oracle.compute(small, tokens)

    def _tensor(self, name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        if tensor.shape == shape:
            return tensor
        if "hidden" in self.kept:
            return _narrowed(tensor, shape, self.config.hidden, self.kept["hidden"])
        match = re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.(.+)", name)
        assert match is not None, name
        number = int(match[1])
        layer = 2 * number + 1 if self.config.family in TWO_IN_ONE else number
        place = f"layers.{layer}.mlp"
        if "shared" in match[2] and f"{place}.shared" in self.kept:
            return self._of_mlp(tensor, shape, f"{place}.shared")
        expert = re.search(r"experts\.(\d+)\.", match[2])
        if expert is not None:
            return self._of_mlp(tensor, shape, f"{place}.experts.{expert[1]}")
        if f"{place}.experts.0" in self.kept and ("expert" in match[2] or tensor.dim() > 2):
            return self._of_experts(tensor, shape, place)
        return self._of_mlp(tensor, shape, place if place in self.kept else f"{place}.shared")

    def _of_experts(self, tensor: Tensor, shape: Sequence[int], place: str) -> Tensor:
        """All experts in one tensor; in DBRX, with the rows of all in one matrix."""
        count = self.config.experts.count
        each = tensor if len(tensor) == count else tensor.view(count, -1, *tensor.shape[1:])
        one = (
            torch.empty(shape).view(count, -1, *shape[1:]).shape[1:]
            if each is not tensor
            else shape[1:]
        )
        made = [self._of_mlp(each[n], one, f"{place}.experts.{n}") for n in range(count)]
        return torch.stack(made).reshape(tuple(shape))

    def _of_mlp(self, tensor: Tensor, shape: Sequence[int], mlp: str) -> Tensor:
        alternates = self.config.family == "gpt_oss"
        return _narrowed(tensor, shape, sizes_of_mlps(self.config)[mlp], self.kept[mlp], alternates)


def _narrowed(
    tensor: Tensor, shape: Sequence[int], width: int, kept: Sequence[int], alternates: bool = False
) -> Tensor:
    """A tensor with these channels on each axis that differs. An axis may hold several times the channels.

    alternates: True if the first channel of each follows the first ones of the others.
    """
    for axis, (before, after) in enumerate(zip(tensor.shape, shape, strict=True)):
        if before != after:
            numbers = torch.arange(before)
            together = numbers.view(width, -1).t() if alternates else numbers.view(-1, width)
            chosen = together[:, list(kept)]
            order = chosen.t() if alternates else chosen
            tensor = tensor.index_select(axis, order.flatten())
    return tensor


NO_NARROW_MLPS = frozenset((
    "bloom", "gemma3n_text", "gemma4_text, layer inputs", "gemma4_unified_text, shared keys and values", "inkling_text",
    "longcat_flash", "mpt", "nemotron_nas", "openai_gpt", "zamba2",
))  # fmt: skip
"""Families and variants whose MLPs have widths of their own, or follow from the hidden size."""
NO_NARROW_STATES = frozenset((
    "bamba", "biogpt", "bitnet", "bloom", "codegen", "cohere", "ctrl", "dbrx", "falcon", "falcon_mamba", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "granite_moe_hybrid", "helium", "inkling_text", "jamba", "lfm2", "lfm2_moe",
    "lfm3", "mamba", "mamba2", "modernbert_decoder", "mpt", "nemotron_nas", "olmo", "olmoe", "openai_gpt", "opt", "persimmon",
    "phi", "phimoe, longrope", "recurrent_gemma", "stablelm", "xglm", "zamba", "zamba2",
))  # fmt: skip
"""The same of those whose heads, convolutions or states are as wide as the hidden states."""


def family_in(name: str) -> str:
    """The family in the name of a variant."""
    return name.partition(",")[0]


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_transformers_computes_each_family_with_narrower_mlps(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path / "hf")
    config = megaconv.open(tmp_path / "hf").config
    random = Random(name)
    # Many a config.json says how many times as wide a shared expert is as another one.
    kept = {
        mlp: some(random, width, config.experts.ffn) for mlp, width in sizes_of_mlps(config).items()
    }
    if not kept:
        return
    if {name, family_in(name)} & NO_NARROW_MLPS:
        with pytest.raises(NotExpressible, match="--keep-channels"):
            megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", keep_channels=kept)
        return
    _assert_sliced(name, tmp_path, kept)


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_transformers_computes_each_family_with_narrower_states(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path / "hf")
    hidden = megaconv.open(tmp_path / "hf").config.hidden
    kept = {"hidden": some(Random(name), hidden)}
    if {name, family_in(name)} & NO_NARROW_STATES:
        with pytest.raises(NotExpressible, match="--keep-channels"):
            megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", keep_channels=kept)
        return
    _assert_sliced(name, tmp_path, kept)


def _assert_sliced(name: str, place: Path, kept: Kept) -> None:
    """The output computes the same bits as transformers' model with these channels of its own state dictionary."""
    source, output = place / "hf", place / "out"
    made = megaconv.convert(source, output, saver="hf", keep_channels=kept, workers=1, verify=True)
    assert made.changes.channels is not None
    assert set(made.changes.channels.after.values()) == {*map(len, kept.values())}
    if family_in(name) in OTHER_NAMES and "hidden" not in kept:
        return
    tokens = torch.randint(7, 120, (1, 12))
    found = oracle.compute(oracle.load(output), tokens)
    expected = Sliced(source, kept).logits(output, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense layers, layers with routed and shared experts, and an MTP layer."""
    place = tmp_path_factory.mktemp("mixture") / "hf"
    layers = {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 1,
    }
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
    }
    return write_model(place, "glm4_moe", **layers, **experts)


@pytest.fixture(scope="module")
def chosen(mixture: Path) -> dict[str, list[int]]:
    """Channels of everything that has some."""
    config, random = megaconv.open(mixture).config, Random(3)
    of_mlps = {
        mlp: some(random, width, config.experts.ffn) for mlp, width in sizes_of_mlps(config).items()
    }
    return {"hidden": some(random, config.hidden), **of_mlps}


@pytest.fixture(scope="module")
def narrow(
    mixture: Path, chosen: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The narrower model of Hugging Face's files."""
    output = tmp_path_factory.mktemp("narrow") / "hf"
    megaconv.convert(mixture, output, saver="hf", keep_channels=chosen)
    return output


def fingerprint(model: Path) -> str:
    return json.loads((model / "megaconv.json").read_text())["fingerprint"]  # type: ignore[no-any-return]


def test_hidden_states_and_mlps_become_narrower_together(
    mixture: Path, chosen: dict[str, list[int]], narrow: Path
) -> None:
    whole, found = weights(mixture), weights(narrow)
    assert found.keys() == whole.keys()
    hidden, dense, mtp = chosen["hidden"], chosen["layers.1.mlp"], chosen["mtp.0.mlp.experts.5"]
    up, down = "layers.1.mlp.up.weight", "mtp.0.mlp.experts.5.down.weight"
    assert torch.equal(found[up], whole[up][dense][:, hidden])
    assert torch.equal(found[down], whole[down][hidden][:, mtp])
    join = "mtp.0.join.weight"
    both = [*hidden, *(len(whole[join]) + each for each in hidden)]
    assert torch.equal(found[join], whole[join][hidden][:, both])
    router = "layers.2.mlp.router.weight"
    assert torch.equal(found[router], whole[router][:, hidden])
    assert torch.equal(found["final_norm.weight"], whole["final_norm.weight"][hidden])


@pytest.mark.parametrize(
    "layout",
    [
        ["--tp", "2", "--ep", "2"],
        ["--ep", "8", "--ckpt-format", "torch_dist"],
        ["--pp", "2", "--ep", "4", "--etp", "1"],
    ],
    ids=" ".join,
)
def test_channels_are_kept_between_all_formats(
    layout: list[str], mixture: Path, chosen: dict[str, list[int]], narrow: Path, tmp_path: Path
) -> None:
    assert run("convert", mixture, tmp_path / "core", "--saver", "core", *layout).status == 0
    file = kept_file(tmp_path / "kept.json", chosen)
    words = ["convert", tmp_path / "core", tmp_path / "out", "--keep-channels", file, "--verify"]
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    config = megaconv.open(mixture).config
    line = f"{len(chosen['hidden'])} of {config.hidden} channels of the hidden states"
    assert line in outcome.err
    assert fingerprint(tmp_path / "out") == fingerprint(narrow)
    assert run("verify", tmp_path / "out").status == 0
    record = json.loads((tmp_path / "out" / "megaconv.json").read_text())
    said = record["provenance"]["options"]["--keep-channels"]
    assert said == str(kept_channels(chosen))
    assert len(said) < 200
    megaconv.convert(tmp_path / "out", tmp_path / "back", saver="hf")
    assert fingerprint(tmp_path / "back") == fingerprint(narrow)


def test_quantized_weights_become_narrower_too(
    mixture: Path, chosen: dict[str, list[int]], tmp_path: Path
) -> None:
    megaconv.convert(mixture, tmp_path / "fp8", saver="hf", quantize="fp8-block")
    megaconv.convert(tmp_path / "fp8", tmp_path / "bf16", saver="hf", dtype="bfloat16")
    for place in ("fp8", "bf16"):
        output = tmp_path / f"narrow-{place}"
        megaconv.convert(
            tmp_path / place, output, saver="hf", dtype="bfloat16", keep_channels=chosen
        )
    assert fingerprint(tmp_path / "narrow-fp8") == fingerprint(tmp_path / "narrow-bf16")


def test_channels_have_the_numbers_of_the_input_beside_experts_and_layers(
    mixture: Path, chosen: dict[str, list[int]], narrow: Path, tmp_path: Path
) -> None:
    experts: dict[str, Any] = {"keep_experts": [0, 3, 5, 6], "layers": [0, 3]}
    megaconv.convert(mixture, tmp_path / "out", saver="hf", keep_channels=chosen, **experts)
    megaconv.convert(narrow, tmp_path / "later", saver="hf", **experts)
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "later")


def test_a_head_size_that_followed_from_the_hidden_size_is_written(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "llama", layers=2)
    raw = json.loads((model / "config.json").read_text())
    raw.pop("head_dim", None)
    (model / "config.json").write_text(json.dumps(raw | {"unknown_key": 7}))
    config = megaconv.open(model).config
    kept = {"hidden": range(0, config.hidden, 2)}
    megaconv.convert(model, tmp_path / "out", saver="hf", keep_channels=kept)
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["head_dim"] == config.attention.head_dim
    assert made["hidden_size"] == config.hidden // 2
    assert made["unknown_key"] == 7


def test_a_killed_run_is_not_continued_with_other_channels(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "llama", layers=4)
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--resume", "--workers", 1]
    kept = [kept_file(tmp_path / f"{n}.json", {"hidden": list(range(n, n + 16))}) for n in (0, 1)]
    kill = KILL.format(owner="os", name="pwrite", number=10, journaled="pass")
    killed = finish(start(*words, "--keep-channels", kept[0], before=kill))
    assert killed.status == -signal.SIGKILL, killed
    assert run(*words, "--keep-channels", kept[1]).status == 0
    name = "model.norm.weight"
    assert torch.equal(stored(tmp_path / "out")[name], stored(model)[name][1:17])


def test_optimizer_state_is_left_out(tmp_path: Path) -> None:
    trained = FIXTURES / "dist-mixtral-optim-ep2-fully_reshardable"
    file = kept_file(tmp_path / "kept.json", {"hidden": list(range(16))})
    words = ["convert", trained, tmp_path / "out", "--saver", "core", "--keep-channels", file]
    assert_refused(run(*words, "--optimizer"), 2, "--optimizer", "--keep-channels")
    assert run(*words).status == 0
    assert not megaconv.inspect(tmp_path / "out").header.has_optimizer


@pytest.mark.parametrize(
    ("keep", "status", "message"),
    [
        ({"hidden": [0, 999]}, 2, "hidden of {} has no channel 999; its channels are 0 to "),
        ({"layers.9.mlp": [0]}, 2, "{} has no layers.9.mlp"),
        ({"layers.2.mlp": [0]}, 2, "{} has no layers.2.mlp"),
        ({"layers.0.mlp": [0]}, 2, "says nothing of layers.1.mlp, which has as many channels in {}"),
        (
            {"layers.0.mlp": [0], "layers.1.mlp": [0, 1]},
            2,
            "layers.0.mlp keeps 1 channel and layers.1.mlp 2; all must keep the same number",
        ),
        ({"hidden": [3, 3]}, 2, "hidden: names channel or head 3 twice; name each channel or head once"),
        ({}, 3, 'expected an object "keep" with the channels and heads that stay'),
        ({"layers.3": [0]}, 3, "expected names such as hidden, layers.3.mlp or layers.3.attn in place of 'layers.3'"),
        ({"hidden": []}, 3, "expected a list of numbers from 0 for hidden"),
        ({"hidden": [1.5]}, 3, "expected a list of numbers from 0 for hidden"),
        ({"hidden": "0-3"}, 3, "expected a list of numbers from 0 for hidden"),
    ],
)  # fmt: skip
def test_wrong_channels_are_refused(
    keep: Any, status: int, message: str, mixture: Path, tmp_path: Path
) -> None:
    file = kept_file(tmp_path / "kept.json", keep)
    words = ["convert", mixture, tmp_path / "out", "--saver", "hf", "--keep-channels", file]
    assert_refused(run(*words), status, message.format(mixture))
    assert not (tmp_path / "out").exists()


def test_other_words_and_models_are_refused(mixture: Path, tmp_path: Path) -> None:
    words = ["convert", mixture, tmp_path / "out", "--saver", "hf", "--keep-channels"]
    assert_refused(run(*words, "0-3"), 2, "0-3: is no file; write one with")
    assert_refused(run(*words, ""), 2, "--keep-channels '': is an empty path")
    twice = tmp_path / "twice.json"
    twice.write_text('{"keep": {"hidden": [0], "hidden": [1]}}')
    assert_refused(run(*words, twice), 3, "twice.json: has the key 'hidden' twice")
    file = kept_file(tmp_path / "kept.json", {"hidden": [0]})
    assert_refused(
        run(*words, file, "--base", mixture), 2, "--keep-channels and --base", "leave --base out"
    )
    case = FIXTURES / "peft-llama-all-linear"
    words[1] = case / "base"
    assert_refused(run(*words, file, "--adapter", case / "adapter"), 2, "merge the adapter first")


def test_python_takes_numbers_by_name() -> None:
    assert kept_channels({"hidden": [2, 0]}).numbers == {"hidden": (0, 2)}
    assert str(kept_channels({"hidden": [2, 0]})) == str(kept_channels({"hidden": range(0, 3, 2)}))
    assert str(kept_channels({"hidden": [2, 0]})) != str(kept_channels({"hidden": [2, 1]}))
    with pytest.raises(TypeError, match="channels"):
        kept_channels({"hidden": [0.5]})  # type: ignore[list-item]
    wrong: list[tuple[dict[str, list[int]], str]] = [
        ({"hidden": [-1]}, "hidden: expected a list of numbers from 0"),
        ({"hidden": []}, "hidden: expected a list of numbers from 0"),
        ({}, "names no channels"),
        ({"hid\nden": [0]}, "expected names such as hidden, layers.3.mlp or layers.3.attn"),
    ]
    for given, message in wrong:
        with pytest.raises(UsageError, match=message):
            kept_channels(given)


@pytest.mark.oracle
def test_a_factor_that_a_config_json_states_stays(tmp_path: Path) -> None:
    """Granite's factor of the embedding is a key of its own. Here it is the root of the hidden size by chance."""
    oracle.create(ALL["granite"], tmp_path / "hf", embedding_multiplier=8.0)
    megaconv.convert(
        tmp_path / "hf", tmp_path / "out", saver="hf", keep_channels={"hidden": range(48)}
    )
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["embedding_multiplier"] == 8.0


@pytest.mark.oracle
def test_the_factor_of_a_tied_head_follows_the_hidden_size(tmp_path: Path) -> None:
    """The first T5 multiplies the states before its head by 1 / sqrt(d_model)."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "d_model": 64,
        "d_kv": 8,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 60,
    }
    torch.manual_seed(0)
    whole = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    whole.save_pretrained(tmp_path / "hf")
    kept = {"hidden": some(Random(1), 64)}
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", keep_channels=kept)
    small = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
    expected = transformers.T5ForConditionalGeneration(small.config)
    expected.load_state_dict(
        {
            name: _narrowed(tensor, shapes[name], 64, kept["hidden"])
            for name, tensor in whole.state_dict().items()
        }
    )
    tokens = {"input_ids": torch.arange(2, 9)[None], "decoder_input_ids": torch.arange(3, 8)[None]}
    with torch.inference_mode():
        found, logits = (model.eval()(**tokens).logits for model in (small, expected))
    torch.testing.assert_close(found, logits, rtol=0, atol=0)


@pytest.mark.oracle
def test_mlps_of_an_encoder_with_a_width_of_its_own_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
    }
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "vocab_size": 60,
        "max_position_embeddings": 16,
    }
    transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, **heads)
    ).save_pretrained(tmp_path / "hf")
    config = megaconv.open(tmp_path / "hf").config
    kept = {mlp: range(8) for mlp in sizes_of_mlps(config)}
    with pytest.raises(NotExpressible, match="MLPs of other widths; keep the channels of MLPs"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", keep_channels=kept)
