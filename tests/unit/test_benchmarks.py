"""`make bench`: its modules import, what it measures works, and a broken promise ends it with 1."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import __main__, bench_runs, bench_start, measure
from benchmarks.measure import Benchmark, Times


def busy() -> None:
    sum(range(100_000))


def shown(*benchmarks: Benchmark) -> tuple[int, str]:
    lines: list[str] = []
    return measure.run(benchmarks, lines.append), "\n".join(lines)


def test_a_broken_promise_gives_1_and_is_named() -> None:
    status, text = shown(Benchmark("kept", busy, 60.0, 3), Benchmark("fake", busy, -1.0, 3))
    assert status == 1
    assert "promise broken: fake" in text
    assert "promise broken: kept" not in text


def test_kept_promises_give_0() -> None:
    assert shown(Benchmark("kept", busy, 60.0, 3), Benchmark("none made", busy, None, 3))[0] == 0


def test_a_promise_is_about_the_least_cpu_time_and_no_wall_time() -> None:
    promised = Benchmark("x", busy, 1.0)
    assert not measure.broken(promised, Times(wall=[9.0, 9.0], cpu=[0.9, 5.0]))
    assert measure.broken(promised, Times(wall=[0.1, 0.1], cpu=[1.1, 1.2]))


def test_time_of_child_processes_counts() -> None:
    child = bench_start.command(sys.executable, "-c", "sum(range(3_000_000))")
    assert measure.measured(Benchmark("child", child, None, 1)).cpu[0] > 0.01


@pytest.mark.parametrize("broken", [True, False])
def test_the_whole_ends_as_its_promises_do(
    broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("bench_start", "bench_plan", "bench_profiles", "bench_runs"):
        promise = -1.0 if broken and module == "bench_plan" else 60.0
        benchmark = Benchmark(module, busy, promise, 1)
        monkeypatch.setattr(getattr(__main__, module), "benchmarks", lambda scratch, made=benchmark: iter([made]))
    assert __main__.main() == int(broken)
    assert ("BROKEN" in capsys.readouterr().out) == broken


def test_runs_and_checkpoints_to_measure_are_what_they_are_called(tmp_path: Path) -> None:
    run = bench_runs.long_run(tmp_path / "long", segments=3, steps=4)
    state = bench_runs.read_state(run, bench_runs.NoQueue())
    assert (state.state, state.saved_step, len(state.rewards), len(state.segments)) == ("finished", 12, 12, 3)
    bench_runs.submitter(tmp_path / "chain")()
