"""A passage index on disk, searched by BM25 (tantivy).

    index = Index.create("wiki")                                # or Index.open("wiki")
    index.add_file("passages.jsonl.gz")                         # AddCounts(added=6119, replaced=0, unchanged=0)
    index.add([("q-7", "Mira", "Mira lives in Velmora.")])      # id, title, text; an id of None is made from the two
    index.search("Where does Mira live?", 5)                    # [Hit(id="q-7", title="Mira", text=…, score=3.1), …]
    samples, recall = retrieve_passages(index, samples, k=5)    # samples with the passages that were found

    wiki/meta.json       format, versions, files added; it makes the folder an index
    wiki/index.lock      held by the one process that writes
    wiki/tantivy/        the files of the engine, each with a checksum

Passages are committed in batches. A killed `add` leaves every committed batch, and the same call again completes it: a
passage that is already there is not written twice. An `Index` sees what was committed when it was opened, and what it
writes itself.
"""

from floatscope.tasks.index.engine import Hit
from floatscope.tasks.index.folder import ENGINE
from floatscope.tasks.index.index import AddCounts, Index, IndexStats
from floatscope.tasks.index.integrity import SEGMENT_FILES
from floatscope.tasks.index.passage_file import PassageFile, passage_id
from floatscope.tasks.index.retrieval import retrieve_passages

__all__ = [
    "ENGINE",
    "SEGMENT_FILES",
    "AddCounts",
    "Hit",
    "Index",
    "IndexStats",
    "PassageFile",
    "passage_id",
    "retrieve_passages",
]
