"""Steps and Reductions become a `Trace`; Traces become a run folder that survives a crash, and come back."""

from floatscope.trace.forecast import Forecast, forecast
from floatscope.trace.recorder import Recorder
from floatscope.trace.run import Run, controls, create_run, open_run
from floatscope.trace.trace import Trace

__all__ = ["Forecast", "Recorder", "Run", "Trace", "controls", "create_run", "forecast", "open_run"]
