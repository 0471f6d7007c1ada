"""tests/stores/real.sh, against the servers of the tests: it passes, and leaves nothing."""

import os
import subprocess
import sys

import pytest

from tests.documentation.test_documentation import ROOT
from tests.stores.conftest import BUCKET
from tests.stores.small_store import SmallStore

SERVERS = {
    "s3": ("s3", "writable"),
    "gs": ("gs", "google"),
    "az": ("az", "azure"),
    "azurite": ("az", "microsofts"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.azurite if name == "azurite" else ())
        for name in SERVERS
    ],
)
def test_the_script_passes_and_leaves_nothing(request: pytest.FixtureRequest, name: str) -> None:
    scheme, server = SERVERS[name]
    store: SmallStore = request.getfixturevalue(server)
    ended = subprocess.run(
        ["sh", "tests/stores/real.sh", f"{scheme}://{BUCKET}", "dry"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert "17 passed" in ended.stdout
    assert store.all_keys() == []
