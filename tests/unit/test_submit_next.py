"""What submits the next segments from within one, with a queue of files for Slurm: templates/submit_next.sh."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import write_json

SCRIPT = Path(__file__).parents[2] / "templates" / "submit_next.sh"
JOB_NAME = "name-01234567"
CLIENTS = r"""#!/bin/bash
cd "$(dirname "$0")/.." || exit 1
echo "$(basename "$0") $*" >> calls
env > "env.$(basename "$0")"
echo "Notice: maintenance on Friday, 512 GPU-hours left"
case $(basename "$0") in
  sbatch)
    if [ -s refusals ]; then sed -n 1p refusals >&2; sed -i 1d refusals; exit 1; fi
    number=$(($(cat number) + 1)); echo $number > number
    for script; do :; done
    after=$(sed -n 's/.*--dependency=\([^ ]*\).*/\1/p' <<< "$*")
    [ ! -e loose ] || after='(null)'
    echo "PENDING|$after|$(cat name)|$script" > "jobs/$number"
    cat said 2>/dev/null || echo "$number;main" ;;
  squeue)
    for file in jobs/*; do
      job=${file#jobs/}
      IFS='|' read -r state after name script < "$file"
      [[ "$*" != *--jobs=* || "$*" == *"--jobs=$job "* ]] || continue
      case "$*" in
        *%E*) echo "dsv4kit|$after|$name" ;;
        *%T*) echo "dsv4kit|$state" ;;
        *%o*) echo "dsv4kit|$job|$script" ;;
      esac
    done ;;
  scontrol) echo "JobId=7 ExcNodeList=$(cat excluded 2>/dev/null || echo '(null)') Features=(null)" ;;
  scancel) rm -f "jobs/$1" ;;
esac
"""


class Chain:
    """Segment 2 of a run of nine, job 7, about to submit the next ones."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, RunDir(root / "a run it's 50% $HOME")
        for number in range(1, 10):
            segment = self.run.segment(number)
            segment.path.mkdir(parents=True)
            segment.script.write_text("the script")
        self.run.save_chain([ChainLink(1, "6"), ChainLink(2, "7"), *map(ChainLink, range(3, 10))])
        (root / "bin").mkdir()
        (root / "jobs").mkdir()
        (root / "number").write_text("10")
        (root / "name").write_text(JOB_NAME)
        (root / "jobs" / "7").write_text(f"RUNNING||{JOB_NAME}|{self.run.segment(2).script}\n")
        for name in ("squeue", "sbatch", "scontrol", "scancel"):
            (root / "bin" / name).write_text(CLIENTS)
            (root / "bin" / name).chmod(0o755)

    def submit_next(self, limit: int = 3, tries: int = 2, last: int = 9, wait: int = 0, **env: str) -> int:
        values = [self.run.segment(2).path, JOB_NAME, last, limit, tries, 0, wait]
        environment = {**os.environ, "PATH": f"{self.root / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **env}
        done = subprocess.run(["bash", SCRIPT, *map(str, values)], env=environment, capture_output=True, text=True)
        self.said = done.stdout + done.stderr
        return done.returncode

    @property
    def ids(self) -> list[str]:
        """Job ids of the segments from the third on, as every reader of the run sees them."""
        return [link.job_id for link in self.run.chain()[2:] if link.job_id]

    @property
    def submitted(self) -> list[str]:
        calls = (self.root / "calls").read_text().splitlines() if (self.root / "calls").exists() else []
        return [call for call in calls if call.startswith("sbatch")]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def test_as_many_are_in_the_queue_as_may_be_each_behind_the_one_before(chain: Chain) -> None:
    assert chain.submit_next() == 0
    assert chain.ids == ["11", "12"]
    third, fourth = chain.run.segment(3), chain.run.segment(4)
    assert chain.submitted == [
        f"sbatch --parsable --export-file={third.path}/job.env --dependency=singleton,afterany:7 {third.script}",
        f"sbatch --parsable --export-file={fourth.path}/job.env --dependency=singleton,afterany:11 {fourth.script}",
    ]
    assert not third.submitting_file.exists()


def test_nothing_is_submitted_twice_nor_behind_the_end_of_the_chain(chain: Chain) -> None:
    for _ in range(2):
        assert chain.submit_next(limit=9, last=5) == 0
    assert chain.ids == ["11", "12", "13"]
    assert len(chain.submitted) == 3


def test_two_that_submit_at_the_same_time_submit_each_segment_once(chain: Chain) -> None:
    command = ["bash", SCRIPT, str(chain.run.segment(2).path), JOB_NAME, "9", "8", "2", "0", "0"]
    env = {**os.environ, "PATH": f"{chain.root / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    both = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) for _ in range(4)]
    for process in both:
        process.wait()
    scripts = [call.rpartition("/segments/")[2] for call in chain.submitted]
    assert sorted(scripts) == [f"{number:04d}/segment.sbatch" for number in range(3, 10)]


def test_a_job_that_nobody_lived_to_note_is_found_in_the_queue(chain: Chain) -> None:
    (chain.root / "jobs" / "9").write_text(f"PENDING|afterany:7|{JOB_NAME}|{chain.run.segment(3).script}\n")
    chain.submit_next()
    assert chain.ids == ["9", "11"]
    assert len(chain.submitted) == 1


@pytest.mark.parametrize(("content", "alive_s", "dead_s"), [("", 60, 150), ("5\n", 500, 700)])
def test_whoever_is_at_it_is_left_to_it_until_it_must_be_dead(
    chain: Chain, content: str, alive_s: int, dead_s: int
) -> None:
    """`dsv4kit submit`, whose file is empty, is given two minutes; another job ten."""
    claim = chain.run.segment(3).submitting_file
    claim.write_text(content)
    os.utime(claim, (time.time() - alive_s,) * 2)
    assert chain.submit_next() == 0
    assert (chain.ids, chain.submitted) == ([], [])
    os.utime(claim, (time.time() - dead_s,) * 2)
    assert chain.submit_next() == 0
    assert chain.ids == ["11", "12"]
    assert not claim.exists()


def test_the_end_of_a_segment_waits_for_a_submission_that_may_have_been_killed(chain: Chain) -> None:
    """The first segment was over within minutes, so nobody submitted the others, and the chain ended early."""
    claim = chain.run.segment(3).submitting_file
    claim.write_text("")
    os.utime(claim, (time.time() - 118,) * 2)
    assert chain.submit_next(wait=20) == 0
    assert chain.ids == ["11", "12"]


def test_a_submission_that_lives_is_waited_for_and_nothing_submitted_twice(chain: Chain) -> None:
    third = chain.run.segment(3)
    third.submitting_file.write_text("")
    job = f"PENDING|afterany:7|{JOB_NAME}|{third.script}\n"
    submitter = threading.Timer(1, (chain.root / "jobs" / "9").write_text, [job])
    submitter.start()
    assert chain.submit_next(wait=100) == 0
    assert chain.ids == ["9", "11"]
    submitter.join()


def test_a_refusal_is_tried_again_and_its_reason_stays_until_it_works(chain: Chain) -> None:
    (chain.root / "refusals").write_text("sbatch: error: busy\n" * 3)
    assert chain.submit_next() == 1
    reason = chain.run.segment(3).not_submitted_file
    assert reason.read_text() == "sbatch: error: busy\n"
    assert "segment 3 is not submitted, try 2 of 2: sbatch: error: busy" in chain.said
    assert not chain.run.segment(3).submitting_file.exists()
    assert chain.submit_next() == 0
    assert chain.ids == ["11", "12"]
    assert not reason.exists()


@pytest.mark.parametrize(
    ("lie", "content", "said"),
    [
        ("said", "this job costs 512 GPU-hours\n", "no job id in the last line of its output: 'this job costs 512 GPU"),
        ("said", "7\n", "sbatch named job 7, which is no new job of this run"),
        ("name", "else", "sbatch named job 11, which is no new job of this run"),
        ("loose", "", "job 11 did not wait for job 7, as sbatch was told: it waited for '(null)'"),
    ],
)
def test_a_job_that_is_not_what_sbatch_was_told_is_none(chain: Chain, lie: str, content: str, said: str) -> None:
    (chain.root / lie).write_text(content)
    assert chain.submit_next(tries=1) == 1
    assert chain.ids == []
    assert (chain.root / "jobs" / "7").exists()
    assert said in chain.run.segment(3).not_submitted_file.read_text()


def test_a_run_that_its_user_has_cancelled_gets_no_more_jobs(chain: Chain) -> None:
    write_json(chain.run.segment(4).cancel_file, {"from_attempt": 0})
    assert chain.submit_next() == 0
    assert chain.ids == ["11"]


def test_a_cancel_while_sbatch_is_at_it_takes_the_new_job_along(chain: Chain) -> None:
    sbatch = chain.root / "bin" / "sbatch"
    sbatch.write_text(CLIENTS.replace("number=$((", f'touch "{chain.run.segment(3).path}/cancelled.json"; number=$(('))
    sbatch.write_text(sbatch.read_text().replace("$HOME", "\\$HOME"))
    assert chain.submit_next() == 0
    assert not (chain.root / "jobs" / "11").exists()


def test_a_segment_from_before_a_resume_adds_nothing(chain: Chain) -> None:
    write_json(chain.run.segment(5).resumed_file, {"time": 1})
    assert chain.submit_next() == 0
    assert chain.submitted == []


def test_new_jobs_avoid_what_this_one_avoids(chain: Chain) -> None:
    (chain.root / "excluded").write_text("node[3-5],node9")
    chain.submit_next()
    assert all(" --exclude=node[3-5],node9 " in call for call in chain.submitted)


def test_nothing_that_steers_slurms_clients_or_belongs_to_this_job_reaches_sbatch(chain: Chain) -> None:
    lines = (Path(__file__).parents[1] / "data" / "slurm_variables.txt").read_text().splitlines()
    names = {line.split()[1] for line in lines if not line.startswith("#")}
    chain.submit_next(**dict.fromkeys([*names, "SLURM_NODELIST"], "else"), SLURM_CONF="/etc/slurm.conf")
    for client in ("sbatch", "squeue", "scontrol"):
        seen = (chain.root / f"env.{client}").read_text().splitlines()
        assert [line for line in seen if line.endswith("=else") or line.startswith("SLURM_")] == [
            "SLURM_CONF=/etc/slurm.conf"
        ]
