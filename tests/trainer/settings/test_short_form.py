"""`finetune MODEL DATA`: the settings that follow, recipes, the help on one screen and completion."""

import json
import subprocess
from pathlib import Path

import pytest

from megaconv.errors import UsageError
from megaconv.families import family_of_hf
from megatron_lite.commands import completion, recipes
from megatron_lite.planning.memory import stage_memory
from megatron_lite.planning.stages import Described
from megatron_lite.settings.arguments import make_parser, parse
from megatron_lite.settings.contradictions import check_flags
from megatron_lite.settings.help_text import short_help
from megatron_lite.settings.objective_flags import check_objective_flags
from megatron_lite.settings.recipes import description, names, recipe_path
from megatron_lite.settings.run_options import model_options, optimizer_options
from megatron_lite.settings.short_form import ShortForm, positionals
from megatron_lite.settings.sizes import work_out

PUBLISHED = Path(__file__).parents[2] / "fixtures" / "published_models.json"


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "1 2 3"}\n')
    return str(path)


def test_model_and_data_set_everything_else(data: str) -> None:
    settings, _ = parse("finetune", ["--save", "out"], ShortForm("model", data))
    assert settings.checkpointing.load == "model"
    assert settings.data.finetune_data == (data,)
    assert settings.training.epochs == 3
    assert settings.training.eval_iters == 0
    assert settings.optimizer.lr_decay_style == "cosine"
    assert settings.checkpointing.resume
    assert settings.logging.guide
    check_flags(settings)
    check_objective_flags(settings)


def test_flags_win_over_the_recipe_and_the_recipe_over_defaults(data: str) -> None:
    words = ["--recipe", "llama3-70b-lora", "--lr", "3e-4"]
    settings, _ = parse("finetune", words, ShortForm("model", data))
    assert settings.optimizer.lr == 3e-4
    assert settings.training.epochs == 2
    assert settings.checkpointing.load == "model"
    alone, _ = parse("finetune", [*words, "--finetune-data", data])
    assert alone.checkpointing.load == "meta-llama/Llama-3.3-70B-Instruct"


def test_flags_win_over_other_words_for_the_same_in_a_recipe_or_a_file(
    data: str, tmp_path: Path
) -> None:
    """The recipe has epochs and a share of warm-up, the file a batch and a precision."""
    in_file = tmp_path / "run.yaml"
    in_file.write_text("global_batch_size: 8\nbf16: true\n")
    words = "--train-samples 40 --lr-warmup-samples 4 --step-batch-size-schedule 0:4 --fp32"
    given = [*words.split(), "--config-file", str(in_file), "--recipe", "llama3-8b-lora"]
    settings, _ = parse("finetune", given, ShortForm("model", data))
    check_flags(settings)
    assert settings.training.epochs is None
    assert settings.training.global_batch_size is None
    assert settings.optimizer.lr_warmup_fraction is None
    assert (settings.precision.fp32, settings.precision.bf16) == (True, False)


def test_a_chosen_length_replaces_the_epochs(data: str) -> None:
    settings, _ = parse("finetune", ["--train-iters", "5"], ShortForm("model", data))
    assert settings.training.epochs is None
    assert settings.training.train_iters == 5


def test_the_prefix_of_a_corpus_is_read_as_one(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus_text_document"
    Path(f"{prefix}.idx").touch()
    settings, _ = parse("finetune", [], ShortForm("model", str(prefix)))
    assert settings.data.data_path == (str(prefix),)
    assert settings.data.split == "1,0,0"
    check_flags(settings)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_of_a_corpus_is_refused_with_its_prefix(suffix: str, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus_text_document"
    for name in ("bin", "idx"):
        Path(f"{prefix}.{name}").touch()
    with pytest.raises(UsageError, match=f"give its prefix {prefix}"):
        parse("finetune", [], ShortForm("model", f"{prefix}.{suffix}"))


def test_several_ranks_share_optimizer_state_and_a_gpu_computes_in_bf16(data: str) -> None:
    settings, _ = parse("finetune", [], ShortForm("model", data, ranks=4, bf16=True))
    assert settings.parallel.use_distributed_optimizer
    assert settings.precision.bf16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model"], "DATA is missing.* megatron-lite finetune model DATA --save"),
        (["model", "data", "more", "--save", "x"], "takes MODEL and DATA first"),
    ],
)
def test_other_numbers_of_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        positionals(words)


def test_data_that_is_not_there_and_a_second_model_are_refused(data: str) -> None:
    with pytest.raises(UsageError, match="no such file or directory, and no indexed corpus"):
        parse("finetune", [], ShortForm("model", "nowhere"))
    with pytest.raises(UsageError, match="--load is already set by MODEL DATA"):
        parse("finetune", ["--load", "other"], ShortForm("model", data))
    with pytest.raises(UsageError, match="did you mean llama3-8b-lora"):
        parse("finetune", ["--recipe", "llama-8b-lora"])


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_a_run_that_can_start(name: str, data: str) -> None:
    settings, ignored = parse("finetune", ["--recipe", name, "--finetune-data", data])
    check_flags(settings)
    check_objective_flags(settings)
    assert not ignored
    assert recipe_path(name).read_text().startswith("# ")


def test_the_recipe_for_all_weights_of_an_8b_model_fits_its_devices(data: str) -> None:
    settings, _ = parse("finetune", ["--recipe", "llama3-8b-full", "--finetune-data", data])
    published = {each["model"]: each["config"] for each in json.loads(PUBLISHED.read_text())}
    raw = published["meta-llama/Llama-3.1-8B-Instruct"]
    config = family_of_hf(raw, "config.json").read_hf(raw)
    options = model_options(settings, {"hidden_dropout": 0.0, "attention_dropout": 0.0})
    run = Described(
        config, work_out(settings, config, options, 8), options, optimizer_options(settings)
    )
    assert max(memory.total for memory in stage_memory(run)) < 70e9


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in names())
    assert recipes.main(["llama3-8b-lora"]) == 0
    assert "lora_rank: 16" in capsys.readouterr().out
    assert recipes.main(["nothing"]) == 2
    capsys.readouterr()
    assert recipes.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: description(name) for name in names()}
    with pytest.raises(UsageError, match="--json is for the list"):
        recipes.main(["llama3-8b-lora", "--json"])


@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_help_fits_on_a_screen_and_names_flags_that_exist(command: str) -> None:
    text = short_help(command)
    assert len(text.splitlines()) <= 45
    every = make_parser(command).format_help()
    named = {word.strip(",()[]") for word in text.split() if word.startswith("--")}
    assert not {flag for flag in named - {"--help-all"} if flag.partition("=")[0] not in every}


@pytest.mark.parametrize(
    "words", ["'megatron-lite' 'fine'", "'megatron-lite' 'finetune' '--lora-r'"]
)
def test_bash_completes_commands_and_flags(words: str) -> None:
    count = len(words.split()) - 1
    program = f"{completion.script('bash')}\nCOMP_WORDS=({words}); COMP_CWORD={count}; _megatron_lite; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == ("finetune" if count == 1 else "--lora-rank")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_flag(shell: str) -> None:
    assert "lora-rank" in completion.script(shell)
