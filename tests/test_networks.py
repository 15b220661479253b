"""Networks of users: each learner either learns with them as it should, or says why it does not."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from parabolic import CLSER, ER, InputError, Learner, ParabolicClassifier, ReplayLearner
from parabolic.learners import find_learner, known_learners
from parabolic.states import same_state

ALL = sorted(known_learners())
CLASSES = 4


def make_learner(name, model, **options):
    cls = find_learner(name)
    return cls(model, **({"memory": 30, "replay": 8} if issubclass(cls, ReplayLearner) else {}) | options)


def tasks(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(8, *shape, generator=generator).to(dtype), torch.arange(8) % 2 + 2 * task) for _ in range(3)]
        for task in range(2)
    ]


def learn_tasks(learner, data):
    for task, batches in enumerate(data):
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, task if learner.needs_tasks else None)
        learner.end_task(batches)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, dtype=torch.cfloat))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        assert not x.is_complex()
        return self.head((x.cfloat() @ self.weight).abs())


class Warm(nn.Module):
    """A linear layer with a temperature, a weight that is one number."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(x * self.scale)


class Cached(nn.Module):
    """It builds what depends on the length of its inputs when it meets one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cosine", torch.ones(2), persistent=False)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        if len(self.cosine) < x.shape[1]:
            self.cosine = torch.arange(x.shape[1], dtype=x.dtype).cos()
        return self.head((x * self.cosine[: x.shape[1], None]).mean(1))


@pytest.mark.parametrize("cls", [ER, CLSER])
def test_complex_weights_are_averaged_too(cls):
    learner = cls(Complex(), memory=30, replay=8, lr=0.5, **({"average": 0.5} if cls is ER else {"stable_rate": 1}))
    weights = [learner.model.weight.detach().clone()] if cls is CLSER else []  # the first of those that it averages
    for x, y in tasks(3)[0]:
        learner.observe(x, y)
        weights.append(learner.model.weight.detach().clone())
    mean = weights[0]
    for step, weight in enumerate(weights[1:], 1):
        mean = mean + max(1 / (1 + step), 0.5 if cls is ER else 0.01) * (weight - mean)
    assert torch.allclose(learner.predicting_weights()["weight"], mean)
    assert not torch.allclose(mean, weights[-1])


@pytest.mark.parametrize("name", ["agem", "ewc", "gem", "si", "vrmcl"])
def test_methods_that_compare_weights_or_gradients_refuse_complex_ones(name):
    with pytest.raises(InputError, match=r"model: got complex weights \(weight\), expected real ones; hold them as"):
        make_learner(name, Complex())


@pytest.mark.parametrize("name", ALL)
def test_a_network_with_a_weight_that_is_one_number_grows(name):
    learner = make_learner(name, Warm(), average=0.9)
    data = tasks(3)
    learn_tasks(learner, data)
    learner.grow(CLASSES + 1)
    new_class = [(x, y * 0 + CLASSES) for x, y in data[0]]
    learner.start_task(new_class)
    learner.observe(*new_class[0], 2 if learner.needs_tasks else None)
    assert learner.scores(new_class[0][0]).shape == (8, CLASSES + 1)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_layer_that_is_frozen_later_stays_as_it_is_or_is_refused_at_once(name, grows):
    model, data = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, CLASSES)), tasks(3)
    learner = make_learner(name, model, optimizer="SGD(momentum=0.9)")
    learn_tasks(learner, data)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    if grows:
        learner.grow(CLASSES + 1)
    learner.start_task(data[0])
    refused = contextlib.nullcontext()
    if name in ("agem", "ewc", "gem", "si", "vrmcl"):  # which have vectors of all weights
        message = r"^model: got weights that were frozen after the learner was created \(0\.weight\), expected the same"
        refused = pytest.raises(InputError, match=message)
    with refused:
        learner.observe(*data[0][0], 2 if learner.needs_tasks else None)
    assert torch.equal(model[0].weight, before)


class Fixed(nn.Module):
    """A network with buffers that do not change, and that torch does not overwrite or compare as others."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, CLASSES)
        self.register_buffer("neighbours", torch.eye(3).to_sparse(), persistent=False)
        self.register_buffer("scale", torch.full((1, 1), 0.5).expand(1, 3), persistent=False)

    def forward(self, x):
        return self.head(self.norm((self.neighbours @ x.T).T) * self.scale)


@pytest.mark.parametrize("name", ALL)
def test_sparse_and_expanded_buffers_stay_as_they_are(name):
    learner, data = make_learner(name, Fixed(), average=0.9), tasks(3)
    learn_tasks(learner, data)
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(InputError, match=rf"^y: got 99, expected labels from 0 to {CLASSES - 1}"):
        learner.observe(data[0][0][0], torch.full_like(data[0][0][1], 99), 1 if learner.needs_tasks else None)
    assert same_state(learner.state_dict(), before)
    assert torch.equal(learner.predictor()(data[0][0][0]), learner.scores(data[0][0][0]))


def test_a_buffer_that_changes_its_shape_is_refused_with_a_remedy_where_weights_are_averaged():
    learner = ER(Cached(), memory=30, replay=8, average=0.9)
    (x, y), *_ = tasks(5, 3)[0]
    with pytest.raises(InputError, match=r"model: got cosine of shape \[5\], expected \[2\].*; call it on"):
        learner.observe(x, y)
    model = Cached()
    model(x)
    learner = ER(model, memory=30, replay=8, average=0.9)
    learner.observe(x, y)
    assert learner.predict(x).shape == (8,)


class Recomputed(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.recomputes, self.first = recomputes, nn.Linear(3, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.head(checkpoint(self.body, h, use_reentrant=False) if self.recomputes else self.body(h))


class Doubled(torch.autograd.Function):
    """In the old form, which has no rule for vmap."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        return slope @ weight.mT, x.mT @ slope


class ByFunction(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own, self.weight, self.head = own, nn.Parameter(torch.randn(3, 8)), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head((Doubled.apply(x, self.weight) if self.own else x @ self.weight).tanh())


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths, which it packs."""

    def __init__(self, packs):
        super().__init__()
        self.packs, self.rnn, self.head = packs, nn.GRU(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        lengths = (x[:, :, 0] < torch.inf).sum(1).cpu()
        sequences = pack_padded_sequence(x, lengths, batch_first=True) if self.packs else x
        return self.head(self.rnn(sequences)[1][0])


def special_and_plain(network_class):
    """The same network twice: as users write it, and plainly."""
    networks = []
    for special in (True, False):
        torch.manual_seed(0)
        networks.append(network_class(special).double())
    return networks


@pytest.mark.parametrize("name", sorted({*ALL} - {"vrmcl"}))
def test_a_network_that_recomputes_its_activations_learns_as_one_that_does_not(name):
    learners = [make_learner(name, model, average=0.9) for model in special_and_plain(Recomputed)]
    for learner in learners:
        learn_tasks(learner, tasks(3, dtype=torch.float64))
    ours, theirs = (learner.scores(tasks(3)[0][0][0].double()) for learner in learners)
    assert torch.allclose(ours, theirs, rtol=1e-10)


def test_a_method_that_would_recompute_activations_with_other_weights_refuses():
    learner = make_learner("vrmcl", Recomputed(True))
    batches = tasks(3)[0]
    learner.start_task(batches)
    with pytest.raises(InputError, match=r"model: got one that computes activations again .*; turn off checkpointing"):
        learner.observe(*batches[0], task=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("network_class", "shape"), [(ByFunction, (3,)), (Packed, (4, 3)), (Recomputed, (3,))])
def test_ewc_measures_what_vmap_cannot(network_class, shape):
    data = tasks(*shape, dtype=torch.float64)
    learners = [make_learner("ewc", model) for model in special_and_plain(network_class)]
    for learner in learners:
        learn_tasks(learner, data)
    ours, theirs = (learner.importance for learner in learners)
    assert bool((theirs > 0).any())
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["er", "clser", "obc"])
def test_data_parallel_with_other_weights_is_refused_by_name(name):
    learner = make_learner(name, nn.DataParallel(nn.Linear(3, CLASSES)), average=0.9 if name == "er" else None)
    with pytest.raises(InputError, match=r"model: got .*DataParallel.*; pass model\.module"):
        learn_tasks(learner, tasks(3))


class Keeping(nn.Module):
    """It keeps what it computed, to look at."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.activations = nn.Linear(3, 8), nn.Linear(8, CLASSES), []

    def forward(self, x):
        self.activations = [self.first(x).relu()]
        return self.head(self.activations[0])


def pruned_network():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


@pytest.mark.parametrize("make_network", [Keeping, pruned_network])
@pytest.mark.parametrize("name", ALL)
def test_a_network_that_keeps_what_it_computed_is_copied_and_loaded(name, make_network, tmp_path):
    learner, data = make_learner(name, make_network(), average=0.9), tasks(3)
    task = 1 if learner.needs_tasks else None
    learn_tasks(learner, data)
    learner.observe(*data[1][0], task)
    copies = [copy.deepcopy(learner), Learner.load(learner.save(tmp_path / "it.safetensors"), model=make_network())]
    assert torch.equal(learner.predictor()(data[0][0][0]), learner.scores(data[0][0][0]))
    for any_learner in (learner, *copies):
        any_learner.observe(*data[1][1], task)
    for copied in copies:
        assert same_state(learner.state_dict(), copied.state_dict())


def test_an_estimator_of_a_network_that_keeps_what_it_computed_is_copied():
    model, data = Keeping(), tasks(3)[0]
    model(data[0][0])
    learner = ParabolicClassifier("er", model=model, random_state=0).partial_fit(data[0][0], data[0][1])
    copies = [copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))]
    for any_estimator in (learner, *copies):
        any_estimator.partial_fit(*data[1])
    for copied in copies:
        assert same_state(learner.learner_.state_dict(), copied.learner_.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused():
    """A copy of a learner would train other weights than those of its model."""
    scripted = torch.jit.script(nn.Linear(3, CLASSES))
    for model, name in ((scripted, ""), (nn.Sequential(scripted, nn.Linear(CLASSES, CLASSES)), r" \(0\)")):
        with pytest.raises(
            InputError, match=rf"model: got TorchScript{name}, .*; pass the network that it was made of"
        ):
            ER(model)


class Other(nn.Module):
    """The layer that gives the scores is not defined last."""

    def __init__(self, width):
        super().__init__()
        self.head, self.body = nn.Linear(width, CLASSES), nn.Linear(3, width)

    def forward(self, x):
        return self.head(self.body(x).relu())


class Scaled(Warm):
    def forward(self, x):
        return self.head(x) * self.scale


class Adapted(nn.Module):
    """A frozen layer and what adapts it."""

    def __init__(self):
        super().__init__()
        self.more, self.base = nn.Parameter(torch.ones(3, CLASSES)), nn.Linear(3, CLASSES).requires_grad_(False)

    def forward(self, x):
        return self.base(x) + x @ self.more


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Other(8), "scores that are not the output of its last linear layer"),
        (lambda: Other(CLASSES), "scores that are not the output of its last linear layer"),
        (Scaled, "scores that are not the output of its last linear layer"),
        (Adapted, "a frozen last linear layer"),
    ],
)
@pytest.mark.parametrize("name", ["lwf", "obc"])
def test_methods_that_train_the_last_layer_alone_refuse_another(name, model, message):
    learner, batches = make_learner(name, model()), tasks(3)[0]
    with pytest.raises(InputError, match=f"model: got .*{message}"):
        learn_tasks(learner, [batches])
    assert learner.steps == 0


@pytest.mark.parametrize("name", ["lwf", "obc"])
def test_scores_may_be_made_probabilities(name):
    learner = make_learner(name, nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES), nn.LogSoftmax(-1)))
    learn_tasks(learner, tasks(3))
    assert learner.steps == 6


@pytest.mark.parametrize("name", ["lwf", "obc"])
def test_features_of_a_compiled_network_are_found(name):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    models = [plain, torch.compile(copy.deepcopy(plain), backend="eager")]
    models[1](torch.zeros(8, 3))  # compiled before anything looks into it
    with torch.no_grad():
        models[1].eval()(torch.zeros(1, 3))
        models[1].train()(torch.zeros(8, 3))
    learners = [make_learner(name, model) for model in models]
    for learner in learners:
        learn_tasks(learner, tasks(3))
    ours, theirs = (learner.scores(tasks(3)[0][0][0]) for learner in learners)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), [("er", {"clip_norm": 1.0}), ("agem", {}), ("vrmcl", {})])
def test_sparse_gradients_are_refused_where_they_cannot_be_used(name, options):
    model = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Flatten(), nn.Linear(6, CLASSES))
    learner, x, y = make_learner(name, model, **options), torch.arange(16).view(8, 2), torch.arange(8) % CLASSES
    learner.start_task([(x, y)])
    with pytest.raises(InputError, match=r"model: got an embedding with sparse gradients \(0\), .*; set sparse=False"):
        learner.observe(x, y, 0 if learner.needs_tasks else None)
