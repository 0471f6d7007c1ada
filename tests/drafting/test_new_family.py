"""`megaconv new-family`: the draft of a family that exists is that family, or differs where a question says so."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megaconv.commands.drafting import new_family, save
from megaconv.drafting.code import literal
from megaconv.drafting.draft import MARKER, Draft
from megaconv.drafting.reference import reference_of
from megaconv.errors import CorruptCheckpoint, TargetExists, UnknownFamily, UsageError
from megaconv.families import Family, families
from megaconv.model.meaning import config_differences
from tests.runs import assert_refused, run

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.oracle

ASKED: dict[str, dict[str, str]] = {
    "mistral": {},
    "phi3": {"positions.interleaved": "rotate_half"},
    "olmo2": {},
    "starcoder2": {},
    "cohere": {
        "norm.kind": "CohereLayerNorm.forward",
        "norm.bias": "CohereLayerNorm.__init__",
        "layers.{l}.attn.{q|k}_norm.weight": "CohereAttention.__init__",
    },
}
"""Family -> field or row in which its draft differs from its own file -> the function that a question names."""
QUICK = ("mistral",)
CASES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in ASKED
]


def default_config(model_type: str, place: Path) -> dict[str, Any]:
    """The default configuration of transformers as a config.json. Returns its keys."""
    transformers = pytest.importorskip("transformers")
    text = transformers.AutoConfig.for_model(model_type).to_json_string(use_diff=False)
    (place / "config.json").write_text(text)
    found: dict[str, Any] = json.loads(text)
    return found


def module_of(draft: Draft, place: Path) -> ModuleType:
    """The drafted file as a module."""
    file = place / "drafted.py"
    save(draft, file)
    spec = importlib.util.spec_from_file_location("drafted", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(family: Family) -> dict[str, Any]:
    return {
        row.canonical: (row.shapes, row.tp, row.when, row.names["hf"], row.names["core"])
        for row in family.rows
    }


@pytest.mark.parametrize("name", CASES)
def test_a_draft_is_the_familys_own_file_but_for_what_it_asks(name: str, tmp_path: Path) -> None:
    raw = default_config(name, tmp_path)
    draft = new_family(tmp_path)
    drafted: Family = module_of(draft, tmp_path).FAMILY
    own = families()[name]
    raw["architectures"] = [own.architectures[0]]
    differences = config_differences(own.read_hf(raw), drafted.read_hf(raw))
    fields = {field for field, _, _ in differences}
    ours, theirs = rows_of(own), rows_of(drafted)
    rows = {row for row in {*ours, *theirs} if ours.get(row) != theirs.get(row)}
    assert fields | rows == set(ASKED[name])
    for function in ASKED[name].values():
        assert any(function in question for question in draft.questions)
    assert draft.text.count(f"# {MARKER}: ") == len(draft.questions)
    assert draft.base != name
    assert_clean(tmp_path / "drafted.py")


def assert_clean(file: Path) -> None:
    """ruff finds nothing to change in a file."""
    settings = ("--config", str(ROOT / "pyproject.toml"), str(file))
    for command in (("check",), ("format", "--check")):
        ruff = [sys.executable, "-m", "ruff", *command, *settings]
        assert subprocess.run(ruff, capture_output=True, check=False).returncode == 0, command


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["afmoe", "jamba", "deepseek_v3", "qwen3_next", "falcon", "gpt2", "openai-gpt"]
)
def test_a_draft_of_any_architecture_is_a_module_that_ruff_accepts(
    model_type: str, tmp_path: Path
) -> None:
    default_config(model_type, tmp_path)
    draft = new_family(tmp_path / "config.json")
    family: Family = module_of(draft, tmp_path).FAMILY
    assert family.model_type == model_type
    assert rows_of(family) == rows_of(draft.family)
    assert dict(family.fixed) == dict(draft.family.fixed)
    assert dict(family.only) == dict(draft.family.only)
    assert_clean(tmp_path / "drafted.py")


def test_a_draft_asks_only_about_functions_that_the_class_uses(tmp_path: Path) -> None:
    """Gemma 3's file in transformers has a multimodal model too. Its `layer_types` follow from the number of layers."""
    default_config("gemma3_text", tmp_path)
    draft = new_family(tmp_path)
    questions = "\n".join(draft.questions)
    assert "Gemma3Attention.forward" in questions
    assert "Projector" not in questions
    assert "ConditionalGeneration" not in questions
    assert "if layer_types is missing" in questions
    assert "sliding_attention" not in draft.text.partition("FAMILY = ")[0].partition("# DECIDE")[0]


def test_a_draft_never_replaces_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("mine")
    with pytest.raises(TargetExists, match="already exists"):
        save(Draft(families()["llama"], "draft", "llama", ()), file)
    assert file.read_text() == "mine"


def test_an_existing_family_is_named(tmp_path: Path) -> None:
    default_config("mistral", tmp_path)
    outcome = run("new-family", tmp_path)
    assert outcome.status == 0, outcome.err
    assert "the family mistral has this architecture already" in outcome.err


def test_a_place_without_a_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no config\.json"):
        new_family(tmp_path)


def test_a_draft_for_a_multimodal_model_is_that_of_its_language_model(tmp_path: Path) -> None:
    """The family of the language model serves the whole model too."""
    whole = default_config("dots3_note", tmp_path)
    assert whole["model_type"] == "dots3_note"
    reference = reference_of(tmp_path / "config.json")
    found = (reference.architecture, reference.model_type, reference.raw["architectures"])
    assert found == ("Dots3NoteForCausalLM", "dots3_note_text", ["Dots3NoteForCausalLM"])
    assert "model.embed_tokens.weight" in reference.tensors
    assert not any("vision" in name for name in reference.tensors)


def test_too_many_experts_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """Doge's default has 16,384 experts, which it uses only with is_moe."""
    raw = default_config("doge", tmp_path)
    with pytest.raises(CorruptCheckpoint, match="state fewer in a copy of the file"):
        reference_of(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_experts": 64}))
    assert reference_of(tmp_path / "config.json").architecture == "DogeForCausalLM"


def test_a_draft_that_cannot_read_the_configuration_says_how_to_compare_names(
    tmp_path: Path,
) -> None:
    default_config("zamba", tmp_path)
    draft = new_family(tmp_path)
    (asked,) = (each for each in draft.questions if "no tensor names were compared" in each)
    assert "`megaconv inspect` of a small model" in asked


def test_an_architecture_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobodys", "hidden_size": 8}')
    with pytest.raises(UnknownFamily, match=r"/config.json: transformers"):
        new_family(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 8}, "can't read it: .*Class validation error"),
        ({"hidden_act": "nobodys"}, "LlamaForCausalLM can't be built from it: KeyError"),
    ],
)
def test_a_configuration_that_transformers_refuses_is_refused(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **changed}))
    with pytest.raises(UnknownFamily, match=message):
        new_family(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([1], "expected a JSON object, found list"),
        ({"model_type": ["llama"]}, "model_type should be a name, found"),
        (
            {"model_type": "llama", "num_hidden_layers": 10**9},
            "num_hidden_layers should be at most",
        ),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "experts.count should be at most"),
        ({"model_type": "mixtral", "num_local_experts": 60_000}, "32 layers of 60,000 experts"),
    ],
)
def test_an_impossible_configuration_is_refused_before_a_class_is_built(
    raw: object, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(CorruptCheckpoint, match=message) as caught:
        new_family(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "model_type should be a word, found None"),
        ({"model_type": "a-class\n"}, r"has no model_type 'a-class\\n'"),
        ({"model_type": "llama", "to_json_string": 1}, "can't read it: TypeError"),
        ({"model_type": "llama", "num_attention_heads": 0}, "can't read it: ZeroDivisionError"),
    ],
)
def test_an_odd_configuration_is_refused_in_one_line(
    raw: object, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnknownFamily, match=message) as caught:
        new_family(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_names_code_runs_none(tmp_path: Path) -> None:
    plain = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    expected = reference_of(tmp_path / "config.json")
    code = {
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
        "_attn_implementation": "nobody/kernel",
        "attn_implementation": "nobody/kernel",
        "attribute_map": {"mine": "hidden_size"},
    }
    (tmp_path / "config.json").write_text(json.dumps(plain | code))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    found = reference_of(tmp_path / "config.json")
    assert (found.aliases, found.tensors) == (expected.aliases, expected.tensors)
    assert not code.keys() & found.raw.keys()
    assert not (tmp_path / "ran").exists()


def test_a_model_with_several_language_models_is_refused_in_one_line(tmp_path: Path) -> None:
    default_config("musicgen", tmp_path)
    outcome = run("new-family", tmp_path)
    said = "config.json: transformers can't read it: ValueError: Multiple valid text configs"
    assert_refused(outcome, 3, said)


def test_transformers_4_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match=r"needs transformers 5 or newer, and 4\.57\.1"):
        new_family(tmp_path)


@pytest.mark.parametrize(
    "value", [float("inf"), -float("inf"), "a\r\t\x00'\u00e9", [None, True, (1,)]]
)
def test_the_source_of_a_value_is_read_as_the_value(value: object) -> None:
    assert eval(literal(value)) == value
