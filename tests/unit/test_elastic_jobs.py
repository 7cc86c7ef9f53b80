"""What a supervisor knows of a script: its events, its commits, when it gives up; and the ranks' output on its way to people."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.cluster.elastic_jobs import EVENT, Launch, ScriptJob, TrainJob, job_name
from hvd_adaptive.cluster.last_checkpoint import COMMIT, directory_name, newest_checkpoint, number_of
from hvd_adaptive.cluster.output import Lines
from hvd_adaptive.state.folder_owner import FolderOwner


def commit_name(number: int) -> str:
    return directory_name(number, COMMIT)


def event(name: str, **content: Any) -> str:
    return EVENT + json.dumps({"event": name, **content})


@pytest.mark.parametrize("seed", range(20))
def test_output_is_shown_as_it_comes_but_for_what_is_meant_for_the_supervisor(seed: int) -> None:
    said = f"a\n 10%|#\r 20%|##{event('step')}\nhvd-adaptive: b\n{event('x')}\nhvd-\n\nlast hvd-adaptive-ev".encode()
    shown = b"a\n 10%|#\r 20%|##hvd-adaptive: b\nhvd-\n\nlast hvd-adaptive-ev"
    heard: list[str] = []

    def keep(line: str) -> bool:
        heard.append(line)
        return EVENT in line

    lines, chance, rest, out = Lines(keep, EVENT), random.Random(seed), said, b""
    while rest:
        size = chance.randint(1, 12)
        out += lines.feed(rest[:size])
        rest = rest[size:]
    assert out == b"a\n 10%|#\r 20%|##hvd-adaptive: b\nhvd-\n\nlast "
    assert out + lines.end() == shown
    assert heard == said.decode().split("\n")
    # What has no end of line is not held back.
    assert Lines(keep, EVENT).feed(b"50%|####") == b"50%|####"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    return tmp_path / "memory", tmp_path / "disk"


def launch(number: int = 2, num_before: int = 0) -> Launch:
    return Launch(number, {"a": 1}, "start", [], num_before, {})


def test_commits_and_checkpoints_are_told_by_their_names(tmp_path: Path) -> None:
    names = ("commit-00000002", "commit-00000010", "commit-00000009.safetensors", "commit-x", "round-9", "round-00000010")
    for name in (*names, ".part-1-commit-00000011"):
        (tmp_path / name).mkdir()
    newest, checkpoint = newest_checkpoint(tmp_path / "none", tmp_path, kind=COMMIT), newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == commit_name(10) and number_of(newest) == 10
    assert checkpoint is not None and checkpoint.name == "round-00000010" and number_of(checkpoint) == 10


def test_a_script_without_commits_gets_on_by_stepping_for_a_while_and_not_by_failing(folders: tuple[Path, Path]) -> None:
    job = ScriptJob([], ["x.py"], None, folders[0])
    assert job.beginning(launch()) is None and not job.stops_in_order
    assert job.hear("10%|" + event("step", commit=0, seconds={"imports": 1.5}))
    beginning = job.beginning(launch())
    assert beginning is not None and beginning.parts_s == {"imports": 1.5} and beginning.record == {"commit": 0}
    assert not job.has_got_on(launch(), 1, blamed=True)
    job.hear(event("steady"))
    assert job.has_got_on(launch(), 1, blamed=False)
    # The script ends itself without an error, and so that nobody hears that it is finished: os._exit(0).
    assert not job.has_got_on(launch(), 0, blamed=False) and job.has_got_on(launch(), 0, blamed=True)
    job.hear(event("raised"))
    # Unless another's end was first.
    assert not job.has_got_on(launch(), 1, blamed=False) and job.has_got_on(launch(), 1, blamed=True)
    assert not job.hear("a line of the script's") and job.hear(EVENT + "{cut") and job.hear(EVENT + "[]")
    assert not job.is_finished(0) and not job.was_stopped(75)
    job.hear(event("finished"))
    assert job.is_finished(0) and not job.is_finished(1)
    assert job.arguments(2, local=True) and job.beginning(launch(3)) is None and not job.is_finished(0)


def test_a_script_with_commits_gets_on_by_new_ones(folders: tuple[Path, Path]) -> None:
    memory, disk = folders
    job = ScriptJob(["--interval", "5"], ["x.py", "--elastic"], disk, memory)
    (disk / commit_name(4)).mkdir()
    assert job.num_done() == 4
    job.hear(event("commits"))
    job.hear(event("steady"))
    assert job.stops_in_order and not job.has_got_on(launch(num_before=4), 1, blamed=True)
    (disk / commit_name(5)).mkdir()
    assert job.has_got_on(launch(num_before=4), 1, blamed=False) and commit_name(5) in job.saved()
    job.hear(event("stopped"))
    assert job.was_stopped(75) and not job.was_stopped(1)
    # In a folder that was chosen, so not to memory, wherever the ranks are.
    where = ["run", "--launch", "7", "--commit-dir", str(disk), "--job", job_name(memory)]
    assert job.arguments(7, local=True) == [*where, "--interval", "5", "x.py", "--elastic"]
    # That it commits is known at the next start, too, and nothing else is.
    assert job.stops_in_order and not job.was_stopped(75)
    # Until it has the folder, a refusal may say that what is there is to be removed.
    assert job.close(finished=False) == ""
    job.hear(event("has folder"))
    assert f"--commit-dir {disk} goes on from its commit 5" in job.close(finished=False)
    (disk / (".part-1-" + commit_name(6))).mkdir()
    (disk / "restarts.jsonl").touch()
    assert job.close(finished=True) == "" and [path.name for path in disk.iterdir()] == ["restarts.jsonl"]


def test_a_script_that_ends_itself_within_mpi_is_not_started_again_for_ever(folders: tuple[Path, Path]) -> None:
    job = ScriptJob([], ["x.py"], None, folders[0])
    for line in (event("step", commit=0, seconds={}), event("steady"), "node alpha exiting improperly. There are three reasons"):
        job.hear(line)
    assert not job.hear("node alpha exiting improperly. There are three reasons")
    assert not job.has_got_on(launch(), 1, blamed=False) and job.has_got_on(launch(), 1, blamed=True)


def test_a_training_gets_on_by_new_checkpoints_and_not_by_the_same_merge_again(tmp_path: Path) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    memory.mkdir()
    job = TrainJob([], run, None, memory)

    def begin(number: int, *, first: int) -> Launch:
        with (run / "rounds.jsonl").open("a") as file:
            file.write(json.dumps({"round": first, "start": {"launch": number, "seconds": {}}}) + "\n")
        one = launch(number)
        one.has_begun = job.beginning(one) is not None
        return one

    assert not job.has_got_on(launch(1), 1, blamed=True)
    assert not job.has_got_on(begin(1, first=0), 1, blamed=False)
    (memory / directory_name(1)).mkdir()
    assert job.has_got_on(begin(1, first=0), 1, blamed=False)
    # It fails after the merge of round 2, each time, and nothing newer is saved.
    assert not job.has_got_on(begin(2, first=1), 1, blamed=True)
    (run / "checkpoints" / directory_name(2)).mkdir()
    assert job.has_got_on(begin(3, first=1), 1, blamed=False)


def test_a_checkpoint_in_memory_goes_to_the_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, run = tmp_path / "hvd-adaptive-0-0123", tmp_path / "run"
    checkpoints = run / "checkpoints"
    for number in (3, 4):
        (memory / directory_name(number)).mkdir(parents=True)
    (memory / directory_name(4) / "file").write_text("four")
    (memory / "lock").touch()
    checkpoints.mkdir(parents=True)
    (checkpoints / directory_name(2)).mkdir()
    (run / "rounds.jsonl").write_text(json.dumps({"round": 0, "start": {"launch": 1, "seconds": {}}}) + "\n")
    job = TrainJob([], run, None, memory)
    # A run that never began may have another one's folder.
    FolderOwner(run, "a", job=f"{job_name(memory)}/1").take()
    assert job.close(finished=False) == "" and len(list(checkpoints.iterdir())) == 1
    assert job.beginning(launch(1)) is not None and job.close(finished=True) == ""
    # Another job writes there since.
    FolderOwner(run, "a").take()
    assert "round-00000002" in job.close(finished=False) and len(list(checkpoints.iterdir())) == 1
    (run / ".owner").unlink()
    assert "round-00000004" in job.close(finished=False)
    shutil.rmtree(checkpoints / directory_name(4))
    FolderOwner(run, "a", job=f"{job_name(memory)}/2").take()
    assert job.close(finished=False) == f"the last checkpoint is {checkpoints / directory_name(4)}"
    assert (checkpoints / directory_name(4) / "file").read_text() == "four"
    shutil.rmtree(checkpoints / directory_name(4))

    def fails(source: Path, target: Path) -> None:
        target.mkdir()
        raise shutil.Error([(str(source), str(target), "No space left on device")] * 2)

    monkeypatch.setattr(shutil, "copytree", fails)
    said = job.close(finished=False)
    kept = next(tmp_path.glob("hvd-adaptive-rounds-*"))
    assert f"to {checkpoints}: No space left on device. It stays in memory" in said
    assert f"move {kept}/round-* to {checkpoints}, and go on with --resume auto" in said
    assert f"--resume {kept} and another --out" in said
    assert (kept / directory_name(4) / "file").exists() and not memory.exists() and len(list(checkpoints.iterdir())) == 1


def test_a_folder_that_another_job_has_taken_over_is_left_to_it(folders: tuple[Path, Path]) -> None:
    memory, disk = folders

    def owner(job: str) -> FolderOwner:
        return FolderOwner(disk, "a", job=job)

    mine = ScriptJob([], ["x.py"], disk, memory, owner(job_name(memory)).other)
    (disk / commit_name(1)).mkdir()
    owner("earlier").take()
    # Until it has committed, what an earlier job has left is no loss; nor is it this one's to remove.
    assert mine.arguments(1, local=True) and mine.close(finished=True) == "" and len(list(disk.iterdir())) == 2
    for _ in range(2):
        # Each launch takes it anew.
        owner(job_name(memory)).take()
        mine.hear(event("has folder"))
        assert mine.arguments(2, local=True)
    owner("later").take()
    with pytest.raises(RuntimeError, match=f"another job writes in {disk}"):
        mine.arguments(3, local=True)
    assert mine.close(finished=True) == mine.close(finished=False) == "" and len(list(disk.iterdir())) == 2
    owner(job_name(memory)).take()
    assert mine.close(finished=True) == "" and not disk.exists()


def test_commits_in_memory_go_where_other_hosts_find_them(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = folders
    monkeypatch.chdir(disk)
    job = ScriptJob([], ["x.py"], None, memory)
    assert job.arguments(1, local=True)[-3:] == ["--memory-dir", str(memory), "x.py"]
    assert not list(disk.iterdir())
    (memory / commit_name(3)).mkdir()
    (memory / commit_name(3) / "file").write_text("three")
    assert "--memory-dir" not in job.arguments(2, local=False)
    folder = next(disk.iterdir())
    assert (folder / commit_name(3) / "file").read_text() == "three"
    # One that the disk has newer stays.
    (folder / commit_name(4)).mkdir()
    assert f"{folder} goes on from its commit 4" in job.close(finished=False)
    assert job.close(finished=True) == "" and not list(disk.iterdir()) and not list(memory.glob("commit*"))
    # Nothing was committed: nothing is left, and nothing said.
    assert ScriptJob([], ["x.py"], None, memory).close(finished=False) == "" and not list(disk.iterdir())


def test_a_commit_that_finds_no_room_on_the_disk_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "hvd-adaptive-0-0123", tmp_path / "disk"
    (memory / commit_name(3)).mkdir(parents=True)
    (memory / "lock").touch()
    disk.mkdir()
    monkeypatch.chdir(disk)

    def fails(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", fails)
    said = ScriptJob([], ["x.py"], None, memory).close(finished=False)
    kept = next(tmp_path.glob("hvd-adaptive-commits-*"))
    assert "No space left on device" in said and f"--commit-dir {kept} goes on from its commit 3" in said
    # What supervisors look for is gone, and so is what was begun on the disk.
    assert not memory.exists() and [path.name for path in kept.iterdir()] == [commit_name(3)] and not list(disk.iterdir())
    # As in a working directory that cannot be written.
    kept.rename(memory)
    job = ScriptJob([], ["x.py"], None, memory)
    disk.rmdir()
    disk.touch()
    assert "goes on from its commit 3" in job.close(finished=False)
