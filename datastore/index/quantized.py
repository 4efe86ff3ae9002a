"""Vectors as codes of few bytes, by ranges or centroids that are learnt from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import faiss
from pydantic import Field

from datastore.index.base import Ids, Vectors
from datastore.index.codes import CodesIndex
from datastore.index.index_file import IndexFile, Learnt, read_index_file
from datastore.index.layout import learnable, require_layout
from datastore.index.settings import LossySettings
from datastore.index.single_thread import use_one_thread
from knnper.config.errors import ConfigError, Problem
from knnper.config.ranges import PositiveInt

_OUTGROWN_AFTER = 3
"""An index learns anew when that many times its sample was added: it has then grown
fourfold, or been replaced three times."""

_RANGE_MARGIN = 0.25
"""By which part of its width a learnt range is extended at both ends. What is added
later and lies outside is cut to the range. On embeddings of CIFAR-10, recall@10 after
learning from 256 of 50,000 is 0.980 without a margin, 0.990 with this one; after
learning from all it is 0.99 either way."""

_RANGE_SAMPLE = 256
"""With fewer vectors a range is too narrow for those that follow (recall@10 of 0.946
without a margin, and 0.975 with it, after 64), and there is little to be saved."""

_POINTS_PER_CENTROID = (4, 64)
"""The fewest and the most vectors for each centroid in k-means. With fewer, centroids
are hardly more than single vectors; more take four times as long for an accuracy that
is the same within a point."""


@dataclass(frozen=True)
class ScalarSettings(LossySettings):
    """Each number in 8 bits, p bytes a vector.

    A number's range is learnt in each dimension. While there are fewer than 256
    vectors they are kept as they are. On 50,000 embeddings of CIFAR-10 (p = 512)
    recall@10 is 0.99.
    """

    name: Literal["sq8"] = "sq8"

    def code_bytes(self, dim: int) -> int:
        """Return p."""
        return dim


@dataclass(frozen=True)
class ProductSettings(LossySettings):
    """Product quantisation: parts of a vector, each as the number of a centroid.

    While there are fewer than 4 vectors for each centroid (1,024 with 8 bits) they are
    kept as they are. On 50,000 embeddings of CIFAR-10 (p = 512) recall@10 is 0.73 by
    default, in 64 bytes a vector; among 40 candidates are 0.995 of the ten nearest, so
    that ``rerank`` of 4 makes up for it.

    Attributes
    ----------
    num_parts
        M, the number of sub-quantisers; divides p. Null is the largest divisor of p
        that leaves at least 8 numbers in a part.
    num_bits
        Of the number of a centroid, from 4 to 8: there are 2^bits in each part.
    """

    name: Literal["pq"] = "pq"
    num_parts: PositiveInt | None = None
    num_bits: Annotated[int, Field(ge=4, le=8)] = 8

    def code_bytes(self, dim: int) -> int:
        """Return M bits / 8, rounded up."""
        return (self.parts_of(dim) * self.num_bits + 7) // 8

    def parts_of(self, dim: int) -> int:
        """Return M for vectors of p = ``dim`` numbers.

        Raises
        ------
        ConfigError
            If ``num_parts`` does not divide p.
        """
        divisors = [parts for parts in range(1, dim + 1) if dim % parts == 0]
        if self.num_parts is None:
            return max(parts for parts in divisors if parts <= max(1, dim // 8))
        if self.num_parts not in divisors:
            message = (
                f"found {self.num_parts}, which does not divide {dim}, the size of an "
                f"embedding; choose one of {', '.join(map(str, divisors))}, or null"
            )
            raise ConfigError([Problem("index.num_parts", message)], "the store")
        return self.num_parts


class LearningIndex(CodesIndex):
    """Codes that were learnt, or the vectors themselves while there are too few.

    It does not forget: a code leaves no trace, but what was learnt from its vector
    stays until the index is built anew.

    Parameters
    ----------
    content
        See `CodesIndex`.
    num_needed
        The fewest vectors to learn from.
    """

    keeps_vectors = False
    forgets = False

    def __init__(self, content: IndexFile, num_needed: int) -> None:
        super().__init__(content)
        self._num_needed = num_needed

    @property
    def has_learnt(self) -> bool:
        """Whether the vectors are codes; if not, they are kept as they are."""
        return self._learnt.num_sample > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes, of the table of ids and of what was learnt."""
        return super().num_bytes + 4 * _num_learnt(self._index)

    @property
    def is_outgrown(self) -> bool:
        """Whether there now are enough vectors to learn from, or many new ones."""
        if self._learnt.num_sample == 0:
            return len(self) >= self._num_needed
        return self._learnt.num_since >= _OUTGROWN_AFTER * self._learnt.num_sample

    def _encodable(self, vectors: Vectors) -> Vectors:
        return vectors if self._learnt.num_sample == 0 else learnable(vectors)


class ScalarIndex(LearningIndex):
    """Each number in 8 bits."""


class ProductIndex(LearningIndex):
    """Each part of a vector as the number of a centroid."""

    @property
    def _queries_at_once(self) -> int:
        # FAISS compares several queries with the centroids by a matrix product, whose
        # last bits depend on how many there are.
        return 1


def build_scalar(
    settings: ScalarSettings,  # noqa: ARG001 (one signature for all kinds)
    dim: int,
    ids: Ids,
    vectors: Vectors,
) -> ScalarIndex:
    """Return an index of ``vectors`` (n, p) under ``ids`` (n,)."""
    scalar = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit)
    scalar.sq.rangestat_arg = _RANGE_MARGIN
    content = _filled(scalar, ids, vectors, _RANGE_SAMPLE)
    return ScalarIndex(content, _RANGE_SAMPLE)


def read_scalar(settings: ScalarSettings, path: Path, dim: int) -> ScalarIndex:
    """Return what was written; see `datastore.index.catalogue.read_index`."""
    content = read_index_file(path)
    scalar = {faiss.IndexScalarQuantizer: settings.code_bytes(dim)}
    require_layout(content, path, dim, {faiss.IndexFlatL2: 4 * dim, **scalar})
    return ScalarIndex(content, _RANGE_SAMPLE)


def build_product(
    settings: ProductSettings, dim: int, ids: Ids, vectors: Vectors
) -> ProductIndex:
    """Return an index of ``vectors`` (n, p) under ``ids`` (n,).

    Raises
    ------
    ConfigError
        If ``num_parts`` does not divide p.
    """
    product = faiss.IndexPQ(dim, settings.parts_of(dim), settings.num_bits)
    clustering = product.pq.cp
    clustering.min_points_per_centroid, clustering.max_points_per_centroid = (
        _POINTS_PER_CENTROID
    )
    num_needed = _points_needed(settings)
    content = _filled(product, ids, vectors, num_needed)
    return ProductIndex(content, num_needed)


def read_product(settings: ProductSettings, path: Path, dim: int) -> ProductIndex:
    """Return what was written; see `datastore.index.catalogue.read_index`."""
    content = read_index_file(path)
    product = {faiss.IndexPQ: settings.code_bytes(dim)}
    require_layout(content, path, dim, {faiss.IndexFlatL2: 4 * dim, **product})
    return ProductIndex(content, _points_needed(settings))


def _points_needed(settings: ProductSettings) -> int:
    return int(_POINTS_PER_CENTROID[0] * 2**settings.num_bits)


def _filled(
    index: faiss.IndexFlatCodes, ids: Ids, vectors: Vectors, num_needed: int
) -> IndexFile:
    """Train ``index`` and fill it; where there is too little for it, a flat one."""
    use_one_thread()
    if len(vectors) < num_needed:
        flat = faiss.IndexFlatL2(index.d)
        flat.add(vectors)
        return IndexFile(flat, ids, Learnt(num_sample=0))
    index.train(learnable(vectors))
    index.add(learnable(vectors))
    return IndexFile(index, ids, Learnt(num_sample=len(vectors)))


def _num_learnt(index: faiss.IndexFlatCodes) -> int:
    """Return how many numbers were learnt."""
    if isinstance(index, faiss.IndexScalarQuantizer):
        return int(index.sq.trained.size())
    return int(index.pq.centroids.size()) if isinstance(index, faiss.IndexPQ) else 0
