"""Pictures of bridges: they are those that PCL draws."""

from dataclasses import replace

import pytest
import torch
from fontTools.ttLib import TTFont
from matplotlib.axes import Axes
from matplotlib.font_manager import fontManager

from parabolic import PCL, Stream, make_stream
from parabolic.pde import bridge, on_simplex
from parabolic.report.sheets import bridges_of, draw_sheet


def shares(label):
    """The classes of a label, with the share of each in percent."""
    return {name: int(share.rstrip("%")) for name, share in (line.split() for line in label.splitlines())}


def test_labels_of_the_reference_move_by_one_number_for_all_classes():
    strip = bridges_of(make_stream("seq-digits"), {"sigma_y": 0.5, "variant": "reference"}, seed=3)
    generator, x = torch.Generator().manual_seed(3), torch.zeros(1, 64)
    bridge(x, x, 0.03, 5, 2, variant="reference", generator=generator)  # the examples' draws come first
    ends = torch.eye(10)[[int(end) for end in strip.ends]]
    drawn = bridge(ends[:1], ends[1:], 0.5, 5, 2, variant="reference", common=True, generator=generator)
    for labels, points in zip(strip.labels, on_simplex(drawn)[0], strict=True):
        for label, point in zip(labels, points, strict=True):
            expected = {str(index): float(point[index]) * 100 for index in point.topk(2).indices.tolist()}
            assert shares(label) == pytest.approx(
                {name: share for name, share in expected.items() if share >= 0.5}, abs=1
            )


def test_labels_that_are_not_folded_are_shown_as_they_are():
    stream, options = make_stream("seq-digits"), {"sigma_y": 3.0}
    totals = {
        simplex: [
            sum(shares(label).values())
            for labels in bridges_of(stream, {**options, "simplex": simplex}).labels
            for label in labels
        ]
        for simplex in (True, False)
    }
    assert max(totals[True]) <= 101  # two of ten shares, rounded, of a whole
    assert max(totals[False]) > 200


def test_bytes_are_what_the_learner_makes_of_them():
    x = torch.randint(256, (40, 1, 4, 4), dtype=torch.uint8)
    stream = Stream.from_arrays(x, torch.arange(40) % 4, tasks=2)
    strip = bridges_of(stream, {"sigma_x": 0.0, "times": 2})
    inputs = PCL(torch.nn.Linear(16, 4)).inputs(next(iter(stream[0].batches(32)))[0])
    assert torch.equal(strip.paths[0, 0], inputs[0])


def test_points_have_the_labels_that_the_learner_is_given_and_lie_where_the_bridges_do(tmp_path, monkeypatch):
    """Also if labels are permuted within a batch, and if the stream prepares its points for the model."""
    drawn, ends = {}, set()
    stream = replace(make_stream("seq-blobs", corruption="shuffle"), prepare=lambda x: x / 100)

    def scatter(self, x, y, *, label, **_):
        drawn.update(dict.fromkeys(zip(x.tolist(), y.tolist(), strict=True), int(label)))

    def plot(self, x, y, **_):
        ends.update([(x[0].item(), y[0].item()), (x[-1].item(), y[-1].item())])

    monkeypatch.setattr(Axes, "scatter", scatter)
    monkeypatch.setattr(Axes, "plot", plot)
    monkeypatch.setattr(Axes, "legend", lambda self, **_: None)
    draw_sheet(stream, tmp_path / "a.png", {}, batch=10)
    batches = [batch for task in stream for batch in task.batches(10)]
    given = {tuple((point / 100).tolist()): int(label) for x, y in batches for point, label in zip(x, y, strict=True)}
    assert drawn == given
    assert ends <= given.keys()


@pytest.mark.parametrize("shape", [(1, 4, 4), (2,)])
def test_names_of_classes_are_shown_as_they_are(tmp_path, shape):
    """Dollar signs do not make a formula of them, which may not be one."""
    stream = Stream.from_arrays(
        torch.rand(40, *shape), torch.arange(40) % 4, tasks=2, class_names=["$5", "$\\frac{$", "$5 to $10", "four"]
    )
    assert draw_sheet(stream, tmp_path / "a.png", {}).exists()


def animals():
    """A stream with Chinese names of classes."""
    return Stream.from_arrays(torch.rand(40, 1, 4, 4), torch.arange(40) % 2, tasks=1, class_names=["大猫", "小猫"])


def test_characters_that_no_font_has_are_told_of_once(tmp_path, monkeypatch):
    own = [entry for entry in fontManager.ttflist if entry.name.startswith("DejaVu")]  # matplotlib's
    monkeypatch.setattr(fontManager, "ttflist", own)
    with pytest.warns(UserWarning, match="boxes in place of 3 characters") as told:
        draw_sheet(animals(), tmp_path / "a.png", {})
    assert len(told) == 1


def test_a_font_with_east_asian_characters_is_used_if_there_is_one(tmp_path, monkeypatch):
    ttfs = [entry for entry in fontManager.ttflist if entry.name == "DejaVu Sans" and entry.style == "normal"]
    font = TTFont(ttfs[0].fname)
    for table in font["cmap"].tables:
        if table.isUnicode():
            table.cmap |= {ord(character): "A" for character in "大小猫"}
    for record in font["name"].names:
        if record.nameID in (1, 16):
            record.string = "WenQuanYi Zen Hei"
    font.save(tmp_path / "own.ttf")
    monkeypatch.setattr(fontManager, "ttflist", [*fontManager.ttflist])
    fontManager.addfont(tmp_path / "own.ttf")
    draw_sheet(animals(), tmp_path / "a.png", {})  # a warning would be an error
