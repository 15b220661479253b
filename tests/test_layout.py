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
    weights_by_name = weights()
    layout = Layout(weights_by_name)
    vector = layout.join(weights_by_name.values())
    assert vector.shape == (sum(weight.numel() for weight in weights_by_name.values()),)
    for part, weight in zip(layout.cut(vector), weights_by_name.values(), strict=True):
        assert torch.equal(part, weight)
        assert part.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    vector.mul_(2)
    assert layout.named(vector).keys() == weights_by_name.keys()
    assert all(torch.equal(part, 2 * weights_by_name[name]) for name, part in layout.named(vector).items())
    contiguous = [weight.contiguous() for weight in weights_by_name.values()]
    assert torch.equal(layout.join(contiguous), vector / 2)  # however they lie


def test_parts_lie_as_the_weights_do():
    """To the stride, along sides of one entry too: only then an optimiser takes all weights in one operation."""
    weights_by_name = weights()
    assert weights_by_name["0.weight"].stride() == (27, 1, 9, 3)
    assert weights_by_name["2.weight"].stride() == (4, 1, 4, 4)
    layout = Layout(weights_by_name)
    assert {name: part.stride() for name, part in layout.named(layout.join(weights_by_name.values())).items()} == {
        name: weight.stride() for name, weight in weights_by_name.items()
    }


@pytest.mark.parametrize(
    "unusual", [torch.arange(12.0).view(3, 4)[:, ::2], torch.ones(2, 1).expand(2, 3), torch.ones(())]
)
def test_what_leaves_gaps_or_overlaps_is_laid_out_by_itself(unusual):
    layout = Layout({"odd": unusual, "even": torch.ones(2)})
    vector = layout.join([unusual, torch.ones(2)])
    assert vector.tolist() == [*unusual.flatten().tolist(), 1, 1]
    assert torch.equal(layout.views(vector)[0], unusual)


def test_cutting_and_joining_have_every_derivative():
    weights_by_name = weights()
    layout = Layout(weights_by_name)
    vector = layout.join(weights_by_name.values()).requires_grad_()

    def cut_and_join(vector_given):
        first, *others = layout.cut(vector_given)
        return layout.join([first * others[0].square().sum(), *[part.exp() for part in others]])

    assert torch.autograd.gradcheck(cut_and_join, [vector])
    assert torch.autograd.gradgradcheck(cut_and_join, [vector])


def test_a_vector_grows_with_its_weights():
    before, now = Layout({"a": torch.zeros(2), "b": torch.zeros(1)}), Layout({"a": torch.zeros(3), "b": torch.zeros(1)})
    grown = now.grown(torch.tensor([1.0, 2.0, 3.0]), before, [torch.full((3,), 7.0), torch.full((1,), 7.0)])
    assert grown.tolist() == [1, 2, 7, 3]


def trained(learner, until=2):
    generator = torch.Generator().manual_seed(0)
    for task in range(2):
        batches = [
            (
                torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64),
                torch.randint(4, (6,), generator=generator),
            )
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
    plain, channels_last = (
        trained(find_learner(name)(net(layout), seed=0, **options))
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    for plain_weight, other_weight in zip(plain.model.parameters(), channels_last.model.parameters(), strict=True):
        torch.testing.assert_close(plain_weight, other_weight, rtol=0, atol=1e-10)
    restored = find_learner(name)(net(), seed=0, **options)
    restored.load_state_dict(channels_last.state_dict())
    for part in getattr(restored, "_vectors", ()):
        ours, theirs = (learner.weights.layout.named(getattr(learner, part)) for learner in (restored, channels_last))
        assert all(torch.equal(ours[weight], theirs[weight]) for weight in ours)
        assert any(value.any() for value in ours.values()) or part == "path"  # which ends with its task


def test_a_state_of_another_making_is_refused():
    learner = SI(net())
    state = learner.state_dict() | {"anchor": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"^state: got a tensor .*, expected tensors named 0.weight, "):
        learner.load_state_dict(state)
