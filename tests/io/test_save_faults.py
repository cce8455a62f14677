"""`es.save` killed, interrupted, out of space, not allowed: the old file or the new.

A few kills; in `nox -s fuzz` they are 50 of each sort. What
goes wrong at a known step is in `test_save.py`; here it happens at random moments, and
on file systems that are full or read-only.
"""

import contextlib
import errno
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest
from helpers import IS_FUZZ

import eqx_state as es


KILLS = 50 if IS_FUZZ else 10
SIZE = 250_000  # numbers; a file of 1 MB


def tree(number, size=SIZE):
    return {"x": np.full(size, number, "float32"), "y": np.array(number)}


OLD, NEW = tree(0), tree(1)


# --- At random moments ----------------------------------------------------------------

# Imports once; then, for each line, a process of its own saves one tree and the other
# over and over, until it is killed. JAX is not started before it forks.
SAVING = """
import os, signal, sys
import numpy as np
import eqx_state as es

# What is started in the background is often told to ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
path, size = sys.argv[1], int(sys.argv[2])
trees = [
    {"x": np.full(size, i, "float32"), "y": np.array(i)} for i in range(2)
]
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it does not outlive the test
        try:
            print(os.getpid(), flush=True)
            while True:
                for tree in trees:
                    es.save(path, tree)
        except KeyboardInterrupt:
            os._exit(0)
        except BaseException as e:
            print(repr(e), flush=True)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@contextlib.contextmanager
def saving(path):
    """A function that starts to save to `path`, and kills that in the midst of it."""
    command = [sys.executable, "-W", "ignore", "-c", SAVING, str(path), str(SIZE)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:

        def kill(number, delay):
            process.stdin.write("go\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            time.sleep(delay)  # there is no other way to a random moment
            os.kill(child, number)
            return int(process.stdout.readline())

        assert process.stdout.readline() == "ready\n"
        yield kill
        process.stdin.close()
    assert process.returncode == 0


def is_whole(path):
    loaded = es.load(path, OLD)
    return eqx.tree_equal(loaded, OLD) or eqx.tree_equal(loaded, NEW)


@pytest.mark.parametrize("there_is_one", [True, False])
def test_kills_leave_the_old_file_or_the_new(there_is_one, tmp_path):
    path = tmp_path / "model.safetensors"
    moments = random.Random(0)
    left = missing = 0
    with saving(path) as kill:
        for n in range(10 * KILLS):  # more than asked for on a busy machine
            if n >= KILLS and left > KILLS // 10:
                break
            path.unlink(missing_ok=True)
            if there_is_one:
                es.save(path, OLD)
            assert kill(signal.SIGKILL, moments.uniform(0, 0.1)) == -signal.SIGKILL
            if path.exists():
                assert is_whole(path)
            else:
                missing += 1
            for name in set(os.listdir(tmp_path)) - {path.name}:
                # Ours, and the one that safetensors writes to.
                assert re.fullmatch(r"\.[0-9a-f]{16}\.tmp|\.tmp\w+", name)
                (tmp_path / name).unlink()
                left += 1
            es.save(path, NEW)  # nothing stands in the way
            assert eqx.tree_equal(es.load(path, OLD), NEW)
    assert not (there_is_one and missing)
    assert left > KILLS // 10  # else the kills were never in the midst of a save


def test_interrupts_leave_no_other_file(tmp_path):
    path = tmp_path / "model.safetensors"
    moments = random.Random(1)
    es.save(path, OLD)
    with saving(path) as kill:
        for _ in range(KILLS):
            # Not before it has come to the `try`.
            assert kill(signal.SIGINT, moments.uniform(0.005, 0.03)) == 0
            assert is_whole(path)
            assert os.listdir(tmp_path) == [path.name]


# --- Real file systems ----------------------------------------------------------------


@contextlib.contextmanager
def disk(folder, options):
    """A small file system of its own in memory, at `folder`."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def assert_only(path, tree):
    assert os.listdir(path.parent) == [path.name]
    assert eqx.tree_equal(es.load(path, tree), tree)


@pytest.mark.parametrize(
    "options", ["size=1500k", "size=8m,nr_inodes=3"], ids=["space", "inodes"]
)
def test_a_disk_that_is_full(options, tmp_path):
    with disk(tmp_path / "disk", options) as folder:
        path = folder / "model.safetensors"
        es.save(path, OLD)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left on device") as info:
                es.save(path, NEW)
            assert info.value.errno == errno.ENOSPC
            info.match(
                f"`es.save` cannot write `{path}`: .*Nothing on disk was changed"
            )
            assert_only(path, OLD)
        small = tree(2, size=10)
        if "inodes" not in options:  # there is room for a smaller one
            es.save(path, small)
            assert_only(path, small)
            es.save(path, NEW)  # and then for the large one
            assert_only(path, NEW)


def test_a_disk_that_is_full_at_first(tmp_path):
    with disk(tmp_path / "disk", "size=100k") as folder:
        with pytest.raises(OSError, match="No space left on device"):
            es.save(folder / "model.safetensors", NEW)
        assert os.listdir(folder) == []


def test_a_disk_that_is_read_only(tmp_path):
    with disk(tmp_path / "disk", "size=8m") as folder:
        path = folder / "model.safetensors"
        es.save(path, OLD)
        again = ["mount", "-o", "remount,ro", str(folder)]
        subprocess.run(again, check=True)
        for target in (path, folder / "new"):
            with pytest.raises(OSError, match="Read-only file system") as info:
                es.save(target, NEW)
            assert info.value.errno == errno.EROFS
            info.match(f"`es.save` cannot write `{target}`")
        assert_only(path, OLD)


def test_no_more_files_may_be_opened(tmp_path):
    path = tmp_path / "model.safetensors"
    es.save(path, OLD)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            es.save(path, NEW)
        with pytest.raises(OSError, match="Too many open files"):
            es.load(path, OLD)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_only(path, OLD)


# --- Permissions ----------------------------------------------------------------------


@pytest.fixture
def open_folder():
    """A directory that every user may look into, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextlib.contextmanager
def an_ordinary_user(*paths):
    """Modes hold nobody who is root; so for a while be somebody else."""
    if os.geteuid() != 0:
        yield
        return
    for path in paths:
        os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_directory_that_may_not_be_written(mode, open_folder):
    folder = open_folder / "models"
    folder.mkdir()
    path = folder / "model.safetensors"
    es.save(path, OLD)
    with an_ordinary_user(path, folder):
        folder.chmod(mode)
        for target in (path, folder / "new"):
            message = (
                f"`es.save` cannot write `{target}`: Permission denied.*was changed"
            )
            with pytest.raises(PermissionError, match=message):
                es.save(target, NEW)
        folder.chmod(0o755)
        assert_only(path, OLD)
        es.save(path, NEW)
        assert_only(path, NEW)


def test_a_file_that_may_not_be_written(open_folder):
    path = open_folder / "model.safetensors"
    es.save(path, OLD)
    with an_ordinary_user(path, open_folder):
        for mode in (0o444, 0o000):
            path.chmod(mode)
            message = f"`es.save` cannot write `{path}`: Permission denied"
            with pytest.raises(PermissionError, match=message):
                es.save(path, NEW)
        with pytest.raises(PermissionError, match=f"denied.*{path}"):
            es.load(path, OLD)
        path.chmod(0o644)
        assert_only(path, OLD)


# --- What changes while it saves ------------------------------------------------------


def test_the_directory_goes_away_meanwhile(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    folder.mkdir()

    def remove(descriptor):
        for name in os.listdir(folder):
            (folder / name).unlink()
        folder.rmdir()

    monkeypatch.setattr(os, "fsync", remove)
    with pytest.raises(FileNotFoundError, match="`es.save` cannot write"):
        es.save(folder / "model.safetensors", NEW)
    assert os.listdir(tmp_path) == []


def test_a_directory_takes_the_place_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    monkeypatch.setattr(os, "fsync", lambda descriptor: path.mkdir())
    with pytest.raises(IsADirectoryError, match=f"cannot write `{path}`"):
        es.save(path, NEW)
    assert os.listdir(tmp_path) == [path.name]
    assert path.is_dir()


def test_a_link_that_leads_in_a_circle(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    path.symlink_to(other)
    other.symlink_to(path)
    for f in (lambda: es.save(path, NEW), lambda: es.load(path, OLD)):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            f()
    assert path.is_symlink()
    assert other.is_symlink()
    assert len(os.listdir(tmp_path)) == 2
