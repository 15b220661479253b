"""The results of a scene in sentences, for someone who has read nothing else."""

from __future__ import annotations

import math

from parabolic.report.comparisons import level, many, on_earlier_tasks, standing
from parabolic.report.scenes import Method, Scene
from parabolic.statistics import Difference

__all__ = ["ahead", "headline", "judgement"]


def headline(scene: Scene) -> list[str]:
    """Which method is the most accurate, by how much, whether that may be chance, and what it costs."""
    done = scene.done
    if not done:
        diverged = sum(len(method.diverged) for method in scene.methods)
        return [f"No run has finished here: {diverged} diverged." if diverged else "No run has finished here yet."]
    best, *others = done
    tasks, acc, leaders = best.curves.shape[1], best.summary("acc"), [method.name for method in scene.leaders]
    if len(leaders) > 1:
        who, whose = f"{' and '.join(leaders)} do equally well", "their"
    else:
        who, whose = f"{best.name} does best" if others else best.name, "its"
    said = [
        f"{who}: after {many(tasks, 'task')} {whose} accuracy is {acc.mean:.1f} %, "
        f"averaged over the tasks, all classes competing ({_seeds(best)})."
    ]
    if others:
        said.append(_against(best, others[0]))
        last = others[-1]
        worst = "" if last.name in leaders else f", which does worst of {len(done)},"
        lost = {name: each.cell("forgetting").ours for name, each in ((best.name, best), (last.name + worst, last))}
        said += on_earlier_tasks(lost, digits=1, between="; ")
        said.append(_times(best, others))
    return said


def ahead(one: Method, other: Method) -> Difference | None:
    """How far one method's accuracy is ahead of another's, paired over the seeds that both have."""
    return one.cell("acc").against(other.cell("acc"))


def judgement(gap: Difference | None) -> str:
    """Whether a difference may be chance, in a few words.

    >>> judgement(Difference(mean=4.0, low=1.0, high=7.0, p=0.02))
    'unlikely to be chance'
    """
    if gap is None:
        return "no seed in common"
    if level(gap.mean):
        return "no difference"
    return {
        "unknown": "a single seed cannot tell",
        "no difference": "may be chance",
        "higher": "unlikely to be chance",
        "lower": "unlikely to be chance",
    }[gap.verdict]


def _against(best: Method, second: Method) -> str:
    gap = ahead(best, second)
    if gap is None:
        mean = second.summary("acc").mean
        return f"Next comes {second.name} with {mean:.1f} %, but the two have no seed in common to compare."
    common = len(best.runs.keys() & second.runs.keys())
    told = f"On the same {many(common, 'seed')} {standing(best.name, gap.mean, second.name)}"
    if math.isnan(gap.p):
        return f"{told}; a single seed cannot tell whether that is chance."
    told += f" (95 % interval {gap.low:z.1f} to {gap.high:z.1f}, p {_p(gap.p)})"
    if level(gap.mean):
        return f"{told}."
    if gap.verdict == "no difference":
        return f"{told}: that may be chance; more seeds would tell."
    return f"{told}: that is unlikely to be chance (5 % level)."


def _times(best: Method, others: list[Method]) -> str:
    seconds = {method.name: method.summary("seconds").mean for method in (best, *others)}
    mine, fastest = seconds[best.name], min(seconds, key=lambda name: seconds[name])
    if fastest == best.name:
        return f"It is also the fastest, with {mine:.3g} s of training a run."
    return f"A run takes {mine:.3g} s of training; the fastest, {fastest}, takes {seconds[fastest]:.3g} s."


def _seeds(method: Method) -> str:
    n, diverged = len(method.runs), len(method.diverged)
    told = f"the mean of {n} seeds" if n > 1 else "one seed"
    return f"{told}; {diverged} more diverged" if diverged else told


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"
