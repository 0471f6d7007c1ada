"""Who knows what in the parallel core: groups, collectives, and what a model has no business with."""

import ast

from tests.test_architecture import fail_at, imports, modules

FILES = dict(modules("megatron_lite"))
MODEL = ("model", "tensor", "attention", "rotary", "loss", "recompute", "rng")
CORE = (*MODEL, "pipeline", "buckets", "zero", "clip", "precision", "parameters", "weights", "engine")
KEPT_FROM_THE_MODEL = {"grid", "pipeline", "buckets", "zero", "clip", "parameters", "engine", "checkpoint", "weights"}


def test_collectives_have_their_names_in_one_file_and_groups_in_another() -> None:
    """Types are free to be named anywhere."""
    fail_at(
        [
            f"{FILES[name]}:{node.lineno}: {name} imports {ast.unparse(node)}; comm.py and grid.py alone do"
            for name in (f"megatron_lite.{word}" for word in CORE)
            for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom) and "torch.distributed" in ast.unparse(node)
            if not isinstance(node, ast.ImportFrom)
            or not {item.name for item in node.names} <= {"ProcessGroup", "Work"}
        ]
    )


def test_a_model_knows_nothing_of_stages_buckets_and_checkpoints() -> None:
    fail_at(
        [
            f"{FILES[name]}:{item.line}: {name} imports {item.module}"
            for name in (f"megatron_lite.{word}" for word in MODEL)
            for item in imports(name, FILES[name])
            if item.module.removeprefix("megatron_lite.") in KEPT_FROM_THE_MODEL
        ]
    )
