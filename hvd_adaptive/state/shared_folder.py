"""Whether all ranks see one folder as the same one."""

from __future__ import annotations

import secrets
from pathlib import Path

from hvd_adaptive.comm.protocols import Collectives, agree
from hvd_adaptive.state import checkpoint


def check_shared_folder(folder: Path, transport: Collectives, remedy: str) -> None:
    """Makes a folder and tries whether every rank can write where rank 0 can. COLLECTIVE.

    Args:
        folder: for checkpoints or commits.
        transport: the world.
        remedy: what else to name, for the error.

    Raises:
        AgreedError: naming the host that cannot.
    """
    token = transport.allgather_object(secrets.token_hex(8))[0]
    probe = folder / f".part-probe-{token}"
    error = None
    if transport.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
        except FileExistsError:
            error = f"checkpoint folder {folder} is a file, and not a folder: give another name"
        except OSError as failure:
            error = f"checkpoint folder {folder} cannot be written: {failure}"
    agree(transport, error)
    try:
        (probe / str(transport.rank)).touch()
    except OSError as failure:
        error = f"checkpoint folder {folder}: {transport.host} cannot write where rank 0 can ({failure}); name a {remedy}"
    agree(transport, error)
    if transport.rank == 0:
        checkpoint.remove(probe)
