"""The one list of rules that can refuse a run before it is submitted.

`plan`, its search and its levers, `submit`, its dry run, `doctor` and `resume` all ask it, in this order, so that the
first line a user reads is the same whichever is asked. A rule yields what is wrong, most telling first; a `UserError`
that something below it raises is a refusal too.

What depends on the moment is apart (`at_submission`): the files the site names have to be there when a run is
submitted, not when it is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dsv4kit.errors import UserError
from dsv4kit.feasibility import (
    file_rules,
    image_rules,
    logger_rules,
    planner_rules,
    retention_rules,
    schedule_rules,
    site_files,
    trainer_rules,
    verl_rules,
)
from dsv4kit.feasibility.case import Case, Refusal
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.from_settings import question
from dsv4kit.plan.proposals import changes

Rule = Callable[[Case], Iterator[Refusal]]

# What follows from the settings alone.
OF_SETTINGS: tuple[Rule, ...] = (
    planner_rules.of_model,
    *trainer_rules.RULES,
    planner_rules.of_nodes,
    planner_rules.virtual_stages,
    planner_rules.layout,
    schedule_rules.segments,
    schedule_rules.time,
    *retention_rules.RULES,
    verl_rules.clashes,
)
# Rules that also read something else: the image, the user's files, verl's own configuration.
OF_FILES: tuple[Rule, ...] = (
    image_rules.fits,
    file_rules.readable,
    file_rules.whole_model,
    file_rules.reward_function,
    file_rules.data,
    verl_rules.known_keys,
)

RULES: tuple[Rule, ...] = (*OF_SETTINGS, *OF_FILES)

# What a search may change: a refusal of one of these is a reason to search, not to give up.
SEARCHED = (
    *("schedule.nodes", "data.train_batch_size", "rollout.tensor_model_parallel_size"),
    *("parallel.actor", "parallel.rollout", "optimizer."),
)


def refusals(case: Case, rules: tuple[Rule, ...] = RULES) -> Iterator[Refusal]:
    """Everything that speaks against the run."""
    for rule in rules:
        try:
            yield from rule(case)
        except UserError as error:
            yield Refusal("", None, "", str(error))


def refuse(case: Case) -> None:
    """Raises UserError for the first refusal."""
    for refusal in refusals(case):
        raise UserError(refusal.line)


def at_submission(case: Case) -> Iterator[Refusal]:
    """What has to be there at the moment a run is submitted or resumed."""
    for problem in site_files.problems(case.site):
        yield Refusal("site", case.site.name, "", problem)
    yield from logger_rules.in_the_image(case)
    yield from logger_rules.with_a_key(case)


def allows(case: Case) -> Callable[[Question], bool]:
    """Whether the case with the planner's question in place of its own would be let through, as a function of it.

    For proposals (levers, searches), which change settings only: of the files nothing is asked again.
    """
    own = question(case.settings)

    def allowed(proposed: Question) -> bool:
        if own is None:
            return True
        try:
            changed = case.changed(changes(own, proposed))
        except UserError:
            return False
        return next(refusals(changed, OF_SETTINGS), None) is None

    return allowed


def of_the_layout(case: Case) -> Refusal | None:
    """The first refusal, where all that speaks against the run is that its profile's split does not go into its nodes.

    None where nothing does, where something else does, and where the user gave the split.
    """
    found = list(refusals(case))
    chosen = ("parallel.", "rollout.tensor_model_parallel_size", "optimizer.")
    by_hand = any(key.startswith(chosen) and said.startswith(("SET ", "VERL ")) for key, said in case.sources.items())
    if not found or by_hand or not all(refusal.key.startswith(SEARCHED) for refusal in found):
        return None
    return found[0]


def beyond_search(case: Case) -> Refusal | None:
    """The first refusal that no other layout on the same nodes cures; None where there is none."""
    found = (refusal for refusal in refusals(case) if not refusal.key.startswith(SEARCHED))
    return next(found, None)
