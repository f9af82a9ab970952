"""Small file systems that only the calling process and its children see, some of which fail."""

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x4000, 0x40000  # linux/mount.h
_MNT_DETACH = 2
_LOOP_SET_STATUS64, _LOOP_GET_STATUS64 = 0x4C04, 0x4C05  # linux/loop.h
_LOOP_INFO_BYTES, _SIZE_LIMIT_AT = 232, 32  # struct loop_info64: lo_sizelimit
_LONGEST_HANG_S = 60


def in_private_namespace():
    """Move this process into a mount namespace of its own; raises OSError where it may not.

    Without root it becomes the owner of a user namespace, too, under its own number.
    """
    if os.geteuid() == 0:
        _check(_LIBC.unshare(_CLONE_NEWNS))
    else:
        user, group = os.geteuid(), os.getegid()
        _check(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
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


class FailingDisk:
    """An ext4 file system on a loop device whose sectors can be lost for a while.

    They are lost by making the device shorter than the file system: what lies behind its new end
    is answered with EIO. The file system's own tables lie before it, and it has no journal, so
    that it goes on when the sectors are back.
    """

    _SIZE_BYTES = 64 * 1024 * 1024
    _KEPT_BYTES = 4 * 1024 * 1024
    _BALLAST_BYTES = 8 * 1024 * 1024  # fills what is kept: the files of a test lie behind it

    def __init__(self, image, folder):
        self._folder = folder
        self._hangs = False
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(self._SIZE_BYTES)
        _call("mkfs.ext4", "-q", "-b", "4096", "-N", "64", "-O", "^has_journal", image)
        _call("mount", "-o", "loop,errors=continue", image, folder)
        self._device = _call("findmnt", "--noheadings", "--output", "SOURCE", folder)
        _call("blockdev", "--setra", "0", self._device)  # pages are read when they are needed
        (folder / "ballast").write_bytes(bytes(self._BALLAST_BYTES))
        os.sync()

    def lose_sectors(self):
        """Answer with EIO whatever is not in the page cache."""
        self._limit(self._KEPT_BYTES)

    def find_sectors(self):
        """Be whole again."""
        self._limit(0)

    def hang(self):
        """Let every write wait, and whoever writes be unable to die, for a minute at most."""
        _call("fsfreeze", "--freeze", self._folder)
        self._hangs = True
        later = f"sleep {_LONGEST_HANG_S}; fsfreeze --unfreeze '{self._folder}'"
        self._end_of_hang = subprocess.Popen(
            ["sh", "-c", later], stderr=subprocess.DEVNULL, start_new_session=True
        )

    def go_on(self):
        """End the hang, if there is one."""
        if not self._hangs:
            return
        self._hangs = False
        _call("fsfreeze", "--unfreeze", self._folder)
        os.killpg(self._end_of_hang.pid, signal.SIGKILL)
        self._end_of_hang.wait()

    def forget_cached(self, file):
        """Have a file, which nobody maps, be read from the device the next time."""
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    def close(self):
        """Unmount it; the kernel frees the loop device."""
        self.go_on()
        self.find_sectors()
        _LIBC.umount2(os.fsencode(self._folder), _MNT_DETACH)

    def _limit(self, size_bytes):
        status = bytearray(_LOOP_INFO_BYTES)
        with Path(self._device).open("r+b", buffering=0) as device:
            fcntl.ioctl(device, _LOOP_GET_STATUS64, status)
            struct.pack_into("<Q", status, _SIZE_LIMIT_AT, size_bytes)
            fcntl.ioctl(device, _LOOP_SET_STATUS64, bytes(status))


def why_not():
    """Why mounting is not possible here; None when it is."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return _why_it_fails("unshare", *user, "--mount", "mount", "-t", "tmpfs", "none", "/mnt")


def why_no_failing_disk():
    """Why there can be no :class:`FailingDisk` here; None when there can."""
    if os.geteuid() != 0:
        return "a loop device needs root"
    tries = (
        "image=$(mktemp) && truncate --size 8M $image && mkfs.ext4 -q $image && "
        "mount -o loop $image /mnt; status=$?; rm -f $image; exit $status"
    )
    return _why_it_fails("unshare", "--mount", "sh", "-c", tries)


def _why_it_fails(*command):
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if tried.returncode == 0 else f"mounting is not permitted: {tried.stderr.strip()}"


def _call(*command):
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{words}: {done.stderr}")
    return done.stdout.strip()


def _check(status):
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
