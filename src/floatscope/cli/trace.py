"""`floatscope trace`: decode many samples, watched, into a run folder that can be interrupted and resumed."""

from __future__ import annotations

from typing import Annotated, Any

from floatscope.cli import options as o
from floatscope.cli.output import Output
from floatscope.errors import UserError, unknown_choice
from floatscope.schema import LEVELS


@o.expand_groups
def trace(
    model: o.ModelName,
    *,
    out: o.OutFolder,
    level: Annotated[str, o.Opt(help="How much of each step is stored: summary, heads, rows or full.")] = "summary",
    influence: Annotated[
        bool, o.Opt("--influence", help="Also store the gradient of each committed token's logit.")
    ] = False,
    experts: Annotated[
        bool, o.Opt("--experts", help="Also store which experts of a mixture process each token.")
    ] = False,
    untrained_controls: Annotated[
        int, o.Opt(min=0, metavar="N", help="Also trace N untrained controls: fresh weights, same architecture.")
    ] = 0,
    redo_damaged: Annotated[
        bool, o.Opt("--redo-damaged", help="When resuming, decode samples again whose files are damaged.")
    ] = False,
    as_json: o.AsJson = False,
    data: o.OptionalData = None,
    prompt: Annotated[list[str], o.DataOpt(metavar="TEXT", help="A text to answer or continue; may be repeated.")] = [],  # noqa: B006
    reading: o.DataOptions,
    chat: o.Chat = None,
    sampling: o.SamplingOptions,
    batch_size: o.BatchSize = None,
    loading: o.ModelOptions,
) -> None:
    """Decode many samples and store a trace of each in a run folder.

    An interrupted run is resumed by the same command; a finished sample is not decoded again.

    By default all new tokens are decoded even if the text ends earlier, so that runs of several models have the same
    steps; --stop changes that.
    """
    if (data is None) == (not prompt):
        raise UserError("give either --data FILE or --prompt TEXT")
    if data is None and reading.are_set:
        raise UserError("--limit, --format and --skip-bad apply to --data; leave them out with --prompt")
    if level not in LEVELS:
        raise unknown_choice("level", level, LEVELS)
    o.check_model(model)
    questions = None if data is None else reading.read(data)
    output = Output(as_json)
    output.line("opening", model)

    from floatscope.capture.watcher import Watch
    from floatscope.files.sizes import format_size
    from floatscope.pipelines.trace import plan_trace

    loaded = loading.load(model)
    job = plan_trace(
        loaded,
        prompt if questions is None else questions.samples,
        out,
        watch=Watch(level, influence=influence, experts=experts),
        controls=range(untrained_controls),
        redo_damaged=redo_damaged,
        source={} if data is None else reading.describe(data),
        chat=chat,
        batch_size=batch_size,
        **sampling.settings,
    )
    resumed = job.done
    output.line("model", repr(loaded))
    skipped = output.skipped(questions)
    if job.forecast is not None:
        runs = f" in {len(job.parts)} runs" if len(job.parts) > 1 else ""
        output.line("forecast", f"{format_size(job.forecast.total)} for {job.total} samples{runs}")
    output.run("tracing", job)
    runs_json = [run.as_json for run in job.summaries()]
    if as_json:
        output.finish({**runs_json[0], "resumed": resumed, "skipped": skipped, "controls": runs_json[1:]})
        return
    for i, run in enumerate(runs_json):
        output.line("control" if i else "run", _describe_run(run))


def _describe_run(run: dict[str, Any]) -> str:
    from floatscope.files.sizes import format_size

    score = "" if run["acc"] is None else f", acc {run['acc']:.3f}"
    return f"{run['run']}: {run['samples']} samples, {format_size(run['bytes'])}{score}"
