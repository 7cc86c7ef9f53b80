"""The binary cache of a data set: a directory of .npy files, built once a node and mapped by all its ranks.

The directory's name contains a hash of what it was built from (paths, sizes, modification times, format
version), so a changed source has another directory, and a directory never changes once it has its name. A
build happens under a file lock in a temporary directory, which is forced to the disk and renamed: a crash
leaves no half cache behind. Each use sets the directory's modification time: a build removes those of its
paths that have long been out of use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adaptive.state.disk import share, sync_directory
from hvd_adaptive.validation import parse_json
from hvd_adaptive.xmc.data.cache_content import ARRAY_DTYPES, FORMAT_VERSION, SPLITS, write_content
from hvd_adaptive.xmc.data.chunk import MAX_ID
from hvd_adaptive.xmc.data.source import DataSource
from hvd_adaptive.xmc.data.sparse import SparseDataset

logger = logging.getLogger(__name__)

# Longer than a job runs: it sets the time only when it opens its cache.
_UNUSED_S = 7 * 86400

# Of file systems without locks: Lustre mounted without flock, NFS without lockd.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def default_cache_dir() -> Path:
    """Return ``${XDG_CACHE_HOME:-~/.cache}/hvd_adaptive/data``.

    Raises:
        RuntimeError: there is no home directory either.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that relative paths are to be ignored.
    return (root if root.is_absolute() else Path.home() / ".cache") / "hvd_adaptive" / "data"


def build(source: DataSource, cache_dir: Path | None = None) -> None:
    """Make the cache of a data set unless it is there and intact. Not collective: one rank a node calls it.

    Safe to call from several processes, also on several nodes with a common file system: one builds, the others
    wait. Where the file system has no locks, each may build it, and a warning says so. docs/data.md says how long
    that takes.

    Args:
        source: from `resolve`.
        cache_dir: where caches lie, one directory each; None for `default_cache_dir`.

    Raises:
        ValueError: the data are not legal; the message starts with ``path:line:``.
        RuntimeError: the cache cannot be written, or a source file cannot be read or changed meanwhile.
    """
    root = default_cache_dir() if cache_dir is None else cache_dir
    directory = _directory(source, root)
    if _fault(directory) is None:
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{_prefix(source)}.lock") as is_alone:
            fault = _fault(directory)
            if fault is not None:
                if directory.exists():
                    logger.warning("rebuilding the cache %s: %s", directory, fault)
                _build_locked(source, root, directory, is_alone=is_alone)
    except OSError as error:
        raise RuntimeError(
            f"cannot build the cache of {source.name} in cache_dir {root}: {error}; "
            "name a writable directory with enough space, or free some"
        ) from error


def open_splits(source: DataSource, cache_dir: Path | None = None) -> tuple[SparseDataset, SparseDataset]:
    """Map the cache that `build` made.

    Args:
        source: as for `build`.
        cache_dir: as for `build`.

    Returns:
        The training and the test split, sharing their memory with other processes of this node.

    Raises:
        RuntimeError: there is no intact cache of the source as it is now.
    """
    root = default_cache_dir() if cache_dir is None else cache_dir
    directory = _directory(source, root)
    fault = _fault(directory)
    if fault is None:
        # Another user's cache may be read-only.
        with contextlib.suppress(OSError):
            os.utime(directory)
        try:
            meta = _read_meta(directory)
            return _open_split(directory, meta, source.name, "train"), _open_split(
                directory, meta, source.name, "test"
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, tokenize.TokenError) as error:
            fault = str(error)
    raise RuntimeError(
        f"no usable cache of {source.name} for its present files: {directory}: {fault}; "
        "call hvd_adaptive.xmc.data.build(source, cache_dir) once on this node, or remove that directory first"
    )


def _build_locked(source: DataSource, root: Path, directory: Path, *, is_alone: bool) -> None:
    """Build while holding the source's lock: nobody else works on an unfinished directory of these paths.

    A finished one may be another host's, whose files at these paths are its own, or that of a running job. Without a lock
    (``is_alone`` False) nothing is removed but a damaged directory, and another process may be the first to finish.
    """
    # In this order: one that comes into being meanwhile is another process's, and whole.
    if not is_alone and directory.exists() and _fault(directory) is not None:
        # Another process may be about it as well.
        shutil.rmtree(directory, ignore_errors=True)
    for leftover in root.glob(f"{_prefix(source)}-*") if is_alone else ():
        is_unfinished = leftover.name.startswith(f"{_prefix(source)}-partial-")
        if leftover == directory or is_unfinished or leftover.stat().st_mtime < time.time() - _UNUSED_S:
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
    started_s = time.monotonic()
    logger.info("building the cache of %s in %s", source.name, directory)
    before = _identity(source)
    temporary = Path(tempfile.mkdtemp(prefix=f"{_prefix(source)}-partial-", dir=root))
    try:
        write_content(source, temporary)
        if _identity(source) != before:
            raise RuntimeError(
                f"the files of {source.name} changed while they were read; start again once they are complete"
            )
        # mkdtemp makes it private, and cache_dir may be shared.
        share(temporary)
        sync_directory(temporary)
        try:
            temporary.rename(directory)
        except OSError:
            if is_alone or _fault(directory) is not None:
                raise
        sync_directory(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("built the cache of %s in %.1f s", source.name, time.monotonic() - started_s)


def _identity(source: DataSource) -> str:
    """Describe the source's files as they are now; equal as long as nobody changes a file."""
    stats = []
    try:
        for path in source.files:
            # Opening it tells an unreadable source from trouble with the cache.
            with path.open("rb") as stream:
                stats.append((str(path), os.fstat(stream.fileno())))
    except OSError as error:
        raise RuntimeError(f"cannot read the data of {source.name}: {error}") from error
    return json.dumps([FORMAT_VERSION, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]])


def _prefix(source: DataSource) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.name).lstrip(".")[:60]
    return f"{name or 'data'}-{_short_hash(json.dumps([str(path) for path in source.files]))}"


def _directory(source: DataSource, root: Path) -> Path:
    return root / f"{_prefix(source)}-{_short_hash(_identity(source))}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock, which ends with the process; the file stays, as removing it would race. False: there are none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        is_alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_alone = False
            logger.warning(
                "cache_dir %s is on a file system without locks (%s): every node may build it, where else one does and the "
                "others wait. A cache_dir on a node's own disk has locks",
                path.parent, error.strerror,
            )  # fmt: skip
        yield is_alone
    finally:
        os.close(descriptor)


def _read_meta(directory: Path) -> dict[str, Any]:
    meta = parse_json((directory / "meta.json").read_text(encoding="utf-8"))
    if not isinstance(meta, dict):
        raise ValueError("meta.json holds no object")
    return meta


def _fault(directory: Path) -> str | None:
    """Say what is wrong with a cache, or None: files missing, cut or of another size."""
    if not directory.is_dir():
        return "not built, or the source changed since"
    try:
        meta = _read_meta(directory)
        if meta["format_version"] != FORMAT_VERSION:
            return f"format version {meta['format_version']}, expected {FORMAT_VERSION}"
        for name, num_bytes in meta["files"].items():
            actual = (directory / name).stat().st_size
            if actual != num_bytes:
                return f"{name} has {actual} bytes, expected {num_bytes}"
        for split in SPLITS:
            for array in ARRAY_DTYPES:
                if f"{split}.{array}.npy" not in meta["files"]:
                    return f"meta.json does not name {split}.{array}.npy"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"damaged: {error!r}"
    return None


def _names_path(directory: Path, meta: dict[str, Any], kind: str) -> Path | None:
    if not meta[f"has_{kind}"]:
        return None
    if f"{kind}.txt" not in meta["files"]:
        raise ValueError(f"meta.json does not name {kind}.txt")
    return directory / f"{kind}.txt"


def _check_rows(where: str, indptr: Any, indices: Any, num_columns: int) -> None:
    """Raises ValueError for rows that would lead out of an array: what reads them in C does not ask."""
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(f"{where}_indptr.npy does not lead from 0 to {len(indices)} in order")
    if len(indices) and not 0 <= indices.min() <= indices.max() < num_columns:
        raise ValueError(f"{where}_indices.npy holds a number outside [0, {num_columns})")


def _open_split(directory: Path, meta: dict[str, Any], name: str, split: str) -> SparseDataset:
    sizes = meta["splits"][split]
    for kind in ("num_features", "num_labels"):
        if not isinstance(sizes[kind], int) or not 1 <= sizes[kind] <= MAX_ID:
            raise ValueError(f"meta.json: {kind} must be in [1, {MAX_ID}], got {sizes[kind]!r}")
    arrays = {}
    for array, dtype in ARRAY_DTYPES.items():
        path = directory / f"{split}.{array}.npy"
        arrays[array] = np.load(path, mmap_mode="r", allow_pickle=False)
        expected = (np.dtype(dtype), (sizes["lengths"][array],))
        if (arrays[array].dtype, arrays[array].shape) != expected:
            raise ValueError(
                f"{path} holds {arrays[array].shape} of {arrays[array].dtype}, expected {expected}"
            )
    for letter, columns in (("x", sizes["num_features"]), ("y", sizes["num_labels"])):
        _check_rows(f"{directory / split}.{letter}", arrays[f"{letter}_indptr"], arrays[f"{letter}_indices"], columns)
    return SparseDataset(
        name=name,
        split=split,
        num_features=sizes["num_features"],
        num_labels=sizes["num_labels"],
        fingerprint=sizes["fingerprint"],
        label_names_path=_names_path(directory, meta, "label_names"),
        feature_names_path=_names_path(directory, meta, "feature_names"),
        **arrays,
    )
