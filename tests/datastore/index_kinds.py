"""Settings of an index of every kind, small enough for tests to train."""

from knnper.datastore.index import FactorySettings, FlatSettings, IndexSettings

GRAPH = FactorySettings("HNSW16", parameters="efSearch=128", rerank=2)
LISTS = FactorySettings("IVF3,Flat", parameters="nprobe=2", train_size=16, rerank=2)
HALF = FactorySettings("SQfp16")
SCALAR = FactorySettings("SQ8", train_size=16)
PRODUCT = FactorySettings("PQ2x4", train_size=16)
RERANKED = FactorySettings("PQ2x4", train_size=16, rerank=3)

KINDS: dict[str, IndexSettings] = {
    "flat": FlatSettings(),
    "graph": GRAPH,
    "lists": LISTS,
    "half": HALF,
    "scalar": SCALAR,
    "product": PRODUCT,
    "reranked": RERANKED,
}
