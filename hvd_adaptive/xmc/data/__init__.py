"""Sparse multi-label data: XMC text files or the embedded set, as memory maps that a node's ranks share.

`resolve` names the files, `build` makes the cache (one rank a node), `open_splits` maps it (every rank).
None of them communicates; who builds, and that the others wait, is the caller's business.
"""

from hvd_adaptive.xmc.data.cache import build, default_cache_dir, open_splits
from hvd_adaptive.xmc.data.source import DataSource, resolve
from hvd_adaptive.xmc.data.sparse import SparseDataset
from hvd_adaptive.xmc.rows import SparseRows

__all__ = [
    "DataSource",
    "SparseDataset",
    "SparseRows",
    "build",
    "default_cache_dir",
    "open_splits",
    "resolve",
]
