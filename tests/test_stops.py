"""Ctrl-C and SIGTERM: what was learned is whole and written down first, and nothing is learned twice."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from grids import children, until

from parabolic import ER, MLP, Callback, RunSpec, Store, make_stream, run, train
from parabolic.engine.stops import PutOff
from parabolic.experiments import execute, run_grid
from parabolic.options import option
from parabolic.states import read_state

EPOCHS = 10  # of 120 steps: enough that no run ends before it is told to stop
STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143}
NEVER = "100000"  # seconds: so what is written down was written because of the signal


@pytest.fixture
def signals_handled():
    """The signals that a SIGTERM handler of the user's own received."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_waits_and_the_second_does_not():
    received = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        with PutOff() as stop:
            signal.raise_signal(signal.SIGINT)
            assert (stop.asked, received) == (True, [])
            signal.raise_signal(signal.SIGINT)
            assert (stop.asked, received) == (False, [signal.SIGINT])
            signal.raise_signal(signal.SIGINT)  # the handler has not ended it: from here on all is as without
        assert received == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def raise_in_turn(*numbers):
    with PutOff():
        for number in numbers:
            signal.raise_signal(number)


def test_a_repeated_sigterm_is_the_same_request(monkeypatch, signals_handled):
    """A cluster tells all processes of a job, and a grid tells its workers once more."""
    with PutOff() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            assert (stop.asked, signals_handled) == (True, [])
    assert signals_handled == [signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):  # of somebody who sits there
        raise_in_turn(signal.SIGTERM, signal.SIGINT)
    monkeypatch.setattr("parabolic.engine.stops.PATIENCE", 0.1)
    signals_handled.clear()
    with PutOff() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert until(lambda: signals_handled == [signal.SIGTERM])
        assert not stop.asked


FORKED = """
import os, signal, time
from parabolic.engine.stops import PutOff

reading, writing = os.pipe()
with PutOff():
    child = os.fork()
    if not child:
        os.write(writing, b".")  # Python drops what comes before the fork is complete
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_nothing_to_finish():
    process = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert (int(process.stdout), process.stderr) == (-signal.SIGTERM, "")


def test_a_handler_that_was_installed_meanwhile_stays(signals_handled):
    received = []

    def other_handler(number, _):
        received.append(number)

    with PutOff():
        signal.signal(signal.SIGTERM, other_handler)
    assert signal.getsignal(signal.SIGTERM) == other_handler
    signal.raise_signal(signal.SIGTERM)
    assert (received, signals_handled) == ([signal.SIGTERM], [])


def test_what_takes_too_long_is_broken_off(monkeypatch):
    monkeypatch.setattr("parabolic.engine.stops.PATIENCE", 0.1)

    def learn():
        with PutOff():
            signal.raise_signal(signal.SIGINT)
            time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        learn()
    time.sleep(0.2)  # and nothing is sent once more


def test_a_signal_that_was_obeyed_is_not_sent_again(monkeypatch, signals_handled):
    monkeypatch.setattr("parabolic.engine.stops.PATIENCE", 0.1)
    with PutOff() as stop:
        signal.raise_signal(signal.SIGTERM)
        stop.obey()
        time.sleep(0.3)
    assert signals_handled == [signal.SIGTERM]


@pytest.mark.parametrize("more_signals", [[], [signal.SIGTERM]])
def test_a_signal_that_was_obeyed_leaves_no_thread_waiting(monkeypatch, signals_handled, more_signals):
    monkeypatch.setattr("parabolic.engine.stops.PATIENCE", float(NEVER))
    before = threading.active_count()
    with suppress(KeyboardInterrupt), PutOff():
        signal.raise_signal(signal.SIGINT)
        assert threading.active_count() == before + 1
        for number in more_signals:
            signal.raise_signal(number)
    assert signals_handled == more_signals
    assert until(lambda: threading.active_count() == before)


def test_a_signal_that_nobody_obeyed_is_obeyed_at_the_end(signals_handled):
    with pytest.raises(KeyboardInterrupt), PutOff():
        signal.raise_signal(signal.SIGINT)
    with PutOff():
        signal.raise_signal(signal.SIGTERM)
        assert signals_handled == []
    assert signals_handled == [signal.SIGTERM]


def test_handlers_are_as_they_were_afterwards_and_what_is_ignored_stays_so(signals_handled):
    before = {number: signal.getsignal(number) for number in STOPS}
    with PutOff():
        assert all(signal.getsignal(number) != before[number] for number in STOPS)
    assert {number: signal.getsignal(number) for number in STOPS} == before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as nohup does with another
    with PutOff() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert not stop.asked
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_other_threads_leave_signals_alone():
    before, handlers_seen = signal.getsignal(signal.SIGINT), []

    def note_handler():
        with PutOff() as stop:
            handlers_seen.append(signal.getsignal(signal.SIGINT))
            stop.obey()

    thread = threading.Thread(target=note_handler)
    thread.start()
    thread.join()
    assert handlers_seen == [before]


class Interrupted(ER):
    """Presses Ctrl-C in the middle of a step."""

    at: int = option(0, "the step")

    def loss(self, batch, recalled):
        if self.steps == self.at:
            signal.raise_signal(signal.SIGINT)
        return super().loss(batch, recalled)


@pytest.mark.parametrize("at", [0, 5, 12])
def test_a_learner_is_between_two_steps_when_a_training_was_stopped(at):
    stream = make_stream("seq-digits")
    learner = Interrupted(MLP(stream.shape, stream.classes), at=at)
    with pytest.raises(KeyboardInterrupt):
        train(learner, stream, batch=10)
    assert not learner.stepping
    assert learner.steps == at + 1  # the step in which it came was finished, and none came after
    assert len(learner.past) == 10 * (at + 1)
    learner.observe(*next(iter(stream[0].batches(10))))


def test_no_step_is_made_twice(tmp_path):
    """Each step of a run that is stopped at every tenth is seen by a callback once."""
    spec, store, steps = RunSpec("sgd", stream="seq-blobs", batch=50, backbone="mlp"), Store(tmp_path), []

    class InterruptsEveryTenth(Callback):
        def on_step(self, state):
            steps.append(state.step)
            if state.step % 10 == 0:
                signal.raise_signal(signal.SIGINT)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(spec, store, device="cpu", checkpoint=float(NEVER), callbacks=[InterruptsEveryTenth()])
    record, _ = run(spec, store, device="cpu", checkpoint=float(NEVER), callbacks=[InterruptsEveryTenth()])
    assert steps == list(range(1, 25))
    assert record.accuracy == execute(spec, device="cpu").accuracy


MARKED = """
import time
from pathlib import Path

from parabolic import SGD


class Marked(SGD):
    def loss(self, batch, recalled):
        mark = Path(__file__).with_name(f"seed-{self.seed}")
        if self.steps == 20 and not mark.exists():
            mark.touch()
            while not mark.with_name("told").exists():  # so that signals come within this step
                time.sleep(0.02)
        return super().loss(batch, recalled)
"""


@pytest.fixture
def stop_command(tmp_path, monkeypatch):
    """Starts a command that trains MARKED, and stops it once runs of so many seeds are in the middle of a task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "marked.py").write_text(MARKED)
    settings = f"--stream seq-blobs --set epochs={EPOCHS} --checkpoint {NEVER} --device cpu --json".split()

    def stop(number, seeds, *arguments, group=False):
        command = [sys.executable, "-m", "parabolic", *arguments, *settings]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert until(lambda: all((tmp_path / f"seed-{seed}").exists() for seed in range(seeds)))
        if group:
            for worker in children(process.pid):
                os.kill(worker, number)
            time.sleep(0.2)  # for the workers to have noted it
        process.send_signal(number)
        time.sleep(0.5)  # for a grid to have told its workers
        (tmp_path / "told").touch()
        err = process.communicate(timeout=60)[1]
        assert process.returncode == STOPS[number], err
        return err

    return stop


def marked(seed, **options):
    return RunSpec("marked.py:Marked", stream="seq-blobs", seed=seed, epochs=EPOCHS, options=options)


def check_goes_on(seeds):
    """Runs that were stopped end as if they had not been."""
    specs, store = [marked(seed) for seed in range(seeds)], Store("runs")
    for spec in specs:
        assert 20 < read_state(store.checkpoint(spec.key))["progress"]["step"] < 120 * EPOCHS
    outcome = run_grid(specs, store, workers=0, device="cpu", checkpoint=float(NEVER))
    assert outcome.failures == []
    for spec, record in zip(specs, outcome.records.values(), strict=True):
        assert record.environment["resumed"] == 1
        assert record.accuracy == execute(spec, device="cpu").accuracy


@pytest.mark.parametrize("number", STOPS)
def test_a_run_that_is_stopped_goes_on_after_its_last_step(stop_command, number):
    err = stop_command(number, 1, "run", "--learner", "marked.py:Marked")
    assert err.startswith("stopped: the same command resumes")
    check_goes_on(1)


@pytest.mark.parametrize("number", STOPS)
def test_a_grid_that_is_stopped_has_its_workers_write_down_how_far_they_are(stop_command, number):
    err = stop_command(number, 2, "compare", "--learners", "marked.py:Marked", "--seeds", "2", "--workers", "2")
    assert "Stopped." in err
    check_goes_on(2)


def test_a_grid_whose_workers_were_told_too_loses_nothing(stop_command):
    """As by systemd or Slurm, which tell every process of a job."""
    settings = ("--set", "lr=0.01", "--seeds", "2", "--workers", "2")
    err = stop_command(signal.SIGTERM, 2, "compare", "--learners", "marked.py:Marked", *settings, group=True)
    assert "Stopped." in err
    store = Store("runs")
    steps = [read_state(store.checkpoint(marked(seed, lr=0.01).key))["progress"]["step"] for seed in (0, 1)]
    assert all(20 < step < 120 * EPOCHS for step in steps)


def test_a_grid_that_is_stopped_twice_lets_go_of_its_runs(tmp_path, monkeypatch):
    """In a notebook the process goes on, and the traceback is kept."""
    specs = [RunSpec("sgd", stream="seq-blobs", backbone="mlp", seed=seed) for seed in range(2)]

    def stop(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("parabolic.experiments.crews.InProcess.close", stop)
        with pytest.raises(KeyboardInterrupt) as error:  # once a run is begun, and once more at the end
            run_grid(specs, Store(tmp_path), workers=0, device="cpu", watch=stop)
    assert all((claim := Store(tmp_path).claim(spec.key)) is not None and not claim.release() for spec in specs)
    del error
