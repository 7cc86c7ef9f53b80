"""Ranks of a wrapped script that share a GPU: found before the script's first exchange of CUDA tensors."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from torch import Tensor

from hvd_adaptive.comm.shared_gpus import gpu_of, sharing_notice
from hvd_adaptive.comm.through_host import host_route

log = logging.getLogger(__name__)


def prepare_for_shared_gpus() -> None:
    """Makes the way through host memory, where Horovod has NCCL; nothing takes it yet."""
    import horovod.torch as hvd

    if hvd.nccl_built():
        host_route()


def watch_for_shared_gpus(note: Callable[[str], None]) -> None:
    """Has CUDA tensors go through host memory if the first one shows that ranks share a GPU. After hvd.init().

    A script chooses its GPU after hvd.init(), so nothing is known before it uses it. Without NCCL in Horovod, or with one rank on
    each host, there is nothing to find.

    Args:
        note: takes down what people should know.
    """
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    one_each = hvd.local_size() == 1 and mpi_ops._basics.is_homogeneous()
    if not hvd.nccl_built() or hvd.size() == 1 or one_each:
        return
    route = host_route()

    def first_use(tensor: Tensor) -> None:
        places = hvd.allgather_object((socket.gethostname(), gpu_of(tensor.device)), name="hvd_adaptive.gpus")
        notice = sharing_notice(places)
        if notice is None:
            return
        route.is_taken = True
        note(notice)
        if hvd.rank() == 0:
            log.warning(notice)

    route.first_use = first_use
