"""What a benchmark is, how it is measured, and when a promise is broken."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Benchmark(NamedTuple):
    """`work` is done once without being counted and then `runs` times; `promise_s` is the CPU time it may take."""

    name: str
    work: Callable[[], object]
    promise_s: float | None = None
    runs: int = 7


class Times(NamedTuple):
    """Seconds of each run: on the clock, and on a CPU in this process and in the children it has waited for."""

    wall: list[float]
    cpu: list[float]


def measured(benchmark: Benchmark) -> Times:
    """The times of its runs."""
    benchmark.work()
    times = Times([], [])
    for _ in range(benchmark.runs):
        since, before = time.perf_counter(), _cpu_s()
        benchmark.work()
        times.wall.append(time.perf_counter() - since)
        times.cpu.append(_cpu_s() - before)
    return times


def _cpu_s() -> float:
    """User and system time so far; os.times() counts in hundredths of a second only."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def broken(benchmark: Benchmark, times: Times) -> bool:
    """Whether its promise is broken: by the least CPU time of all runs, which other work changes least."""
    return benchmark.promise_s is not None and min(times.cpu) > benchmark.promise_s


def run(benchmarks: Iterable[Benchmark], show: Callable[[str], None] = print) -> int:
    """Measures and shows all of them; returns the exit status, 1 where a promise is broken."""
    show(f"{'':46} {'CPU, median':>12} {'least':>8} {'wall, median':>13} {'promise':>9} {'least/promise':>14}")
    failed = [benchmark.name for benchmark in benchmarks if not _kept(benchmark, show)]
    for name in failed:
        show(f"promise broken: {name}")
    return 1 if failed else 0


def _kept(benchmark: Benchmark, show: Callable[[str], None]) -> bool:
    times = measured(benchmark)
    show("".join(_cells(benchmark, times)))
    return not broken(benchmark, times)


def _cells(benchmark: Benchmark, times: Times) -> Iterator[str]:
    middle = statistics.median
    yield f"{benchmark.name:46} {_ms(middle(times.cpu)):>12} {_ms(min(times.cpu)):>8} {_ms(middle(times.wall)):>13}"
    if benchmark.promise_s is not None:
        yield f" {_ms(benchmark.promise_s):>9} {min(times.cpu) / benchmark.promise_s:>13.0%}"
        yield "  BROKEN" if broken(benchmark, times) else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
