"""The PDE applied to a learner: the loss, its profile, its bounds, and the commands that show them."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from parabolic import ER, MLP, PCL, SGD, CrossEntropy, InputError, make_stream, train
from parabolic.engine import BoundsMonitor, Fleet, ProfileRecorder, train_fleet
from parabolic.experiments import Preset, save_preset
from parabolic.pde import MemoryDomain, gradient_of
from parabolic.profile import LearnerLoss, bounds_of, drift_of, examples_loss, loss_profile


@pytest.fixture(scope="module")
def learner():
    """PCL after seq-blobs, its network small so that paths are quick."""
    torch.manual_seed(0)
    stream = make_stream("seq-blobs")
    learner = PCL(MLP((2,), 6, hidden=(32,)), memory=40, lr=0.2)
    train(learner, stream, batch=10)
    return learner


def test_on_memory_it_is_the_loss_of_what_is_remembered(learner):
    x, y = learner.past["x"], learner.past["y"]
    ours = LearnerLoss(learner)(learner.inputs(x))
    theirs = cross_entropy(learner.scores(x), y, reduction="none")
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_between_two_memory_points_the_label_passes_from_one_to_the_other(learner):
    """As on a bridge without noise: by the fraction of the way, where no third point is nearer."""
    loss = LearnerLoss(learner)
    gaps = torch.cdist(loss.points, loss.points).fill_diagonal_(torch.inf)
    first = int(gaps.min(1).values.argmin())
    second = int(gaps[first].argmin())
    # Close to the segment's ends the two nearest are the ends themselves; in between for the closest pair of all.
    for share in (0.0, 0.25, 0.5, 0.9):
        point = torch.lerp(loss.points[first], loss.points[second], share)[None]
        expected = torch.zeros(6)
        expected[loss.labels[first]] += 1 - share
        expected[loss.labels[second]] += share
        assert torch.allclose(loss.label(point, 6)[0], expected, atol=1e-4)
    anywhere = loss.label(torch.randn(50, 2), 6)
    assert torch.allclose(anywhere.sum(1), torch.ones(50), atol=1e-5)


def test_examples_stored_at_one_place_share_its_label():
    """Cross-entropy is linear in the label: with the mean of their labels, ℓ there is the mean of their losses."""
    learner = ER(MLP((2,), 3), memory=9, replay=1)
    x = torch.tensor([[0.0, 0.0]] * 5 + [[1.0, 0.0]] * 2)
    learner.observe(x, torch.tensor([0, 0, 1, 0, 2, 1, 1]))
    loss, stored = LearnerLoss(learner), cross_entropy(learner.scores(x), learner.past["y"], reduction="none")
    assert torch.allclose(loss(x[:1]), stored[:5].mean(), atol=1e-6)
    assert float(loss(loss.points).mean()) == pytest.approx(float(stored.mean()), abs=1e-6)
    label_between = loss.label(torch.tensor([[0.25, 0.0]]), 3)  # and the label passes from one place to the other
    assert torch.allclose(
        label_between, 0.75 * torch.tensor([[0.6, 0.2, 0.2]]) + 0.25 * torch.tensor([[0.0, 1.0, 0.0]])
    )


def test_one_memory_point_gives_its_label_to_all():
    learner = ER(MLP((2,), 3), memory=1, replay=1)
    learner.observe(torch.zeros(1, 2), torch.tensor([2]))
    assert torch.equal(LearnerLoss(learner).label(torch.randn(4, 2), 3), torch.eye(3)[[2] * 4])


def test_the_profile_is_the_loss_on_memory_and_within_the_maximum_principle_elsewhere(learner):
    loss = LearnerLoss(learner)
    at_memory = loss_profile(learner, loss.points, paths=8, steps=5)
    assert torch.allclose(at_memory.u.mean, loss(loss.points), atol=1e-5)
    assert (at_memory.u.stopped == 1).all()
    domain = MemoryDomain(loss.points, 0.01)
    generator = torch.Generator().manual_seed(0)
    inside = domain.interior(40, generator)
    profile = loss_profile(learner, inside, t=0.5, paths=200, generator=generator)
    losses = torch.cat(
        [loss(domain.interior(2000, generator)), loss(domain.edge(2000, generator)), profile.memory_loss]
    )
    margin = 4 * profile.u.error
    assert (profile.u.mean - margin <= losses.max() * (1 + 0.5)).all()
    assert (profile.u.mean + margin >= losses.min()).all()


def test_bounds_are_made_of_the_pieces_they_name(learner):
    stream = make_stream("seq-blobs")
    first = stream[0]
    past = (first.test.x[first.test_rows], first.test.y[first.test_rows])
    forgetting, ahead = bounds_of(learner, past, past, tau=2.0, generator=torch.Generator().manual_seed(0))
    remembered = cross_entropy(learner.scores(learner.past["x"]), learner.past["y"], reduction="none")
    assert forgetting.memory.max == pytest.approx(float(remembered.max()), abs=1e-5)
    assert forgetting.memory.mean == pytest.approx(float(remembered.mean()), abs=1e-5)
    realised = cross_entropy(learner.scores(past[0]), past[1])
    assert forgetting.realised == pytest.approx(float(realised), abs=1e-5)
    assert forgetting.bound >= forgetting.stated >= forgetting.memory.max
    assert forgetting.holds == (forgetting.realised <= forgetting.bound)
    assert 0 < forgetting.covered <= 1
    largest = max(ahead.memory.max, ahead.edge.max, ahead.inside.max)
    assert ahead.upper == pytest.approx(ahead.constant * 2 + largest)
    assert ahead.lower <= ahead.memory.min
    assert ahead.holds == (ahead.lower <= ahead.realised <= ahead.upper)
    assert [bound.holds for bound in bounds_of(learner)] == [None, None]


def test_the_loss_may_be_among_some_classes_alone():
    model = MLP((2,), 6)
    x, y = torch.randn(20, 2), torch.tensor([1, 4] * 10)
    expected = cross_entropy(model.eval()(x)[:, [4, 1]], torch.tensor([1, 0] * 10), reduction="none")
    assert torch.allclose(examples_loss(SGD(model), x, y, classes=[4, 1]), expected, atol=1e-6)
    weighted = SGD(model, criterion=CrossEntropy(weights=[1, 2, 1, 1, 5, 1]))
    assert torch.allclose(
        examples_loss(weighted, x, y, classes=[4, 1]), expected * torch.tensor([2, 5] * 10), atol=1e-6
    )
    assert torch.equal(examples_loss(weighted, x, y, classes=[1]), torch.zeros(10))  # of the class that competes


def test_remark_1_holds_for_a_learner(learner):
    points = learner.inputs(learner.past["x"]).mean(0, keepdim=True)
    valley = gradient_of(lambda x: (x - points).square().sum(1) / 2)
    bound = drift_of(learner, points, valley, t=0.2, paths=400, generator=torch.Generator().manual_seed(0))
    assert bound.rate.item() == pytest.approx(0, abs=1e-6)
    assert (bound.gap >= 0).all()
    assert bound.holds


@pytest.mark.parametrize("x", [torch.zeros(3, 5), torch.zeros(3, 2).double(), torch.zeros(3, 2, dtype=torch.uint8)])
def test_points_that_are_no_inputs_of_the_model_are_refused(learner, x):
    message = r"^x: got a tensor .*, expected inputs of the model, each of shape \[2\] and torch.float32; learner"
    with pytest.raises(InputError, match=message):
        loss_profile(learner, x)
    with pytest.raises(InputError, match=message):
        drift_of(learner, x, lambda points: -points)


def test_the_monitor_flags_a_broken_bound_and_records_every_task():
    torch.manual_seed(0)
    warnings_given = []
    monitor = BoundsMonitor(samples=64, warn=warnings_given.append)
    stream = make_stream("seq-blobs")
    train(ER(MLP((2,), 6, hidden=(32,)), memory=60, lr=0.3), stream, batch=10, callbacks=[monitor])
    assert [row.task for row in monitor.rows] == [0, 1, 2]
    broken = [(row.task, name) for row in monitor.rows for name in row.violations]
    assert len(warnings_given) == len(broken)
    # Before they come, the clouds of the last task lie outside of the hull and are told wrong with confidence.
    assert (0, "Corollary 1") in broken
    assert monitor.rows[0].generalisation.covered < 0.5
    # After the last task the "future" is in memory too.
    assert monitor.rows[-1].generalisation.holds
    rows = json.loads(json.dumps([row.as_dict() for row in monitor.rows]))
    assert rows[0]["violations"] == ["Corollary 1"]
    assert rows[0]["forgetting"]["memory"]["max"] <= rows[0]["forgetting_bound"]


def test_what_has_no_memory_or_cannot_be_drawn_is_refused_before_training():
    stream = make_stream("seq-blobs")
    for watcher in (BoundsMonitor(), ProfileRecorder()):
        with pytest.raises(InputError, match="learner: got 'SGD', expected a learner with a memory"):
            train(SGD(MLP((2,), 6)), stream, callbacks=[watcher])
    with pytest.raises(InputError, match="points in the plane"):
        train(ER(MLP((1, 8, 8), 10)), make_stream("seq-digits"), callbacks=[ProfileRecorder()])
    with pytest.raises(InputError, match="got an empty memory"):
        LearnerLoss(ER(MLP((2,), 6)))
    with pytest.raises(InputError, match="^eps"):
        bounds_of(ER(MLP((2,), 6)), eps=-1)


def test_runs_that_are_trained_side_by_side_do_not_share_a_list_of_results():
    streams = [make_stream("seq-blobs", seed) for seed in (0, 1)]
    for watcher in (BoundsMonitor(), ProfileRecorder()):
        fleet = Fleet([ER(MLP((2,), 6), memory=50, seed=seed) for seed in (0, 1)])
        with pytest.raises(InputError, match=f"^callbacks: got a {type(watcher).__name__} .* expected it with one run"):
            train_fleet(fleet, streams, callbacks=[watcher])


def test_a_past_or_future_without_examples_is_refused():
    learner, no_examples = ER(MLP((2,), 6), memory=50), (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    learner.observe(torch.randn(40, 2), torch.arange(40) % 6)
    with pytest.raises(InputError, match="^past: got .*, expected at least one example; leave it out"):
        bounds_of(learner, no_examples)
    with pytest.raises(InputError, match="^future: got .*, expected at least one example; leave it out"):
        bounds_of(learner, future=no_examples)


def test_the_past_is_a_pair_of_examples_and_labels_also_as_arrays():
    learner, x, y = ER(MLP((2,), 6), memory=50), torch.randn(40, 2), torch.arange(40) % 6
    learner.observe(x, y)
    realised = [bounds_of(learner, past)[0].realised for past in ((x, y), (x.numpy(), y.tolist()))]
    assert realised[0] == realised[1]
    for no_pair in (x, (x, y, y), {"x": x, "y": y}):
        with pytest.raises(InputError, match=r"^past: got .*, expected a pair, .*; as in past=\(x, y\)$"):
            bounds_of(learner, no_pair)
    with pytest.raises(InputError, match="^future: got 40 examples and 3 labels"):
        bounds_of(learner, future=(x, y[:3]))
    with pytest.raises(InputError, match="^past: got a tensor of shape .. .*, expected a batch of examples and one"):
        bounds_of(learner, (x, torch.tensor(3)))


def test_labels_of_the_past_are_class_numbers_of_any_integer_type_as_in_observe():
    learner, x, y = ER(MLP((2,), 6), memory=50), torch.randn(40, 2), torch.arange(40) % 6
    learner.observe(x, y)
    assert bounds_of(learner, (x, y.int()))[0].realised == bounds_of(learner, (x, y))[0].realised
    for labels, message in (
        (y + 6, "^y: got 11, expected labels from 0 to 5"),
        (y - 1, "^y: got -1, expected labels from 0 to 5"),
        (y.float(), "^y: got .*, expected one whole number for each of the 40 examples"),
    ):
        with pytest.raises(InputError, match=message):
            bounds_of(learner, (x, labels))
    with pytest.raises(InputError, match="^future: got 80 values that are NaN or infinite"):
        bounds_of(learner, future=(x * torch.nan, y))
    with pytest.raises(InputError, match=r"^x: got a tensor of shape \[1, 3\] .*, expected examples as in the first"):
        bounds_of(learner, (torch.zeros(40, 3), y))


def test_past_numbers_may_be_a_row_as_in_observe():
    learner, x = ER(MLP((2,), 1), memory=50, criterion="mse"), torch.randn(40, 2)
    learner.observe(x, x.sum(1))
    found, column = (bounds_of(learner, (x, y))[0] for y in (x.sum(1), x.sum(1, keepdim=True)))
    assert found.past == column.past
    assert found.realised == pytest.approx(float((learner.scores(x)[:, 0] - x.sum(1)).square().mean()))
    with pytest.raises(InputError, match="^y: got .*, expected one number for each of the 40 examples"):
        bounds_of(learner, (x, x))


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_parabolic_bounds_leaves_a_table_json_and_a_picture(parabolic, tmp_path):
    code, out, err = parabolic("bounds", "--stream", "seq-blobs", "--memory", "50", "--samples", "32")
    assert (code, err) == (0, "")
    assert "Proposition 1: the past" in out
    assert "Corollary 1: the future" in out
    (file,) = (tmp_path / "bounds").glob("seq-blobs-pcl-0-*.json")
    content = json.loads(file.read_text())
    assert [row["task"] for row in content["rows"]] == [0, 1, 2]
    assert content["spec"]["memory"] == 50
    assert is_png(file.with_suffix(".png"))
    parabolic("bounds", "--stream", "seq-blobs", "--memory", "60", "--samples", "32")
    assert len(list((tmp_path / "bounds").glob("*.json"))) == 2  # other settings do not take its place


def test_parabolic_bounds_takes_a_preset_as_run_does(parabolic, tmp_path):
    arguments = ("--preset", "pcl-plus", "--stream", "seq-blobs", "--memory", "50", "--set", "times=2", "--json")
    result = json.loads(parabolic("bounds", "--samples", "8", *arguments)[1])
    assert result["spec"] == json.loads(parabolic("run", *arguments)[1])["spec"]
    assert (result["spec"]["options"]["repeats"], result["spec"]["options"]["times"]) == (2, 2)
    save_preset(Preset("mine", "er", stream="seq-blobs", memory=60), tmp_path / "presets")
    result = json.loads(parabolic("bounds", "--samples", "8", "--preset", "mine", "--json")[1])
    assert [result["spec"][name] for name in ("learner", "stream", "memory")] == ["er", "seq-blobs", 60]
    code, _, err = parabolic("bounds", "--preset", "pcl-plus", "--learner", "er")
    assert code == 2
    assert "--learner: got 'er', expected pcl, as in preset 'pcl-plus'" in err


def test_parabolic_profile_takes_a_preset_as_run_does(parabolic, tmp_path):
    few_points = ("--grid", "9", "--paths", "2")
    arguments = ("--preset", "pcl-plus", "--stream", "seq-blobs", "--memory", "50", "--set", "times=2", "--json")
    result = json.loads(parabolic("profile", *few_points, *arguments)[1])
    assert result["spec"] == json.loads(parabolic("run", *arguments)[1])["spec"]
    save_preset(Preset("mine", "er", stream="seq-blobs", memory=70, settings={"lr": 0.2}), tmp_path / "presets")
    save_preset(Preset("bare", "er", settings={"lr": 0.2}), tmp_path / "presets")
    for name, memory in (("mine", 70), ("bare", 60)):  # the last has neither: then they are those of `profile`
        spec = json.loads(parabolic("profile", *few_points, "--preset", name, "--json")[1])["spec"]
        assert [spec[field] for field in ("learner", "stream", "memory")] == ["er", "seq-blobs", memory]
        assert spec["options"]["lr"] == 0.2
    assert "mine on seq-blobs: u(x, 1)" in parabolic("profile", *few_points, "--preset", "mine")[1]
    code, _, err = parabolic("profile", "--preset", "pcl-plus", "--learner", "er")
    assert code == 2
    assert "--learner: got 'er', expected pcl, as in preset 'pcl-plus'" in err


def test_parabolic_profile_leaves_a_table_json_and_a_picture(parabolic, tmp_path):
    code, out, err = parabolic("profile", "--grid", "12", "--paths", "10", "--learner", "er")
    assert (code, err) == (0, "")
    assert "paths stopped" in " ".join(out.split())
    (file,) = (tmp_path / "profile").glob("seq-blobs-er-0-*.json")
    content = json.loads(file.read_text())
    assert len(content["rows"]) == 3
    assert all(len(row["points"]) == len(row["values"]) > 10 for row in content["rows"])
    assert is_png(file.with_suffix(".png"))


@pytest.mark.parametrize("command", [("bounds", "--samples", "8"), ("profile", "--grid", "9", "--paths", "2")])
def test_files_are_named_by_the_run_that_they_tell_of(parabolic, tmp_path, command):
    options = ("--memory", "90", "--stream", "seq-blobs", "--seed", "3", "--json")
    result = json.loads(parabolic(*command, "--learner", "er", *options)[1])
    (file,) = (tmp_path / command[0]).glob("seq-blobs-er-3-*.json")
    parabolic(*command, "--learner", "er", *options, "--eps", "0.2")
    assert json.loads(file.read_text()) == result  # measured otherwise, it has files of its own
    file.unlink()
    settings = [word for setting in ("stream=seq-blobs", "seed=3", "memory=90") for word in ("--set", setting)]
    code, out, _ = parabolic(*command, "--learner", "er", *settings)
    assert code == 0
    assert "on seq-digits" not in out
    assert json.loads(file.read_text()) == result


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("bounds", "--learner", "sgd"), "learner"),
        (("bounds", "--eps", "0"), "eps"),
        (("profile", "--stream", "seq-digits"), "stream"),
        (("profile", "--sigma", "-1"), "sigma"),
        (("profile", "--time", "-1"), "t:"),
        (("bounds", "--stream", "seq-blobs", "--samples", "8", "--output", "/dev/null/x"), "--output"),
        (("profile", "--learner", "er", "--grid", "9", "--paths", "2", "--out", "/dev/null/x"), "--output"),
        (("profile", "--learner", "er", "--grid", "2", "--paths", "2"), "grid: got 2"),
    ],
)
def test_bad_calls_write_nothing(parabolic, tmp_path, arguments, name):
    code, _, err = parabolic(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert name in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_a_memory_point_has_its_own_label_however_far_from_zero_the_memory_lies(offset):
    torch.manual_seed(0)
    learner = ER(MLP((4,), 3), memory=100)
    learner.observe(offset + torch.randn(60, 4), torch.arange(60) % 3)
    loss = LearnerLoss(learner)
    assert torch.allclose(loss.label(loss.points, 3), torch.eye(3)[loss.labels], atol=1e-4)
