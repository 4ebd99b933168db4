"""From traces to numbers: pure functions, one file per question. Tables are tidy, with a row per sample."""

from floatscope.analysis.absorption import absorption as absorption
from floatscope.analysis.detectors import detect as detect
from floatscope.analysis.estimate import difference as difference
from floatscope.analysis.estimate import estimate as estimate
from floatscope.analysis.floating import floating_index as floating_index
from floatscope.analysis.look import TraceView as TraceView
from floatscope.analysis.look import trace_views as trace_views
from floatscope.analysis.measure import build_tables as build_tables
