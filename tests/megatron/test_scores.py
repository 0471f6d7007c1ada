"""Reward models, critics and classifiers: transformers' scores and those of the real megatron-core, and round trips."""

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.models.auto import modeling_auto

import megaconv
from megaconv.families import families
from megaconv.families.parts.scores import CLASSES, SEQUENCE, TOKEN
from tests.families.test_families import weights_of
from tests.megatron.test_oracles import EXPERT_LAYOUTS, LAYOUTS, TOLERANCE, to_core
from tests.megatron_oracle import Megatron, read_rank_file
from tests.runs import assert_refused, run
from tests.transformers_oracle import MIXTURES, VARIANTS, VOCAB, Variant, create, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.oracle

AUTO: dict[str, Any] = {
    SEQUENCE: AutoModelForSequenceClassification,
    TOKEN: AutoModelForTokenClassification,
}
ALL: dict[str, Variant] = {**VARIANTS, **MIXTURES}
SCORED = sorted(
    (name, kind)
    for name, variant in ALL.items()
    for kind in AUTO
    if (family_of(variant), kind) in CLASSES
)
QUICK = {("llama", SEQUENCE), ("llama", TOKEN), ("gemma2", SEQUENCE), ("mixtral", TOKEN)}
TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(4))


def make(directory: Path, variant: str, kind: str, labels: int) -> Path:
    """A model with a head of scores, as transformers saves it."""
    names = {number: f"kind {number}" for number in range(labels)}
    named = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    create(ALL[variant], directory, AUTO[kind], problem_type="regression", **named)
    return directory


def load(directory: Path) -> "PreTrainedModel":
    kind = (
        TOKEN
        if TOKEN in json.loads((directory / "config.json").read_text())["architectures"][0]
        else SEQUENCE
    )
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model: PreTrainedModel = AUTO[kind].from_pretrained(directory, **options).eval()
    return model


def scores_of(directory: Path) -> torch.Tensor:
    """The scores of all tokens, [batch, sequence, labels], by transformers' own modules."""
    model: Any = load(directory)
    with torch.no_grad():
        hidden = model.base_model(input_ids=TOKENS).last_hidden_state
        found: torch.Tensor = model.score(hidden)
        # One by one: without a padding token, transformers finds no last tokens in a batch.
        pooled = torch.cat([model(input_ids=row[None]).logits for row in TOKENS])
    if pooled.dim() == 2:  # of the last token
        assert (pooled - found[:, -1]).abs().max().item() <= TOLERANCE
    else:
        assert (pooled - found).abs().max().item() <= TOLERANCE
    return found


def cases() -> list[Any]:
    return [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in SCORED
    ]


@pytest.mark.parametrize(("variant", "kind"), cases())
def test_megatron_gives_the_scores_that_transformers_gives(
    variant: str, kind: str, megatron: Megatron, tmp_path: Path
) -> None:
    """The real GPTModel loads our files strictly, with the head of verl's value models; and the way back is exact."""
    hf = make(tmp_path / "hf", variant, kind, labels=3)
    expected = scores_of(hf)
    layouts = EXPERT_LAYOUTS if variant in MIXTURES else LAYOUTS
    usual = "tp2 pp1 ep2" if variant in MIXTURES else "tp2 pp2"
    known = (*ALL[variant].quick, *ALL[variant].layouts, usual)
    layout = layouts[next(name for name in known if name)]
    for ckpt_format in ("torch", "torch_dist"):
        options: dict[str, Any] = {**layout, "ckpt_format": ckpt_format}
        core = to_core(hf, tmp_path / ckpt_format, options=ALL[variant].extra, **options)
        found = megatron.logits(core, TOKENS)
        assert found.shape == expected.shape
        assert (found - expected).abs().max().item() <= TOLERANCE
        back = tmp_path / f"back-{ckpt_format}"
        megaconv.convert(core, back, saver="hf")
        assert_same_model(back, hf)


def assert_same_model(found: Path, wanted: Path) -> None:
    """The same weights, bit for bit, and the same config.json."""
    ours, theirs = weights_of(found), weights_of(wanted)
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[name].view(torch.int32), theirs[name].view(torch.int32)) for name in theirs
    )
    assert json.loads((found / "config.json").read_text()) == json.loads(
        (wanted / "config.json").read_text()
    )


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_critic_is_resharded_to_any_layout(
    layout: str, megatron: Megatron, tmp_path: Path
) -> None:
    hf = make(tmp_path / "hf", "llama", TOKEN, labels=1)
    first = to_core(hf, tmp_path / "first", tp=2, pp=2)
    core = to_core(first, tmp_path / "core", **LAYOUTS[layout])
    assert (megatron.logits(core, TOKENS) - scores_of(hf)).abs().max().item() <= TOLERANCE
    assert megaconv.fingerprint(core) == megaconv.fingerprint(hf)


@pytest.mark.parametrize("layout", ["tp2 pp2", "tp1 pp2 vpp2, layers 1+1+2+0", "tp4 pp1, release"])
@pytest.mark.parametrize("kind", [SEQUENCE, TOKEN])
def test_a_critic_that_megatron_saved_as_verl_does_is_read(
    kind: str, layout: str, megatron: Megatron, tmp_path: Path
) -> None:
    """verl stores no args, and beside them the config.json of the language model from which the critic started."""
    hf = make(tmp_path / "hf", "llama", kind, labels=1)
    core = to_core(hf, tmp_path / "core", **LAYOUTS[layout])
    megatron.save(core, TOKENS, tmp_path / "dist_ckpt")
    raw = json.loads((hf / "config.json").read_text())
    of_words = {**raw, "architectures": ["LlamaForCausalLM"], "id2label": None}
    started = tmp_path / "huggingface"
    started.mkdir()
    started.joinpath("config.json").write_text(json.dumps(of_words))
    megaconv.convert(tmp_path / "dist_ckpt", tmp_path / "back", saver="hf", config=started)
    assert torch.equal(scores_of(tmp_path / "back"), scores_of(hf))
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written["architectures"] == [f"Llama{kind}"]
    assert list(written["id2label"]) == ["0"]


@pytest.mark.parametrize("layout", ["tp2 pp2", "tp1 pp4"])
def test_a_reward_model_of_nemo_aligner_is_read(
    layout: str, megatron: Megatron, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron saves it. The unused head for words is left out."""
    hf = make(tmp_path / "hf", "llama", TOKEN, labels=2)
    core = to_core(hf, tmp_path / "core", **LAYOUTS[layout])
    megatron.save(core, TOKENS, tmp_path / "model_weights")
    source = tmp_path / "model_weights"
    megaconv.convert(source, tmp_path / "back", loader="core", saver="hf", config=hf)
    assert "the head for words is left out" in caplog.text
    assert_same_model(tmp_path / "back", hf)


def test_rank_files_of_nemo_aligner_are_read_from_one_rank_alone(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama", TOKEN, labels=2)
    (file,) = to_core(hf, tmp_path / "core").glob("release/mp_rank_00/model_optim_rng.pt")
    weights = read_rank_file(file)["model"]
    named = {
        f"model.{name.replace('output_layer', 'rm_head')}": each for name, each in weights.items()
    }
    for ranks in (["."], ["tp_rank_00_pp_rank_000", "tp_rank_01_pp_rank_000"]):
        source = tmp_path / f"{len(ranks)} ranks"
        for rank in ranks:
            (source / rank).mkdir(parents=True)
            torch.save(named, source / rank / "model_weights.ckpt")
    command = ("--saver", "hf", "--config", hf, "--save-dir", tmp_path / "back", "--load-dir")
    assert_refused(run("convert", *command, source), 3, "each with some columns of rm_head")
    assert run("convert", *command, tmp_path / "1 ranks").status == 0
    assert_same_model(tmp_path / "back", hf)


def test_the_user_chooses_the_class_of_a_critic_without_bias(tmp_path: Path) -> None:
    """transformers makes the bias that the files lack, as zeros."""
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=1)
    core = to_core(hf, tmp_path / "core", tp=2)
    shutil.rmtree(core / "hf")
    megaconv.convert(core, tmp_path / "sequence", saver="hf")
    megaconv.convert(core, tmp_path / "token", saver="hf", options={"head": "token"})
    assert load(tmp_path / "sequence").config.architectures == ["LlamaForSequenceClassification"]
    assert load(tmp_path / "token").config.architectures == ["LlamaForTokenClassification"]
    assert torch.equal(scores_of(tmp_path / "token"), scores_of(hf))
    megaconv.convert(tmp_path / "token", tmp_path / "again", saver="core", pp=2)
    assert megaconv.fingerprint(tmp_path / "again") == megaconv.fingerprint(hf)


def test_a_bias_is_not_lost_in_a_class_that_has_none(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama", TOKEN, labels=1)
    core = to_core(hf, tmp_path / "core", tp=2)
    command = ("convert", core, tmp_path / "back", "--saver", "hf", "--option")
    assert_refused(run(*command, "head=sequence"), 2, "has a bias", "--option head=token")
    assert_refused(run(*command, "head=tokens"), 2, "choose sequence or token")
    plain = tmp_path / "plain"
    create(ALL["llama"], plain)
    words = ("convert", plain, tmp_path / "words", "--saver", "hf", "--option", "head=token")
    assert_refused(run(*words), 2, "has a head for words")


def test_other_numbers_of_labels_are_refused(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=3)
    core = to_core(hf, tmp_path / "core", tp=2)
    other = make(tmp_path / "other", "llama", SEQUENCE, labels=4)
    command = ("convert", core, tmp_path / "back", "--saver", "hf", "--config")
    assert_refused(run(*command, other), 3, "says head.labels = 4", "the checkpoint has 3")
    words = tmp_path / "words"
    create(ALL["llama"], words)
    of_words = (
        "convert",
        to_core(words, tmp_path / "core of words", tp=2),
        tmp_path / "back",
        "--saver",
        "hf",
    )
    assert_refused(
        run(*of_words, "--config", hf), 3, "says head.labels = 3", "the checkpoint has 0"
    )


def described(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model with other values in its config.json."""
    shutil.copytree(source, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | changes))
    return target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"a": "x", "b": "y", "c": "z"}}, "should be the numbers of the classes, found 'a'"),
        ({"id2label": {"0": "x", "00": "y", "1": "z"}}, "two names for one class"),
        ({"num_labels": 5}, "num_labels is 5, id2label has 3 names"),
        ({"id2label": {"0": "x", "1": "y"}}, "score.weight has 3 rows, and config.json describes 2 labels"),
        ({"id2label": None}, "score.weight has 3 rows, and config.json describes 2 labels"),
    ],
)  # fmt: skip
def test_labels_that_transformers_refuses_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=3)
    other = described(hf, tmp_path / "other", **changes)
    with pytest.raises((ValueError, RuntimeError)):
        load(other)
    outcome = run("convert", other, tmp_path / "out", "--saver", "core")
    assert_refused(outcome, 3, words)


@pytest.mark.parametrize("named", [["LlamaForCausalLM"], None])
def test_files_with_a_head_of_scores_of_a_class_without_one_are_refused(
    named: list[str] | None, tmp_path: Path
) -> None:
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=3)
    words = described(hf, tmp_path / "words", architectures=named)
    outcome = run("convert", words, tmp_path / "out", "--saver", "core")
    assert_refused(outcome, 3, "holds a head of scores", "architectures: LlamaForSequence")


def test_of_different_heads_on_tensor_ranks_the_first_is_used_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with other tensors that each rank holds whole. Megatron's distributed checkpoints hold the first as well."""
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=1)
    core = to_core(hf, tmp_path / "core", tp=2)
    (file,) = core.glob("release/mp_rank_01/model_optim_rng.pt")
    state = read_rank_file(file)
    state["model"]["output_layer.weight"].add_(1)
    torch.save(state, file)
    megaconv.convert(core, tmp_path / "back", saver="hf")
    assert re.search(
        r"score\.weight: the copy .* in mp_rank_01/.* the first copy is used", caplog.text
    )
    assert_same_model(tmp_path / "back", hf)


@pytest.mark.parametrize(("labels", "ckpt_format"), [(128, "torch"), (256, "torch_dist")])
def test_a_head_that_looks_like_one_for_words_is_refused(
    labels: int, ckpt_format: str, tmp_path: Path
) -> None:
    """At tp 2, the vocabulary of 131 is padded to 256 rows. A rank's file has 128 of them."""
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels)
    core = tmp_path / "core"
    command = ("convert", hf, core, "--saver", "core", "--ckpt-format", ckpt_format)
    assert_refused(run(*command, "--tp", 2), 2, f"has {labels} labels", "choose another --tp")
    smaller = ("--tp", 2, "--make-vocab-size-divisible-by", 2)
    assert run(*command, *smaller).status == 0
    megaconv.convert(core, tmp_path / "back", saver="hf")
    assert_same_model(tmp_path / "back", hf)


def test_the_classes_are_those_of_transformers() -> None:
    """All classes for a family's models whose head has the name `score`."""
    listed = {
        SEQUENCE: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        TOKEN: modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    expected = {
        (name, kind): named[model_type]
        for name, family in families().items()
        for kind, named in listed.items()
        for model_type in (family.model_type, *family.other_types)
        if model_type in named and has_score(named[model_type])
    }
    assert dict(CLASSES) == expected


def has_score(named: str) -> bool:
    found = getattr(transformers, named)
    is_generic = any(base.__name__.startswith("GenericFor") for base in found.__mro__)
    return is_generic or "self.score = nn.Linear" in inspect.getsource(found)


def test_a_head_for_words_beside_that_of_scores_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=1)
    weights = weights_of(hf)
    both = {**weights, "lm_head.weight": torch.randn(VOCAB, 64)}
    save_file(both, hf / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(hf, tmp_path / "out", saver="hf")
    assert "the head for words is left out" in caplog.text
    assert weights_of(tmp_path / "out").keys() == weights.keys()


@pytest.mark.parametrize("saver", ["gguf", "mlx", "legacy", "llama_mistral", "trtllm"])
def test_formats_without_a_head_of_scores_are_refused_with_the_others(
    saver: str, tmp_path: Path
) -> None:
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=1)
    outcome = run("convert", hf, tmp_path / "out", "--saver", saver)
    assert_refused(outcome, 2, "its head gives scores", f"--saver {saver}", "choose --saver hf")


@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_other_files_of_hugging_face_models_hold_the_head_too(saver: str, tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama", TOKEN, labels=3)
    megaconv.convert(hf, tmp_path / "out", saver=saver)
    megaconv.convert(tmp_path / "out", tmp_path / "back", saver="hf")
    assert_same_model(tmp_path / "back", hf)


def test_inspect_shows_the_head_and_the_trainer_refuses_it(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama", SEQUENCE, labels=3)
    core = to_core(hf, tmp_path / "core", tp=2)
    for place in (hf, core):
        assert "scores, 3 labels" in run("inspect", place).out
    outcome = run("verify", hf, core, "--forward")
    assert_refused(outcome, 2, "the model has a head of scores")
