"""Failures of `es.save`: the path contains either the old file or the new one."""

import errno
import os
import resource
import stat
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import safetensors.numpy
from helpers import rejects, untouched
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_state as es


def tree(number, size=250_000):  # a file of 1 MB
    return {"x": np.full(size, number, "float32"), "y": np.array(number)}


OLD, NEW = tree(0), tree(1)


@pytest.fixture
def path(tmp_path):
    """A file with the old tree, the only one in its directory."""
    path = tmp_path / "model.safetensors"
    es.save(path, OLD)
    return path


def assert_only(path, tree):
    assert os.listdir(path.parent) == [path.name]
    assert eqx.tree_equal(es.load(path, tree), tree)


# --- A save that fails ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "error"),
    [(x, ZeroDivisionError) for x in ("save_file", "chmod", "fsync", "replace")]
    + [("fsync", KeyboardInterrupt)],
)
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


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(path, monkeypatch):
    synced, places = [], []

    def fsync(descriptor):
        synced.append(os.fstat(descriptor))

    def replace(source, target, replace=os.replace):
        places.append((source, target))
        assert [s.st_ino for s in synced] == [os.stat(source).st_ino]
        assert synced[0].st_size > 1_000_000
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    es.save(path, NEW)
    assert [target for _, target in places] == [str(path)]
    assert_only(path, NEW)


# --- The operating system -------------------------------------------------------------


def test_a_limit_of_the_file_size(path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        message = f"`es.save` cannot write `{path}`: .*File too large.*was changed"
        with pytest.raises(OSError, match=message) as info:
            es.save(path, NEW)
        # Safetensors gives the original reason in its text.
        assert info.value.errno == errno.EIO
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_only(path, OLD)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_no_permission(what):
    with tempfile.TemporaryDirectory() as name:  # other users cannot enter `tmp_path`
        folder = Path(name)
        path = folder / "model.safetensors"
        es.save(path, OLD)
        is_root = os.geteuid() == 0
        try:
            if is_root:  # permissions do not apply to root
                for each in (folder, path):
                    os.chown(each, 65534, 65534)
                os.seteuid(65534)
            (path if what == "file" else folder).chmod(0o000)
            message = f"`es.save` cannot write `{path}`: Permission denied.*changed"
            with pytest.raises(PermissionError, match=message):
                es.save(path, NEW)
            with pytest.raises(PermissionError, match=f"denied.*{path}"):
                es.load(path, OLD)
            (path if what == "file" else folder).chmod(0o755)
            assert_only(path, OLD)
        finally:
            if is_root:
                os.seteuid(0)


# --- The path -------------------------------------------------------------------------


def test_a_path_that_cannot_be_written(path, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    for name, error, why in [
        ("folder", OSError, "not a regular file"),
        ("folder/", OSError, "not a regular file"),
        ("pipe", OSError, "not a regular file"),
        ("none/model", FileNotFoundError, "No such file or directory"),
        (f"{path.name}/model", NotADirectoryError, "Not a directory"),
        (300 * "a", OSError, "name too long"),
    ]:
        target = f"{tmp_path}/{name}"
        with rejects(NEW, error, f"`es.save` cannot write `{target}`: .*{why}"):
            es.save(target, NEW)
    assert sorted(os.listdir(tmp_path)) == before
    assert eqx.tree_equal(es.load(path, OLD), OLD)


def test_paths_of_every_type(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    for name in (path.name, os.fsencode(path), path):
        es.save(name, NEW, metadata={"a": "b"})
        assert_only(path, NEW)
        assert eqx.tree_equal(es.load(name, OLD), NEW)
        assert es.load_metadata(name) == {"a": "b"}
    model = eqx.nn.Identity()
    for call in (
        lambda: es.save(model, path),
        lambda: es.load(model, path),
        lambda: es.load_metadata(model),
    ):
        with pytest.raises(TypeError, match="path first, but was given an `Identity`"):
            call()


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


def test_permissions_equal_those_of_open(path, tmp_path):
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


# --- Arrays that cannot be saved ------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Complex dtype")
def test_one_error_lists_all_arrays_that_cannot_be_saved(path):
    tree = {
        "a": np.zeros(2, "c16"),
        "b": jnp.zeros(2, "int4"),
        "c": jax.ShapeDtypeStruct((2,), jnp.float32),
        "d": np.array(["text"]),
        "e": jnp.zeros(2),
    }
    with pytest.raises(TypeError, match=r"\['x'\]: traced; save outside of `jit`"):
        jax.jit(lambda tree: es.save(path, tree))(NEW)
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


def test_arrays_of_several_processes_cannot_be_saved(path, monkeypatch):
    mesh = Mesh(jax.devices(), "devices")
    tree = {
        "spread": jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("devices"))),
        "whole": jax.device_put(jnp.ones(8), NamedSharding(mesh, P())),
    }
    # Pretend that there are several processes.
    not_here = property(lambda self: False)
    monkeypatch.setattr(type(tree["whole"]), "is_fully_addressable", not_here)
    with rejects(tree, TypeError, r"spread'\]: .*orbax-checkpoint.*process_allgather"):
        es.save(path, tree)
    assert_only(path, OLD)
    es.save(path, tree, es.path_matches("*whole*"))
    assert safetensors.numpy.load_file(path)["['whole']"].tolist() == 8 * [1]


def test_a_class_instead_of_a_model(tmp_path):
    path = tmp_path / "model.safetensors"
    es.save(path, eqx.nn.Linear(2, 2, key=jr.key(0)))
    for f in (
        lambda: es.save(path, eqx.nn.Linear),
        lambda: es.load(path, eqx.nn.Linear),
        lambda: es.load_state_dict(eqx.nn.Linear, {}),
        lambda: es.tabulate(eqx.nn.Linear),
        lambda: es.Ema(0.9).init(eqx.nn.Linear),
        lambda: es.Optimizer(optax.sgd(0.1)).init(eqx.nn.Linear),
    ):
        with pytest.raises(TypeError, match=r"`Linear` is a class.*Linear\(\.\.\.\)"):
            f()


@pytest.mark.parametrize("more", [{"epoch": "3"}, jnp.ones(2)], ids=["dict", "array"])
def test_several_trees_and_metadata_are_not_filters(tmp_path, more):
    path = tmp_path / "file"
    cure = r"\(path, \(model, optimizer\)\).*metadata=\{.epoch.: .3.\}.*strict=False"
    model = {"w": jnp.ones(2)}
    es.save(path, model)
    for f in (es.save, es.load):
        with pytest.raises(TypeError, match=f"is not a filter.*{cure}") as info:
            f(path, model, more)
        assert "wrt" not in str(info.value)
