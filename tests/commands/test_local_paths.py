"""Every command refuses a URI where it needs a local path, and creates nothing for it below the working directory."""

import typing
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.commands.cli import app, load
from megaconv.errors import UsageError
from megaconv.hub import tokenizer_directory
from megaconv.local_paths import local_path, local_word
from megatron_lite.cli import main
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import flags, make_settings
from megatron_lite.settings.value_types import type_hints
from tests.models import write_llama
from tests.runs import assert_refused, run

URIS = (
    "s3://bucket/out",
    "msc://bucket/out",
    "hf://org/name",
    "file:///tmp/out",
    "S3://b",
    "msc://profile/x",
    " s3://bucket/out",
    "my_store://bucket/out",
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only thing in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_llama(tmp_path / "model", layers=1)


@pytest.mark.parametrize("uri", URIS)
def test_a_uri_is_refused_as_text_and_as_the_path_that_was_made_of_it(uri: str) -> None:
    for place in (uri, Path(uri)):
        with pytest.raises(
            UsageError, match="is a URI, and only a local path can be given here"
        ) as found:
            local_path(place)
        assert len(str(found.value)) < 200


def test_the_remedy_for_the_hub_is_a_download_or_a_push() -> None:
    with pytest.raises(UsageError, match="`hf download` makes a local copy, `megaconv push` puts"):
        local_path("hf://org/model")


@pytest.mark.parametrize(
    "path",
    [
        "out",
        "a/b",
        "/a/b",
        "./s3:/bucket",
        "a:b/c",
        "-",
        "c:/x",
        "",
        "a//b",
        "2024-01-01T10:00/run",
    ],
)
def test_a_path_is_taken_as_it_is(path: str) -> None:
    assert local_word(path) == path
    assert local_path(path) == Path(path)


@pytest.mark.parametrize(
    "words",
    [
        "convert model msc://bucket/out --saver hf",
        "convert model msc://bucket/out --saver hf --dry-run",
        "convert model msc://bucket/out --saver hf --overwrite",
        "convert model --save-dir msc://bucket/out --saver core",
        "convert model out --saver hf --config s3://bucket/config",
        "convert model out --saver hf --base s3://bucket/base",
        "merge model adapter --save-dir msc://bucket/out",
        "inspect model --html s3://bucket/page.html",
        "diff model model --stats --html s3://bucket/page.html",
        "push msc://bucket/model org/name --dry-run",
        "demo --dir s3://bucket/demo",
    ],
)
def test_every_path_of_a_command_refuses_a_uri(model: Path, words: str) -> None:
    assert_refused(run(*words.split()), 2, "://bucket/", "is a URI")
    assert list(model.parent.iterdir()) == [model]


def test_every_option_that_is_a_path_refuses_a_uri() -> None:
    """The test finds options that are added later, too."""
    found = 0
    load()
    for command in app.registered_commands:
        assert command.callback is not None
        for hint in typing.get_type_hints(command.callback, include_extras=True).values():
            if typing.get_origin(hint) is typing.Annotated and Path in (
                hint.__origin__,
                *typing.get_args(hint.__origin__),
            ):
                assert [option.parser for option in hint.__metadata__] == [local_path], hint
                found += 1
    assert found > 6


def elsewhere(place: Any) -> Any:
    """The same place with a scheme that outputs don't have."""
    return type(place)(str(place).replace("s3:", "msc:"))


def test_the_python_interface_refuses_a_uri(model: Path) -> None:
    calls: list[Any] = [
        lambda place: megaconv.convert(model, elsewhere(place), saver="hf"),
        lambda place: megaconv.convert(model, elsewhere(place), saver="hf", dry_run=True),
        lambda place: megaconv.convert(model, "out", saver="hf", config=place),
        lambda place: megaconv.convert(model, "out", saver="hf", base=place),
        lambda place: megaconv.open(model, config=place),
        lambda place: megaconv.push(elsewhere(place), "org/name", dry_run=True),
    ]
    for call in calls:
        for place in ("s3://bucket/out", Path("s3://bucket/out")):
            with pytest.raises(UsageError, match="is a URI"):
                call(place)
    assert list(model.parent.iterdir()) == [model]


# The trainer.

REMOTE = {
    "bert_load",
    "load",
    "pretrained_checkpoint",
    "tokenizer_model",
    "lora_load",
    "teacher_load",
}
STORED = {"save", "data_path", "train_data_path", "valid_data_path", "test_data_path"}


def test_every_text_of_the_trainer_that_is_no_hub_id_refuses_a_uri() -> None:
    texts = {name for name, hint in type_hints().items() if hint in (str, tuple[str, ...])}
    assert {name for name in flags() if flags()[name][1].metadata["remote"]} == REMOTE | STORED
    for name in texts - REMOTE - STORED:
        for value in ("s3://bucket/x", ["0.3", "s3://bucket/x"]):
            with pytest.raises(UsageError, match="s3://bucket/x: is a URI"):
                make_settings({name: value})
    for name in REMOTE:
        make_settings({name: "hf://org/name"})
    for name in STORED:
        make_settings({name: "s3://bucket/x"})
        with pytest.raises(UsageError, match="msc://bucket/x: is a URI"):
            make_settings({name: "msc://bucket/x"})


@pytest.mark.parametrize(
    "words",
    [
        "pretrain --mock-data --save msc://bucket/run",
        "pretrain --data-path 0.5 msc://bucket/a 0.5 msc://bucket/b",
        "finetune --load model --finetune-data s3://bucket/a.jsonl",
        "pretrain --config-file s3://bucket/a.yaml",
        "plan --load model --save msc://bucket/run",
        "preprocess --input s3://bucket/a.jsonl --tokenizer-type NullTokenizer --output-prefix out",
        "preprocess --input a.jsonl --tokenizer-type NullTokenizer --output-prefix s3://bucket/out",
        "preprocess --input a.jsonl --tokenizer-type GPT2BPETokenizer --vocab-file s3://bucket/v --output-prefix out",
        "generate --load model --output s3://bucket/out.jsonl text",
        "generate --load model --prompts-file s3://bucket/in.jsonl",
        "score --load model --input s3://bucket/in.jsonl",
        "serve --load model --api-key-file s3://bucket/key",
        "evaluate --load model --task LAMBADA --valid-data s3://bucket/a.jsonl",
    ],
)
def test_every_path_of_the_trainers_commands_refuses_a_uri(
    model: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "is a URI, and only a local path can be given here" in message
    assert "Traceback" not in message
    assert list(model.parent.iterdir()) == [model]


def test_a_tokenizer_that_is_no_hub_id_refuses_a_uri() -> None:
    with pytest.raises(UsageError, match="s3://bucket/t: is a URI"):
        tokenizer_directory("s3://bucket/t")


def test_a_uri_in_a_file_of_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("save: msc://bucket/run\n")
    with pytest.raises(UsageError, match="msc://bucket/run: is a URI"):
        parse("pretrain", ["--yaml-cfg", str(tmp_path / "run.yaml")])


def test_a_home_that_no_shell_expanded_is_refused_for_outputs_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = "^~/run: ~ is for a shell to expand"
    with pytest.raises(UsageError, match=message):
        local_word("~/run")
    with pytest.raises(UsageError, match=message):
        make_settings({"save": "~/run"})
    (tmp_path / "~" / "run").mkdir(parents=True)
    assert local_word("~/run") == "~/run"
