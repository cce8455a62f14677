"""`es.save` when something is wrong: what is on the disk is the old file or the new."""

import os
import resource
import stat
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import safetensors.numpy
from helpers import rejects, untouched
from jax.extend.random import define_prng_impl
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_state as es


OLD, NEW = {"x": jnp.zeros(1000)}, {"x": jnp.ones(1000)}


@pytest.fixture
def path(tmp_path):
    """A file with the old tree, alone in its directory."""
    path = tmp_path / "model.safetensors"
    es.save(path, OLD)
    return path


def assert_only(path, tree):
    assert os.listdir(path.parent) == [path.name]
    assert eqx.tree_equal(es.load(path, tree), tree)


# --- A save that fails ----------------------------------------------------------------


class Full(Exception):
    pass


def fail(*args, **kwargs):
    raise Full


@pytest.mark.parametrize("error", [Full, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["save_file", "chmod", "fsync", "replace"])
def test_an_exception_leaves_the_old_file_and_no_other(step, error, path, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    where = safetensors.numpy if step == "save_file" else os
    with monkeypatch.context() as patch, untouched(NEW):
        patch.setattr(where, step, fail)
        with pytest.raises(error, match="^$"):
            es.save(path, NEW)
    assert_only(path, OLD)
    es.save(path, NEW)
    assert_only(path, NEW)


def test_the_disk_is_full(path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with rejects(
            NEW, OSError, "`es.save` cannot write .*Nothing on disk was changed"
        ):
            es.save(path, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_only(path, OLD)


def test_a_file_is_whole_on_the_disk_before_it_takes_the_place(path, monkeypatch):
    synced, places = [], []

    def fsync(descriptor):
        synced.append(os.fstat(descriptor))

    def replace(source, target, replace=os.replace):
        places.append((source, target))
        assert [s.st_ino for s in synced] == [os.stat(source).st_ino]
        assert synced[0].st_size > 4000
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    es.save(path, NEW)
    assert [target for _, target in places] == [str(path)]
    assert [s.st_ino for s in synced[1:]] == [os.stat(path.parent).st_ino]
    assert_only(path, NEW)


def test_directories_need_not_be_opened(path, monkeypatch):
    def refuse(name, *args, open=os.open, **kwargs):
        if os.path.isdir(name):
            raise PermissionError
        return open(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    es.save(path, NEW)
    assert_only(path, NEW)


def test_no_file_stays_open(path):
    def lowest():
        """The number that the next file will have."""
        descriptor = os.open(os.devnull, os.O_RDONLY)
        os.close(descriptor)
        return descriptor

    before = lowest()
    es.save(path, NEW)
    es.load(path, OLD)
    es.load_metadata(path)
    assert lowest() == before


KILLED = """
import os, signal, sys
import jax.numpy as jnp, safetensors.numpy
import eqx_state as es

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def half(arrays, filename, metadata):
    with open(filename, "wb") as file:
        file.write(safetensors.numpy.save(arrays, metadata)[:2000])
    die()

if sys.argv[1] == "half":
    safetensors.numpy.save_file = half
else:
    setattr(os, sys.argv[1], die)
es.save(sys.argv[2], {"x": jnp.ones(1000)})
"""


@pytest.mark.parametrize("step", ["half", "fsync", "replace"])
def test_a_kill_leaves_the_old_file(step, path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), step, str(path)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert eqx.tree_equal(es.load(path, NEW), OLD)
    assert len(os.listdir(path.parent)) == 2  # that it left off is to be seen
    es.save(path, NEW)
    assert eqx.tree_equal(es.load(path, OLD), NEW)


# --- The path -------------------------------------------------------------------------


def test_a_path_that_cannot_be_written(path, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    for name, error, why in [
        ("folder", IsADirectoryError, "it is a directory"),
        ("pipe", OSError, "not a regular file"),
        ("none/model", FileNotFoundError, "directory does not exist"),
        (f"{path.name}/model", NotADirectoryError, "Not a directory"),
        (300 * "a", OSError, "name too long"),
    ]:
        target = tmp_path / name
        message = f"`es.save` cannot write `{target}`: .*{why}"
        with rejects(NEW, error, message):
            es.save(target, NEW)
    for target in (f"{tmp_path}/new/", f"{tmp_path}/folder/"):
        with rejects(NEW, IsADirectoryError, f"cannot write `{target}`: .*directory"):
            es.save(target, NEW)
    assert sorted(os.listdir(tmp_path)) == before
    assert eqx.tree_equal(es.load(path, OLD), OLD)


@pytest.mark.parametrize("forbidden", ["the file", "the directory"])
def test_no_permission(forbidden, path, monkeypatch):
    # Not by `chmod`, which holds nobody who runs the tests as root.
    def refuse(name, mode="r", *args, open=open, **kwargs):
        if (str(name) == str(path)) == (forbidden == "the file") and mode != "rb":
            raise PermissionError(13, "Permission denied", name)
        return open(name, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        message = f"cannot write `{path}`: Permission denied"
        with pytest.raises(PermissionError, match=message):
            es.save(path, NEW)
    assert_only(path, OLD)


def test_what_is_no_path():
    for wrong in (3, None, sys.stdout):
        with pytest.raises(TypeError, match="the path comes first, a string or an"):
            es.save(wrong, NEW)
        with pytest.raises(TypeError, match="the path comes first, a string or an"):
            es.load(wrong, NEW)


def test_paths_may_be_strings_and_relative(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    es.save(path.name, NEW)
    assert_only(path, NEW)
    assert eqx.tree_equal(es.load(path.name, OLD), NEW)


def test_the_target_of_a_link_is_replaced(path, tmp_path):
    folder = tmp_path / "links"
    folder.mkdir()
    link, broken = folder / "link", folder / "broken"
    link.symlink_to(path)
    broken.symlink_to("new")
    es.save(link, NEW)
    es.save(broken, NEW)
    assert link.is_symlink()
    assert broken.is_symlink()
    assert not path.is_symlink()
    assert sorted(os.listdir(folder)) == ["broken", "link", "new"]
    for file in (path, folder / "new"):
        assert eqx.tree_equal(es.load(file, OLD), NEW)


def test_permissions_are_those_of_open(path, tmp_path):
    def mode(path):
        return stat.S_IMODE(os.stat(path).st_mode)

    old = os.umask(0o027)
    try:
        es.save(tmp_path / "new", NEW)
        assert mode(tmp_path / "new") == 0o640
        path.chmod(0o604)
        es.save(path, NEW)
        assert mode(path) == 0o604
    finally:
        os.umask(old)


# --- What cannot be saved -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Complex dtype")
def test_one_error_lists_what_cannot_be_saved(path):
    tree = {
        "a": np.zeros(2, "c16"),
        "b": jnp.zeros(2, "int4"),
        "c": jax.ShapeDtypeStruct((2,), jnp.float32),
        "d": np.array(["text"]),
        "e": jnp.zeros(2),
    }
    expected = (
        r"cannot write these arrays:\n",
        r"\n  \['a'\]: safetensors has no `complex128`",
        r"\n  \['b'\]: safetensors has no `int4`",
        r"\n  \['c'\]: abstract: it has no values",
        r"\n  \['d'\]: safetensors has no `<U4`;",
    )
    with rejects(tree, TypeError, *expected):
        es.save(path, tree)
    assert_only(path, OLD)
    es.save(path, tree, es.path_matches("*e*"))
    assert_only(path, {"e": tree["e"]})


def test_traced_arrays_cannot_be_saved(path):
    with rejects(NEW, TypeError, r"\['x'\]: traced; save outside of `jit`"):
        jax.jit(lambda tree: es.save(path, tree))(NEW)
    assert_only(path, OLD)


def test_arrays_of_several_processes_cannot_be_saved(path, monkeypatch):
    mesh = Mesh(jax.devices(), "devices")
    tree = {
        "spread": jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("devices"))),
        "whole": jax.device_put(jnp.ones(8), NamedSharding(mesh, P())),
    }
    # Which needs several processes to be so.
    not_here = property(lambda self: False)
    monkeypatch.setattr(type(tree["whole"]), "is_fully_addressable", not_here)
    with rejects(tree, TypeError, r"spread'\]: .*orbax-checkpoint.*process_allgather"):
        es.save(path, tree)
    assert_only(path, OLD)
    es.save(path, tree, es.path_matches("*whole*"))
    assert safetensors.numpy.load_file(path)["['whole']"].tolist() == 8 * [1]


def test_a_name_that_safetensors_has_for_itself(path):
    class Odd(eqx.Module):
        __metadata__: jax.Array

    with rejects(NEW, TypeError, r"\n  __metadata__: safetensors uses this name"):
        es.save(path, Odd(jnp.zeros(1)))
    assert_only(path, OLD)


def test_keys_of_an_implementation_without_a_name_cannot_be_saved(path):
    functions = dict.fromkeys(("seed", "split", "random_bits", "fold_in"), fail)
    impl = define_prng_impl(key_shape=(2,), name="dice", tag="d", **functions)
    tree = {"rng": jr.wrap_key_data(jnp.zeros(2, "uint32"), impl=impl)}
    with pytest.raises(TypeError, match=r"\['rng'\]: .*no name; save `jax.random.key"):
        es.save(path, tree)
    assert_only(path, OLD)


def test_a_donated_array_is_named(tmp_path):
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(TypeError, match=r"\['x'\]: deleted, since it was donated"):
        es.save(tmp_path / "f", {"x": x})
    assert list(tmp_path.iterdir()) == []
