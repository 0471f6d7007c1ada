"""Pieces of hostile pickles: calls that would run a command, in every way in which a pickle can ask for a call.

A gadget pushes one object, so that it can stand alone or be hidden in a pickle that is otherwise valid. If anything ran
it, a file called EXECUTED would appear, or the audit hook of server.py would see it.
"""

import pickletools
import struct
from collections.abc import Callable
from random import Random

MARK = "EXECUTED"
_COMMAND = f"touch {MARK}"
_CODE = f"open('{MARK}', 'w')"

CALLS: list[tuple[str, str, tuple[object, ...]]] = [
    ("posix", "system", (_COMMAND,)),
    ("os", "system", (_COMMAND,)),
    ("nt", "system", (_COMMAND,)),
    ("os", "popen", (_COMMAND,)),
    ("subprocess", "Popen", (["touch", MARK],)),
    ("subprocess", "check_output", (["touch", MARK],)),
    ("pty", "spawn", (["touch", MARK],)),
    ("builtins", "eval", (_CODE,)),
    ("builtins", "exec", (_CODE,)),
    ("__builtin__", "eval", (_CODE,)),
    ("builtins", "open", (MARK, "w")),
    ("builtins", "__import__", ("antigravity",)),
    ("builtins", "getattr", ("", "__class__")),
    ("builtins", "compile", (_CODE, "x", "exec")),
    ("builtins", "print", ("x",)),
    ("builtins", "bytearray", (1 << 40,)),
    ("builtins", "range", (1 << 60,)),
    ("builtins", "list", ("x",)),
    ("io", "open", (MARK, "w")),
    ("_io", "FileIO", (MARK, "w")),
    ("pathlib", "Path.touch", (MARK,)),
    ("shutil", "rmtree", ("source",)),
    ("os", "unlink", ("source/config.json",)),
    ("os", "mkdir", (MARK,)),
    ("operator", "attrgetter", ("system",)),
    ("functools", "partial", ("x",)),
    ("functools", "reduce", ("x", "y")),
    ("importlib", "import_module", ("antigravity",)),
    ("runpy", "run_path", ("source/x.py",)),
    ("code", "interact", ()),
    ("webbrowser", "open", ("http://127.0.0.1:9",)),
    ("socket", "create_connection", (("127.0.0.1", 9),)),
    ("timeit", "timeit", (_CODE,)),
    ("cProfile", "run", (_CODE,)),
    ("pdb", "run", (_CODE,)),
    ("trace", "Trace", ()),
    ("pickle", "loads", (b"c",)),
    ("torch", "load", (MARK,)),
    ("torch.serialization", "load", (MARK,)),
    ("torch.hub", "load", ("x", "y")),
    ("torch.jit", "load", (MARK,)),
    ("torch.utils.cpp_extension", "load", ("x", ["y.c"])),
    ("torch.package", "PackageImporter", (MARK,)),
    ("torch._inductor.codecache", "compile_file", ("x",)),
    ("torch.distributed.rpc", "rpc_sync", ("x", "y")),
    ("torch.fx.graph_module", "reduce_graph_module", ({}, "import os")),
    ("torch.storage", "_load_from_bytes", (b"\x80\x02cposix\nsystem\n",)),
    ("torch.utils.data.datapipes.utils.decoder", "basichandlers", ("pickle", b"c")),
    ("numpy", "load", (MARK,)),
    ("numpy", "fromfile", ("source/config.json",)),
    ("numpy.testing._private.utils", "runstring", (_CODE, {})),
    ("numpy.core.multiarray", "_reconstruct", ("x", (1 << 60,), b"b")),
    ("numpy.f2py.crackfortran", "getlincoef", (_CODE, {})),
    ("numpy", "ndarray", ((1 << 40,),)),
    ("numpy.core.multiarray", "scalar", ("x", b"y")),
    ("numpy", "vectorize", ("x",)),
    ("numpy", "dtype", ("V9999999999",)),
    ("collections", "OrderedDict.fromkeys", ("x",)),
    ("collections", "Counter", ("x",)),
    ("argparse", "Namespace", ("x",)),
    ("argparse", "FileType.__call__", ("w", MARK)),
    ("megatron.core.enums", "system", (_COMMAND,)),
    ("megaconv.commands.demo", "run", ()),
    ("formats.pickle_guard", "load", (b".",)),
    ("signal", "raise_signal", (9,)),
    ("sys", "exit", (0,)),
    ("os", "_exit", (0,)),
    ("os", "abort", ()),
    ("ctypes", "CDLL", ("libc.so.6",)),
    ("_codecs", "encode", ("x" * 1000, "zip")),
    ("codecs", "decode", ("x", "unicode_escape")),
    ("types", "FunctionType", ()),
    ("types", "CodeType", ()),
    ("torch._utils", "_rebuild_tensor_v2", ("x", 0, (1 << 50,), (1,), False, {})),
    ("torch._utils", "_rebuild_parameter", ("x", True, {})),
    ("torch._tensor", "_rebuild_from_type_v2", ("x", "y", (), {})),
    ("torch._utils", "_rebuild_device_tensor_from_numpy", ("x",)),
    ("pathlib", "PosixPath", ("/etc/passwd",)),
    ("datetime", "datetime", ("x",)),
    ("copyreg", "_reconstructor", ("x", "y", "z")),
    ("copyreg", "add_extension", ("os", "system", 1)),
]


def gadget(random: Random) -> tuple[bytes, str]:
    """Instructions that push one object, and a description."""
    module, name, arguments = random.choice(CALLS)
    form, build = random.choice(_FORMS)
    return build(module, name, arguments), f"{form} {module}.{name}"


def value(thing: object) -> bytes:
    """The instructions for plain values."""
    if isinstance(thing, str):
        text = thing.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(thing, bytes):
        return b"B" + struct.pack("<I", len(thing)) + thing
    if isinstance(thing, bool):
        return b"\x88" if thing else b"\x89"
    if isinstance(thing, int):
        return number(thing)
    if isinstance(thing, tuple):
        return b"(" + b"".join(map(value, thing)) + b"t"
    if isinstance(thing, list):
        return b"](" + b"".join(map(value, thing)) + b"e"
    return b"}"


def number(thing: int) -> bytes:
    size = thing.bit_length() // 8 + 1
    content = thing.to_bytes(size, "little", signed=True)
    return (
        b"\x8a" + bytes([size]) + content
        if size < 256
        else b"\x8b" + struct.pack("<i", size) + content
    )


def _named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _on_stack(module: str, name: str) -> bytes:
    return value(module) + value(name) + b"\x93"


Form = Callable[[str, str, tuple[object, ...]], bytes]
_FORMS: list[tuple[str, Form]] = [
    ("REDUCE", lambda module, name, words: _named(module, name) + value(words) + b"R"),
    ("REDUCE", lambda module, name, words: _on_stack(module, name) + value(words) + b"R"),
    (
        "INST",
        lambda module, name, words: (
            b"(" + b"".join(map(value, words)) + f"i{module}\n{name}\n".encode()
        ),
    ),
    (
        "OBJ",
        lambda module, name, words: (
            b"(" + _named(module, name) + b"".join(map(value, words)) + b"o"
        ),
    ),
    ("NEWOBJ", lambda module, name, words: _named(module, name) + value(words) + b"\x81"),
    ("NEWOBJ_EX", lambda module, name, words: _on_stack(module, name) + value(words) + b"}\x92"),
    ("BUILD", lambda module, name, words: _named(module, name) + value(words) + b"b"),
    (
        "BUILD of a call",
        lambda module, name, words: (
            _named(module, name) + value(words) + b"\x81" + value(words) + b"b"
        ),
    ),
    ("alone", lambda module, name, words: _named(module, name)),
    (
        "as a state",
        lambda module, name, words: (
            _named("argparse", "Namespace") + b")\x81" + _named(module, name) + value(words) + b"Rb"
        ),
    ),
    ("as a key", lambda module, name, words: b"}" + _named(module, name) + value(words) + b"RNs"),
    ("as an identity", lambda module, name, words: _named(module, name) + value(words) + b"RQ"),
    ("EXT", lambda module, name, words: b"\x82\x01" + value(words) + b"R"),
    (
        "in an OrderedDict",
        lambda module, name, words: (
            _named("collections", "OrderedDict")
            + b")R"
            + value("x")
            + _named(module, name)
            + value(words)
            + b"Rs"
        ),
    ),
    (
        "as items",
        lambda module, name, words: (
            _named(module, name) + value(words) + b"R" + value("x") + value("y") + b"s"
        ),
    ),
    (
        "as an appended",
        lambda module, name, words: _named(module, name) + value(words) + b"R" + value("x") + b"a",
    ),
]


def monster(
    random: Random, counts: tuple[int, ...] = (100, 10_000, 1_000_000)
) -> tuple[bytes, str]:
    """Instructions that ask for too much: depth, sizes, memo indices, parts that multiply. counts: how often they repeat."""
    count = random.choice(counts)
    big = random.choice([2**31 - 1, 2**32 - 1, 2**62])
    choices = {
        "lists in lists": b"]" * count + b"a" * (count - 1),
        "tuples in tuples": b")" + b"\x85" * count,
        "dicts in dicts": (b"}" + b"K\x00") * count + b"N" + b"s" * count,
        "marks": b"(" * count + b"t",
        "a doubling list": b"]q\x00" + b"".join(b"](" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60)),
        "a list of itself": b"]q\x00h\x00a",
        "a long string": b"\x8d" + struct.pack("<Q", big),
        "a string too long": b"X" + struct.pack("<I", big & 0xFFFFFFFF),
        "long bytes": b"\x8e" + struct.pack("<Q", big),
        "a long bytearray": b"\x96" + struct.pack("<Q", big),
        "a long number": b"\x8b" + struct.pack("<i", 2**31 - 1),
        "a number of many digits": b"I" + b"9" * count + b"\n",
        "a long of many digits": b"L" + b"9" * count + b"L\n",
        "a far memo": b"Nr" + struct.pack("<I", big & 0xFFFFFFFF),
        "a far fetch": b"j" + struct.pack("<I", big & 0xFFFFFFFF),
        "a memo of many digits": b"Np" + b"9" * count + b"\n",
        "a frame": b"\x95" + struct.pack("<Q", big) + b"N",
        "pops": b"0" * count,
        "a text without end": b"V" + b"x" * count,
        "names of control characters": b"c\x1b[2J\nx\ry\n",
        "a long name": b"c" + b"a" * count + b"\n" + b"b" * count + b"\n",
    }  # fmt: skip
    name = random.choice(sorted(choices))
    return choices[name], f"{name} ({count})"


def soup(random: Random) -> tuple[bytes, str]:
    """Any instructions in any order, each with an argument of its kind."""
    count = random.choice([3, 10, 40, 200])
    return b"".join(_instruction(random) for _ in range(count)), f"{count} instructions"


def _instruction(random: Random) -> bytes:
    opcode = random.choice(pickletools.opcodes)
    code = opcode.code.encode("latin-1")
    if opcode.arg is None:
        return code
    if opcode.arg.n > 0:
        return code + random.choice(
            [
                bytes(opcode.arg.n),
                b"\xff" * opcode.arg.n,
                random.randbytes(opcode.arg.n),
                b"\1" + bytes(opcode.arg.n - 1),
            ]
        )
    if opcode.arg.n == pickletools.UP_TO_NEWLINE:
        words = [
            b"1",
            b"os\nsystem",
            b"collections\nOrderedDict",
            b"torch\nfloat32",
            b"nan",
            b"'x'",
            b"-1",
            b"0x10",
            b"\\u0041",
            b"",
        ]
        return code + random.choice(words) + b"\n"
    content = random.randbytes(random.choice([0, 1, 8, 300]))
    sizes = {pickletools.TAKEN_FROM_ARGUMENT1: "<B", pickletools.TAKEN_FROM_ARGUMENT4: "<i",
             pickletools.TAKEN_FROM_ARGUMENT4U: "<I", pickletools.TAKEN_FROM_ARGUMENT8U: "<Q"}  # fmt: skip
    return code + struct.pack(sizes[opcode.arg.n], min(len(content), 255)) + content
