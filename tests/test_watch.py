"""`parabolic watch`: real runs, watched from another process, alive and killed."""

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import tracemalloc

import pytest
from grids import kill, until
from rich.console import Console

from parabolic import RunSpec, Store
from parabolic.engine import Look, Tail
from parabolic.engine.looks import Lines
from parabolic.report.live import View, sparkline

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "90", "LINES": "50", "TERM": "xterm"}


def start(folder, *arguments, **settings):
    return subprocess.Popen([sys.executable, "-m", "parabolic", *arguments], cwd=folder, env=ENVIRONMENT, **settings)


class Terminal:
    """`parabolic watch` in a terminal of its own; all that it ever showed is in `text`."""

    def __init__(self, folder, *arguments):
        our_end, its_end = pty.openpty()
        self.process = start(folder, "watch", *arguments, stdout=its_end, stdin=its_end, stderr=its_end)
        os.close(its_end)
        self.our_end, self.text = our_end, ""

    def read(self):
        try:
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self.our_end, 65536).decode(errors="replace"))
        except OSError:  # the other end is closed
            return False
        return True

    def shows(self, pattern):
        while not re.search(pattern, self.text):
            assert self.read(), self.text
        return True

    def end(self):
        while self.read():
            pass
        os.close(self.our_end)
        return self.process.wait()


def tail_of(file):
    tail = Tail(file)
    tail.poll()
    return tail


def test_a_run_is_watched_until_it_is_killed_and_again_until_it_ends(tmp_path):
    """Each time the run is held by its first look, so that the watcher has the time to come."""
    spec = RunSpec.from_settings("er", {"epochs": "4"})
    store = Store(tmp_path / "runs")
    file, arguments = store.monitor(spec.key), ["--device", "cpu", "--checkpoint", "0.1"]

    def run_and_watch():
        looks_before = len(tail_of(file).looks)
        run = start(tmp_path, "run", "--learner", "er", "--set", "epochs=4", *arguments, stdout=subprocess.DEVNULL)
        assert until(lambda: len(tail_of(file).looks) > looks_before + 2 and store.checkpoint(spec.key).exists())
        os.kill(run.pid, signal.SIGSTOP)
        terminal = Terminal(tmp_path, spec.key[:6])
        terminal.shows(r"er on seq-digits, step [\d,]+ of 584, .*running")
        terminal.shows(r"(?s)memory: 200 of 200 kept.*by class.*by age.*newest tenth")
        return run, terminal

    run, terminal = run_and_watch()
    kill(run.pid)
    assert run.wait() == -9
    assert terminal.end() == 0
    assert "stopped: its process is gone" in terminal.text

    run, terminal = run_and_watch()
    os.kill(run.pid, signal.SIGCONT)
    assert terminal.end() == 0
    assert "step 584 of 584, finished" in terminal.text
    assert "bound (Prop. 1)" in terminal.text
    assert run.wait() == 0
    tail = tail_of(file)
    assert tail.began["step"] > 0  # it went on in the middle
    steps = [look.step for look in tail.looks]
    assert steps == sorted(set(steps))
    assert steps[-1] == 584


def test_ctrl_c_ends_the_watching_and_not_the_run(tmp_path):
    lines = Lines(tmp_path / "monitor.jsonl")
    lines.write("began", {"step": 0, "time": 0.0, "learner": "er", "stream": "", "until": None})
    terminal = Terminal(tmp_path, str(tmp_path))
    terminal.shows("nothing measured yet")
    lines.write("look", {"step": 40, "time": 1.0, "loss": 0.25})
    terminal.shows(r"step 40, running\s+loss +0.25")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    lines.close()


def test_a_stream_that_was_begun_is_waited_for(tmp_path):
    (tmp_path / "000000000000.safetensors").write_bytes(b"")  # a journal's
    terminal = Terminal(tmp_path, ".")
    terminal.shows("not started")
    lines = Lines(tmp_path / "monitor.jsonl")
    lines.write("began", {"step": 0, "time": 0.0, "learner": "er", "stream": "", "until": None})
    terminal.shows("running")
    lines.write("ended", {"step": 3, "time": 1.0, "how": "failed", "why": "a reason"})
    lines.close()
    assert terminal.end() == 0
    assert "step 3, failed: a reason" in terminal.text


def test_without_a_terminal_it_prints_what_there_is(parabolic, tmp_path):
    code, out, err = parabolic("watch")
    assert (code, out) == (2, "")
    assert "no run in runs has a monitor: `parabolic run` has one, " in err
    assert "compare, tune and paper have none" in err
    run = ["run", "--learner", "er", "--set", "backbone=mlp"]
    assert parabolic(*run, "--no-monitor")[0] == 0
    (key,) = Store("runs").begun()
    code, _, err = parabolic("watch", key)
    assert code == 2
    assert "where there is no monitor.jsonl" in err
    assert "`parabolic run` has one, and so has your own loop with the callback `Monitor`" in err
    assert parabolic(*run, "--again")[0] == 0
    for arguments in ([], [key], [key[:5]], [f"runs/{key}"], [f"runs/{key}/monitor.jsonl"], ["--once"], ["runs"]):
        code, out, err = parabolic("watch", *arguments)
        assert (code, err) == (0, "")
        assert "er on seq-digits, step 146 of 146, finished" in out
        assert "accuracy so far, %" in out
        assert "\x1b" not in out


def test_what_is_no_run_is_refused_in_a_line(parabolic, tmp_path):
    (tmp_path / "letter").write_text("dear reader\n")
    (tmp_path / "folder" / "monitor.jsonl").mkdir(parents=True)
    for key in ("ab01", "ab02"):
        (tmp_path / "runs" / key).mkdir(parents=True)
    for run, message in (
        ("nope", "RUN: got 'nope', expected the key of a run in runs, or the file of a monitor, or its folder"),
        ("ab", "the beginning of one key, not of 2; give more of it: ab01, ab02"),
        ("letter", "expected the file of a monitor; this file is something else"),
        ("folder", "expected a run, a file or a folder that can be read; Is a directory"),
        ("a" * 300, "expected a run, a file or a folder that can be read; File name too long"),
    ):
        code, out, err = parabolic("watch", run)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_no_rate_is_shown_where_the_clock_was_put_back(tmp_path):
    lines = Lines(tmp_path / "a.jsonl")
    lines.write("began", {"step": 0, "time": 0.0, "learner": "", "stream": "", "until": 10})
    for step in (1, 2):
        lines.write("look", Look(step, 9.0 - step, loss=0.5).as_dict())
    assert View(Tail(tmp_path / "a.jsonl"), "mine")._status_line() == "mine, step 2 of 10, running"
    lines.close()


def test_a_mean_that_is_too_large_to_be_drawn_is_marked():
    assert sparkline([1e308, 1e308, 0.5, 0.5], 2) == "x▁"


@pytest.mark.parametrize("width", [20, 71, 72, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("classes", [0, 12, 100])
def test_it_fits_into_any_terminal(tmp_path, width, encoding, classes):
    lines = Lines(tmp_path / "a.jsonl")
    lines.write("began", {"step": 0, "time": 0.0, "learner": "er", "stream": "seq-digits", "until": 10**6})
    by_class = {label: label + 1 for label in range(classes)} or None
    for step in range(1, 301):
        look = Look(
            step, float(step), loss=math.nan if step == 7 else 1 / step, kept=200, capacity=200, offered=10**9,
            classes=by_class, tenths=[0, *range(9)], memory_loss=0.5, drift=-0.1, since=1, bound=1e30,
        )  # fmt: skip
        lines.write("look", look.as_dict())
    with (tmp_path / "out").open("w", encoding=encoding) as out:
        Console(file=out, width=width).print(View(Tail(tmp_path / "a.jsonl")))
    lines.close()
    text = (tmp_path / "out").read_text(encoding=encoding)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "running" in text
    assert ("100 classes" in " ".join(text.split())) == (classes == 100)
    assert len(text.splitlines()) < 60


def test_a_file_is_never_in_memory_as_a_whole(tmp_path):
    path = tmp_path / "monitor.jsonl"
    with path.open("w") as file:
        for step in range(2000):
            file.write(
                json.dumps({"look": {"step": step, "time": 1, "loss": 0.5, "of a later version": "x" * 10_000}}) + "\n"
            )
        file.write('{"look": {"step": 2000, "ti')
    tail = Tail(path)
    tracemalloc.start()
    try:
        assert tail.poll()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(tail.looks) == 2000
    assert peak < path.stat().st_size / 4
    assert not tail.poll()
    with path.open("a") as file:
        file.write('me": 2}}\n')
    assert tail.poll()
    assert tail.looks[-1].step == 2000


def test_a_terminal_obeys_nothing_that_a_monitor_s_file_says(tmp_path):
    path = tmp_path / "monitor.jsonl"
    began = {"step": 0, "time": 1, "until": None, "learner": "\x1b[2J"}
    path.write_text(json.dumps({"began": began}) + "\n" + json.dumps({"ended": {"step": 5, "why": "\x9b2J"}}) + "\n")
    tail = Tail(path)
    tail.poll()
    assert (tail.began["learner"], tail.ended["why"]) == (r"\x1b[2J", r"\x9b2J")
