"""Asking the kernel whether pages of a map are in memory, on real files.

Owns: the answers, and that reading pages ahead changes them. Does not own: how fast it is
(``mmcache bench``) or who asks (test_disk_store.py).
"""

import mmap
import os

import pytest

from tiered_mmcache.disk import residency

PAGES = 64
SIZE = PAGES * mmap.PAGESIZE


@pytest.fixture
def view(tmp_path):
    """A read-only view of a map whose file is not in the page cache."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * SIZE)
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)  # touching one page must not bring in others
        viewed = memoryview(mapped)
        yield viewed
        viewed.release()
    os.close(descriptor)


def test_whole_pages_around_a_view_are_named(view):
    start, stop = residency.pages_of(view)
    page = mmap.PAGESIZE
    assert stop - start == SIZE
    assert residency.pages_of(view[:1]) == (start, start + page)
    assert residency.pages_of(view[page - 1 : page + 1]) == (start, start + 2 * page)
    assert residency.pages_of(view[16 : 3 * page]) == (start, start + 3 * page)
    assert residency.pages_of(view[page:page]) == (start + page, start + page)


def test_a_view_can_be_released_afterwards(view):
    part = view[:100]
    residency.pages_of(part)
    part.release()  # raises BufferError while anybody holds the buffer


def test_pages_are_read_when_asked_for(view):
    if residency.is_resident(view):
        pytest.skip("this file system keeps every page in memory")
    quarter = SIZE // 4
    residency.read_pages([view[:quarter], view[3 * quarter :]])
    if not residency.is_resident(view[:quarter]):
        pytest.skip("this kernel has no MADV_POPULATE_READ")
    assert residency.is_resident(view[3 * quarter :])
    assert not residency.is_resident(view[quarter : 2 * quarter])
    assert not residency.is_resident(view)
    residency.read_pages([view[start : start + 100] for start in range(0, SIZE, 100)])
    assert residency.is_resident(view)
    assert bytes(view) == b"x" * SIZE


def test_nothing_to_read_is_no_mistake(view):
    residency.read_pages([])
    residency.read_pages([view[:0]])


def test_what_the_kernel_refuses_is_left_to_page_faults(view, monkeypatch):
    monkeypatch.setattr(residency, "_MADV_POPULATE_READ", 9999)
    residency.read_pages([view])
    assert bytes(view) == b"x" * SIZE


def test_where_nobody_can_say_pages_count_as_resident(view, monkeypatch):
    monkeypatch.setattr(residency._libc, "mincore", lambda *arguments: -1)
    assert residency.is_resident(view)
