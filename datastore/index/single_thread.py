"""FAISS on one thread."""

import faiss


def use_one_thread() -> None:
    """Keep FAISS from OpenMP's default, with which forks hang and workers compete.

    The number is a property of the calling thread, so this comes before each use.
    One thread is also what makes the graph of HNSW the same in every build.
    """
    faiss.omp_set_num_threads(1)
