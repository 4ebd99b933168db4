"""From traces to numbers: pure functions, one file per question. Tables are tidy, with a row per sample."""

from floatscope.analysis.absorption import absorption as absorption
from floatscope.analysis.detectors import detect as detect
from floatscope.analysis.estimate import difference as difference
from floatscope.analysis.estimate import estimate as estimate
from floatscope.analysis.floating import floating_index as floating_index
from floatscope.analysis.look import Look as Look
from floatscope.analysis.look import looks as looks
from floatscope.analysis.measure import measure as measure
