from __future__ import annotations

import functools
import itertools
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import wait_until

from hvd_adaptive.comm import heartbeat, host_store
from hvd_adaptive.comm.heartbeat import Heartbeat
from hvd_adaptive.comm.seal import UnsealedError
from hvd_adaptive.comm.side_channel import SideChannel
from hvd_adaptive.comm.store_address import PROBE_S, find_server, own_addresses, serve
from hvd_adaptive.comm.watched_world import WatchedWorld


class Ranks:
    """Several ranks as threads of this process; each function is called with every rank's channel at once."""

    def __init__(self, world_size, *, same_host=True, stall_limit_s=20.0, hosts=None):
        self.world_size = world_size
        self.pool = ThreadPoolExecutor(world_size)
        self.barrier, self.box = threading.Barrier(world_size), {}

        def open_channel(rank):
            return SideChannel(
                rank=rank,
                world_size=world_size,
                gather=lambda value: self.gather(rank, value),
                same_host=same_host,
                stall_limit_s=stall_limit_s,
                hosts=hosts,
            )

        self.channels = list(self.pool.map(open_channel, range(world_size)))

    def gather(self, rank, value):
        self.box[rank] = value
        self.barrier.wait()
        values = [self.box[other] for other in range(self.world_size)]
        self.barrier.wait()
        return values

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
    claims = ranks.run(lambda channel: [channel.store.add("cursor", 3) for _ in range(200)])
    assert sorted(itertools.chain(*claims)) == list(range(3, 3 * 200 * world_size + 1, 3))


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_counters_and_deletion(make_ranks, world_size):
    ranks = make_ranks(world_size)
    first, last = ranks.channels[0], ranks.channels[-1]
    assert first.store.compare_set("key", "", "value") == "value"
    assert last.store.compare_set("key", "another", "new") == "value"
    assert last.store.add("n", -5) == -5
    assert first.store.add("n", 0) == -5
    assert first.store.add("large", 2**62) == 2**62
    last.store.forget("n")
    last.store.forget("never there")
    assert first.store.add("n", 1) == 1


def wait_for_arrivals(store, number, num_ranks):
    """Waits until so many ranks have arrived at a rendezvous; the low bits of its counter count them."""
    wait_until(lambda: store.add(f"arrive/{number}", 0) % (1 << 20) >= num_ranks)


def test_arrive_waits_for_the_last_and_says_how_long(make_ranks):
    ranks = make_ranks(3)
    store = ranks.channels[2].connect()

    def arrive(channel):
        found = []
        for number in range(1, 6):
            if channel.rank == 2:
                wait_for_arrivals(store, number, 2)
                time.sleep(0.1)
            begin = time.monotonic()
            found.append((begin, channel.arrive("here"), time.monotonic()))
        return found

    late = []
    for meeting in zip(*ranks.run(arrive), strict=True):
        begun, waited, woken = zip(*meeting, strict=True)
        # The others had arrived before the last one slept, and nobody goes on before it comes.
        assert min(waited[:2]) >= 0.1 and min(woken) >= begun[2]
        assert all(seconds <= end - begin for begin, seconds, end in zip(begun, waited, woken, strict=True))
        late.append(max(woken) - begun[2])
    # A busy machine holds up a rank now and then, but not each time.
    assert min(late) < 0.2


HOSTS = ["a", "a", "b", "a", "b", "c"]  # a host with one rank, and ranks that do not follow each other


@pytest.fixture
def few(monkeypatch, request):
    """Few ranks meet as many do: in hosts, and where it is asked for in two districts of them."""
    monkeypatch.setattr(host_store, "_FROM_RANKS", 6)
    monkeypatch.setattr(host_store, "_MOST_HOSTS", 2 if getattr(request, "param", False) else 64)


with_and_without_districts = pytest.mark.parametrize("few", [False, True], indirect=True)


@with_and_without_districts
def test_hosts_meet_by_themselves_first(make_ranks, few):
    ranks = make_ranks(6, hosts=HOSTS)
    store = ranks.channels[0].connect()

    def arrive(channel):
        for number in range(1, 6):
            if channel.rank == 4:
                # Those of host a wait in the district that host b is of, where there are districts.
                wait_for_arrivals(store, number, 1)
                time.sleep(0.05)
                late.append(time.monotonic())
            channel.arrive("here")
            woken.append((number, time.monotonic()))
        return channel.host.ranks

    late, woken = [], []
    assert ranks.run(arrive) == [[0, 1, 3], [0, 1, 3], [2, 4], [0, 1, 3], [2, 4], [5]]
    assert all(seconds >= late[number - 1] for number, seconds in woken) and len(woken) == 30
    assert store.num_keys() < 12


def test_a_hosts_counters_and_values_are_its_own(make_ranks, few):
    ranks = make_ranks(6, hosts=HOSTS)
    assert sorted(ranks.run(lambda channel: channel.host.add("n", 1))) == [1, 1, 1, 2, 2, 3]
    ranks.run(lambda channel: channel.arrive("added"))
    assert ranks.run(lambda channel: channel.host.add("n", 0)) == [3, 3, 2, 3, 2, 1]
    assert ranks.channels[0].store.add("n", 0) == 0
    won = ranks.run(lambda channel: channel.host.compare_set("key", "", f"rank {channel.rank}"))
    assert won[0] == won[1] == won[3] and won[2] == won[4] and won[5] == "rank 5"
    ranks.channels[3].host.forget("n")
    assert ranks.channels[0].host.add("n", 0) == 0


@with_and_without_districts
@pytest.mark.parametrize("stray", [0, 4])
def test_hosts_that_meet_in_different_places_all_raise(make_ranks, stray, few):
    def arrive(channel):
        with pytest.raises(RuntimeError, match=r"arrived at '.*' while another rank arrived elsewhere"):
            channel.arrive("there" if channel.rank == stray else "here")

    make_ranks(6, hosts=HOSTS).run(arrive)


def test_districts_are_reached_at_real_addresses(make_ranks, monkeypatch):
    monkeypatch.setattr(host_store, "_MOST_HOSTS", 2)
    ranks = make_ranks(5, hosts=list("abcde"), same_host=False)
    assert [host_store.district(rank, list("abcde")) for rank in (0, 2, 4)] == [[0, 1, 2], [0, 1, 2], [3, 4]]
    assert ranks.channels[0].host is None
    for _ in range(3):
        ranks.run(lambda channel: channel.arrive("here"))


def test_every_rank_hears_that_a_host_has_no_store(make_ranks, monkeypatch, few):
    def refuse(*, same_host, world_size):
        if world_size == 2:
            raise RuntimeError("no room")
        return serve(same_host=same_host, world_size=world_size)

    monkeypatch.setattr("hvd_adaptive.comm.host_store.serve", refuse)
    with pytest.raises(RuntimeError, match="rank 2: no room"):
        make_ranks(6, hosts=HOSTS)


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
    wait_for_arrivals(ranks.channels[1].connect(), 1, 1)
    assert ranks.channels[0].store.add("cursor", 1) == 1
    assert not waiting.done()
    ranks.channels[1].arrive("here")
    assert waiting.result(60) > 0


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
    channel = SideChannel(rank=0, world_size=1, gather=pytest.fail, same_host=True, stall_limit_s=1)
    assert channel.arrive("here") == 0.0
    channel.close()


@pytest.mark.parametrize(
    ("rank", "world_size", "limit"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 0, 1.0), (0, 1, 0.0)]
)
def test_bad_arguments(rank, world_size, limit):
    with pytest.raises(ValueError, match=r"rank|stall_limit_s"):
        SideChannel(
            rank=rank, world_size=world_size, gather=lambda v: [v], same_host=True, stall_limit_s=limit
        )


def test_ranks_on_several_hosts_meet_at_a_real_address(make_ranks):
    try:
        own_addresses()
    except RuntimeError as error:
        pytest.skip(f"no network: {error}")
    ranks = make_ranks(2, same_host=False)
    assert not ranks.channels[1]._world.address[0].startswith("127.")
    assert ranks.run(lambda channel: channel.arrive("here") < 60) == [True, True]


def test_another_program_at_the_address_is_passed_over():
    store, offer = serve(same_host=True, world_size=2)
    assert find_server(offer._replace(addresses=["203.0.113.1.invalid", "127.0.0.1"]), 1, server="it") == "127.0.0.1"
    with pytest.raises(RuntimeError, match=r"rank 1 on .*cannot reach.*another program answers.*firewall"):
        find_server(offer._replace(secret="other"), 1, server="it")
    del store


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    _, offer = serve(same_host=True, world_size=2)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="cannot reach"):
        find_server(offer._replace(port=port), 1, server="it")
    assert time.monotonic() - begin < 2 * PROBE_S


def test_using_it_after_close(make_ranks):
    ranks = make_ranks(2)
    ranks.run(lambda channel: channel.close())
    with pytest.raises(RuntimeError, match="is closed"):
        ranks.channels[1].store.add("n", 1)


RANK = """
import os, sys, time
from mpi4py import MPI
from hvd_adaptive.comm import side_channel
from hvd_adaptive.comm.heartbeat import Heartbeat
from hvd_adaptive.comm.seal import UnsealedError
from hvd_adaptive.comm.side_channel import SideChannel
comm = MPI.COMM_WORLD
side = SideChannel(rank=comm.rank, world_size=comm.size, gather=comm.allgather, same_host=True,
                   stall_limit_s=60)
side.store.add("n", 1)
side.arrive("end")
time.sleep(0.3 * comm.rank)
side.close()
"""


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_proper_end_is_silent(run_job, num_ranks):
    result = run_job(
        [sys.executable, "-c", RANK], np=num_ranks, env={"TORCH_CPP_LOG_LEVEL": "WARNING"}, timeout=200
    )
    assert result.returncode == 0, result.describe()
    assert result.stderr == ""


def test_the_servers_port_is_only_on_the_loopback_interface(make_ranks):
    ranks = make_ranks(2)
    _, port = ranks.channels[0]._world.address
    listening = (
        subprocess.run(["ss", "-ltnH"], capture_output=True, text=True) if os.path.exists("/bin/ss") else None
    )
    if listening is None:
        pytest.skip("ss (iproute2) is not installed")
    hosts = re.findall(rf"(\S+):{port}\s", listening.stdout)
    assert hosts
    assert all("127.0.0.1" in host for host in hosts)


def test_a_stranger_in_the_store_is_not_believed(make_ranks):
    ranks = make_ranks(2)
    first, last = ranks.channels
    store = last.connect()
    assert first.store.compare_set("key", "", "true") == "true"
    stored = bytes(store.get("user/key"))

    def forge(key: str, value: bytes) -> None:
        store.set(key, value)
        # The store does not answer to set, so a rank's request could come first.
        assert bytes(store.get(key)) == value

    for forged in (b"false", stored[:-4] + b"fals", b"", stored[:10]):
        forge("user/key", forged)
        with pytest.raises(UnsealedError, match="that no rank of this job has put there"):
            last.store.compare_set("key", "false", "new")
    # What is right under one key is not under another.
    forge("user/other", stored)
    with pytest.raises(UnsealedError):
        last.store.compare_set("other", "false", "new")
    forge("user/vote", b"mine")
    with pytest.raises(UnsealedError):
        first.store.compare_set("vote", "", "ours")
    assert first.store.compare_set("free", "", "ours") == last.store.compare_set("free", "", "theirs") == "ours"
    assert last.store.compare_set("free", "ours", "theirs") == "theirs"


def test_ranks_do_not_leave_a_rendezvous_for_a_stranger(make_ranks):
    ranks = make_ranks(2)
    ranks.channels[1].connect().set("arrive/1/go", "together")
    with pytest.raises(UnsealedError, match="arrive/1/go"):
        ranks.channels[0].arrive("here")


def test_every_rank_hears_that_rank_0_cannot_serve(make_ranks, monkeypatch):
    def fail(**options):
        raise RuntimeError("no files left")

    monkeypatch.setattr("hvd_adaptive.comm.host_store.serve", fail)
    with pytest.raises(RuntimeError, match=r"^no files left"):
        make_ranks(2)


def test_a_strangers_beat_is_no_sign_of_life(make_ranks, caplog):
    ranks = make_ranks(2)
    failed = threading.Event()
    beats = [
        Heartbeat(channel, rank=rank, host="here", pid=os.getpid(), limit_s=1.0, abort=failed.set)
        for rank, channel in enumerate(ranks.channels)
    ]
    store = ranks.channels[1].connect()
    own = beats[0]._read_beat("beat/1", b"", None)
    beats[1]._beat(store)
    true = beats[0]._read_beat("beat/1", bytes(store.get("beat/1")), own)
    assert own is None and true is not None and true.count == 1
    for forged in (b"{}", true.encode(), b"0" * 32 + true.encode()):
        assert beats[0]._read_beat("beat/1", forged, true) is true
    # Nor is one that is right under another rank's key.
    assert beats[0]._read_beat("beat/0", bytes(store.get("beat/1")), None) is None
    assert caplog.text.count("that no rank of this job has put there") == 1


@pytest.fixture
def many_files():
    """More open files than select() can tell apart, as a rank has that maps many shards of data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LIMITED = """
import resource, sys
hard, world_size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
from hvd_adaptive.comm.store_address import serve
serve(same_host=True, world_size=world_size)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "world_size", "said"),
    [
        (130, 4, "130"),
        (1000, 4, "528"),
        (90, 4, "the limit is 90: raise it (`ulimit -Hn`, LimitNOFILE of the scheduler's daemon)\n"),
        (200, 32, "needs 228 open files, 4 for the connections of each of 32 ranks and 100 of its own, and the limit is 200"),
        (200, 32, "or start fewer ranks"),
    ],
)
def test_a_limit_of_open_files(hard, world_size, said):
    command = [sys.executable, "-c", LIMITED, str(hard), str(world_size)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said in run.stdout + run.stderr and (run.returncode == 0) is said.isdigit()


def make_beats(ranks, abort):
    return [
        Heartbeat(channel, rank=rank, host="here", pid=os.getpid(), limit_s=4.0, abort=abort)
        for rank, channel in enumerate(ranks.channels)
    ]


def test_a_rank_with_many_open_files_goes_on_beating(many_files, make_ranks):
    ranks = make_ranks(2)
    beats = make_beats(ranks, abort=os.abort)
    list(ranks.pool.map(Heartbeat.start, beats))
    assert beats[1]._lifeline.fileno() >= 1024
    deadline = time.monotonic() + 3.0
    while beats[1]._num_beats < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert beats[1]._num_beats >= 3
    list(ranks.pool.map(Heartbeat.leave, beats))


def test_a_heartbeat_that_fails_says_what_it_failed_of(make_ranks, monkeypatch):
    said, ended = [], threading.Event()
    monkeypatch.setattr(heartbeat, "end_job", lambda text, abort: (said.append(text), ended.set()))
    ranks = make_ranks(2)
    beats = make_beats(ranks, abort=os.abort)
    list(ranks.pool.map(Heartbeat.start, beats))
    beats[1].progress(7)
    assert ended.wait(3.0)
    assert list(ranks.pool.map(Heartbeat.abandon, beats)) == [True, True]
    (text,) = said
    assert "the heartbeat of rank 1 on here" in text and "TypeError: 'int' object is not subscriptable" in text


@pytest.mark.parametrize("end", [WatchedWorld.leave, WatchedWorld.abandon])
def test_the_end_of_a_forked_child_is_not_its_ranks(make_ranks, end):
    ranks = make_ranks(2)

    def join(rank):
        end_job, gather = os.abort, functools.partial(ranks.gather, rank)
        world = WatchedWorld(rank=rank, hosts=["here"] * 2, gather=gather, end=end_job, stall_limit_s=20.0)
        world.start()
        return world

    worlds = list(ranks.pool.map(join, range(2)))
    if (pid := os.fork()) == 0:
        # As atexit does in a child that ends by sys.exit().
        try:
            end(worlds[0])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    for name in ("first", "second"):
        list(ranks.pool.map(lambda world, name=name: world.rendezvous(name), worlds))
    list(ranks.pool.map(WatchedWorld.leave, worlds))
