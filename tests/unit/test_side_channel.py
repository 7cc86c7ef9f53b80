from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_adaptive.transport.side_channel import SideChannel
from hvd_adaptive.transport.store_address import PROBE_S, find_server, own_addresses, serve


class Ranks:
    """Several ranks as threads of this process; each function is called with every rank's channel at once."""

    def __init__(self, world_size, *, same_host=True, stall_limit_s=20.0):
        self.world_size = world_size
        self.pool = ThreadPoolExecutor(world_size)
        barrier, box = threading.Barrier(world_size), {}

        def broadcast(rank, value):
            if rank == 0:
                box["value"] = value
            barrier.wait()
            return box["value"]

        def open_channel(rank):
            return SideChannel(
                rank=rank,
                world_size=world_size,
                broadcast=lambda value: broadcast(rank, value),
                same_host=same_host,
                stall_limit_s=stall_limit_s,
            )

        self.channels = list(self.pool.map(open_channel, range(world_size)))

    def run(self, function):
        return list(self.pool.map(function, self.channels))

    def close(self):
        self.run(lambda channel: channel.close())
        self.pool.shutdown()


@pytest.fixture
def make_ranks():
    made = []

    def make(*args, **options):
        made.append(Ranks(*args, **options))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_claims_are_disjoint_and_gapless(make_ranks, world_size):
    ranks = make_ranks(world_size)
    claims = ranks.run(lambda channel: [channel.add("cursor", 3) for _ in range(200)])
    assert sorted(itertools.chain(*claims)) == list(range(3, 3 * 200 * world_size + 1, 3))


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_counters_and_deletion(make_ranks, world_size):
    ranks = make_ranks(world_size)
    first, last = ranks.channels[0], ranks.channels[-1]
    value = bytes(range(256))
    first.set("key", value)
    assert last.get("key") == value
    assert last.add("n", -5) == -5
    assert first.add("n", 0) == -5
    assert first.add("large", 2**62) == 2**62
    last.delete("n")
    last.delete("never there")
    assert first.add("n", 1) == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_key_that_nobody_sets(make_ranks, world_size, capfd):
    ranks = make_ranks(world_size, stall_limit_s=0.3)
    with pytest.raises(RuntimeError, match=r"no rank set 'absent' within 0\.3 s"):
        ranks.channels[-1].get("absent")
    capfd.readouterr()


def test_arrive_waits_for_the_last_and_says_how_long(make_ranks):
    ranks = make_ranks(3)

    def arrive(channel):
        time.sleep(0.2 * channel.rank)
        return channel.arrive("here"), time.monotonic()

    waited, woken = zip(*ranks.run(arrive), strict=True)
    assert 0.35 < waited[0] < 0.7
    assert 0.15 < waited[1] < 0.5
    assert waited[2] < 0.1
    assert max(woken) - min(woken) < 0.1


def test_arrive_sleeps(make_ranks):
    ranks = make_ranks(2)

    def arrive(channel):
        if channel.rank == 1:
            time.sleep(1.0)
        before = time.thread_time()
        channel.arrive("here")
        return time.thread_time() - before

    assert max(ranks.run(arrive)) < 0.05


def test_a_claim_goes_through_while_the_same_rank_waits(make_ranks):
    ranks = make_ranks(2)
    waiting = ranks.pool.submit(ranks.channels[0].arrive, "here")
    time.sleep(0.1)
    assert ranks.channels[0].add("cursor", 1) == 1
    assert not waiting.done()
    ranks.channels[1].arrive("here")
    assert waiting.result(5) > 0.05


def test_ranks_that_meet_in_different_places_all_raise(make_ranks):
    ranks = make_ranks(3)

    def arrive(channel):
        with pytest.raises(RuntimeError, match="arrived elsewhere"):
            channel.arrive("left" if channel.rank == 1 else "right")
        return channel.arrive("together again")

    assert len(ranks.run(arrive)) == 3


def test_a_long_run_does_not_grow_the_store(make_ranks):
    ranks = make_ranks(2)
    store = ranks.channels[0].connect()
    sizes = []
    for _ in range(3):
        ranks.run(lambda channel: [channel.arrive("again") for _ in range(20)])
        sizes.append(store.num_keys())
    assert sizes[0] == sizes[1] == sizes[2]


def test_alone_needs_no_server():
    channel = SideChannel(rank=0, world_size=1, broadcast=pytest.fail, same_host=True, stall_limit_s=1)
    assert channel.arrive("here") == 0.0
    with pytest.raises(RuntimeError, match="one rank"):
        channel.connect()
    channel.close()


@pytest.mark.parametrize(
    ("rank", "world_size", "limit"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 0, 1.0), (0, 1, 0.0)]
)
def test_bad_arguments(rank, world_size, limit):
    with pytest.raises(ValueError, match=r"rank|stall_limit_s"):
        SideChannel(
            rank=rank, world_size=world_size, broadcast=lambda v: v, same_host=True, stall_limit_s=limit
        )


def test_ranks_on_several_hosts_meet_at_a_real_address(make_ranks):
    try:
        own_addresses()
    except RuntimeError as error:
        pytest.skip(f"no network: {error}")
    ranks = make_ranks(2, same_host=False)
    assert not ranks.channels[1]._address.startswith("127.")
    assert ranks.run(lambda channel: channel.arrive("here") < 5) == [True, True]


def test_another_program_at_the_address_is_passed_over():
    store, offer = serve(same_host=True, world_size=2)
    assert find_server(offer._replace(addresses=["203.0.113.1.invalid", "127.0.0.1"]), 1) == "127.0.0.1"
    with pytest.raises(RuntimeError, match=r"rank 1 on .*cannot reach.*another program answers.*firewall"):
        find_server(offer._replace(token="other"), 1)
    del store


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    _, offer = serve(same_host=True, world_size=2)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="cannot reach"):
        find_server(offer._replace(port=port), 1)
    assert time.monotonic() - begin < 2 * PROBE_S


def test_using_it_after_close(make_ranks):
    ranks = make_ranks(2)
    ranks.run(lambda channel: channel.close())
    with pytest.raises(RuntimeError, match="is closed"):
        ranks.channels[1].add("n", 1)


RANK = """
import os, sys, time
from mpi4py import MPI
from hvd_adaptive.transport.side_channel import SideChannel
comm = MPI.COMM_WORLD
side = SideChannel(rank=comm.rank, world_size=comm.size, broadcast=comm.bcast, same_host=True,
                   stall_limit_s=10)
side.add("n", 1)
side.arrive("end")
time.sleep(0.3 * comm.rank)
side.close()
"""


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_proper_end_is_silent(run_job, num_ranks):
    result = run_job(
        [sys.executable, "-c", RANK], np=num_ranks, env={"TORCH_CPP_LOG_LEVEL": "WARNING"}, timeout=60
    )
    assert result.returncode == 0, result.describe()
    assert result.stderr == ""


def test_the_servers_port_is_only_on_the_loopback_interface(make_ranks):
    ranks = make_ranks(2)
    port = ranks.channels[0]._port
    listening = (
        subprocess.run(["ss", "-ltnH"], capture_output=True, text=True) if os.path.exists("/bin/ss") else None
    )
    if listening is None:
        pytest.skip("ss (iproute2) is not installed")
    hosts = re.findall(rf"(\S+):{port}\s", listening.stdout)
    assert hosts
    assert all("127.0.0.1" in host for host in hosts)
