"""`submit` killed at each moment: whatever is on disk and in the queue then, the other verbs cope with it."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import pytest
from file_queue import Cluster

from dsv4kit.cli.status import table
from dsv4kit.config.loading import Override
from dsv4kit.launch.cancel import cancel_run
from dsv4kit.launch.chain import planned
from dsv4kit.launch.changes import Asked
from dsv4kit.launch.freeze import half_renewed
from dsv4kit.launch.resume import Resumption
from dsv4kit.launch.run_dir import find_run
from dsv4kit.launch.state import NOT_SUBMITTED, read_state
from dsv4kit.run.files import read_object, write_json


def killed(act: Callable[[], object], moment: int) -> bool:
    """Has a child do `act`; it kills itself as it is about to put the `moment`-th file in its place or ask Slurm.

    False where there was no such moment.
    """
    child = os.fork()
    if child == 0:
        left = moment

        def look(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ("os.rename", "os.link", "subprocess.Popen"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        try:
            act()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_submission_killed_at_any_moment_can_be_shown_cancelled_and_gone_on_with(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first job and the first `chain.json`, no verb could read the run that its jobs belonged to."""
    monkeypatch.setenv("DSV4KIT_RUNS", str(cluster.run.path.parent))
    submission = cluster.submission(Override("schedule.steps", 8, "test"))
    seen: set[tuple[int, int, int]] = set()
    moment = 0
    while killed(lambda: submission.submit(lambda line: None), moment := moment + 1):
        if cluster.run.record_file.exists():
            assert find_run(None) == cluster.run
            state = read_state(cluster.run, cluster.slurm)
            known = [segment.job_id for segment in state.segments if segment.state != NOT_SUBMITTED]
            assert sorted([*known, *state.other_jobs]) == cluster.jobs
            assert state.state == ("waiting" if cluster.jobs else "incomplete")
            assert bool(state.other_jobs) == ("no segment is known to have it" in table(state))
            new = (len(cluster.jobs), len(known), len(cluster.run.segments()))
            unlike = new not in seen
            seen.add(new)
            count, left = cancel_run(cluster.run, cluster.slurm)
            assert (count, left, cluster.jobs) == (len(known) + len(state.other_jobs), {}, [])
            over = read_state(cluster.run, cluster.slurm)
            assert over.state == ("cancelled" if count else "incomplete")
            assert count or over.reason == "step 0 of 8 is saved; its segments were never submitted"
            if unlike:
                links = Resumption(cluster.run, cluster.slurm).submit(lambda line: None)
                assert sorted(link.job_id for link in links) == cluster.jobs
                assert len(links) == 2
                cancel_run(cluster.run, cluster.slurm)
        else:
            assert cluster.jobs == []
        for path in cluster.run.path.parent.iterdir():
            path.rename(cluster.root / f"{moment}-{path.name}")
    # Jobs in the queue, jobs that the files know, segments written. After the last `chain.json` nothing is left to do.
    assert seen == {(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 2), (1, 1, 2), (2, 1, 2)}
    assert [link.job_id for link in cluster.run.chain()] == cluster.jobs


def test_a_segment_that_a_killed_submission_left_out_is_told_when_the_others_are_over(cluster: Cluster) -> None:
    cluster.submit()
    cluster.run.save_chain([*cluster.run.chain()[:1], *planned(2, 2, 1)])
    (cluster.root / "jobs" / "3").unlink()
    (cluster.root / "jobs" / "2").unlink()
    assert read_state(cluster.run, cluster.slurm).state == "waiting"
    (cluster.root / "jobs" / "1").unlink()
    state = read_state(cluster.run, cluster.slurm)
    assert (state.state, state.reason) == ("incomplete", "step 0 of 12 is saved; 2 segments were never submitted")
    assert [segment.segment for segment in state.segments] == [1, 2, 3]  # the spare one is not worth a line
    Resumption(cluster.run, cluster.slurm).submit(lambda line: None)
    assert read_state(cluster.run, cluster.slurm).state == "waiting"
    assert [link.segment for link in cluster.run.chain()] == [1, 2, 3, 4, 5, 6, 7]


def test_a_resume_that_waits_for_one_that_was_killed_says_so_at_once(cluster: Cluster) -> None:
    """It looked at the other's lease for a minute, and said nothing."""
    cluster.submit()
    cancel_run(cluster.run, cluster.slurm)
    lease = cluster.run.path / "resume.json"
    write_json(lease, {"job_id": "process 77", "segment": "0", "attempt": "0", "host": "login1", "beat": 3})
    said: list[str] = []
    heard = threading.Event()

    def hear(line: str) -> None:
        said.append(line)
        heard.set()

    second = threading.Thread(target=Resumption(cluster.run, cluster.slurm).submit, args=(hear,))
    second.start()
    assert heard.wait(30)
    lease.unlink()  # as the other one does at its end
    second.join()
    assert said[0] == (
        "run first: another `resume` of it (process 77 on login1) is under way or was killed;"
        " waiting up to 60 s to see which"
    )
    assert said[1].startswith("run first: goes on from step 0 of 12")


def test_a_renewal_of_the_kit_that_was_killed_at_any_moment_is_finished_by_the_next_resume(cluster: Cluster) -> None:
    """Between its two renames the run had no kit, and after them one that did not understand the run's node.json."""
    submission = cluster.submission(Override("schedule.steps", 4, "test"))
    interrupted = moment = 0
    while True:
        moment += 1
        submission.submit(lambda line: None)
        cancel_run(cluster.run, cluster.slurm)
        (cluster.run.kit / "of an older kit").touch()
        write_json(cluster.run.node_spec_file, {**read_object(cluster.run.node_spec_file), "of_old": 1})
        renewal = Resumption(cluster.run, cluster.slurm, asked=Asked(new_kit=True))
        if not killed(lambda r=renewal: r.submit(lambda line: None), moment):  # type: ignore[misc]
            break
        cancel_run(cluster.run, cluster.slurm)
        (cluster.run.path / "resume.json").unlink(missing_ok=True)
        said: list[str] = []
        Resumption(cluster.run, cluster.slurm).submit(said.append)
        interrupted += "was killed; the kit is renewed now" in said[0]
        renewed = not (cluster.run.kit / "of an older kit").exists()
        assert (cluster.run.kit / "dsv4kit" / "node" / "agent.py").exists()
        assert ("of_old" in read_object(cluster.run.node_spec_file)) == (not renewed)
        assert not half_renewed(cluster.run.kit)
        cancel_run(cluster.run, cluster.slurm)
        cluster.run.path.rename(cluster.root / f"{moment}")
    assert interrupted >= 3


def test_what_a_refused_resume_was_asked_is_not_asked_of_the_next_one(cluster: Cluster) -> None:
    """FROM_STEP=0 of a resume that sbatch refused was carried out by the next resume, which had not been told so."""
    cluster.submit()
    cancel_run(cluster.run, cluster.slurm)
    (cluster.root / "refuse").write_text("5")
    (cluster.root / "reasons").write_text("sbatch: error: no")
    with pytest.raises(Exception, match="sbatch refused segment 5"):
        Resumption(cluster.run, cluster.slurm, from_step=0).submit(lambda line: None)
    (cluster.root / "refuse").unlink()
    Resumption(cluster.run, cluster.slurm).submit(lambda line: None)
    assert not cluster.run.segment(4).request_file.exists()


class TestSpareSegments:
    def test_they_stand_behind_the_others_and_are_not_counted(self, cluster: Cluster) -> None:
        submission = cluster.submission(Override("schedule.spare_segments", 2, "test"))
        said: list[str] = []
        submission.submit(said.append)
        assert submission.segments == 3
        assert said[3:] == ["segment 4 (spare): job 4", "segment 5 (spare): job 5"]
        state = read_state(cluster.run, cluster.slurm)
        assert [segment.spare for segment in state.segments] == [False] * 3 + [True] * 2
        assert "4 (spare)" in table(state)
        assert "5/segment.sbatch'  # spare" in submission.dry_run() or "segment.sbatch  # spare" in submission.dry_run()

    def test_those_that_were_not_needed_are_not_shown_when_the_run_is_over(self, cluster: Cluster) -> None:
        cluster.submission(Override("schedule.spare_segments", 2, "test")).submit(lambda line: None)
        cancel_run(cluster.run, cluster.slurm)
        assert [one.segment for one in read_state(cluster.run, cluster.slurm).segments] == [1, 2, 3]

    def test_a_resume_has_its_own(self, cluster: Cluster) -> None:
        cluster.submission(Override("schedule.spare_segments", 1, "test")).submit(lambda line: None)
        cancel_run(cluster.run, cluster.slurm)
        links = Resumption(cluster.run, cluster.slurm, steps=14).submit(lambda line: None)
        assert [link.segment for link in links] == [5, 6, 7, 8, 9]
        assert [link.spare for link in links] == [False] * 4 + [True]
