"""`floatscope demo`: the shipped twins answer a few questions, watched, and a report shows where they look."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from floatscope.cli import options as o
from floatscope.cli.console import print_text
from floatscope.cli.output import Output


def demo(
    out: Annotated[Path, o.Opt(metavar="DIR", help="Folder for the runs and the report.")] = Path("demo"),
    as_json: o.AsJson = False,
) -> None:
    """Trace the three twins and their untrained controls on twelve questions, and write a report.

    One twin is autoregressive, one a masked diffusion model trained from scratch, one a masked diffusion model adapted
    from the first. They ship with the package: nothing is downloaded.

    An interrupted demo is resumed by the same command.
    """
    output = Output(as_json)
    output.line("opening", "twin:arm, twin:mdm, twin:mdm-adapted")

    from floatscope.analysis.claims import registry_line
    from floatscope.files.sizes import format_size
    from floatscope.pipelines.demo import QUESTIONS, STEPS, plan_demo, write_demo_report

    job = plan_demo(out)
    output.line("forecast", f"{job.total} samples of {STEPS} steps, at most {format_size(job.max_bytes)}")
    output.run("tracing", job)
    result = write_demo_report(job)
    if as_json:
        output.finish(result.as_json)
        return
    scores = ", ".join(f"{name} {acc:.0%}" for name, acc in result.acc.items())
    output.line("right", f"{scores} of {QUESTIONS} answers, complete and in order")
    output.console.print("\nPublished claims, tested on these runs:")
    for line in result.claims:
        print_text(output.console, f"• {line}")
    output.console.print(f"{registry_line()} Few texts and small models: the page has the intervals.\n")
    output.line("page", str(result.page))
