"""Why a driver ended, from its log and its exit status: the class, the lines, the place."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4kit.run import ends
from dsv4kit.run.failure_signs import SIGNATURES, classify, signal_name

RAY = "(TaskRunnerV1 pid=12) "
WORKER = "(WorkerDict pid=31, ip=10.0.0.3) "
REWARD = "(RewardLoopWorker pid=44) "
STEP = f"{RAY}step:5 - training/global_step:5 - actor/pg_loss:0.1"


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", ends.OUT_OF_GPU_MEMORY),
        ("ValueError: No available memory for the cache blocks.", ends.OUT_OF_GPU_MEMORY),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low", ends.OUT_OF_HOST_MEMORY),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0", ends.OUT_OF_HOST_MEMORY),
        ("OSError: [Errno 28] No space left on device", ends.STORAGE_FULL),
        ("OSError: [Errno 122] Disk quota exceeded: '/r/global_step_4'", ends.STORAGE_FULL),
        ("OSError: [Errno 5] Input/output error", ends.STORAGE),
        ("OSError: [Errno 116] Stale file handle: '/r/x'", ends.STORAGE),
        ("OSError: [Errno 30] Read-only file system: '/r/x'", ends.STORAGE),
        ("PermissionError: [Errno 13] Permission denied: '/r/x'", ends.CONFIGURATION),
        ("Could not override 'actor_rollout_ref.rollout.nmae'.", ends.CONFIGURATION),
        ("ModuleNotFoundError: No module named 'verl'", ends.CONFIGURATION),
        ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory", ends.CONFIGURATION),
        ("OSError: libcudnn_graph.so.9: cannot open shared object file: No such file", ends.CONFIGURATION),
        ("ValueError: DEEPGEMM_MXFP4 backend is not supported on SM90", ends.CONFIGURATION),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", ends.GPU_FAULT),
        ("torch.AcceleratorError: CUDA_ERROR_ILLEGAL_ADDRESS (700)", ends.KERNEL_FAULT),
        ("ImportError: cannot import name 'safe_get_world_size' from 'megatron.core'", ends.CONFIGURATION),
        ("ValueError: DEEPGEMM_MXFP4 is not supported on SM90", ends.CONFIGURATION),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", ends.KERNEL_FAULT),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", ends.KERNEL_FAULT),
        ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", ends.NOT_A_NUMBER),
        ("AssertionError: found NaN in local grad norm for bucket #0", ends.NOT_A_NUMBER),
        ("[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", ends.COLLECTIVE_TIMEOUT),
        ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp, unhandled system error", ends.NETWORK),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", ends.NETWORK),
        ("The node with node id: 3f has been marked dead because the detector has missed too many", ends.NODE_LOST),
        ("ray.exceptions.ActorDiedError: The actor died because its node has died.", ends.NODE_LOST),
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", ends.PROCESS_DIED),
        ("UserWarning: veomni engine is not available: ModuleNotFoundError(\"No module named 'v'\")", ends.UNKNOWN),
        ("something nobody has seen before", ends.UNKNOWN),
    ],
)
def test_a_line_tells_the_class(line: str, end: str) -> None:
    evidence = classify(["starting\n", line + "\n"])
    assert evidence.end == end
    assert line in evidence.lines or "Warning" in line


def test_the_cause_wins_over_the_symptoms_it_brings() -> None:
    log = ["ActorDiedError: The actor died\n", "OSError: [Errno 28] No space left on device\n", "The actor died\n"]
    assert classify(log).end == ends.STORAGE_FULL


def test_what_is_not_recognised_shows_its_first_exceptions_and_the_exit_status() -> None:
    log = [f"{WORKER}RuntimeError: the cause\n", "Traceback\n", "ValueError: later\n"]
    evidence = classify(log, exit_status=1)
    assert evidence.end == ends.UNKNOWN
    assert evidence.lines[0].endswith("RuntimeError: the cause")
    assert evidence.lines[-1] == "the driver ended with exit status 1"


def test_a_failure_says_which_process_on_which_node() -> None:
    log = [
        f"{WORKER}[Rank 9] torch.OutOfMemoryError: CUDA out of memory.",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.update_actor() (pid=31, ip=10.0.0.3, id=a)",
    ]
    evidence = classify(log, 1, {"10.0.0.3": "node3"})
    assert evidence.lines[0] == "WorkerDict pid 31, rank 9 on node3: torch.OutOfMemoryError: CUDA out of memory."
    assert "raised in WorkerDict.update_actor pid 31 on node3" in evidence.lines


# As torchrun 2.11 printed it; the table's own blanks.
TABLE = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
verl.trainer.sft_trainer FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-12-01_05:00:02
  host      : node2
  rank      : 5 (local_rank: 1)
  exitcode  : 1 (pid: 900)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-12-01_05:00:01
  host      : node1
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 812)
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""


@pytest.mark.parametrize(
    ("code", "traceback", "ended"),
    [(1, "To enable traceback see: https", "exit status 1"), (-11, "Signal 11 (SIGSEGV) received", "SIGSEGV (11)")],
)
def test_torchruns_table_names_the_first_process_that_failed(code: int, traceback: str, ended: str) -> None:
    evidence = classify(TABLE.format(code=code, traceback=traceback).splitlines(), 1)
    assert evidence.end == ends.PROCESS_DIED
    (line,) = [line for line in evidence.lines if line.startswith("first to fail")]
    assert line.startswith("first to fail: rank 3 on node1, pid 812, ")
    assert line.endswith(ended)


@pytest.mark.parametrize(("status", "name"), [(-9, "SIGKILL (9)"), (-11, "SIGSEGV (11)"), (137, "SIGKILL (9)")])
def test_a_driver_that_a_signal_ended_says_so(status: int, name: str) -> None:
    evidence = classify([f"{RAY}an unrelated line"], status)
    assert evidence.end == ends.KILLED
    assert evidence.lines[0] == f"the driver was killed by {name}"


@pytest.mark.parametrize("status", [None, 0, 1, 2, 130, 255])
def test_an_ordinary_exit_status_is_no_signal(status: int | None) -> None:
    assert signal_name(status) is None


class TestTextThatProvesNothing:
    CONFIGURATION = "TypeError: f() got an unexpected keyword argument 'x'"

    def test_it_counts_while_no_step_is_done(self) -> None:
        assert classify([self.CONFIGURATION], 1).end == ends.CONFIGURATION

    def test_what_stood_before_the_last_finished_step_is_over(self) -> None:
        assert classify(["RuntimeError: NCCL error", STEP, "ValueError: else"], 1).end == ends.UNKNOWN

    def test_once_a_step_is_done_no_text_makes_a_failure_fatal(self) -> None:
        assert classify([STEP, self.CONFIGURATION], 1).end not in ends.FATAL

    def test_a_killed_driver_died_of_the_signal(self) -> None:
        assert classify([self.CONFIGURATION], -9).end == ends.KILLED

    @pytest.mark.parametrize("source", [REWARD, RAY])
    def test_what_a_model_wrote_is_not_read(self, source: str) -> None:
        sample = ["[prompt] What is it?", "[response] torch.OutOfMemoryError: CUDA out of memory", self.CONFIGURATION]
        log = [f"{source}{line}" for line in [*sample, "step:9 - actor/loss:0.1", "[ground_truth] 4", "[score] 0"]]
        assert classify([*log, f"{RAY}ConnectionResetError: Connection reset by peer"], 1).end == ends.NETWORK

    def test_a_model_that_imitates_the_end_of_a_sample_is_not_read_either(self) -> None:
        log = [f"{REWARD}[prompt] a", f"{REWARD}[response] [score] 1", f"{REWARD}[score] 1", f"{REWARD}MemoryError"]
        assert classify(log, 1).end == ends.UNKNOWN


@given(st.lists(st.text(max_size=80), max_size=30), st.one_of(st.none(), st.integers(-70, 300)))
def test_no_log_upsets_it(lines: list[str], status: int | None) -> None:
    assert classify(lines, status).end


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row["example"][:50])
def test_every_signature_of_the_table_is_known_by_its_example(row: dict[str, str]) -> None:
    assert row["source"]
    assert row["end"] in vars(ends).values()
    assert re.search(row["pattern"], row["example"], re.IGNORECASE)
    assert classify([row["example"]]).end == row["end"]


def test_a_fault_wins_over_the_63_other_nodes_that_only_lost_their_connection() -> None:
    echoes = [f"(WorkerDict pid={n}, ip=10.0.1.{n}) RuntimeError: Connection reset by peer" for n in range(1, 64)]
    cause = "(WorkerDict pid=9, ip=10.0.0.3) torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    found = classify([*echoes, cause, *echoes], 1, {"10.0.0.3": "node3"})
    assert found.end == ends.GPU_FAULT
    assert "node3" in found.lines[0]


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row["example"][:50])
def test_no_signature_counts_in_a_sample_that_the_model_wrote(row: dict[str, str]) -> None:
    log = [f"{REWARD}[prompt] 1+1", f"{REWARD}[response] {row['example']}", f"{REWARD}{row['example']}"]
    assert classify([*log, f"{RAY}something else"], 1).end == ends.UNKNOWN
