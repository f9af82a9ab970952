"""Small file systems that only the calling process and its children see; needs root."""

import contextlib
import ctypes
import os
import subprocess

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000  # linux/sched.h
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x4000, 0x40000  # linux/mount.h
_MNT_DETACH = 2


def in_private_namespace():
    """Move this process into a mount namespace of its own; raises OSError where it may not."""
    _check(_LIBC.unshare(_CLONE_NEWNS))
    _check(_LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))


@contextlib.contextmanager
def tmpfs(folder, size_bytes):
    """A tmpfs in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},mode=0700".encode()
    _check(_LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options))
    try:
        yield folder
    finally:
        _LIBC.umount2(os.fsencode(folder), _MNT_DETACH)


def make_read_only(folder, *, read_only):
    """Remount a file system read-only or writable again."""
    flags = _MS_REMOUNT | (_MS_RDONLY if read_only else 0)
    _check(_LIBC.mount(None, os.fsencode(folder), None, flags, None))


def why_not():
    """Why mounting is not possible here; None when it is."""
    if os.geteuid() != 0:
        return "mounting needs root"
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if tried.returncode == 0 else f"mounting is not permitted: {tried.stderr.strip()}"


def _check(status):
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
