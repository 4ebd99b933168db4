"""Dates that say which of several versions of a passage is the newest: "Last updated in 2014. Mira lives in Velmora."

newest, older = draw_years(Random(0), older=3)      # 2017, [2011, 2014, 2011]: the first is later than all others
add_date(passage, newest)

The twins are trained with this wording. All years are of one decade, so that one digit decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from floatscope.tasks.sample import Passage
from floatscope.tasks.stress.passage_edits import edit_passage

YEARS = range(2010, 2020)


def draw_years(rng: Random, older: int, without: Iterable[str] = ()) -> tuple[int, list[int]]:
    """Draw the year of the newest version and of `older` others, which are all before it.

    Args:
        rng: The random generator.
        older: The number of older versions; two of them may have the same year.
        without: Texts that are not used as a year, such as the answers of a sample; ignored if they are all years.
    """
    texts = set(without)
    years = [year for year in YEARS if str(year) not in texts]
    years = years if len(years) > 1 else list(YEARS)
    newest = rng.randrange(1, len(years))
    return years[newest], [years[rng.randrange(newest)] for _ in range(older)]


def add_date(passage: Passage, year: int) -> Passage:
    """Return the passage with its year in front."""
    return edit_passage(passage, [(0, 0, f"Last updated in {year}. ")])
