"""A file that takes its place as a whole, or not at all."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """The name of a new, empty file, which takes the place of `path` in the end.

    In between nothing is seen of it at `path`; an exception removes it.
    """
    target = os.path.realpath(path)  # which has no slash at its end
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
                raise OSError(errno.EINVAL, "what is there is no regular file")
            open(target, "r+b").close()  # may it be written?
        yield temporary
        # safetensors may have put another file there, with a mode of its own.
        os.chmod(temporary, stat.S_IMODE(mode))
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    with contextlib.suppress(OSError):  # not every system opens directories
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
