"""How long a phase of the trainer's start usually takes: in this run so far, else where the kit was measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median

from dsv4kit.launch.run_dir import read_record
from dsv4kit.run import phases
from dsv4kit.run.directory import RunDir
from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.phases import Mark

MEASURED = Path(__file__).with_name("usual_phases.yaml")


class UsualPhases:
    """The usual durations of one run; what it was submitted with is read once, and only if it is needed."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._measured: dict[str, float] | None = None

    def seconds(self, phase: str, attempts: Iterable[list[Mark]]) -> float | None:
        """Median over the run's attempts that got through the phase; None where nothing is known.

        `attempts` are their marks. A phase after which an attempt ended says nothing.
        """
        if phase not in (phases.CONTAINER_START, *phases.STARTS):
            return None
        took = [
            following.time - mark.time
            for marks in attempts
            for mark, following in pairwise(marks)
            if mark.phase == phase and following.phase != phases.END
        ]
        return median(took) if took else self._of_hardware().get(phase)

    def _of_hardware(self) -> dict[str, float]:
        if self._measured is None:
            from dsv4kit.config.loading import load_yaml  # with pydantic: `runs` has no need of it

            try:
                settings = read_record(self._run)["settings"]
                by_recipe = load_yaml(MEASURED).get(settings["hardware"]["name"], {})
                self._measured = dict(by_recipe.get(settings["recipe"]["name"], {}))
            except (DamagedFileError, KeyError, TypeError):  # it can be shown without
                self._measured = {}
        return self._measured
