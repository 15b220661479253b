"""Fixtures and settings for all tests, including the doctests in `src`."""

import os
import signal
import sys

import pytest
import torch
from hypothesis import settings

from parabolic.cli import main

# Hypothesis draws the same examples in every run.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# A shell makes background jobs ignore Ctrl-C; programs that tests interrupt must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Skip tests that need a GPU if there is none, with the reason."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not `keywords`, which also has the names of parameters
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture(autouse=True)
def _repeatable():
    """Seed what a test draws without a seed of its own, so that a test that fails will fail again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread: on the small networks of tests, more are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path_factory):
    """Hide the project's own records and the user's data, presets and settings, on which tests must not depend."""
    for name in [variable for variable in os.environ if variable.startswith("PARABOLIC_")]:
        monkeypatch.delenv(name)
    for kind in ("records", "data"):
        monkeypatch.setenv(f"PARABOLIC_{kind.upper()}", str(tmp_path_factory.getbasetemp() / f"no {kind}"))


@pytest.fixture
def parabolic(monkeypatch, capsys, tmp_path):
    """A function that calls the command in an empty folder and returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # which an error replaces
    # No test depends on whether the machine needs more than a minute, after which a line of progress would be told.
    monkeypatch.setattr("parabolic.engine.callbacks.MINUTE", 1e6)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["parabolic", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
