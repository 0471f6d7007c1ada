"""What runs on pairs (DPO) and on rated answers (KTO) have in common: adapters at any layout, and flags that are refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.loop import test_preference_runs, test_rated_runs
from tests.trainer.loop.launches import LLAMA, train
from tests.trainer.loop.test_manners import refused

BASE = test_rated_runs.BASE
PAIRS = f"{test_preference_runs.WORDS} --eval-iters 0 --train-iters 4 --save ckpt"


@pytest.mark.parametrize(
    ("words", "write", "figures"),
    [
        (PAIRS, test_preference_runs.write_pairs, test_preference_runs.figures),
        (test_rated_runs.WORDS, test_rated_runs.write_rated, test_rated_runs.figures),
    ],
    ids=["dpo", "kto"],
)
def test_adapters_are_trained_at_another_layout(
    words: str, write: Any, figures: Any, tmp_path: Path
) -> None:
    for name, size, layout in (
        ("alone", 1, ""),
        ("four", 4, "--tp 2 --sequence-parallel --use-distributed-optimizer"),
    ):
        write(tmp_path / name)
        train(tmp_path / name, size, f"{words} {layout} --lora-rank 4")
    for one, other in zip(figures(tmp_path / "alone"), figures(tmp_path / "four"), strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    assert (tmp_path / "four" / "ckpt" / "iter_0000004" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("objective", ["--dpo", "--kto"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("{0}", "{0} needs --load, which is the reference model"),
        ("{0}-beta 0.2", "{0}-beta requires {0}"),
        (f"{{0}} --load {BASE} {{0}}-beta 0", "{0}-beta 0 must be more than 0"),
        (f"{{0}} --load {BASE} --teacher-load {BASE}", "--teacher-load and {0} are two objectives"),
        (f"{{0}} --load {BASE} --finetune-form text", "--finetune-form names a form of examples"),
        ("{0} --load ckpt --save ckpt", "{0}: --load is the reference model and has to stay as it is"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, objective: str, tmp_path: Path
) -> None:
    command = f"pretrain {LLAMA.replace('--mock-data ', '')} --train-iters 2"
    given = f"{command} --finetune-data data.jsonl {flags.format(objective)}"
    assert words.format(objective) in refused(tmp_path, given)
