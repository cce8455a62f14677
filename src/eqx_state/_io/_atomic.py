"""A file that replaces another as a whole, or not at all."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """The name of a new, empty file that replaces `path` when the block ends.

    Until then `path` is as it was. An exception removes the new file.
    """
    target = os.path.realpath(path)  # without a slash at its end
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{os.urandom(8).hex()}.tmp")
    try:
        if not os.path.basename(path):
            raise OSError(errno.EISDIR, "it is a directory")
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode  # as for any new file
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(target).st_mode
            if not stat.S_ISREG(mode):
                if stat.S_ISDIR(mode):
                    raise OSError(errno.EISDIR, "it is a directory")
                raise OSError(errno.EINVAL, "it is not a regular file")
            open(target, "r+b").close()  # raises if it may not be written
        yield temporary
        # safetensors may have put another file there, with another mode.
        os.chmod(temporary, stat.S_IMODE(mode))
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    # So that the new name survives a crash, too. Not every system opens directories.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
