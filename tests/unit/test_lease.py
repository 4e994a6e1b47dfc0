"""The lease of a run: two attempts never hold it at the same time, and one that died does not keep it."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from dsv4kit.run.files import write_json
from dsv4kit.run.lease import NAME, Lease, LeaseHeldError, Owner

FAST = {"heartbeat_s": 0.05, "dead_after_s": 0.5, "settle_s": 0.1}


def lease(run: Path, job_id: str, attempt: int = 0) -> Lease:
    return Lease(run, Owner(job_id, segment=1, attempt=attempt, host="node1"), **FAST)


def test_a_free_lease_is_taken_at_once_and_given_back(tmp_path: Path) -> None:
    mine = Lease(tmp_path, Owner("7", 1, 0, "node1"))
    mine.take()
    content = json.loads((tmp_path / NAME).read_text())
    assert (content["job_id"], content["segment"], content["attempt"], content["host"]) == ("7", "1", "0", "node1")
    mine.give_back()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_whose_heartbeat_goes_on_is_refused_and_names_its_owner(tmp_path: Path) -> None:
    owner = lease(tmp_path, "7")
    owner.take()
    with pytest.raises(LeaseHeldError, match=r"job 7 on node1 \(segment 1, attempt 0\)"):
        lease(tmp_path, "8").take()
    assert owner.lost is None
    owner.give_back()
    lease(tmp_path, "8").take()


def test_the_lease_of_an_owner_that_died_is_taken_after_its_bound(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"job_id": "7", "host": "node9", "beat": 3, "time": time.time() + 3600}))
    began = time.monotonic()
    mine = lease(tmp_path, "8")
    mine.take()
    assert time.monotonic() - began >= FAST["dead_after_s"]
    mine.give_back()


def test_a_damaged_lease_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{")
    mine = lease(tmp_path, "8")
    with pytest.raises(LeaseHeldError):
        mine.take(stop=lambda: True)
    mine.take()
    assert json.loads((tmp_path / NAME).read_text())["job_id"] == "8"
    mine.give_back()


def test_waiting_ends_when_the_job_is_to_end(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"job_id": "7"}))
    with pytest.raises(LeaseHeldError, match="job 7"):
        lease(tmp_path, "8").take(stop=lambda: True)


def test_an_owner_that_comes_back_learns_that_another_holds_it_and_leaves_it_alone(tmp_path: Path) -> None:
    owner = lease(tmp_path, "7")
    owner.take()
    other = {"job_id": "8", "segment": "2", "attempt": "0", "host": "node2"}
    deadline = time.monotonic() + 10
    while owner.lost is None:  # a beat at the same moment may win once; the other would see it and end
        assert time.monotonic() < deadline
        write_json(tmp_path / NAME, other)
        time.sleep(0.2)
    assert owner.lost.startswith("job 8 on node2")
    owner.give_back()
    assert json.loads((tmp_path / NAME).read_text())["job_id"] == "8"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("left_behind", [True, False])
def test_of_many_that_start_at_once_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool, left_behind: bool
) -> None:
    if not links:

        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    if left_behind:
        (tmp_path / NAME).write_text(json.dumps({"job_id": "1"}))
    wanting = [Lease(tmp_path, Owner(str(10 + n), 1, 0, "n"), **{**FAST, "settle_s": 1.0}) for n in range(8)]
    took = []

    def compete(one: Lease) -> None:
        try:
            one.take()
            took.append(one)
        except LeaseHeldError:
            pass

    threads = [threading.Thread(target=compete, args=(one,)) for one in wanting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.3)
    assert len([one for one in took if one.lost is None]) == 1
    assert len(took) == 1
    for one in took:
        one.give_back()
