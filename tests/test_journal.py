"""Journals: whatever ends the process, the next start goes on as if it had not ended."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from grids import until
from journals import KILLS, LENGTH, batch, files, frozen, go_on, make, trajectory
from torch import nn

from parabolic import ER, PCL, Diverged, InputError, Journal, Learner, LwF, ParabolicClassifier
from parabolic.engine import journal
from parabolic.files import atomic_write, write_bytes
from parabolic.states import pack_state, same_state

# -- kills -------------------------------------------------------------------------------------------------


def test_a_hundred_kills_at_random_moments_change_nothing(tmp_path):
    code = f"import journals; journals.main({str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout)
    assert counts["kills"] == KILLS
    assert counts["in a write"] > 0
    assert len(set(counts["starts"])) > 5  # they came at many moments


def start(folder):
    """Another process that has the folder; it says so, and waits."""
    code = f"from journals import *; j = Journal({str(folder)!r}, make()); print('mine', flush=True); input()"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "mine\n"
    return process


def test_one_process_at_a_time_and_a_killed_one_lets_go(tmp_path):
    with start(tmp_path) as other:
        message = "journal: got a folder that another journal has open.*close the other first"
        with pytest.raises(InputError, match=message):
            Journal(tmp_path, make())
        other.kill()
    Journal(tmp_path, make()).close()


def test_one_journal_at_a_time_of_one_process_and_any_thread_may_close_it(tmp_path):
    journal = Journal(tmp_path, make())
    with pytest.raises(InputError, match="another journal has open, here or in another process"):
        Journal(tmp_path, make())
    closing = threading.Thread(target=journal.close)
    closing.start()
    closing.join()
    Journal(tmp_path, make()).close()


def test_a_closed_journal_neither_learns_nor_writes(tmp_path):
    closed = Journal(tmp_path, make(), every=1)
    closed.close()
    with Journal(tmp_path, make()) as journal:
        journal.observe(*batch(0))
        journal.write()
        before = {path.name: path.read_bytes() for path in tmp_path.glob("0*")}
        for call in (
            lambda: closed.observe(*batch(1)), closed.skip, lambda: closed.start_task([]), lambda: closed.end_task([]),
            closed.write,
        ):  # fmt: skip
            with pytest.raises(InputError, match="journal: got a call after it was closed .* create a new Journal for"):
                call()
        assert (closed.learner.steps, closed.batches, closed.tasks) == (0, 0, 0)
        assert {path.name: path.read_bytes() for path in tmp_path.glob("0*")} == before


def test_a_journal_may_be_closed_before_its_block_ends(tmp_path):
    with Journal(tmp_path, make()) as journal:
        journal.observe(*batch(0))
        journal.close()
    assert files(tmp_path) == ["000000000000.safetensors"]


def test_a_journal_stays_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with Journal("journal", make()) as journal:
        monkeypatch.chdir(tmp_path / "elsewhere")
        journal.observe(*batch(0))
    assert files(tmp_path / "journal") == ["000000000000.safetensors", "000000000001.safetensors"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- signals -----------------------------------------------------------------------------------------------


STOPPED = """
import signal, sys
from journals import *
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
with Journal(sys.argv[1], make(), every=10**6) as journal:
    signal.signal(signal.SIGUSR1, lambda *_: journal.write())
    print("ready", flush=True)
    for number in range(journal.batches, 10**6):
        journal.learner.predict(batch(number)[0])
        journal.observe(*batch(number))
        if asked:
            break
print(journal.batches)
"""


FORKS = """
import os, sys
from journals import make
from parabolic import InputError, Journal
with Journal(sys.argv[1], make()):
    if not (child := os.fork()):
        sys.exit()  # through the end of the with block
    os.waitpid(child, 0)
    try:
        Journal(sys.argv[1], make())
    except InputError as error:
        print(error)
"""


def test_a_forked_process_that_ends_does_not_release_the_folder_of_its_parent(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", FORKS, tmp_path], env=environment, capture_output=True, text=True, check=True
    )
    assert re.match("journal: got a folder that another journal has open", process.stdout)


def newer_file(process, folder, batches):
    """Ask for one more file (all earlier ones may be of the first batch); whether one is of a batch after `batches`."""
    process.send_signal(signal.SIGUSR1)
    return any(int(name[:12]) > batches for name in files(folder))


def test_signals_at_random_moments_write_only_whole_states(tmp_path):
    """SIGTERM ends the loop as the manual says; SIGUSR1 asks for a file at once, in a step, a prediction or neither."""
    moments, environment = random.Random(3), os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    learner, start, asked_for = make(), 0, 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPED, tmp_path], stdout=subprocess.PIPE, text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        for _ in range(10):
            time.sleep(moments.uniform(0, 0.02))
            process.send_signal(signal.SIGUSR1)
        assert until(partial(newer_file, process, tmp_path, start))
        time.sleep(0.05)  # some batches more, so that it is not the file of the end
        process.terminate()
        last = int(process.communicate()[0])
        assert process.returncode == 0
        asked_for += sum(start < int(name[:12]) < last for name in files(tmp_path))
        for number in range(start, last):
            learner.observe(*batch(number))
            path = tmp_path / f"{number + 1:012d}.safetensors"
            if path.exists():  # three of those that signals asked for
                with torch.random.fork_rng():  # of which dropout draws
                    loaded = Learner.load(path, model=make(seed=9).model)
                assert same_state(loaded.state_dict(), learner.state_dict())
        start = last
    assert asked_for > 0


@pytest.mark.parametrize("call", ["observe", "start_task", "end_task"])
def test_a_file_that_is_asked_for_in_the_middle_of_a_change_comes_after_it(tmp_path, call):
    class AsksForFile(ER):
        def ask_for_file(self):
            before = files(tmp_path)
            journal.write()
            assert files(tmp_path) == before

        def remember(self, raw, batch):
            self.ask_for_file() if call == "observe" else None
            super().remember(raw, batch)

        def start_task(self, batches):
            self.ask_for_file() if call == "start_task" else None

        def end_task(self, batches):
            self.ask_for_file() if call == "end_task" else None

    journal = Journal(tmp_path, make(AsksForFile))
    if call == "observe":
        journal.observe(*batch(0))
        assert files(tmp_path)[1:] == ["000000000001.safetensors"]
        journal.observe(*batch(1))  # it was asked for again
        assert files(tmp_path)[2:] == ["000000000002.safetensors"]
        loaded = Learner.load(tmp_path / "000000000002.safetensors", model=make().model)
        assert same_state(loaded.state_dict(), journal.learner.state_dict())
    else:
        before = (tmp_path / "000000000000.safetensors").read_bytes()
        getattr(journal, call)([])
        assert (tmp_path / "000000000000.safetensors").read_bytes() != before
    journal.close()
    second = Journal(tmp_path, make(AsksForFile))
    assert (second.batches, second.in_task, second.tasks) == (journal.batches, call == "start_task", call == "end_task")
    second.close()


@pytest.mark.parametrize("during", ["predict", "grow"])
def test_a_signal_during_a_prediction_or_growth_has_the_file_written_after_the_next_batch(tmp_path, during):
    """Averaged weights are in the model's place then, or the head has more rows than its average."""

    class SignalsInPrediction(nn.Sequential):
        def forward(self, x):
            if now == ["predict"]:
                signal.raise_signal(signal.SIGUSR1)
            return super().forward(x)

    class SignalsInGrowth(ER):
        def on_growth(self, moved):
            if now == ["grow"]:
                signal.raise_signal(signal.SIGUSR1)
            super().on_growth(moved)

    now, learner = (
        [],
        SignalsInGrowth(SignalsInPrediction(nn.Linear(3, 4)), optimizer="Adam", average=0.9, memory=40, replay=8),
    )
    with Journal(tmp_path, learner) as journal:
        before = signal.signal(signal.SIGUSR1, lambda *_: journal.write())
        for number in range(3):
            journal.observe(*batch(number))
        now.append(during)
        learner.predict(batch(3)[0]) if during == "predict" else learner.grow(5)
        now.clear()
        signal.signal(signal.SIGUSR1, before)
        assert files(tmp_path) == ["000000000000.safetensors"]
        journal.observe(*batch(3))
        assert files(tmp_path) == ["000000000000.safetensors", "000000000004.safetensors"]
        loaded = Learner.load(tmp_path / "000000000004.safetensors", model=SignalsInPrediction(nn.Linear(3, 4)))
        assert same_state(loaded.state_dict(), learner.state_dict())


def test_a_batch_that_a_second_thread_brings_waits_until_the_first_is_counted(tmp_path):
    """A file counts the batches that it has: between a step and its count, another step must not come."""
    thread, steps = threading.Thread(target=lambda: journal.observe(*batch(1))), []

    def count_steps():  # called when the batch is learned
        thread.start()
        thread.join(0.2)  # long enough for a step
        steps.append(journal.learner.steps)

    with Journal(tmp_path, make(), every=1) as journal:
        journal.observe(*batch(0), notes=count_steps)
        thread.join()
        assert steps == [1]
        assert (journal.batches, journal.learner.steps, journal.saved) == (2, 2, 2)


def test_a_file_comes_after_every_so_many_batches_however_many_threads_bring_them(tmp_path):
    def learn():
        for number in range(50):
            journal.observe(*batch(number))

    threads, interval = [threading.Thread(target=learn) for _ in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # another thread's turn comes anywhere
    try:
        with Journal(tmp_path, make(), every=10, keep=30) as journal:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert files(tmp_path) == [f"{number:012d}.safetensors" for number in range(0, 201, 10)]


def test_a_signal_handler_cannot_learn_a_batch_in_the_middle_of_another(tmp_path):
    def handler():
        with pytest.raises(RuntimeError, match="^journal: called in the middle of a batch; set a flag, and check it"):
            journal.observe(*batch(1))

    with Journal(tmp_path, make(), every=1) as journal:
        journal.observe(*batch(0), notes=handler)
        assert (journal.batches, journal.learner.steps, journal.saved) == (1, 1, 1)


def test_what_was_broken_off_in_its_middle_is_not_written(tmp_path):
    """Whoever stops a loop by Ctrl-C and writes then would write half a step."""

    class InterruptedAtSecond(ER):
        def remember(self, raw, batch):
            if self.steps == 2:
                raise KeyboardInterrupt
            super().remember(raw, batch)

    journal = Journal(tmp_path, make(InterruptedAtSecond), every=2)
    journal.observe(*batch(0))
    journal.observe(*batch(1))
    with pytest.raises(KeyboardInterrupt):
        journal.observe(*batch(2))
    message = r"interrupted in the middle of a step \(after batch 2\), .* start again from 000000000002.safetensors"
    with pytest.raises(InputError, match=message):
        journal.write()
    journal.close()
    assert files(tmp_path)[-1] == "000000000002.safetensors"


def test_another_thread_may_ask_for_a_file_at_any_time(tmp_path):
    """Also when a batch is learned and not yet counted: it must not be given again."""

    class AskedByThread(ER):
        def observe(self, x, y, task=None):
            loss = super().observe(x, y, task)
            asking = threading.Thread(target=journal.write)
            asking.start()
            asking.join()
            return loss

    journal = Journal(tmp_path, make(AskedByThread))
    for number in range(3):
        journal.observe(*batch(number))
    journal.close()
    for count, name in enumerate(files(tmp_path), start=1):
        loaded = Learner.load(tmp_path / name, model=make().model)
        assert (name, loaded.steps) == (f"{count:012d}.safetensors", count)


def test_a_journal_leaves_what_others_are_writing_to_its_folder(tmp_path):
    with atomic_write(tmp_path / "other.txt") as temporary:
        temporary.write_text("done")
        Journal(tmp_path, make()).close()
    assert (tmp_path / "other.txt").read_text() == "done"


# -- disks -------------------------------------------------------------------------------------------------


def test_a_thread_that_writes_slowly_replaces_no_later_state(tmp_path, monkeypatch):
    packed, written = threading.Event(), threading.Event()

    def write_slowly(path, data):
        if threading.current_thread() is writer:
            packed.set()
            written.wait(0.2)
        return write_bytes(path, data)

    with Journal(tmp_path, make()) as journal:
        journal.start_task([])
        monkeypatch.setattr("parabolic.engine.journal.write_bytes", write_slowly)
        writer = threading.Thread(target=journal.write)
        writer.start()
        packed.wait()
        journal.end_task([])  # in a file of the same name, as no batch came between
        written.set()
        writer.join()
        journal.close()
    with Journal(tmp_path, make()) as journal:
        assert (journal.tasks, journal.in_task) == (1, False)


def test_a_journal_that_another_thread_closes_writes_no_more(tmp_path, monkeypatch):
    """Another process may have gone on meanwhile."""
    packed, closed, errors = threading.Event(), threading.Event(), []

    def pack_slowly(content):
        packed.set()
        closed.wait()
        return pack_state(content)

    def try_to_write():
        try:
            journal.write()
        except InputError as error:
            errors.append(str(error))

    journal = Journal(tmp_path, make())
    journal.observe(*batch(0))
    monkeypatch.setattr("parabolic.engine.journal.pack_state", pack_slowly)
    writer = threading.Thread(target=try_to_write)
    writer.start()
    packed.wait()
    journal.close()
    closed.set()
    writer.join()
    assert [text.partition(",")[0] for text in errors] == [f"journal: got a call after it was closed ({tmp_path})"]
    assert files(tmp_path) == ["000000000000.safetensors"]


def test_a_journal_is_not_free_before_a_thread_has_finished_its_file(tmp_path, monkeypatch):
    outcomes = []

    def write_while_closing(path, packed):
        closing.start()
        closing.join(0.2)  # it would be over, if it did not wait for this file
        with pytest.raises(InputError, match="another journal has open"):
            Journal(tmp_path, make())
        outcomes.append("refused")
        return write_bytes(path, packed)

    journal = Journal(tmp_path, make())
    closing = threading.Thread(target=journal.close)
    journal.observe(*batch(0))
    with monkeypatch.context() as patch:
        patch.setattr("parabolic.engine.journal.write_bytes", write_while_closing)
        writing = threading.Thread(target=journal.write)
        writing.start()
        writing.join()
    closing.join()
    assert outcomes == ["refused"]
    with Journal(tmp_path, make()) as reopened:
        assert reopened.batches == 1


def test_a_start_drops_what_is_no_longer_kept_even_where_nothing_can_be_written(tmp_path, monkeypatch):
    with Journal(tmp_path, make(), every=1, keep=6) as journal:
        for number in range(8):
            journal.observe(*batch(number))
    newest = sorted(path.name for path in tmp_path.glob("*.safetensors"))[-2:]

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    journal = Journal(tmp_path, make(), every=1, keep=2)
    assert journal.batches == 8
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == newest
    journal.close()


@pytest.fixture
def limit_file_size():
    """A limit of the operating system on the size of files: a write breaks off in its middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield set_limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_with_many_milestones_is_listed_once_for_each_file(tmp_path, monkeypatch):
    listings, list_files = [], journal._files
    monkeypatch.setattr(journal, "_files", lambda folder: listings.append(folder) or list_files(folder))
    with Journal(tmp_path, make(), every=1, milestones=1) as open_journal:
        listings.clear()
        for number in range(10):
            open_journal.observe(*batch(number))
        assert len(listings) == 10
    assert len(files(tmp_path)) == 11


def test_milestones_are_kept_for_good(tmp_path):
    def kept_batches():
        return sorted(int(path.stem) for path in tmp_path.glob("0*.safetensors"))

    for length in (7, 13, 25):  # the last file of each start is written when it ends
        go_on(tmp_path, length=length, every=2, keep=2, milestones=10)
    assert kept_batches() == [0, 10, 20, 24, 25]
    go_on(tmp_path, length=27, every=2, keep=1, milestones=20)
    assert kept_batches() == [0, 20, 27]  # no longer milestones
    (tmp_path / f"{27:012d}.safetensors").unlink()
    journal = go_on(tmp_path, length=27, every=100, keep=1)
    assert kept_batches() == [27]
    assert same_state(journal.learner.state_dict(), trajectory()[27])  # learned again from batch 20
    with pytest.raises(InputError, match="milestones: got 0, expected a whole number of at least 1"):
        Journal(tmp_path / "other", make(), milestones=0)


def test_a_full_disk_stops_learning_and_loses_nothing(tmp_path, limit_file_size):
    go_on(tmp_path, length=10, every=5)
    limit_file_size(1000)
    with pytest.raises(InputError, match="journal: got File too large .* existing files are safe"):
        go_on(tmp_path, every=5)
    limit_file_size(resource.RLIM_INFINITY)
    assert files(tmp_path) == [f"{count:012d}.safetensors" for count in (0, 5, 10)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".0")] == []
    journal = Journal(tmp_path, make())
    assert journal.batches == journal.saved == 10
    journal.close()
    assert same_state(go_on(tmp_path).learner.state_dict(), trajectory()[LENGTH])


def test_a_full_disk_need_not_stop_learning(tmp_path, limit_file_size):
    with Journal(tmp_path, make(), every=5, on_error="warn") as journal:
        for number in range(LENGTH):
            limit_file_size(1000 if 12 <= number < 22 else resource.RLIM_INFINITY)
            if number in (14, 19):
                message = "nothing after batch 10 is saved, and learning continues: journal: got File too large"
                with pytest.warns(RuntimeWarning, match=message):
                    journal.observe(*batch(number))
            else:
                journal.observe(*batch(number))
            learned = journal.batches
            assert journal.saved == (10 if 10 <= learned < 25 else learned // 5 * 5)
    assert files(tmp_path) == [f"{count:012d}.safetensors" for count in (10, 25, 30)]
    assert same_state(journal.learner.state_dict(), trajectory()[LENGTH])


def test_each_time_that_the_disk_is_full_is_warned_of_once(tmp_path, limit_file_size):
    """However long it lasts: a warning of each attempt would flood the log, and Python would remember every text."""
    with warnings.catch_warnings(record=True) as caught, Journal(tmp_path, make(), every=2, on_error="warn") as journal:
        warnings.simplefilter("default")  # as in a program that leaves them as they are
        for number in range(LENGTH):
            limit_file_size(1000 if 4 <= number < 12 or 16 <= number < 22 else resource.RLIM_INFINITY)
            journal.observe(*batch(number))
    assert [re.match(r"nothing after batch (\d+) is saved", str(warning.message))[1] for warning in caught] == [
        "4",
        "16",
    ]


def test_a_full_disk_at_the_end_is_reported_and_the_folder_is_free_again(tmp_path, limit_file_size):
    def learn(on_error):
        with Journal(tmp_path / on_error, make(), every=5, on_error=on_error) as journal:
            for number in range(7):
                journal.observe(*batch(number))
            limit_file_size(1000)

    with pytest.raises(InputError, match="journal: got File too large .* existing files are safe"):
        learn("stop")
    limit_file_size(resource.RLIM_INFINITY)
    message = "closed, with batches after 5 not saved: the next start resumes from there; journal: got File too large"
    with pytest.warns(RuntimeWarning, match=message):
        learn("warn")
    limit_file_size(resource.RLIM_INFINITY)
    for name in ("stop", "warn"):
        assert same_state(go_on(tmp_path / name).learner.state_dict(), trajectory()[LENGTH])


CROWDED = """
import resource, sys
from journals import *
from parabolic import ER, InputError
journal = Journal(sys.argv[1], ER(nn.Linear(1000, 4), memory=20_000), every=100, on_error=sys.argv[3])
x, y = torch.ones(200, 1000), torch.arange(200) % 4  # small: what a step leaves free is room, too
for _ in range(99):
    journal.observe(x, y)
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + int(sys.argv[2]) * 2**20, resource.RLIM_INFINITY))
warnings.simplefilter("always")
try:
    for number in range(99, 105):
        journal.observe(x[:8], y[:8])
except InputError as error:
    print(error)
print(journal.batches, journal.learner.steps, files(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("room", "on_error", "batches", "written"),
    [(40, "stop", 100, []), (40, "warn", 105, []), (120, "stop", 105, ["000000000100.safetensors"])],
)
def test_a_write_needs_memory_for_one_copy_and_where_there_is_none_the_files_stay(
    tmp_path, room, on_error, batches, written
):
    """The state is of 80 MB."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CROWDED, tmp_path, str(room), on_error]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    assert f"{batches} {batches} {['000000000000.safetensors', *written]}" in process.stdout
    message = "journal: got no memory left for saving, expected room for a copy of the learner; free some"
    assert (message in process.stdout + process.stderr) == (not written)


SMALL = """
import sys
from journals import *
from parabolic import InputError
place = Path(sys.argv[1])
(place / "ballast").write_bytes(bytes(40_000))
try:
    go_on(place, every=5, keep=9)
except InputError as error:
    print(error)
kept = files(place)
(place / "ballast").unlink()
journal = Journal(place, make())
print(kept[-1], journal.batches)
journal.close()
assert same_state(go_on(place, every=100, keep=1).learner.state_dict(), trajectory()[LENGTH])
"""


def test_a_small_disk_that_fills_up_loses_nothing(tmp_path):
    """A real one: a file system of some kilobytes, where the system lets us mount one for ourselves."""
    mount = f"mount -t tmpfs -o size=100k tmpfs {tmp_path}"
    in_namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*in_namespace, mount], capture_output=True).returncode:
        pytest.skip("needs a system that lets a user mount a tmpfs in a namespace of his own")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = f"{mount} && exec {sys.executable} -c '{SMALL}' {tmp_path}"
    process = subprocess.run([*in_namespace, command], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    error, counts = process.stdout.splitlines()
    assert "journal: got No space left on device" in error
    last, batches = counts.split()
    assert last == f"{int(batches):012d}.safetensors"
    assert 0 < int(batches) < LENGTH


# -- divergence --------------------------------------------------------------------------------------------


def diverge(journal, first, last):
    """Learn some batches, at a rate that no learner stands."""
    for group in journal.learner.optim.param_groups:
        group["lr"] = 1e38
    for number in range(first, last):
        journal.observe(*batch(number))


def test_a_learner_that_diverged_is_not_written_and_the_next_start_goes_on_before_that(tmp_path):
    go_on(tmp_path, length=10, every=5)
    before = files(tmp_path)
    message = (
        r"journal: got values that are NaN or infinite \(0.weight, after batch 15\).* again from 000000000010.* lr"
    )
    with pytest.raises(Diverged, match=message), Journal(tmp_path, make(), every=5, keep=1) as journal:
        diverge(journal, 10, 20)
    assert files(tmp_path) == before[-1:]  # as many as it keeps
    journal = go_on(tmp_path, every=5)
    assert same_state(journal.learner.state_dict(), trajectory()[LENGTH])


def test_a_rate_that_was_lowered_stays_low(tmp_path):
    """It is part of the state: a learner with another `lr` would be refused."""
    for rate in (0.01, 0.001, 0.0001):
        with Journal(tmp_path, make()) as journal:
            for group in journal.learner.optim.param_groups:
                assert group["lr"] == pytest.approx(rate)
                group["lr"] /= 10


def test_a_learner_that_diverged_stops_even_where_a_full_disk_would_not(tmp_path):
    """It would answer nothing and be saved never again, while the program seems to learn."""
    go_on(tmp_path, length=5)
    with (
        pytest.raises(Diverged, match=r"after batch 10\).* start again from 000000000005"),
        Journal(tmp_path, make(), every=5, keep=1, on_error="warn") as journal,
    ):
        diverge(journal, 5, 15)
    assert files(tmp_path) == ["000000000005.safetensors"]


def test_a_learner_that_never_was_finite_begins_no_journal(tmp_path):
    learner = make()
    nn.init.constant_(learner.model[0].bias, torch.inf)
    with pytest.raises(Diverged, match=r"0.bias, after batch 0\), expected finite ones; start with a finite learner"):
        Journal(tmp_path, learner)
    Journal(tmp_path, make()).close()


def test_what_is_not_learned_need_not_be_finite(tmp_path):
    """A mask of attention, for example."""
    model = nn.Linear(3, 4)
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    model.fixed = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    with Journal(tmp_path, ER(model)) as journal:
        journal.observe(*batch(0))
    assert files(tmp_path)[-1] == "000000000001.safetensors"


@pytest.mark.parametrize("average", [None, 0.9])
def test_numbers_of_8_bits_are_written(tmp_path, average):
    def quantised():
        model = nn.Linear(3, 4)
        model.register_buffer("table", torch.ones(5).to(torch.float8_e4m3fn))
        return ER(model, average=average)

    starts = []
    for number in range(2):
        with Journal(tmp_path, quantised()) as journal:
            starts.append(journal.batches)
            journal.observe(*batch(number))
    assert starts == [0, 1]


def test_weights_that_are_large_are_written(tmp_path):
    """Their sum is no number of their type; they are."""
    model = nn.Linear(3, 4)
    nn.init.constant_(model.weight, 3e38)
    Journal(tmp_path, ER(model)).close()
    assert files(tmp_path) == ["000000000000.safetensors"]


def test_an_outlier_that_leaves_statistics_infinite_is_not_written(tmp_path):
    """Its loss is finite, and so are all weights; yet from then on every example would be answered alike."""
    go_on(tmp_path, length=10, every=5)
    before = files(tmp_path)
    x, y = batch(10)
    x[0] = 1e25

    def learn():
        with Journal(tmp_path, make(), every=5, keep=1) as journal:
            assert journal.observe(x, y).isfinite()
            for number in range(11, 15):
                journal.observe(*batch(number))

    message = (
        r"NaN or infinite \(1.running_var, after batch 15\).* again from 000000000010.* leave out extreme examples"
    )
    with pytest.raises(Diverged, match=message):
        learn()
    assert files(tmp_path) == before[-1:]  # as many as it keeps


class Units:
    """Some user's own, with a state."""

    def __init__(self, scale=1.0):
        self.scale = torch.tensor(scale)

    def __call__(self, x):
        return x * self.scale.nan_to_num()

    def state_dict(self):
        return {"scales": [self.scale]}

    def load_state_dict(self, state):
        self.scale.copy_(state["scales"][0])


def spoil_units(learner):
    learner.prepare.scale.fill_(torch.nan)


def spoil_average(learner):
    learner.averaged.weights["0.bias"][3] = torch.inf


def spoil_moments(learner):
    """With an infinite square of a gradient a weight would never move again."""
    learner.optim.state[learner.model[0].weight]["exp_avg_sq"][0, 0] = torch.inf


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (spoil_units, "prepare.scales.0"),
        (spoil_average, "average.0.bias"),
        (spoil_moments, "optimizer.state.0.exp_avg_sq"),
    ],
)
def test_all_that_predictions_and_steps_use_must_be_finite(tmp_path, spoil, name):
    journal = Journal(tmp_path, make(prepare=Units()))
    journal.observe(*batch(0))
    spoil(journal.learner)
    with pytest.raises(Diverged, match=rf"\({name}, after batch 1\)"):
        journal.write()
    journal.close()
    assert files(tmp_path) == ["000000000000.safetensors"]


def test_a_mask_and_an_average_go_together(tmp_path):
    """A step from −∞ to −∞ is no number."""

    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.mask

    for length in (5, 10):
        model = Masked(3, 5)
        model.register_buffer("mask", torch.tensor([0.0, 0, 0, 0, -torch.inf]))
        with Journal(tmp_path, ER(model, average=0.9)) as journal:
            for number in range(journal.batches, length):
                journal.observe(*batch(number))
        assert journal.learner.scores(batch(0)[0])[:, :4].isfinite().all()
        assert not journal.learner.scores(batch(0)[0]).isnan().any()


# -- damage ------------------------------------------------------------------------------------------------


def spoil(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_is_passed_over_by_name(tmp_path):
    go_on(tmp_path, length=15, every=5)
    for name in files(tmp_path)[-2:]:
        spoil(tmp_path / name)
    with pytest.warns(RuntimeWarning) as caught:
        journal = go_on(tmp_path, every=5, keep=1)
    for warning, name in zip(caught, ("000000000015", "000000000010"), strict=True):
        message = f"skipped a damaged file, resuming from batch 5: path: got '{tmp_path}/{name}.safetensors'"
        assert message in str(warning.message)
    assert same_state(journal.learner.state_dict(), trajectory()[LENGTH])
    assert files(tmp_path) == ["000000000010.damaged", "000000000015.damaged", "000000000030.safetensors"]


def test_a_journal_of_damaged_files_alone_does_not_begin_anew(tmp_path):
    go_on(tmp_path, length=1)
    before = files(tmp_path)
    for name in before:
        spoil(tmp_path / name)
    with pytest.raises(InputError, match="only damaged files, the newest "):
        Journal(tmp_path, make())
    assert files(tmp_path) == before


def test_a_journal_that_is_opened_in_inference_mode_learns_on(tmp_path):
    for start in range(2):
        learner = make()
        with torch.inference_mode():
            journal = Journal(tmp_path, learner, every=1)
        assert journal.batches == start
        journal.observe(*batch(start))
        journal.close()


def test_a_file_of_another_making_is_refused_and_not_passed_over(tmp_path):
    go_on(tmp_path, length=3)
    for learner, message in [
        (make(times=7), "times: got 7, expected 5, as it was saved"),
        (make(prepare=torch.neg), "prepare: got one of your own, expected None, as it was saved"),
        (make(ER), "learner: got 'parabolic.learners.er:ER', expected parabolic.learners.pcl:PCL"),
        (PCL(nn.Linear(3, 4), memory=40, replay=8, optimizer="Adam", lr=0.01, average=0.9), "of the model: got"),
        (go_on(tmp_path, length=4).learner, "learner: got one that has learned 4 batches, expected a new one"),
    ]:
        before = frozen(learner)
        with pytest.raises(InputError, match=message):
            Journal(tmp_path, learner)
        assert same_state(learner.state_dict(), before)
    make().save(tmp_path / "000000000009.safetensors")
    with pytest.raises(InputError, match="expected a file of a learner and journal and draws"):
        Journal(tmp_path, make())


# -- the ways to use it ------------------------------------------------------------------------------------


def test_the_last_files_stay(tmp_path):
    go_on(tmp_path, length=23, every=5, keep=2)
    assert files(tmp_path) == ["000000000020.safetensors", "000000000023.safetensors"]
    loaded = Learner.load(tmp_path / "000000000020.safetensors", model=make().model)  # each is a learner's file too
    assert same_state(loaded.state_dict(), trajectory(20)[20])


def test_an_error_in_the_loop_writes_nothing(tmp_path):
    """The learner may have been in the middle of a step."""

    def interrupted():
        with Journal(tmp_path, make()) as journal:
            journal.observe(*batch(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files(tmp_path) == ["000000000000.safetensors"]


def test_a_batch_that_is_refused_does_not_count(tmp_path):
    with Journal(tmp_path, make()) as journal:
        with pytest.raises(InputError):
            journal.observe(torch.full((8, 3), torch.nan), torch.zeros(8, dtype=torch.long))
        assert journal.batches == 0


BAD = (4, 7, 13)  # batches that are refused, one of them where a file is due


def go_round(folder, length):
    with Journal(folder, make(), every=5) as journal:
        for number in range(journal.batches, length):
            x, y = batch(number)
            try:
                journal.observe(x * torch.nan if number in BAD else x, y)
            except InputError:
                journal.skip()
        if length < LENGTH:
            journal.close()  # nothing more is written, as after a kill
    return journal


def test_a_batch_that_is_skipped_is_not_given_again(tmp_path):
    undisturbed = make()
    for number in range(LENGTH):
        if number not in BAD:
            undisturbed.observe(*batch(number))
    for length in (9, 17, LENGTH):
        journal = go_round(tmp_path, length)
        assert journal.batches == length
    assert same_state(journal.learner.state_dict(), undisturbed.state_dict())


def test_a_batch_that_was_learned_and_not_written_is_not_skipped(tmp_path, limit_file_size):
    journal = Journal(tmp_path, make(), every=2)
    journal.observe(*batch(0))
    limit_file_size(1000)
    with pytest.raises(InputError, match="File too large"):
        journal.observe(*batch(1))
    with pytest.raises(InputError, match="File too large"):
        journal.skip()
    assert journal.batches == 2
    limit_file_size(resource.RLIM_INFINITY)
    journal.observe(*batch(2))
    journal.skip()
    assert files(tmp_path)[-1] == "000000000004.safetensors"
    journal.close()


def test_notes_may_be_numbers_of_numpy(tmp_path):
    with Journal(tmp_path, make()) as journal:
        journal.notes |= {"n": np.int64(3), "by class": {np.int64(1): np.float32(0.5)}}
    journal = Journal(tmp_path, make())
    assert journal.notes == {"n": 3, "by class": {1: 0.5}}
    assert type(journal.notes["n"]) is int
    journal.notes["seen"] = {(1, 2): 3}
    with pytest.raises(InputError, match=r"journal.notes.seen: got the key \(1, 2\), expected keys that are texts or"):
        journal.write()
    journal.close()


def test_notes_are_kept(tmp_path):
    """A schedule, for example, which is the user's own."""
    rates = []
    for _ in range(3):
        with Journal(tmp_path, make()) as journal:
            schedule = torch.optim.lr_scheduler.StepLR(journal.learner.optim, step_size=4, gamma=0.5)
            schedule.load_state_dict(journal.notes.get("schedule", schedule.state_dict()))
            for number in range(journal.batches, journal.batches + 3):
                journal.observe(*batch(number))
                schedule.step()
                rates.append(journal.learner.optim.param_groups[0]["lr"])
            journal.notes["schedule"] = schedule.state_dict()
    assert rates == [0.01] * 3 + [0.005] * 4 + [0.0025] * 2


@pytest.mark.parametrize("every", [1, 3])
def test_notes_of_a_batch_are_saved_with_it(tmp_path, every):
    """However it is stopped, no offset is learned twice and a schedule is as far as the learner."""

    def learn_with_stops(folder, stops):
        offsets, stops = [], list(stops)
        while True:
            journal = Journal(folder, make(), every=every)
            schedule = torch.optim.lr_scheduler.ExponentialLR(journal.learner.optim, 0.9)
            schedule.load_state_dict(journal.notes.get("schedule", schedule.state_dict()))
            del offsets[journal.batches :]  # what was learned after the file is lost, and learned again

            def advance_schedule():
                schedule.step()  # noqa: B023
                return {"offset": offsets[-1] + 1, "schedule": schedule.state_dict()}  # noqa: B023

            end = stops.pop(0) if stops else 12
            for offset in range(journal.notes.get("offset", 0), end):
                offsets.append(offset)
                journal.observe(*batch(offset), notes=advance_schedule)
            journal.close()  # nothing is written any more, as after a kill
            if end == 12:
                return offsets, frozen(journal.learner)

    offsets_at_once, state_at_once = learn_with_stops(tmp_path / "once", [])
    offsets_with_stops, state_with_stops = learn_with_stops(tmp_path / "again", [2, 4, 7, 7, 11])
    assert offsets_at_once == offsets_with_stops == list(range(12))
    assert same_state(state_at_once, state_with_stops)


def test_notes_of_a_batch_may_come_with_a_skipped_one_and_must_be_a_dict(tmp_path):
    with Journal(tmp_path, make()) as journal:
        for notes in ("offset", lambda: 3, lambda: len):
            with pytest.raises(InputError, match="^notes: got .*, expected a dict, or a function that returns one"):
                journal.skip(notes=notes)
        journal.skip(notes={"offset": 5})
        journal.skip(notes=lambda: None)
        assert journal.notes == {"offset": 5}


TASKS = [[batch(number) for number in range(first, first + 5)] for first in (0, 5, 10)]


def go_through(journal, stop=None):
    """Learn tasks; `stop` ends it before so many calls, as a kill would: nothing is written any more."""
    calls = iter(range(stop if stop is not None else 1000))
    for number in range(journal.tasks, len(TASKS)):
        if next(calls, None) is None:
            return
        journal.start_task(TASKS[number])
        for x, y in TASKS[number][journal.task_batches :]:
            if next(calls, None) is None:
                return
            journal.observe(x, y, number)
        if next(calls, None) is None:
            return
        journal.end_task(TASKS[number])


@pytest.mark.parametrize("stop", range(1, 15))
def test_tasks_start_and_end_once(tmp_path, stop):
    """LwF warms up its last layer at a task's start, and must not do so twice."""
    undisturbed = Journal(tmp_path / "a", make(LwF))
    go_through(undisturbed)
    for turn in range(20):
        journal = Journal(tmp_path / "b", make(LwF, seed=0), every=2)
        go_through(journal, stop=stop + turn)
        journal.close()
    assert journal.tasks == 3
    assert same_state(journal.learner.state_dict(), undisturbed.learner.state_dict())


def test_a_loop_that_asks_whether_a_task_has_started_starts_each_once(tmp_path):
    starts = []

    class NotesStarts(ER):
        def start_task(self, batches):
            starts.append(("start", len(batches)))

    def learn_until(stop):
        with Journal(tmp_path, NotesStarts(nn.Linear(3, 4)), every=1) as journal:
            for number in range(journal.tasks, len(TASKS)):
                if not journal.in_task:
                    journal.start_task(TASKS[number])
                assert journal.in_task
                for x, y in TASKS[number][journal.task_batches :]:
                    if journal.batches == stop:
                        return
                    journal.observe(x, y)
                journal.end_task(TASKS[number])

    learn_until(stop=3)
    assert starts == [("start", 5)]
    learn_until(stop=100)
    assert starts == [("start", 5)] * len(TASKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({name: value}, name) for name in ("every", "keep", "milestones") for value in (0, 1.5)],
        ({"on_error": "panic"}, "on_error: .* stop, warn"),
    ],
)
def test_options_are_checked(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        Journal(tmp_path / "new", make(), **options)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"journal: got {os.strerror(errno.EEXIST)}|{os.strerror(errno.ENOTDIR)}"):
        Journal(tmp_path / "file" / "journal", make())


def test_a_batch_whose_notes_are_wrong_is_learned_and_counted_once(tmp_path):
    """Also by a loop that skips what is refused."""
    with Journal(tmp_path, make()) as journal:
        for number in range(5):
            with pytest.raises(InputError, match="^notes: got <class 'list'>, expected a dict"):
                journal.observe(*batch(number), notes=lambda: [("offset", 1)])
            with pytest.raises(InputError, match="^notes: got <class 'list'>, expected a dict"):
                journal.skip()
        assert journal.batches == journal.learner.steps == 5
        with pytest.raises(InputError, match="^notes"):
            journal.skip(notes=lambda: 3)
        assert journal.batches == 5


@pytest.mark.parametrize("notes", [{"at": datetime.now()}, "offset"])
def test_notes_that_cannot_be_saved_are_refused_before_their_batch_is_learned(tmp_path, notes):
    """Not when the next file is due, many batches later; nor does a loop that skips what is refused lose the batch."""
    with Journal(tmp_path, make()) as journal:
        with pytest.raises(InputError, match="^notes"):
            journal.observe(*batch(0), notes=notes)
        with pytest.raises(InputError, match="^notes"):
            journal.skip()
        assert journal.batches == journal.learner.steps == 0
        journal.observe(*batch(0), notes={"at": 1.5})
    assert journal.notes == {"at": 1.5}


def test_a_learner_that_had_learned_before_goes_on_too(tmp_path):
    pretrained = make()
    for number in range(100, 107):
        pretrained.observe(*batch(number))
    pretrained.save(tmp_path / "pretrained")

    def learn_in_folder(folder, *lengths):
        for length in lengths:
            learner = Learner.load(tmp_path / "pretrained", model=make().model)
            with Journal(tmp_path / folder, learner) as journal:
                for number in range(journal.batches, length):
                    journal.observe(*batch(number))
        return learner

    in_two_parts, in_one_part = learn_in_folder("twice", 5, 9), learn_in_folder("once", 9)
    assert in_one_part.steps == 7 + 9
    assert same_state(in_two_parts.state_dict(), in_one_part.state_dict())
    with pytest.raises(InputError, match="got one that has learned 0 batches, expected one that has learned 7, as"):
        Journal(tmp_path / "once", make())
    with pytest.raises(InputError, match="expected a learner; an estimator is kept by pickling it"):
        Journal(tmp_path / "other", ParabolicClassifier())


def test_a_folder_that_was_removed_or_replaced_is_still_of_one_journal(tmp_path):
    folder = tmp_path / "journal"
    journal = Journal(folder, make(), every=1)
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    journal.observe(*batch(0))  # it is made again
    with pytest.raises(InputError, match="a folder that another journal has open"):
        Journal(folder, make())
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    with Journal(folder, make()) as other:
        assert other.batches == 0
        with pytest.raises(InputError, match="a folder that another journal has open"):
            journal.observe(*batch(1))
        assert files(folder) == ["000000000000.safetensors"]
    journal.observe(*batch(2))  # the other has closed it
    with pytest.raises(InputError, match="a folder that another journal has open"):
        Journal(folder, make())
    assert files(folder)[-1] == "000000000003.safetensors"
    journal.close()


# -- serving -----------------------------------------------------------------------------------------------


def test_another_process_serves_from_the_newest_intact_file(tmp_path):
    journal = go_on(tmp_path, every=10)
    x = batch(99)[0]
    with Journal(tmp_path, make(), every=10) as running:  # which may have the folder open
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        (tmp_path / "000000000040.safetensors").write_bytes(b"half of it")
        (tmp_path / "000000000050.safetensors").symlink_to(tmp_path / "gone")  # listed, and gone when it is read
        with pytest.warns(RuntimeWarning, match=r"skipped a damaged file.*000000000040") as caught:
            served = Journal.load(tmp_path, model=make().model)
        assert len(caught) == 1
        assert torch.equal(served.scores(x), journal.learner.scores(x))
        assert same_state(served.state_dict(), running.learner.state_dict())
        assert {path: path.read_bytes() for path in before} == before
        (tmp_path / "000000000040.safetensors").rename(tmp_path / "half")
        with pytest.raises(InputError, match="^model: got None"):  # not what another file would change
            Journal.load(tmp_path)
    for path in before:
        path.unlink(missing_ok=True)
    (tmp_path / "half").rename(tmp_path / "000000000040.safetensors")
    with (
        pytest.warns(RuntimeWarning, match="skipped a damaged file"),
        pytest.raises(InputError, match="the folder of a journal, with an intact file; 2 are damaged or gone"),
    ):
        Journal.load(tmp_path, model=make().model)
    with pytest.raises(InputError, match="with an intact file; start the journal first"):
        Journal.load(tmp_path / "new", model=make().model)


def test_serving_finds_a_file_however_fast_they_are_replaced(tmp_path):
    with Journal(tmp_path, make(), every=1, keep=1) as journal:
        learning = threading.Thread(target=lambda: [journal.observe(*batch(number)) for number in range(60)])
        learning.start()
        steps = [0]
        while learning.is_alive():
            steps.append(Journal.load(tmp_path, model=make().model).steps)
        learning.join()
    assert steps == sorted(steps)
