"""The opcodes of pickle protocols 0 to 5, as changes of a Machine; `pickle_run` follows them.

CPython's pickletools.py describes each opcode and its argument bytes.
"""

from collections.abc import Callable
from struct import Struct

from formats.pickle_errors import MalformedError, UnsafeCallError
from formats.pickle_machine import Machine

Handler = Callable[[Machine], None]
_U1, _U2, _U4, _U8, _I4, _F8 = (
    Struct("<B"),
    Struct("<H"),
    Struct("<I"),
    Struct("<Q"),
    Struct("<i"),
    Struct(">d"),
)
_LONGEST_NUMBER = 255


def _constant(value: object) -> Handler:
    return lambda m: m.stack.append(value)


def _new(kind: Callable[[], object]) -> Handler:
    cost = 3 if kind is set else 1  # an empty set takes three times the memory of other containers

    def push(m: Machine) -> None:
        m.make(cost)
        m.stack.append(kind())

    return push


def _number(layout: Struct) -> Handler:
    return lambda m: m.stack.append(m.number(layout))


def _long(layout: Struct) -> Handler:
    def push(m: Machine) -> None:
        count = m.number(layout)
        if count > _LONGEST_NUMBER:
            raise MalformedError(f"a number of {count} bytes")
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return push


def _text(layout: Struct) -> Handler:
    return lambda m: m.stack.append(m.take(m.number(layout)).decode("utf-8", "surrogatepass"))


def _blob(layout: Struct) -> Handler:
    return lambda m: m.stack.append(m.take(m.number(layout)))


def _line(decode: Callable[[bytes], object]) -> Handler:
    return lambda m: m.stack.append(decode(m.line()))


def _put(layout: Struct) -> Handler:
    def put(m: Machine) -> None:
        m.memo[m.number(layout)] = m.stack[-1]

    return put


def _get(layout: Struct) -> Handler:
    return lambda m: m.stack.append(m.memo[m.number(layout)])


def _last(count: int) -> Handler:
    def push(m: Machine) -> None:
        m.make()
        m.stack[-count:] = [_exactly(count, m.stack[-count:])]

    return push


def _exactly(count: int, values: list[object]) -> tuple[object, ...]:
    if len(values) != count:
        raise MalformedError("a tuple of values that are not there")
    return tuple(values)


def _mark(m: Machine) -> None:
    m.make()
    m.below.append(m.stack)
    m.stack = []


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.to_mark()


def _pop_mark(m: Machine) -> None:
    m.to_mark()


def _put_line(m: Machine) -> None:
    m.memo[int(m.line())] = m.stack[-1]


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]
    m.require_allowed(len(m.memo))


def _collect(kind: Callable[[list[object]], object]) -> Handler:
    def push(m: Machine) -> None:
        items = m.to_mark()
        m.stack.append(kind(items))

    return push


def _dict(m: Machine) -> None:
    made: dict[object, object] = {}
    items = m.to_mark()
    for key, value in zip(items[::2], items[1::2], strict=True):
        m.check_key(key)
        made[key] = value
    m.stack.append(made)


def _frozenset(m: Machine) -> None:
    items = m.to_mark()
    for item in items:
        m.check_key(item)
    m.stack.append(frozenset(items))


def _append(m: Machine) -> None:
    value = m.stack.pop()
    m.append(m.stack[-1], [value])


def _appends(m: Machine) -> None:
    values = m.to_mark()
    m.append(m.stack[-1], values)


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _set_items(m: Machine) -> None:
    pairs = m.to_mark()
    m.set_items(m.stack[-1], pairs)


def _add_items(m: Machine) -> None:
    items = m.to_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise MalformedError(f"members for a {type(target).__name__}")
    for item in items:
        m.check_key(item)
        target.add(item)


def _global(m: Machine) -> None:
    m.stack.append(m.resolve(m.line().decode(), m.line().decode()))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise MalformedError("a class whose name is not a string")
    m.stack.append(m.resolve(module, name))


def _reduce(m: Machine) -> None:
    args, function = m.stack.pop(), m.stack.pop()
    m.call(function, args)


def _new_with_keywords(m: Machine) -> None:
    keywords, args, function = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.call(function, args)
    if keywords:
        m.build(m.stack[-1], keywords)


def _inst(m: Machine) -> None:
    function, args = m.resolve(m.line().decode(), m.line().decode()), m.to_mark()
    m.call(function, tuple(args))


def _obj(m: Machine) -> None:
    function, *args = m.to_mark()
    m.call(function, tuple(args))


def _build(m: Machine) -> None:
    state = m.stack.pop()
    m.build(m.stack[-1], state)


def _persistent(m: Machine) -> None:
    m.stack.append(m.persistent(m.stack.pop()))


def _extension(m: Machine) -> None:
    raise UnsafeCallError(
        "asks for an object of the program that wrote it (a pickle extension); nothing was executed"
    )


def _refuse(m: Machine) -> None:
    raise MalformedError(f"no such instruction here: {m.data[m.position - 1 : m.position]!r}")


def _skip_frame_size(m: Machine) -> None:
    m.take(8)


def _protocol(m: Machine) -> None:
    if m.number(_U1) > 5:
        raise MalformedError("a pickle protocol above 5")


def _int_line(content: bytes) -> int:
    return content == b"01" if content in (b"00", b"01") else _long_line(content)


def _long_line(content: bytes) -> int:
    if len(content) > 3 * _LONGEST_NUMBER:
        raise MalformedError(f"a number of {len(content)} digits")
    return int(content.removesuffix(b"L"))


def _quoted_line(content: bytes) -> str:
    return content[1:-1].decode("unicode_escape")


def _unicode_line(content: bytes) -> str:
    return content.decode("raw_unicode_escape")


_OPCODES: dict[bytes, Handler] = {
    b"(": _mark, b"0": _pop, b"1": _pop_mark, b"2": lambda m: m.stack.append(m.stack[-1]),
    b"N": _constant(None), b"\x88": _constant(True), b"\x89": _constant(False),
    b"K": _number(_U1), b"M": _number(_U2), b"J": _number(_I4), b"\x8a": _long(_U1), b"\x8b": _long(_I4),
    b"I": _line(_int_line), b"L": _line(_long_line), b"F": _line(float), b"G": _number(_F8),
    b"S": _line(_quoted_line), b"V": _line(_unicode_line),
    b"X": _text(_U4), b"\x8c": _text(_U1), b"\x8d": _text(_U8), b"U": _text(_U1), b"T": _text(_I4),
    b"C": _blob(_U1), b"B": _blob(_U4), b"\x8e": _blob(_U8), b"\x96": _blob(_U8),
    b"]": _new(list), b"}": _new(dict), b")": _constant(()), b"\x8f": _new(set),
    b"t": _collect(tuple), b"l": _collect(list), b"d": _dict, b"\x91": _frozenset,
    b"\x85": _last(1), b"\x86": _last(2), b"\x87": _last(3),
    b"a": _append, b"e": _appends, b"s": _set_item, b"u": _set_items, b"\x90": _add_items,
    b"q": _put(_U1), b"r": _put(_U4), b"p": _put_line, b"\x94": _memoize,
    b"h": _get(_U1), b"j": _get(_U4), b"g": lambda m: m.stack.append(m.memo[int(m.line())]),
    b"c": _global, b"\x93": _stack_global,
    b"R": _reduce, b"\x81": _reduce, b"\x92": _new_with_keywords, b"i": _inst, b"o": _obj,
    b"b": _build, b"Q": _persistent, b"P": lambda m: m.stack.append(m.persistent(m.line().decode())),
    b"\x80": _protocol, b"\x95": _skip_frame_size,
    b"\x82": _extension, b"\x83": _extension, b"\x84": _extension,
}  # fmt: skip
"""\\x97 and \\x98 (buffers outside the pickle) are missing: no file can hold such a pickle."""
HANDLERS = [_OPCODES.get(bytes([code]), _refuse) for code in range(256)]
