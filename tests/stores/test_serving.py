"""A checkpoint in a store is served as a Hugging Face repository. Only the bytes that clients read leave the store."""

from pathlib import Path

from tests.models import write_llama
from tests.runs import run
from tests.serving.servers import ask, serving
from tests.stores.conftest import put
from tests.stores.proxy import Proxy


def test_a_run_in_a_store_is_a_repository(store: Proxy, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    outcome = run("convert", source, tmp_path / "core", "--saver", "core", "--tp", 2)
    assert outcome.status == 0, outcome.err
    uri = put(store, tmp_path / "core", "run")
    outcome = run("convert", tmp_path / "core", tmp_path / "hf", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    with serving({"org/run": uri}) as server:
        reply = ask(server, "/org/run/resolve/main/model.safetensors")
    assert reply.status == 200
    assert reply.body == (tmp_path / "hf" / "model.safetensors").read_bytes()
