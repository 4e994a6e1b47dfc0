"""What a reader should know first: the sentences at the top of a report, and its tables as rows of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsv4kit.report.figures import hours_shown
from dsv4kit.report.gather import RunFacts
from dsv4kit.run import cost, metrics
from dsv4kit.run.ends import COMPLETED
from dsv4kit.text_table import duration

_QUARTER = 4
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def sentences(facts: RunFacts) -> Iterator[str]:
    """State, whether it learns, what it cost, what went wrong."""
    yield f"{facts.saved_step} of {facts.total_steps} steps are saved, on {facts.nodes} nodes."
    yield from _learns(facts)
    held = sum(facts.hours.values())
    if held:
        kept = facts.hours.get(cost.STEPS, 0.0)
        lost = facts.hours.get(cost.LOST, 0.0)
        yield (
            f"It held {held:.1f} node-hours: {kept / held:.0%} trained steps that are kept"
            f"{f', {lost:.1f} were lost to faults' if lost else ', none were lost'};"
            f" {duration(facts.queue_s)} passed in queues between segments."
        )
    faults = [row for row in facts.attempts if row["fault"]]
    if faults:
        kinds = ", ".join(sorted({str(row["end"]) for row in faults}))
        yield f"{len(faults)} of {len(facts.attempts)} attempts ended by a fault: {kinds}."
    elif facts.attempts:
        yield "No attempt ended by a fault."
    jumps = [one for one in facts.resumes if not one["in_order"] or changed(one["learning_rate"])]
    if jumps:
        yield f"{len(jumps)} of {len(facts.resumes)} resumes are not continuous, see Resumes."
    elif facts.resumes:
        yield f"All {len(facts.resumes)} resumes go on with the next step and the same learning rate."
    yield facts.reward.text if facts.reward.steps else "There is no reward to read."
    yield from facts.problems


def _learns(facts: RunFacts) -> Iterator[str]:
    for name, word in ((metrics.REWARD, "reward"), (metrics.SFT_LOSS, "loss")):
        values = [value for value in facts.curve(name)[1] if value is not None]
        bad = len(facts.curve(name)[1]) - len(values)
        if values:
            part = max(1, len(values) // _QUARTER)
            first, last = sum(values[:part]) / part, sum(values[-part:]) / part
            yield f"Mean {word} {first:.3f} in the first quarter of {len(values)} steps, {last:.3f} in the last."
        if bad:
            yield f"The {word} of {bad} step{'s' if bad > 1 else ''} was not a number."


def changed(pair: list[float | None]) -> bool:
    """Whether a learning rate jumps at a resume: by more than a tenth."""
    before, after = pair
    return before is not None and after is not None and abs(after - before) > 0.1 * max(abs(before), abs(after))


def tables(facts: RunFacts) -> list[Table]:
    """(title, columns, rows) in the order of the page."""
    found: list[Table] = [
        ("Attempts", ("segment", "attempt", "steps", "node-hours", "end", "evidence"), [*map(_attempt, facts.attempts)])
    ]
    rows: list[tuple[str, ...]] = [(kind, f"{value:.2f}") for kind, value in hours_shown(facts.hours)]
    rows += [(f"of these lost to: {end}", f"{value:.2f}") for end, value in facts.lost_to.items()]
    found.append(("Node-hours", ("went into", "node-hours"), rows))
    if facts.compared:
        rows = [
            (
                str(one["name"]),
                f"{one['predicted']:.4g} {one['unit']}".strip(),
                "not measured" if one["measured"] is None else f"{one['measured']:.4g} {one['unit']}".strip(),
                "" if not one["measured"] or not one["predicted"] else f"{one['measured'] / one['predicted'] - 1:+.0%}",
            )
            for one in facts.compared
        ]
        found.append(("Predicted and measured", ("", "plan", "measured", "measured over plan"), rows))
    if facts.resumes:
        found.append(
            (
                "Resumes",
                ("segment.attempt", "from step", "first step", "steps again", "learning rate", "reward or loss"),
                [*map(_resume, facts.resumes)],
            )
        )
    if facts.validation:
        rows = [(name, f"{value:.4g}") for name, value in facts.validation.items()]
        found.append(("Last validation", ("", ""), rows))
    if facts.memory.nodes:
        rows = [
            (node.node, node.role, f"{node.host_peak:.0f}", _number(node.planned_host), _number(node.gpu_peak),
             _number(node.planned_gpu))
            for node in facts.memory.nodes
        ]  # fmt: skip
        columns = ("node", "holds", "host peak (GiB)", "plan", "GPU peak (GiB)", "plan")
        found.append(("Memory peaks", columns, rows))
    if facts.excluded:
        rows = [(str(one["node"]), str(one["segment"]), str(one["reason"])) for one in facts.excluded]
        found.append(("Avoided nodes", ("node", "since segment", "why"), rows))
    found.append(("Versions", ("", ""), [*versions(facts.record).items()]))
    return found


def versions(record: Mapping[str, Any]) -> dict[str, str]:
    """Which kit, profile and site made it."""
    settings, site = record.get("settings") or {}, record.get("site") or {}
    known = {
        "profile": settings.get("profile"),
        "description": settings.get("description"),
        "hardware": (settings.get("hardware") or {}).get("name"),
        "model": (settings.get("model") or {}).get("name"),
        "recipe": (settings.get("recipe") or {}).get("name"),
        "site": site.get("name"),
        "image": (site.get("container") or {}).get("image"),
        "submitted": record.get("submitted"),
        **(record.get("versions") or {}),
    }
    return {key: str(value) for key, value in known.items() if value not in (None, "")}


def _attempt(row: Mapping[str, Any]) -> tuple[str, ...]:
    reached = row["reached"] if row["reached"] is not None else row["last_step"]
    steps = "" if row["start"] is None else f"{row['start']} to {reached if reached is not None else '?'}"
    evidence = "; ".join(row["evidence"]) if row["end"] != COMPLETED else ""
    return (
        str(row["segment"]),
        str(row["attempt"]),
        steps,
        f"{row['node_hours']:.2f}",
        row["end"] or "no outcome (yet)",
        evidence,
    )


def _resume(one: Mapping[str, Any]) -> tuple[str, ...]:
    def pair(values: list[float | None]) -> str:
        return " to ".join("?" if value is None else f"{value:.4g}" for value in values)

    order = "" if one["in_order"] else f" (expected {one['from_step'] + 1})"
    jump = " (jump)" if changed(one["learning_rate"]) else ""
    usual = "" if one["usual_change"] is None else f" (usual change {one['usual_change']:.2g})"
    return (
        f"{one['segment']}.{one['attempt']}",
        str(one["from_step"]),
        f"{one['first_step']}{order}",
        str(one["again"]),
        f"{pair(one['learning_rate'])}{jump}",
        f"{pair(one['value'])}{usual}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def differences(one: RunFacts, other: RunFacts) -> Table:
    """What two runs have otherwise: versions, settings, and the numbers that matter."""
    rows: list[tuple[str, ...]] = []
    for name, get in (
        ("steps saved", lambda facts: str(facts.saved_step)),
        ("node-hours", lambda facts: f"{sum(facts.hours.values()):.1f}"),
        ("node-hours lost", lambda facts: f"{facts.hours.get(cost.LOST, 0.0):.1f}"),
        ("usual step (s)", _usual),
        ("attempts", lambda facts: str(len(facts.attempts))),
    ):
        rows.append((name, get(one), get(other)))
    settings = [
        _flat({"settings": facts.record.get("settings") or {}, **versions(facts.record)}) for facts in (one, other)
    ]
    for key in sorted(settings[0].keys() | settings[1].keys()):
        before, after = (which.get(key, "") for which in settings)
        if before != after:
            rows.append((key, before, after))
    return ("What differs", ("", one.run, other.run), rows)


def _usual(facts: RunFacts) -> str:
    values = sorted(value for value in facts.curve(metrics.STEP_TIME)[1] if value is not None)
    return f"{values[len(values) // 2]:.1f}" if values else ""


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = str(value)
    return found
