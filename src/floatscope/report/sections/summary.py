"""What carries the report, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from floatscope.report.compared import Compared
from floatscope.report.sections.parts import having, listed


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
