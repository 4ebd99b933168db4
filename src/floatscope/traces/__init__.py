"""Steps and reductions → `Trace`; traces ↔ a run folder that survives a crash. Reading needs no torch."""

from floatscope.traces.forecast import Forecast, forecast
from floatscope.traces.run import Run, controls, create_run, open_run
from floatscope.traces.trace import Trace

__all__ = ["Forecast", "Run", "Trace", "controls", "create_run", "forecast", "open_run"]
