"""Random journeys of quantized models: quantized from any format they are the same files, and read they are the same model."""

import shutil
from pathlib import Path
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import megaconv
from megaconv.mlx.names import WRITTEN
from tests.engine.journeys import (
    FAMILIES,
    Options,
    attempt,
    keys_of,
    moved,
    ordinary,
    run_in_temporary_directory,
    write_possible,
)
from tests.engine.test_chains import check_same_weights

FORMS: tuple[Options, ...] = (
    *({"saver": "hf", "quantize": form} for form in ("fp8-block", "fp8-per-channel", "nvfp4")),
    *(
        {"saver": "hf", "quantize": form, "options": {"group_size": "32"}}
        for form in ("w4a16", "w8a16")
    ),
    {"saver": "mlx", "options": {"bits": "4", "group_size": "32"}},
    {"saver": "mlx", "options": {"mode": "mxfp8"}},
)


def run_journey(number: int, folder: Path) -> None:
    """Run the journey of a number. Models and forms are drawn until a model can have the form."""
    random = Random(number)
    source, quantized = folder / "source", folder / "quantized"
    while True:
        families = random.choice((FAMILIES, sorted(WRITTEN)))
        config = write_possible(families, source, random, ordinary)
        form = random.choice(FORMS)
        if attempt(folder, megaconv.convert, source, quantized, **form, verify=True):
            break
        shutil.rmtree(source)
    made = [form]
    elsewhere = moved(source, folder / "elsewhere", config, random)
    megaconv.convert(elsewhere, folder / "again", **form)
    check_same_weights(folder / "again", quantized, made)
    assert keys_of(folder / "again") == keys_of(quantized)
    plain, back = folder / "plain", folder / "back"
    megaconv.convert(quantized, plain, saver="hf")
    expected = megaconv.fingerprint(plain)
    assert megaconv.fingerprint(quantized) == expected
    at = moved(quantized, folder / "moved", config, random)
    assert megaconv.fingerprint(at) == expected
    megaconv.convert(at, back, saver="hf")
    check_same_weights(back, plain, made)
    assert keys_of(back) == keys_of(plain)


@given(st.integers(0, 1 << 30))
@settings(max_examples=2, phases=[Phase.generate])
def test_a_quantized_model_is_the_same_from_everywhere(number: int) -> None:
    run_in_temporary_directory(run_journey, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(300))
def test_many_quantized_models_are_the_same_from_everywhere(number: int) -> None:
    run_in_temporary_directory(run_journey, number)
