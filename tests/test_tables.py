"""Tables of results: marks, verdicts and gaps, and the same table in every format."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import made_up
import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from parabolic import InputError, RunSpec, Store
from parabolic.experiments import Record
from parabolic.experiments.paper import NAMES, Selection, paper_tables
from parabolic.report import Cell, Column, Results, comparison, in_words, render, terminal
from parabolic.report.comparisons import FIGURES
from parabolic.report.formats import lines
from parabolic.report.paper import paper_results
from parabolic.report.tables import marks
from parabolic.statistics import Summary

RESULTS = [name for name in NAMES if name not in ("bounds", "runtime")]
# In the two tables of ablations the paper does not mark the best cells, but for two that it marks and that are not.
UNMARKED = {
    "ablation": {
        ("Min Loss", 0), ("Min Loss", 1), ("BB Tempering", 2), ("Max Loss", 3), ("Min Loss", 4), ("BB Tempering", 5),
    },
    "ablation_buffers": {
        ("Max Loss", 0), ("BB Tempering", 1), ("BB Tempering", 2), ("BB Tempering", 3), ("BB Tempering", 4),
        ("Max Loss", 5),
    },
}  # fmt: skip
MARKED_WRONGLY = {"ablation_buffers": {("PCL", 3), ("PCL", 5)}}


def printed(name):
    """The paper's marks, by row and column."""
    return {
        (row, column): figure.mark
        for row, figures in paper_tables()[name].rows.items()
        for column, figure in enumerate(figures)
        if figure.mark
    }


def expected(name):
    """The marks that are right: the paper's, where it is consistent."""
    best = dict.fromkeys(UNMARKED.get(name, ()), "best")
    wrong = MARKED_WRONGLY.get(name, set())
    assert {place: printed(name)[place] for place in wrong} == dict.fromkeys(wrong, "best")
    return {place: mark for place, mark in printed(name).items() if place not in wrong} | best


@pytest.mark.parametrize("name", RESULTS)
def test_the_papers_figures_give_the_papers_marks(name):
    [published] = paper_results(Selection((name,)), {})
    table = paper_tables()[name]
    of_published = {
        (row, column): judged.published_mark
        for row, cells in zip(published.rows, published.judged, strict=True)
        for column, judged in enumerate(cells)
        if judged.published_mark
    }
    assert of_published == expected(name)
    # Were these figures ours, ours would be marked so.
    as_ours = {row: [Cell({0: figure.value.mean}) for figure in figures] for row, figures in table.rows.items()}
    ours = Results(name, name, published.columns, as_ours, underlines=table.underlines)
    of_ours = {
        (row, column): judged.mark
        for row, cells in zip(table.rows, ours.judged, strict=True)
        for column, judged in enumerate(cells)
        if judged.mark
    }
    assert of_ours == expected(name)


@pytest.mark.parametrize("name", RESULTS)
def test_the_latex_of_the_papers_figures_has_the_papers_marks(name):
    text = render(paper_results(Selection((name,)), {}), "latex")
    table, marks_found = paper_tables()[name], {}
    of_paper = [line for line in text.splitlines() if line.startswith(r"\quad paper")]
    for (row, figures), line in zip(table.rows.items(), of_paper, strict=True):
        cells = line.removesuffix(r" \\").split(" & ")[1:]
        for column, (figure, cell) in enumerate(zip(figures, cells, strict=False)):
            parts = re.fullmatch(r"(\\textbf|\\underline)?{?([\d.]+)}? \$_{\\pm ([\d.]+)}\$", cell)
            assert (float(parts[2]), float(parts[3])) == (figure.value.mean, figure.value.sd)
            if parts[1]:
                marks_found[row, column] = {r"\textbf": "best", r"\underline": "second"}[parts[1]]
    assert marks_found == expected(name)


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in UNMARKED])
def test_every_column_of_the_paper_has_one_best_and_one_second(name):
    assert sorted((column, mark) for (_, column), mark in printed(name).items()) == [
        (column, mark) for column in range(6) for mark in ("best", "second")
    ]


def test_what_looks_equal_shares_a_mark():
    assert marks([3.0, 1.0, 3.0, 2.0]) == ["best", "", "best", "second"]
    assert marks([3.0, 1.0, 2.0], "lower") == ["", "best", "second"]
    assert marks([3.0, 1.0, 2.0], second=False) == ["best", "", ""]
    assert marks([math.nan, 1.0, 2.0]) == ["", "second", "best"]
    assert marks([1.0, 1.0]) == ["", ""]  # nothing is better than anything
    assert marks([3.0, 1.0], "neither") == ["", ""]
    close = Results("t", "t", [Column("Acc", digits=1)], {"a": [Cell({0: 50.04})], "b": [Cell({0: 49.96})]})
    assert [row[0].mark for row in close.judged] == ["", ""]  # 50.0 and 50.0


def table(**changes):
    """Three rows of a column that has all there is to a table."""
    rows = {
        "A & B": [Cell({0: 60.0, 1: 62.0, 2: 61.0}, 3, Summary(50.0, 1.0, 5)), Cell({0: 1.0, 1: 2.0, 2: 3.0}, 3)],
        "50%_{x}": [Cell({0: 59.0, 1: 63.0, 2: 60.5}, 3, Summary(61.0, 1.0, 5)), Cell({0: 9.0, 1: 9.5, 2: 9.2}, 3)],
        "gone": [Cell({2: 40.0}, 3, Summary(45.0, 2.0, 5)), Cell({}, 3, Summary(7.0, 1.0, 5))],
    }
    columns = [Column("Acc", "γ = 2", digits=2), Column("seconds", "γ = 2", "lower")]
    return Results("t", "A title with 100 %", columns, rows, ["A note."], "method", **{"ranked": True, **changes})


def test_rows_that_are_all_alike_lack_the_dagger_more_often_than_one_in_twenty():
    """The best is chosen first, and the others are tested against it: docs/experiments.md has the figure."""
    rng, lacking = np.random.default_rng(0), []
    for _ in range(400):
        rows = {
            str(row): [Cell(dict(enumerate(seeds)))] for row, seeds in enumerate(rng.normal(50, 2, (15, 5)).tolist())
        }
        judged = [row[0] for row in Results("t", "t", [Column("Acc", digits=9)], rows).judged]
        lacking += [not judged_cell.level for judged_cell in judged if judged_cell.mark != "best"]
    assert np.mean(lacking) == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("scale", [1, 1e-3], ids=["as 0.026", "as 2.6e-05"])
def test_small_figures_that_look_different_do_not_share_a_mark(scale):
    rows = {name: [Cell({0: mean * scale})] for name, mean in {"a": 0.041, "b": 0.026, "c": 0.0262, "d": 5e3}.items()}
    results = Results("x", "x", [Column("forgetting", better="lower")], rows, ranked=True)
    means = [line.entries[0].mean for line in lines(results)]
    assert means[1] == means[2]
    assert len(set(means)) == 3
    assert [row[0].mark for row in results.judged] == ["second", "best", "best", ""]
    assert results.ranks() == [3.0, 1.5, 1.5, 4.0]


def test_a_cell_is_judged_against_its_column_and_against_the_paper():
    best, close, gone = table().judged
    assert [cell.mark for cell in (best[0], close[0], gone[0])] == ["best", "second", ""]
    assert [cell.mark for cell in (best[1], close[1], gone[1])] == ["best", "second", ""]  # lower is better
    assert [cell.published_mark for cell in (best[0], close[0], gone[0])] == ["second", "best", ""]
    # By seed: 1 below, 1 above, half a point below; the seconds, in turn, are clearly more.
    assert (close[0].level, close[1].level, best[0].level) == (True, False, False)
    assert [cell.verdict for cell in (best[0], close[0], gone[0])] == ["higher", "no difference", "unknown"]
    assert table().verdicts() == {"higher": 1, "lower": 0, "no difference": 1, "unknown": 2}
    assert table(incomparable="of other data").verdicts()["unknown"] == 4


@pytest.mark.parametrize("format", ["terminal", "markdown", "latex", "json"])
def test_two_seeds_do_not_show_that_a_gap_is_none(format):
    """With one degree of freedom a gap of 36 points may be chance: that is no reason to say that there is none."""
    best, other = {0: 96.2, 1: 97.0, 2: 96.5}, {0: 56.5, 1: 63.5, 2: 98.0}
    assert stats.ttest_rel([56.5, 63.5], [96.2, 97.0]).pvalue > 0.05
    for seeds, level in ((2, False), (3, True)):
        rows = {
            name: [Cell({seed: figures[seed] for seed in range(seeds)}, 3)]
            for name, figures in (("a", best), ("b", other))
        }
        results = Results("t", "t", [Column("Acc")], rows)
        assert [row[0].level for row in results.judged] == [False, level]
        text = render([results], format)
        if format == "json":
            assert [row["cells"][0]["level"] for row in json.loads(text)[0]["rows"]] == [False, level]
        else:
            assert (("†" in text) or ("dagger" in text)) is level
            assert ("not shown to differ from the best of its column" in " ".join(text.split())) is level


def test_ranks_are_over_the_columns_and_there_are_none_while_one_figure_is_missing():
    """Else a row may be the first of those that are whole, and behind another in every column that both have."""
    complete = replace(table(), rows={name: cells for name, cells in table().rows.items() if name != "gone"})
    assert complete.ranks() == [1.0, 2.0]
    assert "rank: the mean rank over the columns." in render([complete])
    assert all(map(math.isnan, table().ranks()))
    assert "rank: the mean rank over the columns; ours have none while a figure is missing." in render([table()])
    assert not any(line.ranks for line in lines(table(ranked=False)))


def test_published_ranks_are_among_the_rows_that_were_published():
    [main] = paper_results(Selection(("main",), ("pcl", "er")), {})
    assert list(main.rows) == ["ER", "PCL", "PCL (text)"]
    assert main.ranks("published")[:2] == [2.0, 1.0]
    assert math.isnan(main.ranks("published")[2])
    assert all(map(math.isnan, table().ranks("published")))  # one of three rows is whole


def test_shares_of_one_time_are_no_sample():
    """Five runs side by side have the same seconds: that is no sign that a sixth would."""
    published, others = Summary(165.0, 2.6, 5), {seed: 9.0 + seed for seed in range(5)}
    fleet = Cell(dict.fromkeys(range(5), 7.9), 5, published, shared=True)
    rows = {"pcl": [fleet], "er": [Cell(others, 5)], "sgd": [replace(fleet, by_seed=dict.fromkeys(range(5), 9.5))]}
    results = Results("t", "t", [Column("seconds", better="lower")], rows)
    text = render([results], "markdown")
    assert "| pcl | **7.9** |" in text
    assert "▲ 0 higher, ▼ 0 lower, = 0 no difference, 2 unknown." in text
    assert "Runs side by side share their time: their seconds have no deviation and no verdict." in text
    assert [row[0].behind for row in results.judged] == [None] * 3
    assert "side by side" not in render([replace(results, rows={"er": rows["er"]})])


def test_a_gap_stays_a_gap():
    """Nothing is filled in from the paper, and what is there of an incomplete cell says how much it is."""
    ours = [line for line in lines(table()) if not line.published][2]
    assert [(entry.mean, entry.signs) for entry in ours.entries] == [("40.00", "(n=1)"), ("–", "(n=0)")]
    assert ours.ranks == ["–"]
    for format in ("terminal", "markdown", "latex"):
        assert "if some are missing" in render([table()], format)
    cells = json.loads(render([table()], "json"))[0]["rows"][2]["cells"]
    assert (cells[0]["ours"]["n"], cells[0]["ours"]["sd"], cells[1]["ours"]) == (1, None, None)


def test_the_spread_is_a_deviation_or_an_interval():
    [deviation, *_], [interval, *_] = (list(lines(table(), intervals=intervals)) for intervals in (False, True))
    assert deviation.entries[0].spread == "1.0"
    assert float(interval.entries[0].spread) == pytest.approx(stats.t.ppf(0.975, 2) / math.sqrt(3), abs=0.05)
    assert "95 % interval" in render([table()], "markdown", intervals=True)


def test_markdown_is_a_table():
    text = render([table()], "markdown")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {5}
    assert rows[0] == "| method | γ = 2 Acc | γ = 2 seconds | rank |"
    assert rows[2] == "| A & B | **61.00** ± 1.0 ▲ | **2.0** ± 1.0 | – |"
    assert rows[3] == "| paper | <ins>50.00</ins> ± 1.0 | – | – |"
    assert rows[4] == "| 50%_{x} | <ins>60.83</ins> ± 2.0 †= | <ins>9.2</ins> ± 0.3 | – |"
    assert "▲ 1 higher, ▼ 0 lower, = 1 no difference, 2 unknown." in text
    assert text.rstrip().endswith("A note.")


def test_latex_can_be_set():
    text = render([table()], "latex")
    body = re.search(r"\\toprule\n(.*)\\bottomrule", text, re.DOTALL)[1]
    for line in body.replace("\\midrule\n", "").splitlines():
        spanned = sum(int(count) - 1 for count in re.findall(r"\\multicolumn{(\d+)}", line))
        assert len(re.findall(r"(?<!\\)&", line)) + spanned == 3, line
        assert line.endswith(r" \\")
    bare = re.sub(r"\\[\\{}%&_#$]", "", text)  # without what is escaped
    depth = 0
    for letter in bare:
        depth += (letter == "{") - (letter == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    assert r"A \& B" in text
    assert r"50\%\_\{x\}" in text
    assert "A title with 100 \\%." in text
    assert "paper main -{}-no-records." in render([replace(table(), notes=["paper main --no-records."])], "latex")
    assert [letter for letter in bare if ord(letter) > 127] == []
    outside = re.sub(r"\$.*?\$", "", bare)
    assert "_" not in outside
    assert "%" not in outside.replace(r"% \usepackage{booktabs}", "")


def test_the_terminal_shows_all_figures_whatever_its_width():
    text = render([table()], "terminal")
    for figure in ("61.00 ± 1.0 ▲", "60.83 ± 2.0 †=", "40.00 (n=1)", "– (n=0)", "50.00 ± 1.0", "50%_{x}", "A note."):
        assert figure in text
    styled = Results("t", "[bold]t", [Column("[red]c")], {"[i]r": [Cell({0: 1.0})]}, ["[b]n"])
    assert all(text_shown in render([styled]) for text_shown in ("[bold]t", "[red]c", "[i]r", "[b]n"))


def test_a_table_as_text_has_no_codes_for_a_terminal(monkeypatch):
    """It may be written to a file."""
    plain = render([table()])
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert render([table()]) == plain
    assert "\x1b" not in plain


def test_a_narrow_terminal_shows_all_headings_and_figures():
    """Otherwise Seq-CIFAR10 and Seq-CIFAR100 would look alike."""
    columns = [Column("Acc", f"Seq-CIFAR{number}") for number in (10, 100)]
    results = Results("t", "A title", columns, {"a_method_with_a_long_name": [Cell({0: 12.5}), Cell({0: 3.5})]})
    console = Console(width=30)
    with console.capture() as capture:
        console.print(terminal(results))
    cells = zip(*(re.split("[│┃]", line)[1:-1] for line in capture.get().splitlines() if line[0] in "│┃"), strict=True)
    contents = ["".join(map(str.strip, cell)) for cell in cells]
    assert contents == ["a_method_with_a_long_name", "Seq-CIFAR10Acc12.5", "Seq-CIFAR100Acc3.5"]


def test_json_says_all_and_is_json():
    [result] = json.loads(render([table()], "json"), parse_constant=pytest.fail)
    first, second, gone = (row["cells"][0] for row in result["rows"])
    assert [row["name"] for row in result["rows"]] == ["A & B", "50%_{x}", "gone"]
    assert first["by_seed"] == {"0": 60.0, "1": 62.0, "2": 61.0}
    assert first["ours"]["interval"] == pytest.approx(stats.t.interval(0.95, 2, 61, 1 / math.sqrt(3)))
    assert (first["mark"], first["behind"], first["verdict"], gone["wanted"]) == ("best", None, "higher", 3)
    assert second["behind"]["p"] == pytest.approx(stats.ttest_rel([59, 63, 60.5], [60, 62, 61]).pvalue)
    expected = stats.ttest_ind_from_stats(61, 1, 3, 50, 1, 5, equal_var=False)
    assert first["difference"]["p"] == pytest.approx(expected.pvalue)
    assert [row["rank"] for row in result["rows"]] == [None] * 3
    with pytest.raises(InputError, match="format: got 'html', expected one of json, latex, markdown, terminal"):
        render([], "html")


def record(seed, acc, forgetting=1.0, seconds=2.0):
    metrics = {"acc": acc, "aaa": acc, "forgetting": forgetting, "backward_transfer": 0.0}
    return Record(str(seed), {"seed": seed}, metrics, [[acc] * task for task in range(1, 6)], [seconds], [0.1], 1, {})


def test_a_comparison_in_a_table_and_in_words():
    runs = {
        "pcl": [record(seed, 80 + seed, forgetting=8) for seed in range(3)],
        "er": [record(seed, 84 + seed * 1.5, forgetting=4) for seed in range(3)],
        "sgd": [record(0, 20.0, forgetting=90, seconds=1.0)],
    }
    results = comparison(runs, title="t", seeds=3, notes=["a note"])
    assert [[judged.mark for judged in row[::3]] for row in results.judged] == [
        ["second", "second"], ["best", "second"], ["", "best"]
    ]  # fmt: skip
    assert "20.0 (n=1)" in render([results])
    difference = stats.ttest_rel([84, 85.5, 87], [80, 81, 82]).confidence_interval(0.95)
    words = in_words(runs)
    assert "After 5 tasks, the mean accuracy over them, all classes competing, is: er 86 %, pcl 81 %, sgd 20 %" in words
    assert f"er is 4.5 points ahead of pcl (95 % interval {difference.low:.1f} to {difference.high:.1f})" in words
    assert "On the earlier tasks er has lost 4 points against its best before the end, sgd has lost 90 points." in words
    assert in_words({"er": [], "pcl": runs["pcl"]}).endswith("competing, is: pcl 81 %.")
    assert in_words({"er": []}) == "There is nothing to compare."
    single = {name: [replace(run, accuracy=[[80.0]]) for run in row] for name, row in runs.items()}
    assert "earlier tasks" not in in_words(single)


def test_runs_with_a_head_for_each_task_are_told_of_by_what_they_know_with_the_task_told():
    """Across tasks their scores are not comparable, so the order with all classes competing says nothing."""

    def with_heads(seed, acc, task_acc, heads=True):
        run = record(seed, acc)
        metrics = run.metrics | {"task_acc": task_acc, "task_forgetting": 2.0}
        return replace(run, spec={"seed": seed, "heads": heads}, metrics=metrics)

    runs = {"er": [with_heads(seed, 94.0, 90.0 + seed) for seed in range(2)]}
    runs["ewc"] = [with_heads(seed, 60.0, 99.0 + seed / 2) for seed in range(2)]
    words = in_words(runs)
    assert words.startswith("After 5 tasks, the mean accuracy over them, the task told, is: ewc 99 %, er 90 %.")
    assert "On the same seeds ewc is 8.8 points ahead of er" in words
    assert "ewc has lost 2 points against its best before the end" in words
    table = comparison(runs, title="t", seeds=2)
    assert [column.title for column in table.columns] == [
        "Acc %, task told", "AAA %, task told", "forgetting, task told", "seconds"
    ]  # fmt: skip
    assert table.rows["ewc"][0].by_seed == {0: 99.0, 1: 99.5}
    one_without = runs | {"sgd": [with_heads(0, 95.0, 80.0, heads=False)]}
    assert comparison(one_without, title="t", seeds=2).columns[0].title == "Acc %"
    assert "all classes competing, is: sgd 95 %, er 94 %, ewc 60 %." in in_words(one_without)
    one_without["sgd"] = [replace(run, diverged="no numbers", metrics={}) for run in one_without["sgd"]]
    assert comparison(one_without, title="t", seeds=2).columns[0].title == "Acc %"
    assert "all classes competing, is: er 94 %" in in_words(one_without)  # as the columns above


@pytest.mark.parametrize("of", [partial(comparison, title="t", seeds=2), in_words])
def test_a_comparison_of_all_runs_of_a_store_is_refused(of):
    """Of those with one seed only one would count, whatever its stream and memory."""
    mixed = [made_up.record(RunSpec("er", memory=memory, seed=seed)) for memory in (50, 200) for seed in (0, 1)]
    with pytest.raises(InputError, match="runs of er: got 2 with seed 0, expected one for each seed"):
        of({"er": mixed})
    assert of({"er": mixed[:2], "sgd": []})


def test_a_comparison_has_the_figures_that_are_asked_for():
    with_task_acc = record(0, 80.0)
    with_task_acc = replace(with_task_acc, metrics={**with_task_acc.metrics, "task_acc": 97.0})
    columns = {name: FIGURES[name] for name in ("task_acc", "backward_transfer", "acc")}
    options = {"title": "t", "seeds": 2, "columns": columns}
    results = comparison({"er": [with_task_acc, record(1, 82.0)]}, **options)
    assert [column.title for column in results.columns] == ["Acc %, task told", "backward transfer", "Acc %"]
    assert [cell.by_seed for cell in results.rows["er"]] == [{0: 97.0}, {0: 0.0, 1: 0.0}, {0: 80.0, 1: 82.0}]
    (note,) = results.notes
    assert note.startswith("1 run was trained before one of these figures was measured, and left out of its column: ")
    assert not comparison({"er": [with_task_acc]}, **options).notes


def test_compare_has_the_columns_that_are_asked_for(parabolic):
    arguments = ("compare", "--learners", "sgd", "--stream", "seq-blobs", "--seeds", "2", "--workers", "0")
    code, out, _ = parabolic(*arguments, "--metrics", "task_acc, acc", "--format", "markdown")
    assert code == 0
    assert "| learner | Acc %, task told | Acc % |" in out
    code, _, err = parabolic(*arguments, "--metrics", "accuracy")
    assert code == 2
    assert "--metrics: got 'accuracy', expected one of aaa, acc, " in err


def test_words_for_one_point_and_for_none():
    runs = {"pcl": [record(0, 80.0, forgetting=1.2)], "er": [record(0, 70.0, forgetting=-0.3)]}
    assert in_words(runs).endswith("pcl has lost 1 point against its best before the end, er has lost 0 points.")
    assert "| er | <ins>70.0</ins> | <ins>70.0</ins> | **-0.3** |" in render(
        [comparison(runs, title="t", seeds=1)], "markdown"
    )
    around_zero = {"er": [record(seed, 70.0, forgetting=forgetting) for seed, forgetting in enumerate((-0.3, 0.28))]}
    assert " | 0.0 ± 0.4 | " in render([comparison(around_zero, title="t", seeds=2)], "markdown")


def test_what_was_gained_is_not_said_to_be_lost_and_a_tie_is_no_lead():
    runs = {
        "pcl": [record(seed, acc, forgetting=-9.0) for seed, acc in enumerate((80.0, 82.0, 81.0))],
        "er": [record(seed, acc, forgetting=-0.9) for seed, acc in enumerate((81.0, 80.0, 82.0))],
    }
    words = in_words(runs)
    assert "pcl has gained 9 points against its best before the end, er has gained 1 point." in words
    assert "On the same seeds there is no difference between pcl and er (95 % interval " in words
    assert "ahead" not in words


def test_a_lead_is_computed_over_the_seeds_that_both_have():
    runs = {"pcl": [record(0, 70.0), record(1, 72.0), record(2, 90.0)], "er": [record(0, 72.0), record(1, 75.0)]}
    assert "On the same seeds pcl is 2.5 points behind er (95 % interval " in in_words(runs)


def test_seconds_of_a_fleet_have_no_deviation_in_a_comparison():
    runs = {
        name: [replace(record(seed, 80.0 + seed), environment={"fleet": fleet}) for seed in range(2)]
        for name, fleet in (("er", 1), ("pcl", 2))
    }
    rows = {line.name: line.entries for line in lines(comparison(runs, title="t", seeds=2))}
    assert (rows["er"][3].spread, rows["pcl"][3].spread) == ("0.0", "")
    assert rows["er"][0].spread == rows["pcl"][0].spread == "0.7"


def test_compare_prints_in_every_format(parabolic, tmp_path):
    store = Store(tmp_path / "runs")
    for learner, acc in (("er", 80.0), ("sgd", 20.0)):
        for seed in range(2):
            spec = RunSpec(learner, seed=seed)
            store.save(replace(record(seed, acc + seed, forgetting=0.0), key=spec.key, spec=spec.resolved()))
    arguments = ("compare", "--learners", "er,sgd", "--seeds", "2")
    assert "On the same seeds er is 60.0 points ahead of sgd" in " ".join(parabolic(*arguments)[1].split())
    assert "| er | **80.5** ± 0.7 |" in parabolic(*arguments, "--format", "markdown")[1]
    assert r"er & \textbf{80.5} $_{\pm 6.4}$" in parabolic(*arguments, "--format", "latex", "--intervals")[1]
    code, out, _ = parabolic(*arguments, "--format", "json", "--output", "a.json")
    assert (code, out.strip()) == (0, "Written: a.json")
    assert json.loads((tmp_path / "a.json").read_text())[0]["rows"][0]["cells"][0]["by_seed"] == {"0": 80.0, "1": 81.0}
    code, _, err = parabolic(*arguments, "--format", "html")
    assert (code, err[:27]) == (2, "error: --format: got 'html'")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({0: 0.00003}, "3.0e-05"),
        ({0: 0.00003, 1: 0.000034}, "3.2e-05 ± 2.8e-06"),
        ({0: 0.7, 1: -0.64}, "0.0 ± 0.9"),
        ({0: 0.0}, "0.0"),
        ({0: 0.026, 1: 0.03}, "0.028 ± 0.003"),
        ({0: 0.0012}, "0.0012"),
        ({0: 0.094, 1: 0.1}, "0.1 ± 0.0"),
    ],
)
def test_a_small_mean_is_printed_with_more_digits_or_its_power_of_ten_unless_its_spread_is_larger(values, expected):
    table = render([Results("one", "One", [Column("bound")], {"er": [Cell(values)]})], "markdown")
    assert re.search(rf"^\| er \| {re.escape(expected)} \|$", table, re.MULTILINE), table
