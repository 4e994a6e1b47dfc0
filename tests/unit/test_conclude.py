"""What the batch host does once a segment's srun is over, with stand-ins for Slurm's clients: templates/conclude.sh."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dsv4kit.run import ends, outcome, phases
from dsv4kit.run.directory import SegmentDir

SCRIPT = Path(__file__).parents[2] / "templates" / "conclude.sh"
CLIENTS = r"""#!/bin/bash
cd "$(dirname "$0")/.." || exit 1
echo "$(basename "$0") $*" >> calls
case $(basename "$0") in
  squeue) echo "Notice: maintenance on Friday, 512 GPU-hours left"; printf 'dsv4kit|%s\n' 8 9 ;;
  sinfo) echo "a notice"; for n in 1 2 3 4; do echo "dsv4kit|node$n|idle"; done; echo "dsv4kit|node5|drained*" ;;
  scontrol)
    case "$1 $2" in
      "show hostnames")
        for name in ${3//,/ }; do
          [[ $name == *'['* ]] || { echo "$name"; continue; }
          range=${name#*[}; range=${range%]}
          for n in $(seq "${range%-*}" "${range#*-}"); do echo "${name%[*}$n"; done
        done ;;
      "show job") echo "JobId=$4 ExcNodeList=$(cat excluded 2>/dev/null || echo '(null)') Features=(null)" ;;
    esac ;;
esac
"""


class Segment:
    """Segment 2 of a run, its srun just over."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, root / "run it's 50% $HOME"
        self.dir = self.run / "segments" / "0002"
        self.dir.mkdir(parents=True)
        self.checkpoints = self.run / "checkpoints"
        self.checkpoints.mkdir()
        (root / "bin").mkdir()
        for name in ("squeue", "sinfo", "scontrol", "scancel"):
            (root / "bin" / name).write_text(CLIENTS)
            (root / "bin" / name).chmod(0o755)

    def conclude(self, log: str = "", nodes: int = 2, limit: int = 2, status: int = 1, start: int = 0) -> int:
        (self.dir / "slurm.log").write_text(log)
        values = [self.dir, self.checkpoints, "name-1", nodes, limit, status, start]
        env = {**os.environ, "PATH": f"{self.root / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        env |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_PARTITION": "main", "DSV4KIT_ATTEMPT": "0"}
        done = subprocess.run(["bash", SCRIPT, *map(str, values)], env=env, capture_output=True, text=True)
        self.said = done.stdout + done.stderr
        return done.returncode

    def verdict(self, text: str, excluded: str = "") -> None:
        (self.dir / "verdict").write_text(f"{text}\n")
        (self.dir / "excluded_nodes").write_text(excluded)

    @property
    def outcome(self) -> outcome.Outcome:
        found = outcome.load(SegmentDir(self.dir).attempt(0))
        assert found is not None
        return found

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def told(self) -> list[str]:
        return [call for call in self.calls if call.startswith("scontrol update")]


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return Segment(tmp_path)


def test_of_a_job_that_started_its_trainer_twice_the_last_attempt_counts(segment: Segment) -> None:
    attempts = [SegmentDir(segment.dir).attempt(number) for number in range(2)]
    outcome.save(outcome.Outcome(2, 0, "7", 0, 4, 2, ends.KILLED, "continue", "", again=True), attempts[0].segment)
    attempts[1].path.mkdir()
    attempts[1].course_file.write_text("{}")
    segment.conclude("srun: error: node2: task 1: Exited with exit code 7\n")
    assert "next continue" in segment.said
    lost = outcome.load(attempts[1])
    assert lost is not None
    assert (lost.attempt, lost.end, lost.excluded_nodes) == (1, ends.LOST, ["node2"])
    first = outcome.load(attempts[0])
    assert first is not None
    assert first.end == ends.KILLED


@pytest.mark.parametrize(("verdict", "status"), [("finished", 0), ("stop", 1)])
def test_a_run_that_is_over_cancels_what_waits(segment: Segment, verdict: str, status: int) -> None:
    segment.verdict(verdict)
    assert segment.conclude() == status
    assert segment.calls == ["scancel --me --name=name-1 --state=PENDING"]


def test_nodes_to_avoid_are_added_to_what_is_excluded_already(segment: Segment) -> None:
    (segment.root / "excluded").write_text("node[6-7]")
    segment.verdict("continue", "node2")
    assert segment.conclude() == 0
    assert segment.told == [f"scontrol update JobId={job} ExcNodeList=node6,node7,node2" for job in (8, 9)]


def test_what_the_run_no_longer_avoids_is_taken_back(segment: Segment) -> None:
    (segment.root / "excluded").write_text("node3,node6")
    (segment.run / "excluded_nodes.jsonl").write_text('{"time": 1, "segment": 1, "node": "node3", "reason": "r"}\n')
    segment.verdict("continue", "node2")
    segment.conclude()
    assert segment.told[0].endswith("ExcNodeList=node6,node2")


def test_never_are_so_many_avoided_that_the_run_could_not_start(segment: Segment) -> None:
    segment.verdict("continue", "node1,node2,node3")
    segment.conclude(nodes=3)
    assert segment.told[0].endswith("ExcNodeList=node1")
    assert "node3 is not avoided any longer" in segment.said


class TestLost:
    """The agents never wrote a word: the image, Python or the run directory was not there on a node."""

    def test_the_first_cause_is_told_and_its_node_avoided(self, segment: Segment) -> None:
        (segment.checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
        log = (
            'slurmstepd-node2: error: pyxis: failed to import "a.sqsh": No such file\n'
            "slurmstepd-node2: error: pyxis: couldn't start container\n"
            "srun: error: node2: task 1: Exited with exit code 1\nsrun: error: node1: task 0: Terminated\n"
        )
        assert segment.conclude(log) == 0
        found = segment.outcome
        assert (found.end, found.next, found.start, found.reached) == (ends.NEVER_STARTED, "continue", 4, 4)
        assert found.evidence[0] == 'slurmstepd-node2: error: pyxis: failed to import "a.sqsh": No such file'
        assert found.excluded_nodes == ["node2"]
        (line,) = (segment.run / "excluded_nodes.jsonl").read_text().splitlines()
        assert json.loads(line)["node"] == "node2"
        assert segment.told[0].endswith("ExcNodeList=node2")

    @pytest.mark.parametrize(
        ("line", "node"),
        [
            ("slurmstepd-node2: error: execve(): /nowhere/python: No such file or directory", "node2"),
            ("srun: error: Task launch for StepId=7.0 failed on node node2: Invalid job credential", "node2"),
            ("srun: error: node2: task 1: Exited with exit code 127", "node2"),
        ],
    )
    def test_a_node_is_named_in_the_ways_slurm_has(self, segment: Segment, line: str, node: str) -> None:
        segment.conclude(f"{line}\n")
        assert (segment.outcome.evidence, segment.outcome.excluded_nodes) == ([line], [node])

    def test_what_goes_wrong_on_all_nodes_is_no_nodes_fault(self, segment: Segment) -> None:
        segment.conclude("srun: error: node[1-2]: tasks 0-1: Exited with exit code 2\n")
        assert segment.outcome.excluded_nodes == []
        assert not (segment.run / "excluded_nodes.jsonl").exists()

    def test_a_traceback_of_the_agent_is_told_by_its_last_line(self, segment: Segment) -> None:
        log = "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'dsv4kit'\n"
        segment.conclude(log + "srun: error: node1: task 0: Exited with exit code 1\n")
        assert segment.outcome.evidence[0] == "ModuleNotFoundError: No module named 'dsv4kit'"

    def test_what_an_earlier_start_said_does_not_count(self, segment: Segment) -> None:
        old = "srun: error: node1: task 0: Exited with exit code 9\n"
        segment.conclude(old, start=len(old), status=143)
        assert segment.outcome.evidence == ["srun ended with status 143 and no agent of this attempt left a word"]

    def earlier(self, segment: Segment, **changes: object) -> None:
        fields: dict[str, object] = {"segment": 1, "attempt": 0, "job_id": "6", "start": 4, "target": 6, "reached": 4}
        fields |= {"end": ends.NEVER_STARTED, "next": "continue", "reason": "", **changes}
        directory = segment.run / "segments" / "0001"
        outcome.save(outcome.Outcome(**fields), SegmentDir(directory))  # type: ignore[arg-type]

    def test_the_second_in_a_row_stops_the_run_and_keeps_the_rest_unused(self, segment: Segment) -> None:
        self.earlier(segment)
        assert segment.conclude() == 1
        assert segment.outcome.next == "stop"
        assert segment.calls[-1].startswith("scancel")

    @pytest.mark.parametrize(
        "changes", [{"reached": 6}, {"end": ends.CANCELLED}, {"end": ends.ANOTHER_LIVE}, {"end": ends.NODE_LOST}]
    )
    def test_an_attempt_that_saved_or_had_no_chance_is_not_counted(
        self, segment: Segment, changes: dict[str, object]
    ) -> None:
        self.earlier(segment, **changes)
        assert segment.conclude() == 0

    def test_attempts_from_before_a_resume_are_not_counted(self, segment: Segment) -> None:
        self.earlier(segment)
        (segment.dir / "resumed.json").write_text("{}")
        assert segment.conclude() == 0

    def test_hostile_lines_stay_text(self, segment: Segment) -> None:
        line = 'srun: error: node1: "\\$(touch pwned)`touch pwned` \x1b[31m'
        segment.conclude(f"{line}\n")
        assert segment.outcome.evidence[0].startswith('srun: error: node1: "\\$(touch pwned)')
        assert not list(segment.root.rglob("pwned"))


def test_an_outcome_without_a_verdict_file_counts(segment: Segment) -> None:
    fields = {"segment": 2, "attempt": 0, "job_id": "7", "start": 0, "target": 2, "reached": 2, "end": ends.COMPLETED}
    outcome.save(outcome.Outcome(**fields, next="finished", reason="done"), SegmentDir(segment.dir))  # type: ignore[arg-type]
    assert segment.conclude() == 0
    assert segment.calls[-1].startswith("scancel")


def test_where_nothing_can_be_written_the_rest_of_the_chain_is_held(segment: Segment) -> None:
    (segment.dir / "attempt-0").write_text("in the way, as a full disk is")
    assert segment.conclude() == 1
    assert [call for call in segment.calls if "hold" in call] == ["scontrol hold 8", "scontrol hold 9"]
    assert "Comment=held by segment 2: nothing can be written to" in segment.told[0]


def test_how_long_the_containers_removal_took_is_added_to_the_attempts_phases(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SegmentDir(segment.dir).attempt(0)
    files.path.mkdir(parents=True)
    done = outcome.Outcome(2, 0, "7", 0, 4, 4, ends.COMPLETED, outcome.CONTINUE, "", started=100.0, ended=305.25)
    outcome.save(done, SegmentDir(segment.dir))
    segment.verdict("continue")
    monkeypatch.setenv("DSV4KIT_STEP_ENDED", "335.500000000")
    assert segment.conclude(status=0) == 0
    marks, _ = phases.parse(files.phases_file.read_bytes().splitlines())
    assert marks == [phases.Mark(phases.CONTAINER_REMOVAL, 305.25, 335.5)]


def test_an_attempt_that_left_no_outcome_has_no_removal(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4KIT_STEP_ENDED", "335.500000000")
    segment.conclude("srun: error: node1: task 0: Exited with exit code 1\n")
    assert not SegmentDir(segment.dir).attempt(0).phases_file.exists()
