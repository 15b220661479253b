"""Helpers for tests of grids: specs, a learner that gets into trouble, and the comparable part of a store."""

import json
import os
import signal
import time
from pathlib import Path

from parabolic import RunSpec

SPECS = [RunSpec(learner, seed=seed, backbone="mlp") for seed in range(6) for learner in ("sgd", "er")]

FRAGILE = '''
import os
import signal
import time
from pathlib import Path

from parabolic.learners.sgd import SGD
from parabolic.options import option


class Fragile(SGD):
    """Learns like SGD, and gets into trouble in its second task."""

    trouble: str = option("none", "what kind of trouble")

    def loss(self, batch, recalled):
        if self.steps == 40:
            getattr(self, self.trouble)()
        return super().loss(batch, recalled)

    def none(self):
        pass

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def killed_oddly(self):
        os.kill(os.getpid(), signal.SIGRTMIN + 6)

    def killed_as_a_parent(self):
        if not os.fork():
            time.sleep(20)
            Path(__file__).with_name("over").touch()
            os._exit(0)
        self.killed()

    def leaves(self):
        os._exit(0)

    def waits(self):
        Path(__file__).with_name("waiting").touch()
        time.sleep(600)

    def killed_once(self):
        if first_time("killed"):
            self.killed()

    def broken(self):
        os.environ["BROKEN"] = "yes"
        raise RuntimeError("something nobody expected")

    def needs_a_sound_process(self):
        assert "BROKEN" not in os.environ

    def crowded_once(self):
        if first_time("crowded"):
            raise MemoryError("no room")

    def loud(self):
        print("hello from a learner")


def first_time(name):
    try:
        Path(__file__).with_name(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
'''


def fragile(folder, trouble, seed=0):
    """Write the learner's file to the folder, and return the spec of a run."""
    path = Path(folder) / "fragile.py"
    path.write_text(FRAGILE)
    return RunSpec(f"{path}:Fragile", seed=seed, backbone="mlp", options={"trouble": trouble})


def results(root):
    """Return the results of a store's runs as bytes, without times and environment."""
    by_key = {}
    for path in sorted(Path(root).glob("*/run.json")):
        content = json.loads(path.read_bytes())
        for name in ("train_seconds", "test_seconds", "environment"):
            del content[name]
        by_key[path.parent.name] = json.dumps(content).encode()
    return by_key


def children(pid):
    """Return the ids of the child processes of a process."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == pid:
            pids.append(int(path.parent.name))
    return pids


def alive(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition, seconds=60):
    """Wait until a condition holds, and return whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def kill(pid):
    """Send SIGKILL, which the process cannot catch."""
    os.kill(pid, signal.SIGKILL)
