"""Passages to retrieve from: an index on the disk, searched by BM25 (tantivy).

    index = Index.create("wiki")                                # or Index.open("wiki")
    index.add_file("passages.jsonl.gz")                         # Added(added=6119, replaced=0, unchanged=0)
    index.add([("q-7", "Mira", "Mira lives in Velmora.")])      # id, title, text; an id of None is made from the two
    index.search("Where does Mira live?", 5)                    # [Hit(id="q-7", title="Mira", text=…, score=3.1), …]

    wiki/meta.json       format, versions, files added; what makes the folder an index
    wiki/index.lock      held by the one process that writes
    wiki/tantivy/        the engine's own files, each with a checksum

Passages are committed batch by batch. A killed `add` leaves every committed batch, and the same call again completes
it: a passage that is there already is not written twice. An `Index` sees what was committed when it was opened, and
what it writes itself.
"""

from floatscope.tasks.index.damage import SEGMENT
from floatscope.tasks.index.engine import Hit
from floatscope.tasks.index.folder import ENGINE
from floatscope.tasks.index.index import Added, Index, Stat
from floatscope.tasks.index.passages import PassageFile, passage_id
from floatscope.tasks.index.retrieve import retrieved

__all__ = ["ENGINE", "SEGMENT", "Added", "Hit", "Index", "PassageFile", "Stat", "passage_id", "retrieved"]
