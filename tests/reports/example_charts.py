"""A chart of every kind, and token texts that would break an unsafe page."""

from __future__ import annotations

from floatscope.reports.charts import Dots, Lines, Map, Series, Table

PROMPT = "Document 1: Nias Prearell was a pupil of Relen Feavar.\nQuestion: Who taught Nias Prearell?\nAnswer:"
UNSAFE_TEXTS = (
    "</script><script>document.title='x'</script>",
    "<img src=x onerror=\"document.title='x'\">",
    "\u2028",
    "🦆",
    "שלום",
    "\n",
)
"""Texts of the first tokens of the prompt."""

LINES = Lines(
    "Lines & <more>",
    "layer",
    "lift",
    [0, 1, 2, 3],
    [
        Series("trained", "mdm", [1.234, 2.5, None, 4.75], [1.1, 2.25, None, 4.5], [1.35, 2.75, None, 5.0]),
        Series("untrained", "mdm", [1.0, 1.01, 1.02, 1.03], control=True),
        Series("trained", "arm", [0.5, 123.4, 7.0, 8.0]),
    ],
    reference=1.0,
    reference_label="uniform",
)
NAMED_LINES = Lines("Own x, named x", "part", "share", ["a", "b"], [Series("s", "mdm", [0.1, 0.2])], log=True)
DOTS = Dots(
    "Dots",
    ["shallow", "a category with a name that is rather long"],
    "share of steps",
    [
        Series("trained", "mdm", [0.25, 0.5], [0.2, 0.4], [0.3, 0.6]),
        Series("untrained", "arm", [0.125, None], control=True),
    ],
    reference=0.0,
)
MAP = Map(
    "Map",
    "key",
    "step",
    [[1.0, 2.0, None], [4.0, 8.0, 16.0]],
    [0, 1, 2],
    [0, 1],
    [(0, 1, "top"), (1, 2, "top"), (1, 0, "commit"), (1, 1, "anchor")],
    "× uniform",
    "mdm",
    log=True,
    bounds=(1.0, 16.0),
)
WIDE_MAP = Map("Wide", "key", "step", [[float(k % 7) for k in range(2000)]] * 3, list(range(2000)), [0, 1, 2])
TABLE = Table(["class", "n", "share"], [["newline", 3, 0.125], ["<i>bos</i>", 4, None]], "A table")
