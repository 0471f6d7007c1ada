"""Reserves the space of a file before it is written, if the file system can.

This module calls fallocate(2) itself. On file systems without fallocate (NFS 3, many of FUSE, ext2), the C library's
posix_fallocate writes one byte into every page, which takes longer than writing the file.
"""

import ctypes
import errno
import os

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_library = ctypes.CDLL(None, use_errno=True)
# None on systems other than Linux.
_fallocate = getattr(_library, "fallocate64", None) or getattr(_library, "fallocate", None)


def fallocate(descriptor: int, size: int) -> None:
    """Give a file `size` bytes on the disk. Raises OSError, with ENOSYS if the system has no fallocate."""
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(
        ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size)
    ):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def discard(descriptor: int, start: int, size: int) -> None:
    """Make a range of a file zeros, and give its space back if the file system can. The file keeps its size."""
    flags = _KEEP_SIZE | _PUNCH_HOLE
    place = ctypes.c_int64(start), ctypes.c_int64(size)
    if _fallocate is not None and not _fallocate(
        ctypes.c_int(descriptor), ctypes.c_int(flags), *place
    ):
        return
    zeros = bytes(1 << 20)
    for offset in range(start, start + size, len(zeros)):
        os.pwrite(descriptor, zeros[: start + size - offset], offset)


def allocate(descriptor: int, size: int) -> None:
    """Make a file `size` bytes long, and reserve its space if the file system can. Raises OSError if the disk is full."""
    if not size:
        return
    try:
        fallocate(descriptor, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.ftruncate(descriptor, size)
