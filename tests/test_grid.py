"""The grid: what it keeps is what each run alone would have given, whatever happens meanwhile."""

import contextlib
import io
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from grids import SPECS, alive, children, fragile, kill, results, until
from rich.console import Console
from rich.text import Text

from parabolic import Callback, InputError, RunSpec, Store, run
from parabolic.experiments import Event, GridBar, execute, execute_fleet, run_grid
from parabolic.experiments import grid as grid_module
from parabolic.experiments.crews import InProcess, Processes
from parabolic.experiments.work import Job, Over, work
from parabolic.learners import find_learner

COMPARE = ["compare", "--learners", "sgd,er", "--seeds", "6", "--set", "backbone=mlp", "--device", "cpu", "--json"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The grid's results, one run after the other in this process."""
    root = tmp_path_factory.mktemp("undisturbed")
    outcome = run_grid(SPECS, Store(root), workers=0, device="cpu")
    assert (outcome.trained, outcome.reused, outcome.failures) == (12, 0, [])
    return results(root)


def start_grid(root, *arguments, **options):
    """Start the command in a process of its own."""
    command = [sys.executable, "-m", "parabolic", *COMPARE, "--runs", str(root), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finished_files(root):
    return {path: path.read_bytes() for path in Path(root).glob("*/run.json")}


def test_a_grid_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path, undisturbed):
    moments, finished_before, kills_in_time = random.Random(7), {}, 0
    for _ in range(2):
        process = start_grid(tmp_path)
        until(lambda: len(finished_files(tmp_path)) > len(finished_before) or process.poll() is not None)  # noqa: B023
        time.sleep(moments.uniform(0, 0.4))
        workers = children(process.pid)
        kills_in_time += process.poll() is None
        kill(process.pid)
        process.communicate()
        assert until(lambda: not any(map(alive, workers)))  # noqa: B023
        finished_before = finished_files(tmp_path)
    assert kills_in_time
    out, err = start_grid(tmp_path).communicate()
    assert err == ""
    result = json.loads(out)
    assert result["reused"] == len(finished_before)
    assert {
        path: finished_files(tmp_path)[path] for path in finished_before
    } == finished_before  # not a byte was written anew
    assert results(tmp_path) == undisturbed


def test_ctrl_c_ends_all_processes_and_says_what_is_done(tmp_path):
    process = start_grid(tmp_path, process_group=0)
    until(lambda: finished_files(tmp_path))
    workers = children(process.pid)
    assert workers
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(map(alive, workers))
    assert json.loads(out)["runs"]
    assert err == f"Stopped. Finished runs: {len(finished_files(tmp_path))}. The same command resumes from there.\n"


def test_a_run_that_is_being_saved_at_ctrl_c_counts_as_finished(tmp_path):
    class Interrupted(Store):
        def save(self, record):
            super().save(record)
            signal.raise_signal(signal.SIGINT)

    outcome = run_grid(SPECS, Interrupted(tmp_path), workers=0, device="cpu")
    assert (outcome.trained, outcome.interrupted) == (1, True)
    assert {path.parent.name for path in finished_files(tmp_path)} == set(outcome.records)


def test_two_grids_on_one_store_train_each_run_once(tmp_path, undisturbed):
    processes = [start_grid(tmp_path, "--workers", "1") for _ in range(2)]
    outputs = [json.loads(process.communicate()[0]) for process in processes]
    assert [len(output["runs"]) for output in outputs] == [12, 12]
    assert sum(output["reused"] for output in outputs) == 12
    assert results(tmp_path) == undisturbed


def test_a_run_that_fails_does_not_stop_the_others_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BROKEN", "")  # so that what a run leaves there does not stay
    store, events = Store(tmp_path / "runs"), []
    specs = {trouble: fragile(tmp_path, trouble) for trouble in ("broken", "crowded_once")}
    specs["diverging"] = RunSpec("sgd", backbone="mlp", options={"lr": 1e30})
    specs["no data"] = RunSpec("sgd", stream="seq-cifar10", seed=1)  # there are none here
    specs["sound"] = SPECS[0]
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "data"))
    outcome = run_grid(list(specs.values()), store, workers=0, device="cpu", watch=events.append)
    assert list(outcome.records) == [specs["crowded_once"].key, specs["sound"].key]
    assert [event.spec.key for event in events if event.what == "retried"] == [specs["crowded_once"].key]
    assert [event.left for event in events if event.what in ("trained", "diverged", "failed")] == [4, 3, 2, 1, 0]
    assert [event.spec for event in events if event.what == "diverged"] == [specs["diverging"]]
    assert list(outcome.diverged) == [specs["diverging"].key]
    assert outcome.trained == 3

    reasons = {failure.spec.key: failure.reason for failure in outcome.failures}
    assert reasons.keys() == {specs[name].key for name in ("broken", "no data")}
    assert reasons[specs["broken"].key] == "RuntimeError: something nobody expected"
    assert "parabolic data prepare cifar10" in reasons[specs["no data"].key]
    failures = {failed.key: failed for failed in store.failures()}
    assert {key: failed.reason for key, failed in failures.items()} == reasons
    assert "in broken" in failures[specs["broken"].key].trace
    assert failures[specs["no data"].key].trace == ""

    monkeypatch.setattr(find_learner(specs["broken"].learner), "broken", lambda self: None)
    second = run_grid([specs["broken"], specs["sound"]], store, workers=0, device="cpu")
    assert (second.trained, second.reused, second.failures) == (1, 1, [])
    assert failures.keys() - {failed.key for failed in store.failures()} == {specs["broken"].key}


FAULTY = """
from parabolic import ER
class Faulty(ER):
    def loss(self, batch, recalled):
        return self.missing(batch)
    def missing(self, batch):
        return batch["nothing"]
class Unfit(ER):
    def loss(self, batch, recalled):
        return self.model(batch["x"].flatten(1)[:, :1]).sum()
class Changed(ER):
    def loss(self, batch, recalled):
        odds = self.model(batch["x"]).exp()
        loss = odds.sum()
        odds.zero_()  # the gradient needs them, as torch says in a later call
        return loss
"""


@pytest.mark.parametrize(
    ("class_name", "place"), [("Faulty", "faulty.py:7, missing"), ("Unfit", "faulty.py:10, loss"), ("Changed", None)]
)
def test_a_fault_in_the_users_code_is_reported_with_its_file_and_line(parabolic, class_name, place):
    Path("faulty.py").write_text(FAULTY)
    _, _, err = parabolic("compare", "--learners", f"faulty.py:{class_name}", "--seeds", "2", "--workers", "0")
    [first, _] = sorted(Store("runs").failures(), key=lambda failed: failed.spec["seed"])
    for output in (err, parabolic("runs", "--failed")[1]):
        assert (f" (in {place})\n" in output) == (place is not None)
        assert "(in /" not in output
        assert f"    the traceback is in runs/{first.key}/failed.json\n" in output
    assert err.count("the trace") == 1  # of the same fault
    assert "Traceback" in Path("runs", first.key, "failed.json").read_text()


def test_a_worker_that_dies_or_has_failed_is_replaced(tmp_path, undisturbed):
    store, events = Store(tmp_path / "runs"), []
    specs = [fragile(tmp_path, trouble) for trouble in ("broken", "needs_a_sound_process", "killed", "loud")]
    outcome = run_grid(specs, store, workers=1, device="cpu", watch=events.append)
    assert [failure.spec for failure in outcome.failures] == [specs[0], specs[2]]
    assert "killed by SIGKILL" in outcome.failures[1].reason
    assert [event.spec for event in events if event.what == "retried"] == [specs[2]]
    like_sgd = json.loads(undisturbed[SPECS[0].key])["accuracy"]
    assert [outcome.records[spec.key].accuracy for spec in (specs[1], specs[3])] == [like_sgd, like_sgd]


def test_a_job_whose_worker_has_ended_is_over_and_a_new_worker_takes_the_next(tmp_path):
    crew, others = Processes(["cpu"]), children(os.getpid())

    def end_of(trouble):
        crew.start(Job((fragile(tmp_path, trouble),)))
        while not isinstance(news := next((message for _, message in crew.wait(None)), None), Over):
            pass
        return news.died

    def kill_the_idle():
        (idle,) = {*children(os.getpid())} - {*others}
        kill(idle)
        assert until(lambda: not alive(idle))

    try:
        assert list(crew.wait(0.01)) == []  # nothing to tell
        assert end_of("leaves") == "the worker process exited with code 0"
        assert end_of("none") == ""
        assert end_of("killed_oddly") == f"the worker process was killed by signal {signal.SIGRTMIN + 6}"
        assert end_of("killed_as_a_parent").startswith("the worker process was killed by SIGKILL")
        assert not (tmp_path / "over").exists()  # the child lives on, and is not waited for
        assert end_of("none") == ""
        kill_the_idle()
        assert end_of("none") == "the worker process was killed by SIGKILL, perhaps for lack of memory"
        assert end_of("none") == ""
        kill_the_idle()
        assert list(crew.wait(60)) == []  # of no job
        assert end_of("none") == ""
    finally:
        crew.close()
    assert {*children(os.getpid())} == {*others}


def test_a_worker_ends_with_its_grid_in_the_middle_of_a_run(tmp_path):
    command = [sys.executable, "-c", "from parabolic.experiments.work import serve; serve()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            pickle.dump((Job((fragile(tmp_path, "waits"),)), "cpu"), worker.stdin)
            worker.stdin.flush()
            assert until((tmp_path / "waiting").exists)
            worker.stdin.close()  # as when the grid's process was killed
            assert worker.wait(60) == 0
        finally:
            worker.kill()


def test_fleets_are_of_one_shape_and_what_a_dead_one_leaves_is_tried_run_by_run(tmp_path, monkeypatch):
    crew, jobs = Processes(["cpu"]), []
    monkeypatch.setattr(crew, "gpu", True)  # which trains fleets one run after the other, on this device
    monkeypatch.setattr(crew, "start", lambda job, start=crew.start: (jobs.append(job.specs), start(job)))
    monkeypatch.setattr("parabolic.experiments.grid._make_crew", lambda *arguments: crew)
    first, second, third = (fragile(tmp_path, trouble) for trouble in ("none", "killed_once", "loud"))
    outcome = run_grid([first, SPECS[0], second, SPECS[2], third], Store(tmp_path / "runs"), fleet=3)
    assert (outcome.trained, outcome.failures) == (5, [])
    assert jobs == [(first, second, third), (third,), (second,), (SPECS[0], SPECS[2])]


def test_a_run_that_another_grid_is_at_is_waited_for(tmp_path, undisturbed):
    store, (our_spec, their_spec) = Store(tmp_path), SPECS[:2]
    claim = store.claim(their_spec.key)
    assert claim is not None
    their_record = execute(their_spec, device="cpu")

    def watch(event):
        if event.what == "trained":  # ours is done: now the other grid comes to its end
            store.save(their_record)
            claim.release()

    outcome = run_grid([their_spec, our_spec], store, workers=0, device="cpu", watch=watch)
    assert (outcome.trained, outcome.reused) == (1, 1)
    assert outcome.records[their_spec.key] == their_record
    assert list(outcome.records) == [their_spec.key, our_spec.key]


def test_a_run_that_another_grid_has_just_finished_is_let_go_at_once(tmp_path):
    their_spec, our_spec = SPECS[:2]
    their_record, claimed = execute(their_spec, device="cpu"), []

    class Late(Store):
        def claim(self, key):
            if key == their_spec.key:
                self.save(their_record)
            return super().claim(key)

    def watch(event):
        if event.what == "started":
            claimed.append((store.in_progress(their_spec.key), store.in_progress(our_spec.key)))

    store = Late(tmp_path)
    outcome = run_grid([their_spec, our_spec], store, workers=0, device="cpu", watch=watch)
    assert (outcome.trained, outcome.reused) == (1, 1)
    assert claimed == [(False, True)]


def test_a_run_that_another_grid_gave_up_is_taken_over(tmp_path):
    store, (our_spec, their_spec) = Store(tmp_path), SPECS[:2]
    claim = store.claim(their_spec.key)
    outcome = run_grid([their_spec, our_spec], store, workers=0, device="cpu", watch=lambda _: claim.release())
    assert (outcome.trained, outcome.reused) == (2, 0)


def test_when_the_time_is_up_nothing_more_is_begun_and_the_next_call_goes_on(tmp_path, undisturbed, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(grid_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def watch(event):
        clock[0] += 25 * (event.what == "trained")

    first = run_grid(SPECS, Store(tmp_path), workers=0, device="cpu", minutes=1, watch=watch)
    assert (first.trained, first.put_off, first.failures, first.interrupted) == (3, 9, [], False)  # at 0, 25 and 50 s
    rest = run_grid(SPECS, Store(tmp_path), workers=0, device="cpu", minutes=60)
    assert (rest.reused, rest.trained, rest.put_off) == (3, 9, 0)
    assert results(tmp_path) == undisturbed


def test_runs_that_were_to_be_trained_side_by_side_are_put_off_one_by_one(tmp_path, monkeypatch):
    crew = InProcess("cpu")
    monkeypatch.setattr(crew, "gpu", True)
    monkeypatch.setattr("parabolic.experiments.grid._make_crew", lambda *arguments: crew)
    assert run_grid(SPECS, Store(tmp_path), fleet=5, minutes=1e-9).put_off == len(SPECS)


def test_the_command_says_what_it_has_put_off(tmp_path):
    out, err = (process := start_grid(tmp_path, "--workers", "0", "--minutes", "1e-9")).communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["runs"] == []
    assert "The time is up. Runs not started: 12. The same command resumes from there." in err


def test_a_grid_that_an_error_ended_has_let_go_of_its_runs(tmp_path):
    store = Store(tmp_path)

    def watch(event):
        raise ValueError("of the one who watches")

    with pytest.raises(ValueError, match="of the one who watches") as error:
        run_grid(SPECS[:1], store, workers=0, device="cpu", watch=watch)
    assert not store.in_progress(SPECS[0].key)
    assert error.tb is not None  # which holds on to the lock: nobody waits for the error to be forgotten


def test_again_trains_what_is_there(tmp_path):
    store = Store(tmp_path)
    for again, expected in ((False, (1, 0)), (False, (0, 1)), (True, (1, 0))):
        outcome = run_grid(SPECS[:1], store, workers=0, device="cpu", again=again)
        assert (outcome.trained, outcome.reused) == expected


def test_a_spec_given_twice_is_one_run(tmp_path):
    assert run_grid([SPECS[0], RunSpec("sgd", memory=77, backbone="mlp")], Store(tmp_path), workers=0).trained == 1


def test_what_a_crash_left_half_written_is_no_obstacle(tmp_path, undisturbed):
    store, (first, second, third) = Store(tmp_path), SPECS[:3]
    run_grid([first, second, third], store, workers=0, device="cpu")
    record_file = store.path(first.key) / "run.json"
    record_file.write_bytes(record_file.read_bytes()[:200])
    (store.path(second.key) / "run.json").unlink()
    stray = store.path(second.key) / ".run.json.0123456789abcdef"
    stray.write_text("{")
    os.utime(stray, (0, 0))
    outcome = run_grid([first, second, third], store, workers=0, device="cpu")
    assert (outcome.trained, outcome.reused) == (2, 1)
    assert results(tmp_path) == {spec.key: undisturbed[spec.key] for spec in (first, second, third)}
    assert [path.name for path in store.path(second.key).iterdir()] == ["run.json"]
    assert store.unreadable() == {}


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of its own, with little room."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_and_a_read_only_disk_are_reported_and_nothing_is_lost(tmp_path):
    store = Store(tmp_path)
    with small_disk(tmp_path, "256k"):
        run_grid(SPECS[:1], store, workers=0, device="cpu")
        before = finished_files(tmp_path)
        with contextlib.suppress(OSError), open(tmp_path / "filler", "wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        with pytest.raises(InputError, match="runs: got No space left on device .*free some space.*are safe"):
            run_grid(SPECS[:2], store, workers=0, device="cpu")
        assert finished_files(tmp_path) == before
        assert run_grid(SPECS[:1], store).reused == 1
        (tmp_path / "filler").unlink()
        assert run_grid(SPECS[:2], store, workers=0, device="cpu").trained == 1
        assert not [path for path in store.path(SPECS[1].key).iterdir() if path.name != "run.json"]
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert run_grid(SPECS[:2], store).reused == 2
        with pytest.raises(InputError, match="runs: got Read-only file system"):
            run_grid(SPECS[:3], store, workers=0)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # less than a record
from parabolic.cli import main
main()
"""


def test_a_write_that_fails_ends_the_command_with_an_error_and_leaves_nothing_broken(tmp_path):
    command = [sys.executable, "-c", LIMITED, *COMPARE, "--seeds", "1", "--runs", str(tmp_path), "--workers", "1"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr.startswith(f"error: runs: got File too large ({tmp_path}), expected a folder with room")
    assert "Traceback" not in process.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and ".claims" not in path.parts] == []


def test_a_file_in_place_of_the_folder_is_reported_before_anything_is_trained(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputError, match="runs: got .*, expected a folder"):
        run_grid(SPECS[:1], Store(tmp_path / "runs"), workers=0, watch=lambda event: pytest.fail(event.what))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "slurm"}, "engine: got 'slurm', expected one of local, ray"),
        ({"workers": -1}, "workers: got -1"),
        ({"engine": "ray", "workers": 0}, "workers: got 0, expected a whole number of at least 1"),
        ({"address": "auto"}, "address: got 'auto', .* use engine 'ray'"),
        ({"fleet": 0}, "fleet: got 0"),
        ({"gpus": 0}, "gpus: got 0"),
        ({"retries": -1}, "retries: got -1"),
        ({"minutes": 0}, "minutes: got 0"),
        ({"device": "abacus"}, "device: got 'abacus'"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        run_grid(SPECS[:1], Store(tmp_path / "runs"), **arguments)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), torch.AcceleratorError("lost", 0), MemoryError()])
def test_a_run_whose_machine_failed_is_tried_again(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("parabolic.learners.er.ER.loss", fail)
    (outcome,) = work(Job((RunSpec("er"),)), "cpu")
    assert outcome.retry
    monkeypatch.setattr("parabolic.learners.er.ER.loss", lambda *_: torch.zeros(()) / 0)
    (outcome,) = work(Job((RunSpec("er"),)), "cpu")
    assert not outcome.retry


def test_an_error_of_a_fleet_as_a_whole_is_that_of_every_run_it_leaves(monkeypatch):
    def fail(specs, **options):
        yield from execute_fleet(specs[:1], device="cpu")
        raise MemoryError("no room")

    monkeypatch.setattr("parabolic.experiments.work.execute_fleet", fail)
    first, *rest = work(Job(tuple(SPECS[:3]), command="mine"), "cpu")
    assert (first.key, first.record.environment["command"]) == (SPECS[0].key, "mine")
    assert [(outcome.key, outcome.retry) for outcome in rest] == [(spec.key, True) for spec in SPECS[1:3]]
    assert all("no room" in outcome.reason for outcome in rest)


def test_workers_are_spread_over_the_gpus_or_stay_on_the_one_that_is_named(monkeypatch):
    monkeypatch.setattr(grid_module, "find_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert grid_module.worker_devices("cuda") == ["cuda:0", "cuda:1"]
    assert grid_module.worker_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert grid_module.worker_devices("cuda:1", 2) == ["cuda:1", "cuda:1"]


def test_without_ray_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"engine: got no Ray, .*pip install 'parabolic-cl\[ray\]'"):
        run_grid(SPECS[:1], Store(tmp_path), engine="ray")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_progress_of_a_run_is_the_share_of_what_was_left_of_it(tmp_path, workers):
    class Stop(Callback):
        def on_step(self, state):
            if state.step == 150:
                raise KeyboardInterrupt

    specs = [RunSpec("sgd", stream="seq-blobs", batch=4, backbone="mlp", seed=seed) for seed in range(2)]
    store, shares = Store(tmp_path), {spec: [] for spec in specs}
    with pytest.raises(KeyboardInterrupt):
        run(specs[0], store, device="cpu", checkpoint=1e-9, callbacks=[Stop()])
    outcome = run_grid(
        specs, store, workers=workers, device="cpu", progress=lambda spec, share: shares[spec].append(share)
    )
    assert [record.steps for record in outcome.records.values()] == [300, 300]
    assert shares == {
        specs[0]: [(step - 149) / 151 for step in range(160, 301, 20)],  # 149 steps had been saved
        specs[1]: [step / 300 for step in range(20, 301, 20)],
    }


def test_reports_of_progress_do_not_end_a_wait():
    """After each wait a grid tries to claim its waiting runs, which takes a lock on disk for each."""
    crew, shares = Processes(["cpu"]), []
    try:
        crew.start(Job((RunSpec("sgd", stream="seq-blobs", batch=4, backbone="mlp"),)))
        (job, news), = crew.wait(None, lambda spec, share: shares.append((spec, share)))  # fmt: skip
        assert news.record.steps == 300
        assert shares == [(job.specs[0], step / 300) for step in range(20, 301, 20)]
    finally:
        crew.close()


def test_the_bar_shows_how_many_run_ended_and_failed():
    screen = io.StringIO()
    with GridBar(Console(file=screen, force_terminal=True, width=120)) as bar:
        events = ["reused", "started", "started", "trained", "started", "retried", "started", "failed", "started"]
        left = [9, 9, 9, 8, 8, 8, 8, 7, 7]
        for what, count in zip(events, left, strict=True):
            bar(Event(what, SPECS[0], count))
        bar.progress.refresh()
        assert "2/9 2 running, 1 failed" in last_line_of(screen)
        assert re.search(r"about \d:\d\d:\d\d left", last_line_of(screen))
        for seed, share in ((1, 0.2), (2, 0.5), (1, 0.9)):
            bar.reach(replace(SPECS[0], seed=seed), share)
        bar.progress.refresh()
        assert "3/9 2 running, 70 % through, 1 failed" in last_line_of(screen)  # 3.4, rounded down
        bar(Event("trained", replace(SPECS[0], seed=1), 6))
        bar.progress.refresh()
        assert "3/9 1 running, 50 % through, 1 failed" in last_line_of(screen)


def last_line_of(screen):
    return Text.from_ansi(screen.getvalue()).plain.splitlines()[-1]


@pytest.mark.parametrize("minute", [0.01, 60])
def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, minute):
    monkeypatch.setattr("parabolic.engine.callbacks.MINUTE", minute)
    log = io.StringIO()
    with GridBar(Console(file=log, force_terminal=False)) as bar:
        for what, count in (("started", 9), ("trained", 8), ("started", 8), ("failed", 7), ("started", 7)):
            bar(Event(what, SPECS[0], count))
        bar.reach(SPECS[0], 0.89)
        until(lambda: minute == 60 or "2 of 9 done, 1 running, 89 %" in log.getvalue())
    if minute == 60:  # none for short work
        assert log.getvalue() == ""
    else:
        assert re.fullmatch(
            r"runs: 2 of 9 done, 1 running, 89 % through, 1 failed; \d+ s", log.getvalue().splitlines()[-1]
        )


def test_lines_of_progress_go_to_standard_error_alone(parabolic, monkeypatch):
    monkeypatch.setattr("parabolic.engine.callbacks.MINUTE", 1e-3)
    code, out, err = parabolic("compare", "--learners", "er", "--seeds", "2", "--workers", "0", "--json")
    assert (code, len(json.loads(out)["runs"])) == (0, 2)
    assert "runs: 1 of 2 done, 1 running; " in err


def test_the_page_on_grids(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "experiments.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "run_grid(" in block]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "experiments.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "4 0 []"


@pytest.mark.gpu
def test_on_a_gpu_runs_of_one_shape_are_trained_side_by_side(tmp_path):
    outcome = run_grid(SPECS, Store(tmp_path), device="cuda", fleet=4)
    assert (outcome.trained, outcome.failures) == (12, [])
    sizes = [outcome.records[spec.key].environment["fleet"] for spec in SPECS]
    assert sorted(sizes) == [2] * 4 + [4] * 8
