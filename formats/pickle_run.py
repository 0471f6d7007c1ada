"""The loop that follows the instructions of a pickle."""

from struct import Struct

from formats.ceilings import PICKLE_BYTES
from formats.pickle_columns import Columns
from formats.pickle_errors import MalformedError
from formats.pickle_machine import Machine
from formats.pickle_opcodes import HANDLERS
from formats.pickle_records import Global, Opaque

_U2, _U4, _I4 = Struct("<H"), Struct("<I"), Struct("<i")
_GET, _GET4, _PUT4, _MEMOIZE, _STOP = b"hjr\x94."
_NONE, _NUMBER1, _NUMBER2, _NUMBER4, _LONG, _TEXT = b"NKMJ\x8aX"
_EMPTY_TUPLE, _NEW, _EMPTY_DICT, _MARK, _SET_ITEMS, _BUILD = b")\x81}(ub"
_KEY_LENGTH = 1 << 10
"""Maximum length of a text that is accepted as a key without further checks."""
_BLOCK = 1 << 16
"""Bytes between two checks of the number of values. A block can't add enough values to do harm."""


def run(machine: Machine) -> object:
    """The object at the next STOP. Raises MalformedError, UnsafeCallError, or any error that bad bytes cause."""
    columns = Columns(machine)
    while machine.position < machine.end:
        until = min(machine.end, machine.position + _BLOCK)
        if _reaches_stop(machine, columns, until):
            return machine.stack.pop()
        machine.require_allowed(max(machine.made, len(machine.memo)))
        machine.require_copies(machine.copied)
    short = machine.end == len(machine.data)
    raise MalformedError(
        "it ends too early" if short else f"it is longer than {PICKLE_BYTES} bytes"
    )


def _reaches_stop(machine: Machine, columns: Columns, until: int) -> bool:
    """Follow the instructions that begin before `until`. Returns True at a STOP.

    `.metadata` of a large model has millions of instructions. This function follows the instructions that describe
    chunks without a call, and keeps the machine's state in local variables. Each branch does the same as the opcode's
    handler, and leaves unusual cases to it. If records repeat, `columns` follows many of them at once.
    """
    data, end, memo, below = machine.data, machine.end, machine.memo, machine.below
    position, stack, made, copied = machine.position, machine.stack, machine.made, machine.copied
    natural2, natural4, integer4 = _U2.unpack_from, _U4.unpack_from, _I4.unpack_from
    try:
        while position < until:
            code = data[position]
            position += 1
            if code == _GET4:
                stack.append(memo[natural4(data, position)[0]])
                position += 4
            elif code == _EMPTY_TUPLE:
                # Make an instance of a class known only by name. Nearly every empty tuple in a pickle is for that.
                if data[position] == _NEW and type(kind := stack[-1]) is Global and kind.inert:
                    if position > columns.next_look:
                        machine.position, machine.stack, machine.made, machine.copied = position, stack, made, copied  # fmt: skip
                        if columns.follow(position - 1, until):
                            position, made, copied = machine.position, machine.made, machine.copied
                            continue
                    position += 1
                    made += 1
                    stack[-1] = Opaque(kind.module, kind.name, ())
                else:
                    stack.append(())
            elif (
                code == _BUILD
                and type(state := stack[-1]) is dict
                and type(target := stack[-2]) is Opaque
            ):
                copied += len(state)
                target.state = stack.pop()
            elif code == _EMPTY_DICT:
                made += 1
                stack.append({})
            elif code == _MARK:
                made += 1
                below.append(stack)
                stack = []
            elif code == _SET_ITEMS and type(keyed := below[-1][-1]) is dict:
                for key, value in zip(stack[::2], stack[1::2], strict=True):
                    # Records are keys of `.metadata`. They compare by identity or content, so all are accepted.
                    if type(key) is not Opaque and (type(key) is not str or len(key) > _KEY_LENGTH):
                        machine.check_key(key)
                    keyed[key] = value
                stack = below.pop()
            elif code == _GET:
                stack.append(memo[data[position]])
                position += 1
            elif code == _NONE:
                stack.append(None)
            elif code == _LONG and data[position] < 9:
                stop = position + 1 + data[position]
                stack.append(int.from_bytes(data[position + 1 : stop], "little", signed=True))
                position = stop
            elif code == _TEXT and (stop := position + 4 + natural4(data, position)[0]) <= end:
                stack.append(data[position + 4 : stop].decode("utf-8", "surrogatepass"))
                position = stop
            elif code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _PUT4:
                memo[natural4(data, position)[0]] = stack[-1]
                position += 4
            elif code == _NUMBER1:
                stack.append(data[position])
                position += 1
            elif code == _NUMBER2:
                stack.append(natural2(data, position)[0])
                position += 2
            elif code == _NUMBER4:
                stack.append(integer4(data, position)[0])
                position += 4
            elif code == _STOP:
                return True
            else:
                machine.position, machine.stack, machine.made, machine.copied = position, stack, made, copied  # fmt: skip
                HANDLERS[code](machine)
                position, stack, made, copied = machine.position, machine.stack, machine.made, machine.copied  # fmt: skip
    finally:
        machine.position, machine.stack, machine.made, machine.copied = position, stack, made, copied  # fmt: skip
    return False
