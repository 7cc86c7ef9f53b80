"""A checkpoint on disk, of a run or of a script's state: one directory, whole or not at all, whose every byte is checked
before it is used.

round-00000123/
  global.safetensors       what all ranks hold alike, written by rank 0
  rank-0000.safetensors    what rank 0 holds alone, and so on
  MANIFEST.json            format version, what the run was, size and SHA-256 of every file, and of itself; written last

A script's commit is ``commit-00000123`` and has a global file only. A safetensors file holds the tensors of a state, and in its
metadata the rest of it as JSON. The directory is written as ``.part-1-round-00000123`` and renamed when all is on the disk, so
a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hvd_adaptive import __version__
from hvd_adaptive.cluster.last_checkpoint import COMMIT, ROUND, directory_name, find_checkpoints
from hvd_adaptive.state.disk import sync_directory, sync_file
from hvd_adaptive.state.nested import DTYPES, unflatten_state
from hvd_adaptive.state.tensor_file import open_tensors
from hvd_adaptive.validation import parse_json

FORMAT = "hvd_adaptive checkpoint"
FORMAT_VERSION = 1
GLOBAL_FILE = "global.safetensors"
MANIFEST = "MANIFEST.json"
_CHUNK_BYTES = 1 << 23
# What manifests say besides their files: a run's and a script's.
_RUN_FIELDS: dict[str, type] = {
    **dict.fromkeys(("round", "epoch", "cursor", "world_size"), int), "model": list, "data": dict, "options": dict
}  # fmt: skip
_COMMIT_FIELDS: dict[str, type] = {"commit": int, "world_size": int}


class RefusedError(ValueError):
    """A checkpoint that cannot be used; says which and why."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file of a checkpoint: size in bytes and SHA-256 in hex."""

    num_bytes: int
    sha256: str


def rank_file(rank: int) -> str:
    """Returns the name of a rank's own file."""
    return f"rank-{rank:04d}.safetensors"


def part_of(final: Path, attempt: int) -> Path:
    """Returns what a checkpoint is called while it is written; an attempt's own, since an older may be being removed."""
    return final.with_name(f".part-{attempt}-{final.name}")


def write_state(path: Path, skeleton: Any, tensors: dict[str, Tensor]) -> Written:
    """Writes one safetensors file and forces it to the disk.

    Not through ``safetensors.save_file``: that holds Python's lock while it writes, would have the file read again for
    its checksum, and hides a full disk's error number.

    Args:
        path: the file; must not exist.
        skeleton: what goes into the metadata as JSON.
        tensors: contiguous CPU tensors by name.

    Raises:
        OSError: naming the file.
        TypeError: for a dtype that safetensors has no name for.
    """
    header: dict[str, Any] = {"__metadata__": {"state": json.dumps(skeleton, allow_nan=False)}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"state {name} cannot be saved: safetensors has no dtype {tensor.dtype}")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    try:
        with path.open("xb") as file:
            head = memoryview(len(text).to_bytes(8, "little") + text)
            for block in (head, *map(_bytes, tensors.values())):
                for start in range(0, len(block), _CHUNK_BYTES):
                    chunk = block[start : start + _CHUNK_BYTES]
                    digest.update(chunk)
                    file.write(chunk)
            num_bytes = file.tell()
            sync_file(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    return Written(num_bytes, digest.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_state(path: Path) -> Any:
    """Reads what :func:`write_state` wrote of a state.

    Raises:
        RefusedError: if it cannot be read.
    """
    try:
        with open_tensors(path) as opened:
            skeleton = parse_json((opened.metadata() or {})["state"])
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        return unflatten_state(skeleton, tensors)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        # torch adds a stack of C++ to what it says.
        raise RefusedError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from None


def measure_file(path: Path, *, sync: bool = False) -> Written:
    """Returns size and SHA-256 of a file.

    Args:
        path: the file.
        sync: force it to the disk first.

    Raises:
        OSError: if it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if sync:
            sync_file(file)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return Written(file.tell(), digest.hexdigest())


def add_file(folder: Path, source: Path) -> None:
    """Gives a checkpoint that is being written a file that is never changed in place: a second name for it, or a copy."""
    try:
        os.link(source, folder / source.name)
    except OSError:
        shutil.copyfile(source, folder / source.name)


def commit(part: Path, final: Path, files: dict[str, Written], content: dict[str, Any]) -> None:
    """Makes a complete part directory a checkpoint: its manifest, then its name.

    Args:
        part: the part directory.
        final: the checkpoint; one of that name is replaced.
        files: every file of it.
        content: what the manifest says besides.

    Raises:
        OSError: naming the file; the part directory stays.
    """
    body = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "versions": {"hvd_adaptive": __version__, "torch": torch.__version__, "python": platform.python_version()},
        **content,
        "files": {
            name: {"bytes": item.num_bytes, "sha256": item.sha256} for name, item in sorted(files.items())
        },
    }
    manifest = part / MANIFEST
    try:
        for name in files:
            # Another host may have made a folder of its own, where a disk that all had shared is gone.
            (part / name).stat()
        with manifest.open("x", encoding="utf-8") as file:
            json.dump({**body, "sha256": _digest(body)}, file, indent=1)
            sync_file(file)
        sync_directory(part)
        if final.exists():
            remove(final)
        part.rename(final)
        sync_directory(final.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(error.filename or manifest)) from None


def write_commit(folder: Path, number: int, skeleton: Any, tensors: dict[str, Tensor], *, world_size: int) -> None:
    """Writes a checkpoint of a script's state, by the one rank whose state is the state of all.

    Args:
        folder: of the commits; made where it is missing.
        number: of the commit, >= 1; one of that number is replaced.
        skeleton: of `flatten_state`.
        tensors: of `flatten_state`.
        world_size: the number of ranks.

    Raises:
        OSError: naming the file.
        TypeError: as `write_state`.
    """
    final = folder / directory_name(number, COMMIT)
    part = part_of(final, 1)
    remove(part)
    try:
        part.mkdir(parents=True)
        files = {GLOBAL_FILE: write_state(part / GLOBAL_FILE, skeleton, tensors)}
        commit(part, final, files, {"commit": number, "world_size": world_size})
    finally:
        remove(part)


def read_commit(path: Path) -> Any:
    """Returns the state in a commit.

    Raises:
        RefusedError: if it cannot be used.
    """
    if path.is_file():
        raise RefusedError(f"{path} was written by an older version of hvd_adaptive, and this one cannot read it")
    check_files(path, read_manifest(path, _COMMIT_FIELDS))
    return read_state(path / GLOBAL_FILE)


def remove(path: Path) -> None:
    """Removes a checkpoint or a part of one; a removal that is cut short leaves nothing that looks like a checkpoint."""
    if not path.name.startswith("."):
        hidden = path.with_name(f".part-removed-{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        path = hidden
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def remove_parts(folder: Path) -> None:
    """Removes what interrupted runs left half written."""
    for path in folder.glob(".part-*"):
        remove(path)


def prune(folder: Path, keep: int, kind: str = ROUND) -> None:
    """Removes all but the newest ``keep`` checkpoints or commits."""
    for path in find_checkpoints(folder, kind=kind)[keep:]:
        remove(path)


def read_manifest(path: Path, fields: dict[str, type] = _RUN_FIELDS) -> dict[str, Any]:
    """Reads and checks a checkpoint's manifest.

    Args:
        path: the checkpoint.
        fields: what it must say besides its files.

    Raises:
        RefusedError: if there is none, it is damaged, or it is of a newer or foreign format.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path / MANIFEST} cannot be read: {error}") from None
    try:
        manifest = parse_json(text)
    except ValueError as error:
        raise RefusedError(f"{path / MANIFEST} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RefusedError(f"{path} is no checkpoint of hvd_adaptive")
    version = manifest.get("version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise RefusedError(
            f"{path} has checkpoint format {version}, newer than {FORMAT_VERSION}, which this version reads: "
            "update hvd_adaptive"
        )
    if manifest.pop("sha256", None) != _digest(manifest):
        raise RefusedError(f"{path / MANIFEST} is damaged: its checksum does not match")
    _check_shape(path, manifest, fields)
    return manifest


def _check_shape(path: Path, manifest: dict[str, Any], fields: dict[str, type]) -> None:
    """Raises RefusedError for a manifest that is whole, but not one of :func:`commit`'s."""
    wrong = [name for name, kind in {**fields, "files": dict}.items() if not isinstance(manifest.get(name), kind)]
    if not wrong and manifest["world_size"] < 1:
        wrong = ["world_size"]
    for name, item in {} if wrong else manifest["files"].items():
        whole = isinstance(item, dict) and isinstance(item.get("bytes"), int) and isinstance(item.get("sha256"), str)
        # A name, never a way to another folder.
        if not whole or name != os.path.basename(name) or name in ("", ".", ".."):
            wrong.append(f"files: {name!r}")
    if wrong:
        raise RefusedError(f"{path / MANIFEST} is none of hvd_adaptive's: {', '.join(wrong[:3])} is missing or no such thing")


def check_files(path: Path, manifest: dict[str, Any], names: list[str] | None = None) -> None:
    """Compares files of a checkpoint with its manifest.

    Args:
        path: the checkpoint.
        manifest: its manifest.
        names: the files to compare; None: all.

    Raises:
        RefusedError: naming the first file that is missing, cut short or damaged.
    """
    for name in manifest["files"] if names is None else names:
        expected = manifest["files"].get(name)
        if expected is None:
            raise RefusedError(f"{path / MANIFEST} does not list {name}")
        try:
            found = measure_file(path / name)
        except OSError as error:
            raise RefusedError(f"{path / name} cannot be read: {error.strerror}") from None
        if found.num_bytes != expected["bytes"]:
            raise RefusedError(f"{path / name} has {found.num_bytes} bytes instead of {expected['bytes']}")
        if found.sha256 != expected["sha256"]:
            raise RefusedError(f"{path / name} is damaged: its checksum does not match")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
