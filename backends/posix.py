"""Files and folders of the local backend: reached without following links, made durable in order. All calls block.

Every file is opened relative to its folder, and every folder relative to the one above, refusing symbolic links, so
that no link below the root can lead out of it. A write goes through these steps, each complete before the next:

    1. folders exist, and so does their name in the folder above        mkdir, fsync of the folder above
    2. the content is durable under a temporary name                    write, fsync of the file
    3. the final name appears, unless it exists                         link
    4. the temporary name goes, the final name is durable               unlink, fsync of the folder
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .errors import AlreadyExists, OutcomeUnknown, Permanent, Transient
from .key import TEMPORARY, ObjectKey

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE = 1
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_ATTEMPTS = 100  #: at creating a file whose folder others keep removing


class Tree:
    """The folders below one root. Safe for threads."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._durable: set[tuple[str, ...]] = set()  # folders whose name this process has synced since it saw them

    @contextmanager
    def folder(self, segments: tuple[str, ...]) -> Iterator[int]:
        """A descriptor of an existing folder."""
        descriptor = self.open(segments, create=False)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def reading(self, key: ObjectKey) -> Iterator[tuple[int, int]]:
        """A descriptor of the object, and its size."""
        with self.folder(key.segments[:-1]) as folder:
            # O_NONBLOCK: opening a pipe that someone put there must not wait for its writer
            descriptor = os.open(key.name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK, dir_fd=folder)
        try:
            yield descriptor, _regular(os.fstat(descriptor)).st_size
        finally:
            os.close(descriptor)

    def stat(self, key: ObjectKey) -> os.stat_result:
        with self.folder(key.segments[:-1]) as folder:
            return _regular(os.stat(key.name, dir_fd=folder, follow_symlinks=False))

    def delete(self, key: ObjectKey) -> None:
        """Remove the object, durably, and the folders that this leaves empty."""
        with self.folder(key.segments[:-1]) as folder:
            _regular(os.stat(key.name, dir_fd=folder, follow_symlinks=False))
            os.unlink(key.name, dir_fd=folder)
            with unsettled(key, "its removal may not survive a loss of power: delete it again"):
                os.fsync(folder)
        self.prune(key)

    def prune(self, key: ObjectKey) -> None:
        """Remove the key's folders that are empty, from the innermost on. Writers cope with it."""
        with suppress(OSError):  # a folder in use, or gone already, ends it
            for depth in range(len(key.segments) - 1, 0, -1):
                folder = key.segments[:depth]
                self._durable.discard(folder)
                with self.folder(folder[:-1]) as above:
                    os.rmdir(folder[-1], dir_fd=above)

    def scan(self, segments: tuple[str, ...]) -> tuple[list[str], list[tuple[str, os.stat_result]]]:
        """Folders and regular files of one folder, unsorted; links and other special files are left out."""
        folders, files = [], []
        with self.folder(segments) as folder, os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        files.append((entry.name, entry.stat(follow_symlinks=False)))
        return folders, files

    def open(self, segments: tuple[str, ...], *, create: bool) -> int:
        """A descriptor of the folder, for the caller to close; with `create` it is made, durably, if need be."""
        if create and () not in self._durable:
            _make_root(self.root)
            self._durable.add(())
        try:
            folder = os.open(self.root, _FOLDER)
        except NotADirectoryError as error:
            raise Permanent(
                None, f"its root {self.root} is no folder: move that file away or choose another"
            ) from error
        for depth in range(1, len(segments) + 1):
            above = folder
            try:
                folder = self._enter(above, segments[:depth], create)
            finally:
                os.close(above)
        return folder

    def forget(self) -> None:
        """Trust no folder to be there: make sure of each again."""
        self._durable.clear()

    def _enter(self, above: int, path: tuple[str, ...], create: bool) -> int:
        name = path[-1]
        if create and path not in self._durable:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
            os.fsync(above)  # for a folder made by others too: they may not have come to it yet
            self._durable.add(path)
        try:
            return os.open(name, _FOLDER | _NO_LINK, dir_fd=above)
        except NotADirectoryError:
            _regular(os.stat(name, dir_fd=above, follow_symlinks=False))  # says so where it is a link
            raise


class Staged:
    """An object on its way: `open`, write to `file`, `publish`; and `close`, whatever became of it."""

    def __init__(self, tree: Tree, key: ObjectKey) -> None:
        self.key = key
        self.file = -1  #: descriptor to write the content to
        self._tree = tree
        self._folder = -1
        self._name = ""  # of the temporary file; empty while there is none

    def open(self) -> None:
        """Create the temporary file beside the object to be, in a folder made for it if need be.

        :raises AlreadyExists: the object stands.
        """
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError):  # someone pruned the folder under our hands: make it again
                self._folder = self._tree.open(self.key.segments[:-1], create=True)
                if _exists(self.key.name, self._folder):  # better now than after the upload
                    self._refuse()
                name = f"{self.key.name}.{os.urandom(4).hex()}{TEMPORARY}"
                self.file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666, dir_fd=self._folder)
                self._name = name
                return
            self.close()
            self._tree.forget()
        raise Permanent(self.key, f"its folder goes as often as it is made: look who else works in {self._tree.root}")

    def publish(self) -> None:
        """Give the content its final name, durably.

        :raises AlreadyExists: the name is taken.
        :raises OutcomeUnknown: the name is there, but may not survive a loss of power.
        """
        os.fsync(self.file)  # content before name: whoever sees the name can rely on the content
        self._appear()
        with unsettled(self.key, "it may not survive a loss of power: read it back, or write it under another name"):
            self._remove()
            os.fsync(self._folder)

    def close(self) -> None:
        """Remove what is left of an object that did not come to be."""
        try:
            if self._name:
                self._remove()
                self._tree.prune(self.key)
        finally:
            for descriptor in (self.file, self._folder):
                if descriptor >= 0:
                    os.close(descriptor)
            self.file = self._folder = -1

    def _remove(self) -> None:
        with suppress(FileNotFoundError):  # it was renamed
            os.unlink(self._name, dir_fd=self._folder)
        self._name = ""

    def _appear(self) -> None:
        try:
            os.link(self._name, self.key.name, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)
        except OSError as error:
            # A network file system may report a failure for a link that it made: the count of names decides.
            if os.fstat(self.file).st_nlink == 2:
                return
            if isinstance(error, FileNotFoundError):
                raise Transient(self.key, f"someone removed its temporary file {self._name}; try again") from error
            if isinstance(error, FileExistsError):
                self._refuse(error)
            if error.errno not in _NO_HARD_LINKS:
                raise
            self._rename()

    def _rename(self) -> None:
        """For file systems without hard links."""
        number = _rename_without_replacing(self._folder, self._name, self.key.name)
        if number == errno.EEXIST:
            self._refuse()
        if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise Permanent(
                self.key,
                "the file system has neither hard links nor renameat2 without replacing, so an object cannot appear "
                "whole and only once; put the store on one that has (ext4, XFS, btrfs, NFS)",
            )
        if number:
            raise OSError(number, os.strerror(number), self._name)

    def _refuse(self, cause: OSError | None = None) -> None:
        """Raise AlreadyExists, once the object that stands is sure to stay."""
        with suppress(FileNotFoundError):  # it stood a moment ago
            if stat.S_ISDIR(os.stat(self.key.name, dir_fd=self._folder, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.key.name) from cause
        os.fsync(self._folder)  # its writer may not have come to it yet
        raise AlreadyExists(self.key, "stands already and is never replaced") from cause


@contextmanager
def unsettled(key: ObjectKey, message: str) -> Iterator[None]:
    """Turn failures of the last steps, when the effect may be there already, into OutcomeUnknown."""
    try:
        yield
    except OSError as error:
        raise OutcomeUnknown(key, f"{error.strerror} in the last step; {message}") from error


def _make_root(root: str) -> None:
    missing = []
    folder = root
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder)
        above = os.open(os.path.dirname(folder), _FOLDER)
        try:
            os.fsync(above)
        finally:
            os.close(above)


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _regular(status: os.stat_result) -> os.stat_result:
    """The status, if that of an object."""
    if stat.S_ISDIR(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "a folder is no object")
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "a device, pipe or socket is no object")
    return status


def _rename_without_replacing(folder: int, source: str, target: str) -> int:
    """renameat2(RENAME_NOREPLACE) within the folder; the error number, 0 for success."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return errno.ENOSYS
    failed = call(folder, os.fsencode(source), folder, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE))
    return ctypes.get_errno() if failed else 0
