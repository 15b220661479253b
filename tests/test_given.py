"""What is given to a learner: it is neither changed nor taken for what it is not."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from parabolic import InputError, Learner, ReplayLearner
from parabolic.learners import Diverged, known_learners
from parabolic.states import same_state

BATCHES = 6
ALL = sorted(known_learners())


class InPlace(nn.Module):
    """A network that works on its input itself."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x -= 5
        return self.head(x)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator) + 5, torch.arange(8) % 3) for _ in range(BATCHES)]


@pytest.mark.parametrize("name", ALL)
def test_a_network_that_would_change_what_is_kept_is_refused_and_has_changed_nothing(name):
    learner = known_learners()[name](InPlace())
    learner.start_task(batches())
    before, data = copy.deepcopy(learner.state_dict()), batches()
    if name == "pcl":  # whose paths are copies from the start
        [learner.observe(x, y, task=0) for x, y in data]
    else:
        with pytest.raises(InputError, match="model: got one that changes its input in place"):
            learner.observe(*data[0], task=0)
        after = learner.state_dict()
        assert all(same_state(after[part], before[part]) for part in ("model", "optimizer", "generator", "steps"))
    assert all(torch.equal(x, original) for (x, _), (original, _) in zip(data, batches(), strict=True))


def test_prediction_leaves_alone_what_it_is_given():
    learner = known_learners()["er"](InPlace())
    x, _ = batches()[0]
    original = x.clone()
    assert torch.equal(learner.scores(x), learner.scores(x))
    assert torch.equal(x, original)


@pytest.mark.parametrize("name", ["prepare", "augment"])
def test_a_change_of_examples_in_place_is_refused(name):
    functions = {"prepare": lambda x: x.sub_(5), "augment": lambda x, generator: x.mul_(2)}
    learner = known_learners()["er"](nn.Linear(4, 3), **{name: functions[name]})
    with pytest.raises(InputError, match="prepare or augment: got one that changes examples in place"):
        learner.observe(*batches()[0])


@pytest.mark.parametrize("name", ALL)
def test_what_was_made_in_inference_mode_is_learned_from(name):
    def learn(inference):
        learner = known_learners()[name](nn.Linear(4, 3))
        learner.start_task(batches())
        with torch.inference_mode(inference):
            data = [(x + 0, y + 0) for x, y in batches()]
        assert data[0][0].is_inference() == inference
        return torch.stack([learner.observe(x, y, task=0) for x, y in data])

    torch.manual_seed(0)
    first = learn(True)
    torch.manual_seed(0)
    assert torch.equal(first, learn(False))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", ALL)
def test_learning_and_predicting_are_the_same_where_the_caller_switched_gradients_off(name, mode, tmp_path):
    def learn_and_save(context):
        model, larger_model = nn.Linear(4, 3), nn.Linear(4, 4)
        with context():
            learner = copy.deepcopy(known_learners()[name](model, average=0.9))
            learner.start_task(batches()[:3])
            losses = [learner.observe(x, y, task=0) for x, y in batches()[:3]]
            learner.end_task(batches()[:3])
            learner.grow(4)
            learner = Learner.load(learner.save(tmp_path / "learner.safetensors"), model=larger_model)
            answers = learner.predict(batches()[0][0].numpy())
        learner.start_task(batches()[3:])
        return learner, [*losses, *(learner.observe(x, y, task=1) for x, y in batches()[3:])], answers

    torch.manual_seed(0)
    learner, losses, answers = learn_and_save(mode)
    torch.manual_seed(0)
    expected_learner, expected, expected_answers = learn_and_save(contextlib.nullcontext)
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected]
    assert torch.equal(answers, expected_answers)
    assert same_state(learner.state_dict(), expected_learner.state_dict())


def test_a_loss_sees_what_its_inputs_were_made_of_and_makes_other_views():
    class TwoViews(ReplayLearner):
        keeps = ("x", "y")

        def loss(self, batch, recalled):
            for batch_or_recalled in filter(None, (batch, recalled)):
                assert torch.equal(batch_or_recalled["x"], self.inputs(batch_or_recalled["raw"]) + 1)
                assert torch.equal(self.augmented(batch_or_recalled["raw"]), batch_or_recalled["x"])
                raw_batches.append(batch_or_recalled["raw"])
            return self.error(self.model(batch["x"]), batch["y"])

    raw_batches, data = [], batches()[:2]
    learner = TwoViews(nn.Linear(4, 3), augment=lambda x, generator: x + 2, prepare=lambda x: x / 2)
    for x, y in data:
        learner.observe(x, y)
    first, second, recalled = raw_batches[0], raw_batches[1], raw_batches[2]
    assert torch.equal(first, data[0][0])
    assert torch.equal(second, data[1][0])
    assert sorted(recalled.tolist()) == sorted(first.tolist())
    assert learner.past.fields == ("x", "y")


@pytest.mark.parametrize("norm_trains", [False, True])
def test_a_network_that_keeps_its_norm_frozen_when_it_trains_is_let(norm_trains):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def train(self, mode=True):
            super().train(mode)
            self.body.train(mode and norm_trains)
            return self

        def forward(self, x):
            return self.head(self.body(x))

    learner = known_learners()["er"](nn.Sequential(Frozen(), nn.Identity()))
    for x, y in batches():
        learner.observe(x, y)
        learner.predict(x)
    assert bool(learner.model[0].body.running_mean.any()) == norm_trains


def test_modules_that_were_set_to_predict_stay_so():
    model = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Linear(4, 3))
    learner = known_learners()["er"](model)
    learner.observe(*batches()[0])
    assert not model[0].running_mean.any()


def test_a_network_that_cannot_learn_is_refused():
    with torch.inference_mode():
        inference = nn.Linear(4, 3)
    cases = {
        "one made in inference mode, expected one that can learn": inference,
        "one with weights on the meta device, which have no values": nn.Linear(4, 3, device="meta"),
        "one with lazy layers that have no weights yet, .* model.x.": nn.LazyLinear(3),
        "one with lazy layers": nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 3)),
    }
    for message, model in cases.items():
        with pytest.raises(InputError, match=f"model: got {message}"):
            known_learners()["er"](model)
    lazy = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3))
    lazy(batches()[0][0])
    known_learners()["er"](lazy).observe(*batches()[0])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {"device": "cuda"}, r"option of PCL: got 'device', .* where its model is: .* model\.to\('cuda'\)"),
        ((), {"sigmax": 0.1}, "option of PCL: got 'sigmax', .* did you mean 'sigma_x'. help.PCL. explains them"),
        ((), {"buffer_size": 9}, "option of PCL: got 'buffer_size', expected one of"),
        ((200,), {}, "PCL: got 2 arguments without a name, expected 1: model; name the others, as in lr=0.1"),
        ((), {"model": nn.Linear(4, 3)}, "multiple values for argument 'model'"),
    ],
)
def test_arguments_that_a_learner_does_not_take_are_refused_with_those_that_it_does(args, options, message):
    with pytest.raises(TypeError, match=message):  # as Python's own error would be
        known_learners()["pcl"](nn.Linear(4, 3), *args, **options)


def test_a_method_with_an_init_of_its_own_keeps_it():
    class Given(known_learners()["er"]):
        def __init__(self, size, **options):
            super().__init__(nn.Linear(size, 3), **options)

    assert Given(4, memory=50).past.capacity == 50
    with pytest.raises(TypeError, match="option of Given: got 'memry', .* did you mean 'memory'"):
        Given(4, memry=50)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda scores: scores[:, 0],
            r"an output of shape \[1\] for 1 example, expected scores \[n, classes\], a row",
        ),
        (lambda scores: scores.expand(7, 3), r"an output of shape \[7, 3\] for 1 example, expected scores"),
        (lambda scores: scores.to(torch.complex64), "torch.complex64, expected scores that are floating-point numbers"),
        (lambda scores: {"scores": scores}, "<class 'dict'>, expected one tensor of scores"),
    ],
)
def test_a_network_whose_answers_are_no_scores_is_refused(answer, message):
    class Odd(nn.Linear):
        def forward(self, x):
            return answer(super().forward(x))

    learner = known_learners()["er"](Odd(4, 3))
    with pytest.raises(InputError, match=f"^model: got {message}"):
        learner.observe(*batches()[0])
    assert (learner.steps, len(learner.past)) == (0, 0)


def test_a_network_on_a_device_without_float64_is_refused():
    class OnMps(nn.Parameter):  # torch cannot make one where there is no such device
        device = torch.device("mps")

    model = nn.Linear(4, 3)
    model.weight = OnMps(torch.zeros(3, 4))
    with pytest.raises(InputError, match="model: got one on mps, which has no float64, .* move it with model.cpu"):
        known_learners()["er"](model)


@pytest.mark.parametrize(
    ("unusual", "message"),
    [
        (torch.eye(4).to_sparse(), r"a tensor of shape \[4, 4\] and type float32, .* convert it with .to_dense"),
        (
            torch.nested.nested_tensor([torch.ones(4), torch.ones(3)], layout=torch.jagged),
            "a nested tensor, .*to_padded",
        ),
        (torch.eye(4).to(torch.float8_e5m2), ".* expected floating-point numbers of at least 16 bits; .*half()"),
    ],
)
def test_tensors_of_another_layout_or_of_8_bits_are_refused_with_how_to_convert_them(unusual, message):
    learner = known_learners()["er"](nn.Linear(4, 3))
    with pytest.raises(InputError, match=f"^x: got {message}"):
        learner.observe(unusual, torch.arange(len(unusual.unbind())) % 3)
    with pytest.raises(InputError, match=f"^x: got {message}"):
        learner.predict(unusual)


def test_masked_values_are_refused_and_a_mask_of_nothing_is_not():
    learner = known_learners()["er"](nn.Linear(4, 3))
    x, y = (tensor.numpy() for tensor in batches()[0])
    masked = np.ma.masked_greater(x, 6)
    with pytest.raises(InputError, match=r"x: got an array with \d+ masked values, expected one without gaps; fill in"):
        learner.observe(masked, y)
    with pytest.raises(InputError, match="y: got an array with 2 masked values"):
        learner.observe(x, np.ma.masked_equal(y, 2))
    with pytest.raises(InputError, match="x: got an array with"):
        learner.predict(masked)
    assert learner.steps == 0
    learner.observe(np.ma.masked_array(x), np.ma.masked_array(y))
    assert learner.steps == 1


def test_a_network_that_diverged_neither_answers_nor_takes_the_place_of_a_good_file(tmp_path):
    learner = known_learners()["er"](nn.Linear(4, 3))
    learner.observe(*batches()[0])
    path = learner.save(tmp_path / "er.safetensors")
    good = path.read_bytes()
    with torch.no_grad():
        learner.model.weight[0, 0] = torch.nan
    with pytest.raises(Diverged, match="predict: the scores are NaN after 1 steps; go back to"):
        learner.predict(batches()[0][0])
    with pytest.raises(Diverged, match="save: weights are NaN or infinite"):
        learner.save(path)
    assert path.read_bytes() == good


def test_no_other_thread_learns_between_scores_and_the_answer_that_is_made_of_them(monkeypatch):
    learner, acquired = known_learners()["er"](nn.Linear(4, 3)), []
    with ThreadPoolExecutor(1) as executor:

        def answer(self, scores):
            acquired.append(executor.submit(learner.lock.acquire, blocking=False).result())
            return scores.argmax(-1)

        monkeypatch.setattr(type(learner.error), "answer", answer)
        learner.predict(batches()[0][0])
    assert acquired == [False]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            {"ids": torch.zeros(2, 4), "mask": torch.ones(2, 4)},
            r"x: got <class 'dict'>, expected one tensor, whose first .*as in torch.stack\(\[ids, mask\], 1\)",
        ),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), r"x: got <class 'tuple'>, expected one tensor"),
        ([torch.zeros(4), torch.zeros(4)], r"x: got <class 'list'>, expected one tensor.*use torch.stack\(x\)"),
        (torch.zeros(2, 4, dtype=torch.float64), r"and torch.float32; convert them: x.to\(torch.float32\)"),
        (torch.zeros(2, 3), "pad sequences to one length"),
        (torch.zeros(4), r"add a dimension: x\[None\]"),
    ],
)
def test_examples_of_another_form_are_told_how_to_be_given(x, message):
    learner = known_learners()["er"](nn.Linear(4, 3))
    learner.observe(*batches()[0])
    with pytest.raises(InputError, match=message):
        learner.observe(x, torch.tensor([0, 1]))
    assert learner.steps == 1


@pytest.mark.parametrize("learned", [False, True])
def test_a_single_number_is_no_batch(learned):
    learner = known_learners()["er"](nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 3)))
    if learned:
        learner.observe(torch.randn(6), torch.arange(6) % 3)
    with pytest.raises(InputError, match=r"^x: got a tensor of shape \[\] .* a batch of examples; .*x\[None\]"):
        learner.predict(1.5)


def test_several_inputs_go_through_as_one():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids_and_mask):
            ids, mask = ids_and_mask.unbind(1)
            return self.head((self.words(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(9, (8, 5), generator=generator), torch.ones(8, 5, dtype=torch.long)
    learner = known_learners()["er"](Masked(), lr=0.5)
    losses = [float(learner.observe(torch.stack([ids, mask], 1), ids[:, 0] % 3)) for _ in range(40)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", ["er", "pcl"])
def test_an_error_of_the_model_itself_leaves_no_trace(name):
    """Whatever the error: batch norm's statistics and the random draws are as before the batch."""

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head, self.fails = nn.BatchNorm1d(4), nn.Linear(4, 3), False

        def forward(self, x):
            x = self.norm(x)
            if self.fails and self.training:
                raise KeyError("an error of the user's")
            return self.head(x)

    learner, (first, second, *_) = known_learners()[name](Fails()), batches()
    learner.observe(*first)
    before = copy.deepcopy(learner.state_dict())
    learner.model.fails = True
    with pytest.raises(KeyError, match="an error of the user's"):
        learner.observe(*second)
    assert same_state(before, learner.state_dict())
