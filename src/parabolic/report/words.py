"""The results of a scene in sentences, for someone who has read nothing else."""

from __future__ import annotations

import math

from parabolic.report.comparisons import forgetting_sentences, gap_phrase, is_level, plural
from parabolic.report.scenes import Method, Scene
from parabolic.statistics import Difference

__all__ = ["headline", "judgement", "lead"]


def headline(scene: Scene) -> list[str]:
    """Which method is the most accurate, by how much, whether that may be chance, and what it costs."""
    done = scene.done
    if not done:
        diverged = sum(len(method.diverged) for method in scene.methods)
        return [f"No run has finished here: {diverged} diverged." if diverged else "No run has finished here yet."]
    best, *others = done
    tasks, acc, leaders = best.curves.shape[1], best.summary("acc"), [method.name for method in scene.leaders]
    if len(leaders) > 1:
        subject, possessive = f"{' and '.join(leaders)} do equally well", "their"
    else:
        subject, possessive = f"{best.name} does best" if others else best.name, "its"
    sentences = [
        f"{subject}: after {plural(tasks, 'task')} {possessive} accuracy is {acc.mean:.1f} %, "
        f"averaged over the tasks{scene.remark or ', all classes competing'} ({_seed_phrase(best)})."
    ]
    if others:
        sentences.append(_lead_sentence(best, others[0]))
        lowest = others[-1]
        remark = "" if lowest.name in leaders else f", which does worst of {len(done)},"
        lost = {
            name: method.cell("forgetting").ours for name, method in ((best.name, best), (lowest.name + remark, lowest))
        }
        sentences += forgetting_sentences(lost, digits=1, between="; ")
        sentences.append(_time_sentence(best, others))
    return sentences


def lead(one: Method, other: Method) -> Difference | None:
    """How far one method's accuracy is ahead of another's, paired over the seeds that both have."""
    return one.cell("acc").against(other.cell("acc"))


def judgement(gap: Difference | None) -> str:
    """Whether a difference may be chance, in a few words.

    >>> judgement(Difference(mean=4.0, low=1.0, high=7.0, p=0.02))
    'unlikely to be chance'
    """
    if gap is None:
        return "no seed in common"
    if is_level(gap.mean):
        return "no difference"
    return {
        "unknown": "a single seed cannot tell",
        "no difference": "may be chance",
        "higher": "unlikely to be chance",
        "lower": "unlikely to be chance",
    }[gap.verdict]


def _lead_sentence(best: Method, second: Method) -> str:
    gap = lead(best, second)
    if gap is None:
        mean = second.summary("acc").mean
        return f"Next comes {second.name} with {mean:.1f} %, but the two have no seed in common to compare."
    common = len(best.runs.keys() & second.runs.keys())
    sentence = f"On the same {plural(common, 'seed')} {gap_phrase(best.name, gap.mean, second.name)}"
    if math.isnan(gap.p):
        return f"{sentence}; a single seed cannot tell whether that is chance."
    sentence += f" (95 % interval {gap.low:z.1f} to {gap.high:z.1f}, p {_p_value(gap.p)})"
    if is_level(gap.mean):
        return f"{sentence}."
    if gap.verdict == "no difference":
        return f"{sentence}: that may be chance; more seeds would tell."
    return f"{sentence}: that is unlikely to be chance (5 % level)."


def _time_sentence(best: Method, others: list[Method]) -> str:
    seconds = {method.name: method.summary("seconds").mean for method in (best, *others)}
    best_seconds, fastest = seconds[best.name], min(seconds, key=lambda name: seconds[name])
    if fastest == best.name:
        return f"It is also the fastest, with {best_seconds:.3g} s of training a run."
    return f"A run takes {best_seconds:.3g} s of training; the fastest, {fastest}, takes {seconds[fastest]:.3g} s."


def _seed_phrase(method: Method) -> str:
    n, diverged = len(method.runs), len(method.diverged)
    phrase = f"the mean of {n} seeds" if n > 1 else "one seed"
    return f"{phrase}; {diverged} more diverged" if diverged else phrase


def _p_value(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"
