"""The grid on a Ray cluster: the same results as in this process, and the same patience with what dies."""

import pytest
import torch
from grids import SPECS, fragile, results

from parabolic import InputError, Store
from parabolic.experiments import run_grid

ray = pytest.importorskip("ray", reason="needs the extra `ray`: pip install 'parabolic-cl[ray]'")

pytestmark = pytest.mark.timeout(900)  # a cluster of six processes takes minutes where others want the cores too


def test_a_cluster_with_a_worker_killed_in_the_middle_ends_as_if_nothing_had_happened(tmp_path):
    specs, events = [fragile(tmp_path, "killed_once"), *SPECS[:5]], []
    outcome = run_grid(specs, Store(tmp_path / "ray"), engine="ray", workers=2, device="cpu", watch=events.append)
    assert (tmp_path / "killed").exists()
    assert [event.spec for event in events if event.what == "retried"] == [specs[0]]
    assert (outcome.trained, outcome.reused, outcome.failures) == (6, 0, [])
    assert not ray.is_initialized()
    run_grid(specs, Store(tmp_path / "here"), workers=0, device="cpu")
    assert results(tmp_path / "ray") == results(tmp_path / "here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where Ray is promised a GPU that is not there")
def test_tasks_ask_for_their_share_of_a_gpu_and_failures_are_reported(tmp_path):
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)  # of which Ray takes our word
    try:
        running, most = 0, 0

        def watch(event):
            nonlocal running, most
            running += {"started": 1, "failed": -1}[event.what]
            most = max(most, running)

        outcome = run_grid(SPECS[:4], Store(tmp_path), engine="ray", fleet=1, gpus=0.5, watch=watch)
        assert most == 2
        assert len(outcome.failures) == 4
        assert all("no CUDA device was found" in failure.reason for failure in outcome.failures)
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "address: got '127.0.0.1:9', expected a running Ray cluster; start one"),
        ("ray://somewhere:10001", "expected auto or HOST:PORT; run the command on a node"),
    ],
)
def test_a_cluster_that_is_not_there_is_reported_at_once(tmp_path, address, message):
    with pytest.raises(InputError, match=message):
        run_grid(SPECS[:1], Store(tmp_path), engine="ray", address=address)
