"""The knowledge of the parallel core: groups and collectives, and nothing of the model."""

import ast

from tests.package.test_architecture import fail_at, imports, modules

FILES = dict(modules("megatron_lite"))
ROOM = "megatron_lite.parallel."
GROUPS_AND_COLLECTIVES = {f"{ROOM}comm", f"{ROOM}grid"}
OF_A_LAYER = {
    f"{ROOM}{name}" for name in ("comm", "tensor", "parameter_kinds", "payload", "context")
}
"""The parts of the parallel core that models are made with."""


def inside(*rooms: str) -> list[str]:
    return [
        name for name in FILES if name.startswith(tuple(f"megatron_lite.{room}." for room in rooms))
    ]


def test_collectives_have_their_names_in_one_file_and_groups_in_another() -> None:
    """Types are free to be named anywhere."""
    fail_at(
        [
            f"{FILES[name]}:{node.lineno}: {name} imports {ast.unparse(node)}; comm.py and grid.py alone do"
            for name in (
                *inside("models", "optimizer", "parallel", "products", "rank"),
                "megatron_lite.engine",
            )
            if name not in GROUPS_AND_COLLECTIVES
            for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
            and "torch.distributed" in ast.unparse(node)
            if not isinstance(node, ast.ImportFrom)
            or not {item.name for item in node.names} <= {"ProcessGroup", "Work"}
        ]
    )


def test_a_model_knows_nothing_of_stages_buckets_and_checkpoints() -> None:
    fail_at(
        [
            f"{FILES[name]}:{item.line}: {name} imports {item.module}"
            for name in inside("models")
            for item in imports(name, FILES[name])
            if item.module.startswith(ROOM) and item.module not in OF_A_LAYER
        ]
    )
