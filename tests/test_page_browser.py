"""The report in a real browser: all of it is drawn, nothing leaves the page, and what a person does works."""

import threading
from pathlib import Path

import pytest
from browser import Browser, chromium
from made_up import (
    AROUND,
    EVIL,
    record,
    record_with_heads,
    rename_in_file,
    save_few_runs,
    save_many_runs,
    save_run_with_bounds,
)

from parabolic import RunSpec, Store
from parabolic.report.page import write_page

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium, and none is installed")

SECTIONS = ["overview", "bounds", "paper", "damaged", "runs"]


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A page of few runs with everything on it: bounds, points in the plane, a failed run, a damaged one, bad names."""
    folder = tmp_path_factory.mktemp("small")
    store = Store(folder / "runs")
    save_few_runs(store)
    save_run_with_bounds(store, RunSpec("pcl"))
    store.save(record_with_heads(RunSpec("ewc"), 20, 80))
    store.save_failure(RunSpec("gem"), "the loss became nan")
    store.save(record(RunSpec("pcl", "seq-blobs"), 90, tasks=3))
    spec = RunSpec("er", memory=77)
    store.save(record(spec))
    rename_in_file(store, spec.key, learner=f"x.py:{EVIL}", stream=EVIL)
    (store.root / "damaged").mkdir()
    (store.root / "damaged" / "run.json").write_text("{")
    return write_page(store, folder / "page.html", title=f"A page {EVIL}")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    save_many_runs(Store(folder / "runs"))
    return write_page(Store(folder / "runs"), folder / "page.html")


# Texts of a chart that fall on one another, and those that its edge cuts off.
CROWDED = """[...document.querySelectorAll('.chart')].filter(each => each.offsetParent).flatMap(chart => {
  const edge = chart.getBoundingClientRect();
  const parts = ['.xtitle', '.ytitle', '.legend', '.xaxislayer-above', '.yaxislayer-above', '.infolayer .cbtitle'];
  const boxes = parts.flatMap(part =>
    [...chart.querySelectorAll(part)].map(each => [part, each.getBoundingClientRect()]))
    .filter(([, box]) => box.width && box.height);
  const told = [];
  boxes.forEach(([name, one], place) => {
    const out = [edge.left - one.left, one.right - edge.right, edge.top - one.top, one.bottom - edge.bottom];
    if (Math.max(...out) > 1) told.push(`${chart.ariaLabel}: ${name} is cut`);
    boxes.slice(place + 1).forEach(([other, two]) => {
      const across = Math.min(one.right, two.right) - Math.max(one.left, two.left);
      const down = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
      if (across > 2 && down > 2) told.push(`${chart.ariaLabel}: ${name} lies on ${other}`);
    });
  });
  const bar = chart.querySelector('.legend .scrollbar');
  if (bar?.getBoundingClientRect().height) told.push(`${chart.ariaLabel}: the legend scrolls`);
  return told;
})"""


@pytest.mark.parametrize("page", ["small", "large"])
@pytest.mark.parametrize("width", [1440, 390])
def test_all_is_drawn_within_its_bounds_and_asks_for_nothing(browser, request, page, width):
    path = request.getfixturevalue(page)
    browser.open(path, width)
    sections = browser.do("[...document.querySelectorAll('section:not(.scene)')].map(each => each.id)")
    assert sections == SECTIONS
    scenes = browser.do("[...document.querySelectorAll('.scene')].map(each => each.id)")
    assert len(scenes) == {"small": 5, "large": 8}[page]  # bounds are measured in a run of its own
    for scene in scenes if page == "small" else (browser.do("chooser.value"), scenes[0]):
        browser.do(f"choose('{scene}')")
        browser.draw_all()
        shown = browser.do(
            "[...document.querySelectorAll('.scene')].filter(each => each.offsetParent).map(each => each.id)"
        )
        assert shown == [scene]
        assert browser.do(f"document.querySelectorAll('#{scene} .chart.drawn').length") >= 4
        assert browser.do("document.documentElement.scrollWidth") == width
        assert browser.do(CROWDED) == []
    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]


def test_the_page_of_five_hundred_runs_is_under_eight_megabytes(browser, large):
    assert large.stat().st_size < 8e6
    browser.open(large)
    assert browser.do("document.querySelectorAll('#all tbody tr').length") == 500


def test_names_of_the_user_run_nothing(browser, small):
    browser.open(small)
    browser.draw_all()
    assert browser.do("document.querySelector('h1').textContent") == f"A page {EVIL}"
    assert EVIL in browser.do("document.querySelector('#chooser').textContent")
    assert browser.do("document.scripts.length") == 3
    assert not [event for event in browser.events if event.get("method") == "Page.javascriptDialogOpening"]
    # Even one that found its way in would not run.
    browser.do("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    browser.do("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert browser.do("window.ran") is None


def column_texts(browser, column):
    return browser.do(f"[...document.querySelectorAll('#all tbody tr')].map(row => row.cells[{column}].textContent)")


def test_tables_are_sorted_by_mouse_and_by_keyboard(browser, large):
    browser.open(large)
    head = "document.querySelectorAll('#all thead th')[6]"
    browser.do(f"{head}.querySelector('button').click()")
    figures_shown = column_texts(browser, 6)
    figures = [float(figure) for figure in figures_shown if figure != "–"]
    assert figures == sorted(figures, reverse=True)
    assert len(set(figures)) > 50
    assert figures_shown[-13:] == ["–"] * 13  # what failed has no figure and comes last, either way
    assert browser.do(f"{head}.getAttribute('aria-sort')") == "descending"
    browser.do(f"{head}.querySelector('button').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )
    figures_shown = column_texts(browser, 6)
    assert [float(figure) for figure in figures_shown[:-13]] == sorted(figures)
    assert figures_shown[-13:] == ["–"] * 13
    browser.do("document.querySelectorAll('#all thead th')[1].querySelector('button').click()")
    names = column_texts(browser, 1)
    assert names == sorted(names)
    assert names[0] == "agem"
    browser.do("document.querySelectorAll('#all thead th')[0].querySelector('button').click()")
    keys = column_texts(browser, 0)
    assert keys == sorted(keys)


def test_the_list_of_runs_can_be_searched(browser, large):
    browser.open(large)
    browser.do("filter.value = 'the loss became nan'; filter.dispatchEvent(new Event('input'))")
    assert browser.do("[...document.querySelectorAll('#all tbody tr')].filter(row => row.offsetParent).length") == 13
    assert browser.do("document.querySelector('#count').textContent") == "13 of 500"


def test_light_and_dark_follow_the_system_and_the_switch(browser, small):
    def background_and_ink():
        ground = browser.do("getComputedStyle(document.body).backgroundColor")
        ink = browser.do("document.querySelector('.chart .xtitle').style.fill")
        return sum(map(int, ground[4:-1].split(","))), ink

    browser.open(small, scheme="dark")
    browser.draw_all()
    dark = background_and_ink()
    browser.open(small, scheme="light")
    browser.draw_all()
    light = background_and_ink()
    assert dark[0] < 150 < 600 < light[0]
    assert dark[1] != light[1]
    browser.do("document.querySelector('#theme').click()")
    assert background_and_ink() == dark
    browser.open(small, scheme="light")  # the choice is remembered
    browser.draw_all()
    assert background_and_ink() == dark
    browser.do("document.querySelector('#theme').click()")
    assert background_and_ink() == light


def test_where_a_number_comes_from_is_one_click_away(browser, small):
    browser.open(small)
    browser.do("choose('scene-3')")
    browser.draw_all()
    browser.do("document.querySelector('#scene-3 td .figure').click()")
    assert browser.do("dialog.open")
    text = browser.do("dialog.innerText")
    for word in (AROUND["command"], "A Processor", "2.13.0", "options.lr", "runs/", "Acc, %\tAAA, %"):
        assert word in text
    assert browser.do("document.querySelectorAll('#origin-body table')[0].rows.length") == 1 + 3
    browser.do("dialog.close()")
    # The points of the charts lead there too.
    browser.do(
        "chart = document.querySelector('#scene-3 .chart'); "
        "chart.emit('plotly_click', {points: [{data: chart.data[1], pointNumber: 0}]})"
    )
    assert browser.do("dialog.open")
    assert browser.do("document.querySelectorAll('#origin-body table')[0].rows.length") == 1 + 3
    browser.do("dialog.close(); choose('scene-4'); document.querySelector('#scene-4 td .figure').click()")
    assert "Acc, the task told, %\tAAA, the task told, %" in browser.do("dialog.innerText")
    browser.do("dialog.close(); document.querySelector('#all .bad .figure').click()")
    assert "the loss became nan" in browser.do("dialog.innerText")


def test_a_page_that_is_watched_shows_what_comes_in_where_the_reader_is(browser, tmp_path):
    store, path = Store(tmp_path / "runs"), tmp_path / "page.html"
    save_few_runs(store)
    store.save(record(RunSpec("er", "seq-blobs"), 90, tasks=3))
    write_page(store, path, refresh=0.5)
    browser.open(path)
    browser.until("document.querySelector('header').textContent.includes('10 finished runs')")
    browser.until("(choose('scene-1'), scrollTo(0, 700), true)")
    threading.Timer(0.2, lambda: (store.save(record(RunSpec("si"), 30)), write_page(store, path, refresh=0.5))).start()
    browser.until("document.querySelector('header').textContent.includes('11 finished runs')")
    browser.until("scrollY === 700")
    browser.until("document.querySelector('#scene-1').hidden === false")
    browser.until("document.querySelector('#scene-2').hidden === true")
    assert browser.complaints == []
    # Someone reads: it is left alone. (It may have been about to load again, and the reader opens it once more.)
    wait = "new Promise(done => setTimeout(done, {}, true))"
    browser.until(f"(showOrigin([Object.keys(data.runs)[0]]), window.mark = 1, {wait.format(700)})")
    Path(path).unlink()
    browser.until(wait.format(1200))
    assert browser.do("window.mark") == 1
