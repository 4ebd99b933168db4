"""Steps and reductions → `Trace`; traces ↔ a run folder that survives a crash. Reading needs no torch."""

from floatscope.traces.run import Run, create_run, find_controls, open_run
from floatscope.traces.size_forecast import Forecast, forecast
from floatscope.traces.trace import Trace

__all__ = ["Forecast", "Run", "Trace", "create_run", "find_controls", "forecast", "open_run"]
