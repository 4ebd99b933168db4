"""What carries the report, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floatscope.reports.compared import Compared
from floatscope.reports.sections.parts import having, listed


def summary(runs: Sequence[Compared]) -> list[str]:
    """What carries the report, by question, each number beside its control."""
    sentences = []
    if those := having(runs, "absorption"):
        first = listed(_first_key(run) for run in those)
        sentences.append(f"**One sink?** Where it takes most, the first key has {first}.")
    if those := having(runs, "floating"):
        within, across = (listed(_away(run, kind) for run in those) for kind in ("within", "across"))
        sentences.append(
            f"**Does the anchor move?** While a text is decoded, a layer's top key is away from its usual place in"
            f" {within}. Over all texts it is away from the layer's usual position in {across}."
        )
        sentences += [sentence for run in those if (sentence := _verdict(run))]
    sentences += [sentence for ask in (_heads, _flow, _qk, _order, _influence) if (sentence := ask(runs))]
    if bare := [run.label for run in runs if not run.controls and not run.unfinished]:
        sentences.append(
            f"There is no untrained control beside {listed(bare)}: what architecture alone would show cannot be told"
            f" from what was learnt. Trace it with --control untrained."
        )
    return sentences


def _first_key(run: Compared) -> str:
    """In the layer where it takes most."""
    mean = run.table("absorption", {"set": "first"}).groupby("layer")["percent"].mean()
    where = {"set": "first", "layer": int(mean.idxmax())}
    percent, lift = (run.number("absorption", value, where) for value in ("percent", "lift"))
    beside = "" if lift.control is None else f", untrained {lift.control.mean:.1f}"
    return (
        f"**{percent.own.mean:.1f} %** of the attention of layer {where['layer']} in {run.label} (lift"
        f" {lift.own.said(1)}{beside})"
    )


def _away(run: Compared, kind: str) -> str:
    number = run.number("floating", kind)
    beside = "" if number.control is None else f" (untrained {100 * number.control.mean:.0f} %)"
    return f"**{100 * number.own.mean:.0f} %** of the steps in {run.label}{beside}"


def _verdict(run: Compared) -> str | None:
    """Whether the movement within a text is more than architecture alone gives."""
    apart = run.beyond("floating", "within")
    if apart is None:
        return None
    if not apart.sure:
        return f"Within a text the top key of {run.label} moves no more and no less than its control's."
    more = "more" if apart.mean > 0 else "less"
    return f"Within a text the top key of {run.label} moves {more} than its control's: {apart.said(2, sign=True)}."


def _heads(runs: Sequence[Compared]) -> str:
    share = _clear(runs, "retrieval", "active", percent=True)
    return share and f"**Which heads read the evidence?** The share of heads that copy from it in a text is {share}."


def _flow(runs: Sequence[Compared]) -> str:
    ratio = _clear(runs, "flow", "ratio", {"region": "answer", "key_region": "question"})
    return ratio and (
        "**What flows into the answer?** What its rows give the question, over what uniform attention would give it, is"
        f" {ratio}."
    )


def _qk(runs: Sequence[Compared]) -> str:
    angle, norm = (_clear(runs, "attribution", name, percent=True) for name in ("angle", "norm"))
    turned = angle and f"turned to where other keys point, {angle}"
    cut = norm and f"cut to the length of others, {norm}"
    lost = "; ".join(part for part in (turned, cut) if part)
    return lost and f"**Angle or norm?** What anchors lose of their advantage in the score is, {lost}."


def _order(runs: Sequence[Compared]) -> str:
    tau = _clear(runs, "order", "kendall")
    return tau and f"**From left to right?** Kendall's τ of the order of filling, 1 from left to right, is {tau}."


def _influence(runs: Sequence[Compared]) -> str:
    ranks = _clear(runs, "influence", "received")
    return ranks and (
        "**Does attention move what is written?** The rank correlation of a key's influence with the attention of the"
        f" deciding rows is {ranks}."
    )


def _clear(
    runs: Sequence[Compared], table: str, value: str, where: Mapping[str, Any] | None = None, percent: bool = False
) -> str:
    """The number of each run that is surely apart from its control's, beside it; nothing where none is."""
    found = []
    for run in having(runs, table):
        apart, number = run.beyond(table, value, where), run.number(table, value, where)
        if apart is not None and apart.sure and number.control is not None:
            own, control = (_said(each.mean, percent) for each in (number.own, number.control))
            found.append(f"**{own}** in {run.label} (untrained {control})")
    return listed(found) if found else ""


def _said(mean: float, percent: bool) -> str:
    return (f"{100 * mean:.0f} %" if percent else f"{mean:.2f}").replace("-", "−")
