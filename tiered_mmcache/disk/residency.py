"""Whether pages of a memory map are in memory, and having them read before they are touched.

Owns: the two system calls and finding where a view lies.
Does not own: what is read, or when (:mod:`.store`). Imports no torch.

Touching a page of a map that is not in memory reads it and some neighbours, while the toucher
waits. ``MADV_POPULATE_READ`` (Linux 5.14) has a whole range read at once and entered into the page
table in one go. Older kernels refuse it; pages are then read as they are touched. For a range that
is in memory already the call still costs a third of a copy, so it is asked for first.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

View = memoryview | bytes  # what py-lmdb says that a value is

_MADV_POPULATE_READ = 22  # asm-generic/mman-common.h; Python does not name it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``: ctypes itself finds no address of memory that is read-only."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("size_bytes", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("is_readonly", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_Buffer)]


def pages_of(view: View) -> tuple[int, int]:
    """The addresses of the first page that a view touches and of the first one after it."""
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    start, stop = buffer.address or 0, (buffer.address or 0) + buffer.size_bytes
    _release_buffer(ctypes.byref(buffer))
    return start - start % mmap.PAGESIZE, stop + -stop % mmap.PAGESIZE


def is_resident(view: View) -> bool:
    """Whether all pages that a view of a map touches are in memory; True where nobody can say."""
    start, stop = pages_of(view)
    found = ctypes.create_string_buffer((stop - start) // mmap.PAGESIZE)
    if _libc.mincore(start, stop - start, found):
        return True
    return 0 not in found.raw  # of a byte's bits, Linux sets none but the lowest


def read_pages(views: Iterable[View]) -> None:
    """Have the pages read that views of a map touch; adjacent ones together.

    It is a matter of speed only: where the kernel refuses, nothing happens.
    """
    _advise(views, _MADV_POPULATE_READ)


def read_soon(views: Iterable[View]) -> None:
    """As :func:`read_pages`, but the disk begins, and nobody waits."""
    _advise(views, mmap.MADV_WILLNEED)


def _advise(views: Iterable[View], advice: int) -> None:
    start = stop = 0
    for view in views:
        first, after = pages_of(view)
        if first != stop:
            _madvise(start, stop, advice)
            start = first
        stop = after
    _madvise(start, stop, advice)


def _madvise(start: int, stop: int, advice: int) -> None:
    if stop > start:
        _libc.madvise(start, stop - start, advice)
