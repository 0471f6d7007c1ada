"""Random journeys: a model with all its files goes through several formats, is changed on the way, and comes back.

A twin goes the shortest way, from Hugging Face to Hugging Face, with the same changes. Both must arrive as the same files.
The number in a failure repeats a journey: `run_journey(17, folder)`. `make explore` draws new ones.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import megaconv
from megaconv.engine.record import RECORD_NAME
from megaconv.errors import CheckpointError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from tests.engine.journeys import (
    FILES,
    change,
    keys_of,
    run_in_temporary_directory,
    target,
    write_traveller,
)
from tests.engine.test_chains import check_same_weights
from tests.forks import Fork

HOPS = 3
TRIES = 12
"""Targets that are drawn for a journey. Some are refused."""
ALWAYS = ("hf", "dcp", "deepspeed")
"""Savers that any model from Hugging Face can be written with."""
BESIDE = (*FILES, "tokenizer.json", "tokenizer_config.json")
KILLED = """
import os, logging
os.fsync = lambda descriptor: None
logging.disable(logging.CRITICAL)
from tests.trust.kills import Steps, journal_every_tensor
import megaconv
journal_every_tensor()
Steps(fatal={step}).install()
megaconv.convert({source!r}, {output!r}, resume=True, **{options!r})
"""


@dataclass
class Journey:
    """A model on its way, and its twin."""

    folder: Path
    random: Random
    at: Path
    twin: Path
    made: list[dict[str, Any]] = field(default_factory=list)
    """The options of the conversions so far."""

    @property
    def config(self) -> ModelConfig:
        """The model, as the twin's config.json describes it."""
        return read_config(self.twin / CONFIG_NAME)[1]


def run_journey(number: int, folder: Path) -> None:
    """Run the journey of a number and check each output."""
    random = Random(number)
    changes = random.random() < 0.6
    source = write_traveller(folder / "source", random, changes=changes)
    twin = folder / "twin"
    megaconv.convert(source, twin, saver="hf")
    journey = Journey(folder, random, source, twin)
    hop_of_change = random.randrange(HOPS) if changes else None
    for _ in range(TRIES):
        if len(journey.made) == hop_of_change:
            change_twin(journey)
            hop_of_change = None
        elif len(journey.made) < HOPS:
            hop(journey, target(journey.config, random), {})
    check_arrival(journey)


def change_twin(journey: Journey) -> None:
    """Change the twin, and the model with its next conversion. Nothing happens if no such model is possible."""
    chosen = change(journey.config, journey.random)
    output = journey.folder / "changed twin"
    try:
        megaconv.convert(journey.twin, output, saver="hf", **chosen)
    except CheckpointError:
        return
    before, journey.twin = journey.twin, output
    for _ in range(TRIES):
        changed = len(journey.made)
        hop(journey, target(journey.config, journey.random), chosen)
        if len(journey.made) > changed:
            return
    journey.twin = before  # no drawn target can have the changed model


def hop(journey: Journey, options: dict[str, Any], changed: dict[str, Any]) -> None:
    """One conversion. Its output replaces the last one, unless the conversion is refused."""
    output = journey.folder / f"at {len(journey.made)}"
    asked = {**options, **changed}
    if journey.random.random() < 0.1:
        kill(journey, output, asked)
    listed = {path.name for path in journey.folder.iterdir() if not path.name.startswith(".")}
    try:
        report = megaconv.convert(journey.at, output, resume=True, **asked)
    except CheckpointError as error:
        refusal = error
        report = None
    left = {path.name for path in journey.folder.iterdir()}
    if report is None:
        assert left == listed
        check_refusal(asked, str(refusal))
        return
    assert left == listed | {output.name}, journey.made
    journey.at = output
    journey.made.append(asked)
    check_output(journey, report.files)


def check_refusal(asked: dict[str, Any], refusal: str) -> None:
    """It is one line. Formats under transformers' names hold every model that the twin's directory holds."""
    assert "\n" not in refusal
    names = asked.get("options", {}).get("names", "transformers")
    assert asked["saver"] not in ALWAYS or "torchtitan" in names, (asked, refusal)


def kill(journey: Journey, output: Path, options: dict[str, Any]) -> None:
    """Start the same conversion in a process that is killed at a random step."""
    code = KILLED.format(
        step=journey.random.randrange(300),
        source=str(journey.at),
        output=str(output),
        options=options,
    )
    Fork(["-c"], code).communicate(timeout=60)
    if output.exists():  # the process was faster
        shutil.rmtree(output)


def check_output(journey: Journey, planned: dict[str, int]) -> None:
    """The files have the planned sizes. The weights are the twin's, and so are the numbers of inspect."""
    files = [path for path in journey.at.rglob("*") if path.is_file()]
    found = {str(path.relative_to(journey.at)): path.stat().st_size for path in files}
    found.pop(RECORD_NAME)
    assert found == {name: size for name, size in planned.items() if name != RECORD_NAME}
    ours, theirs = megaconv.fingerprint(journey.at), megaconv.fingerprint(journey.twin)
    assert ours.tensors == theirs.tensors, journey.made
    shown = megaconv.inspect(journey.at).to_json()
    expected = megaconv.inspect(journey.twin).to_json()
    for name in ("family", "parameters", "bytes", "dtypes"):
        assert shown[name] == expected[name], (name, journey.made)


def check_arrival(journey: Journey) -> None:
    """The model and its twin are the same files."""
    back = journey.folder / "back"
    megaconv.convert(journey.at, back, saver="hf")
    check_same_weights(back, journey.twin, journey.made)
    assert keys_of(back) == keys_of(journey.twin), journey.made
    assert files_beside(back) == files_beside(journey.twin), journey.made


def files_beside(model: Path) -> dict[str, bytes]:
    return {name: (model / name).read_bytes() for name in BESIDE if (model / name).exists()}


@given(st.integers(0, 1 << 30))
@settings(max_examples=5, phases=[Phase.generate])
def test_a_journey_ends_where_the_shortest_way_does(number: int) -> None:
    run_in_temporary_directory(run_journey, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(400))
def test_many_journeys_end_where_the_shortest_way_does(number: int) -> None:
    run_in_temporary_directory(run_journey, number)
