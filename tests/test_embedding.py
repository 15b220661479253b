"""Inputs that no path can run between, such as ids of words, are embedded, and paths run between embeddings."""

import pytest
import torch
from slow import same_weights
from test_learners import frozen, same
from torch import nn

from parabolic import ER, MLP, PCL, InputError, ReplayLearner
from parabolic.learners import find_learner, known_learners
from parabolic.profile import LearnerLoss, bounds_of


def parts(seed=0):
    torch.manual_seed(seed)
    return MLP((4, 3), 2, hidden=(8,)).double(), nn.Embedding(10, 3).double()


def sentences(count=4, size=16, seed=1):
    """Of class 0 the ids are even, of class 1 odd."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        y = torch.arange(size) % 2
        yield 2 * torch.randint(5, (size, 4), generator=generator) + y[:, None], y


def test_pcl_is_pcl_on_what_the_embedding_gives():
    """Two learners with the same draws: one is given ids, the other their embeddings, through which it is slow to pass
    the gradient on by hand."""
    body, embed = parts()
    other_body, other_embed = parts()
    learner = PCL(body, embed=embed, memory=40, replay=8, seed=3)
    (x, y), *_ = sentences(1)
    loss = learner.observe(x, y)
    points = other_embed(x)
    on_embeddings = PCL(other_body, memory=40, replay=8, seed=3)
    expected = on_embeddings.loss({"x": points, "y": y}, None)
    expected.backward()
    assert loss == expected.detach()
    for ours, theirs in ((body, other_body), (embed, other_embed)):
        for new, old in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(new, old - 0.08 * old.grad, atol=1e-12)


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_every_learner_trains_the_embedding(name):
    body, embed = parts()
    before = embed.weight.detach().clone()
    learner_class = find_learner(name)
    options = {"memory": 40, "replay": 8} if issubclass(learner_class, ReplayLearner) else {}
    learner, data = learner_class(body, embed=embed, lr=0.2, average=0.5, **options), list(sentences(50))
    task = 0 if learner.needs_tasks else None
    learner.start_task(data)
    for x, y in data:
        learner.observe(x, y, task)
    learner.end_task(data)
    assert not torch.equal(before, embed.weight)
    right = [learner.predict(x) == y for x, y in data]
    assert torch.cat(right).float().mean() > 0.9


def test_ids_may_be_bytes():
    outcomes = []
    for dtype in (torch.long, torch.int32, torch.uint8):
        body, embed = parts()
        learner = PCL(body, embed=embed, memory=40)
        outcomes.append([learner.observe(x.to(dtype), y).item() for x, y in sentences()])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_ids_that_the_embedding_does_not_know_are_refused_and_change_nothing():
    body, embed = parts()
    learner = PCL(body, embed=embed, memory=40)
    for x, y in sentences():
        learner.observe(x, y)
    before = frozen(learner.state_dict())
    for bad_ids in (x + 1, x - 1, x.double(), x[:, :3]):
        with pytest.raises(InputError, match="^x: got"):
            learner.observe(bad_ids, y)
    assert same(before, learner.state_dict())


def test_an_embedding_may_be_any_module_with_bridges_in_what_it_gives():
    """Random draws and all: a first layer as embedding, and noise-free paths between its outputs."""
    torch.manual_seed(0)
    stem, body = nn.Linear(3, 5), nn.Linear(5, 2)
    learner = PCL(body, embed=stem, sigma_x=0, sigma_y=0, times=2, memory=40)
    joined = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    joined[0].load_state_dict(stem.state_dict())
    joined[1].load_state_dict(body.state_dict())
    plain = PCL(joined, sigma_x=0, sigma_y=0, times=2, memory=40)  # without noise only the start of a path counts
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    assert torch.equal(learner.observe(x, y), plain.observe(x, y))
    assert same_weights(learner.model, joined, 1e-6)


def test_what_cannot_be_is_refused():
    body, embed = parts()
    with pytest.raises(InputError, match="^embed: got"):
        PCL(body, embed=lambda x: x)
    learner = PCL(body, embed=embed, memory=40)
    learner.observe(*next(sentences()))
    with pytest.raises(InputError, match="^learner: .*inputs are points"):
        LearnerLoss(learner)


def test_ids_without_an_embedding_of_their_own_are_refused_and_change_nothing():
    torch.manual_seed(0)
    learner = PCL(nn.Sequential(nn.Embedding(10, 3), nn.Flatten(), nn.Linear(12, 2)), memory=40)
    (x, y), *_ = sentences(1)
    before = frozen(learner.state_dict())
    with pytest.raises(
        InputError, match=r"^x: got .* int64, expected floating-point numbers.*; .* pass embed=nn.Embedding"
    ):
        learner.observe(x, y)
    assert same(before, learner.state_dict())
    assert learner.classes is None
    linear_learner = PCL(nn.Linear(4, 2), memory=40)
    with pytest.raises(InputError, match=r"^x: got .* int64, .*if they are measurements, convert them with .float\(\)"):
        linear_learner.observe(x, y)
    linear_learner.observe(x.float(), y)


def test_a_first_batch_that_is_refused_does_not_say_what_examples_are_like():
    learner = ER(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), memory=40)
    with pytest.raises(InputError, match="at least two examples"):
        learner.observe(torch.zeros(1, 4, dtype=torch.float64), [0])
    learner.observe(torch.randn(8, 4), torch.arange(8) % 2)


def test_what_is_embedded_for_good_has_bounds():
    """As the refusal of one that is trained advises."""
    body, embed = parts()
    embed.requires_grad_(False)
    trained, fixed = PCL(body, embed=embed, memory=40), PCL(body, prepare=embed, memory=40)
    for learner in (trained, fixed):
        learner.observe(*next(sentences()))
    with pytest.raises(InputError, match="embed in `prepare`, with an embedding that is not trained$"):
        bounds_of(trained)
    before, _ = bounds_of(fixed, samples=8)
    assert before.stated <= before.bound
