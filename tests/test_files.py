"""Files that are replaced: who may read and write them stays as it was."""

import os
import stat
import time

import pytest

from parabolic.checks import InputError
from parabolic.files import atomic_write, disk_errors, sweep, write_text

posix = pytest.mark.skipif(os.name != "posix", reason="needs the permissions of POSIX")


def mode(path):
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.fixture
def _open():
    """A umask that lets everybody read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@posix
@pytest.mark.usefixtures("_open")
@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o664, 0o444])
def test_a_file_that_is_replaced_hands_on_its_permissions(tmp_path, permissions):
    path = tmp_path / "secret"
    write_text(path, "one")
    assert mode(path) == oct(0o644)
    path.chmod(permissions)
    with atomic_write(path) as aside:
        aside.write_text("two")
        meanwhile = stat.S_IMODE(aside.stat().st_mode)
        assert meanwhile & ~0o600 & ~permissions == 0  # nobody else can read it
        assert meanwhile & 0o600 == 0o600  # but its owner can write it, even in place of a file for reading only
    assert (mode(path), path.read_text()) == (oct(permissions), "two")


@posix
@pytest.mark.usefixtures("_open")
def test_what_fails_leaves_the_file_and_nothing_beside_it(tmp_path):
    path = write_text(tmp_path / "secret", "one")
    path.chmod(0o600)
    with pytest.raises(ZeroDivisionError), atomic_write(path):
        raise ZeroDivisionError
    assert (mode(path), path.read_text(), len(list(tmp_path.iterdir()))) == (oct(0o600), "one", 1)


def test_a_new_file_gets_its_folders_and_one_that_fails_before_it_is_begun_says_why(tmp_path):
    path = tmp_path / "not" / "yet" / "there"
    with pytest.raises(ZeroDivisionError), atomic_write(path):
        raise ZeroDivisionError
    assert list(path.parent.iterdir()) == []
    assert write_text(path, "one").read_text() == "one"


@posix
def test_writing_leaves_no_file_or_folder_open(tmp_path):
    def lowest_free_descriptor():
        """The lowest descriptor that is free, which is the one that is given next."""
        descriptor = os.open(tmp_path, os.O_RDONLY)
        os.close(descriptor)
        return descriptor

    free = lowest_free_descriptor()
    write_text(tmp_path / "a", "one")
    write_text(tmp_path / "a", "two")
    assert lowest_free_descriptor() == free


def test_left_over_files_are_removed_after_the_clock_was_put_back(tmp_path):
    left_over = [tmp_path / f".{name}.safetensors.{'0' * 16}" for name in ("a", "b")]
    for path, seconds in zip(left_over, (3600, -3600), strict=True):
        path.touch()
        os.utime(path, (time.time() + seconds,) * 2)
    sweep(tmp_path)  # files that others may be writing: only what is old for certain
    assert [path.exists() for path in left_over] == [True, False]
    sweep(tmp_path, older=0)  # nobody else writes here
    assert not left_over[0].exists()


def test_only_left_over_files_are_removed_and_one_that_cannot_be_is_no_obstacle(tmp_path):
    users_files = [tmp_path / f".run.json.{end}" for end in ("bak", "0" * 15, "0" * 17, "g" * 16)]
    folder, left_over = (tmp_path / f".run.json.{digit * 16}" for digit in "0f")
    folder.mkdir()
    for path in (*users_files, left_over):
        path.touch()
    sweep(tmp_path, older=0)
    assert sorted(tmp_path.iterdir()) == sorted([*users_files, folder])


def test_an_error_of_the_disk_without_a_number_is_reported_too(tmp_path):
    with pytest.raises(InputError, match="^out: got the quota is used up"), disk_errors("out", tmp_path, "mend it"):
        raise OSError("the quota is used up")


def test_a_link_to_nowhere_is_reported_as_such(tmp_path):
    """As to a volume that is not mounted; the system says that the file exists."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    message = r"^out: got a link to a place that does not exist \(.*link\), expected a folder"
    with pytest.raises(InputError, match=message), disk_errors("out", tmp_path / "link", "mend it"):
        (tmp_path / "link").mkdir(exist_ok=True)
