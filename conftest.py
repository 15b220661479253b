"""What all tests share, those in the docstrings of `src` too."""

import signal
import sys

import pytest
import torch
from hypothesis import settings

from parabolic.cli import main

# Examples are drawn anew on a developer's machine and repeat exactly in CI; a failing one is printed either way.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# A shell lets what it starts in the background ignore Ctrl-C: programs that tests interrupt must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture(autouse=True)
def _repeatable():
    """What a test draws without a seed of its own is the same in every run: one that fails, fails again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run small networks: more threads than one only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_records(monkeypatch, tmp_path_factory):
    """What tests find must not depend on the records that the project has by now."""
    monkeypatch.setenv("PARABOLIC_RECORDS", str(tmp_path_factory.getbasetemp() / "no records"))


@pytest.fixture
def parabolic(monkeypatch, capsys, tmp_path):
    """Call the command in an empty folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["parabolic", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        told = capsys.readouterr()
        return code, told.out, told.err

    return call
