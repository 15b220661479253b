"""All weights of a model as one vector: where each number lies, derivatives, growth."""

import pytest
import torch
from torch import nn

from parabolic import SI
from parabolic.learners import find_learner
from parabolic.learners.layout import Layout


def net(layout=torch.contiguous_format):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double().to(memory_format=layout)


def weights():
    return {name: weight.detach() for name, weight in net(torch.channels_last).named_parameters()}


def test_a_vector_is_cut_up_and_joined_again():
    given = weights()
    layout = Layout(given)
    vector = layout.join(given.values())
    assert vector.shape == (sum(weight.numel() for weight in given.values()),)
    for part, weight in zip(layout.cut(vector), given.values(), strict=True):
        assert torch.equal(part, weight)
        assert part.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    vector.mul_(2)
    assert layout.named(vector).keys() == given.keys()
    assert all(torch.equal(part, 2 * given[name]) for name, part in layout.named(vector).items())
    apart = [weight.contiguous() for weight in given.values()]
    assert torch.equal(layout.join(apart), vector / 2)  # however they lie


def test_parts_lie_as_the_weights_do():
    """To the stride, along sides of one entry too: only then an optimiser takes all weights in one operation."""
    given = weights()
    assert given["0.weight"].stride() == (27, 1, 9, 3)
    assert given["2.weight"].stride() == (4, 1, 4, 4)
    layout = Layout(given)
    assert {name: part.stride() for name, part in layout.named(layout.join(given.values())).items()} == {
        name: weight.stride() for name, weight in given.items()
    }


@pytest.mark.parametrize("odd", [torch.arange(12.0).view(3, 4)[:, ::2], torch.ones(2, 1).expand(2, 3), torch.ones(())])
def test_what_leaves_gaps_or_overlaps_is_laid_out_by_itself(odd):
    layout = Layout({"odd": odd, "even": torch.ones(2)})
    vector = layout.join([odd, torch.ones(2)])
    assert vector.tolist() == [*odd.flatten().tolist(), 1, 1]
    assert torch.equal(layout.views(vector)[0], odd)


def test_cutting_and_joining_have_every_derivative():
    given = weights()
    layout = Layout(given)
    vector = layout.join(given.values()).requires_grad_()

    def of(some):
        first, *others = layout.cut(some)
        return layout.join([first * others[0].square().sum(), *[each.exp() for each in others]])

    assert torch.autograd.gradcheck(of, [vector])
    assert torch.autograd.gradgradcheck(of, [vector])


def test_a_vector_grows_with_its_weights():
    before, now = Layout({"a": torch.zeros(2), "b": torch.zeros(1)}), Layout({"a": torch.zeros(3), "b": torch.zeros(1)})
    grown = now.grown(torch.tensor([1.0, 2.0, 3.0]), before, [torch.full((3,), 7.0), torch.full((1,), 7.0)])
    assert grown.tolist() == [1, 2, 7, 3]


def learned(learner, until=2):
    g = torch.Generator().manual_seed(0)
    for task in range(2):
        batches = [
            (torch.randn(6, 3, 4, 4, generator=g, dtype=torch.float64), torch.randint(4, (6,), generator=g))
            for _ in range(4)
        ]
        if task < until:
            learner.start_task(batches)
            for x, y in batches:
                learner.observe(x, y, task)
            learner.end_task(batches)
    return learner


@pytest.mark.parametrize("name", ["si", "ewc", "agem", "gem"])
def test_however_weights_lie_they_are_learned_alike_and_states_go_across(name):
    options = {"memory": 40} if name in ("agem", "gem") else {}
    plain, other = (
        learned(find_learner(name)(net(layout), seed=0, **options))
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    for one, two in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
    taken = find_learner(name)(net(), seed=0, **options)
    taken.load_state_dict(other.state_dict())
    for part in getattr(taken, "_vectors", ()):
        ours, theirs = (each.weights.layout.named(getattr(each, part)) for each in (taken, other))
        assert all(torch.equal(ours[weight], theirs[weight]) for weight in ours)
        assert any(value.any() for value in ours.values()) or part == "path"  # which ends with its task


def test_a_state_of_another_making_is_refused():
    learner = SI(net())
    state = learner.state_dict() | {"anchor": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"^state: got a tensor .*, expected tensors named 0.weight, "):
        learner.load_state_dict(state)
