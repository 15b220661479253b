"""What is given to a learner: it is neither changed nor taken for what it is not."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from parabolic import InputError
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
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=g) + 5, torch.arange(8) % 3) for _ in range(BATCHES)]


@pytest.mark.parametrize("name", ALL)
def test_a_network_that_would_change_what_is_kept_is_refused_and_has_changed_nothing(name):
    learner = known_learners()[name](InPlace())
    learner.start_task(batches())
    before, given = copy.deepcopy(learner.state_dict()), batches()
    if name == "pcl":  # whose paths are copies from the start
        [learner.observe(x, y, task=0) for x, y in given]
    else:
        with pytest.raises(InputError, match="model: got one that changes its input in place"):
            learner.observe(*given[0], task=0)
        after = learner.state_dict()
        assert all(same_state(after[each], before[each]) for each in ("model", "optimizer", "generator", "steps"))
    assert all(torch.equal(x, again) for (x, _), (again, _) in zip(given, batches(), strict=True))


def test_prediction_leaves_alone_what_it_is_given():
    learner = known_learners()["er"](InPlace())
    x, _ = batches()[0]
    kept = x.clone()
    assert torch.equal(learner.scores(x), learner.scores(x))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("which", ["prepare", "augment"])
def test_a_change_of_examples_in_place_is_refused(which):
    functions = {"prepare": lambda x: x.sub_(5), "augment": lambda x, generator: x.mul_(2)}
    learner = known_learners()["er"](nn.Linear(4, 3), **{which: functions[which]})
    with pytest.raises(InputError, match="prepare or augment: got one that changes examples in place"):
        learner.observe(*batches()[0])


@pytest.mark.parametrize("name", ALL)
def test_what_was_made_in_inference_mode_is_learned_from(name):
    def learn(inference):
        learner = known_learners()[name](nn.Linear(4, 3))
        learner.start_task(batches())
        with torch.inference_mode(inference):
            given = [(x + 0, y + 0) for x, y in batches()]
        assert given[0][0].is_inference() == inference
        return torch.stack([learner.observe(x, y, task=0) for x, y in given])

    torch.manual_seed(0)
    first = learn(True)
    torch.manual_seed(0)
    assert torch.equal(first, learn(False))


def test_masked_values_are_refused_and_a_mask_of_nothing_is_not():
    learner = known_learners()["er"](nn.Linear(4, 3))
    x, y = (each.numpy() for each in batches()[0])
    holes = np.ma.masked_greater(x, 6)
    with pytest.raises(InputError, match=r"x: got an array with \d+ masked values, expected one without gaps; fill in"):
        learner.observe(holes, y)
    with pytest.raises(InputError, match="y: got an array with 2 masked values"):
        learner.observe(x, np.ma.masked_equal(y, 2))
    with pytest.raises(InputError, match="x: got an array with"):
        learner.predict(holes)
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
    with pytest.raises(Diverged, match="predict: the scores are no numbers any more, after 1 steps; go back to"):
        learner.predict(batches()[0][0])
    with pytest.raises(Diverged, match="save: weights are NaN or infinite"):
        learner.save(path)
    assert path.read_bytes() == good


def test_no_other_thread_learns_between_scores_and_the_answer_that_is_made_of_them(monkeypatch):
    learner, free = known_learners()["er"](nn.Linear(4, 3)), []
    with ThreadPoolExecutor(1) as other:

        def answer(self, scores):
            free.append(other.submit(learner.lock.acquire, blocking=False).result())
            return scores.argmax(-1)

        monkeypatch.setattr(type(learner.error), "answer", answer)
        learner.predict(batches()[0][0])
    assert free == [False]
