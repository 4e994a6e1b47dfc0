"""MTP: verl's post-processing against the arguments of the installed Megatron-Core."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_model import GPTModel
from verl.models.mcore import mtp_patch

from dsv4kit.plugin.mtp import tolerate_extra_arguments
from dsv4kit.plugin.patching import State

NAME = "_megatron_gptmodel_postprocess"


def test_not_needed_with_this_verl_and_megatron() -> None:
    before = getattr(mtp_patch, NAME)
    assert tolerate_extra_arguments(mtp_patch).state is State.NOT_NEEDED
    assert getattr(mtp_patch, NAME) is before


def test_a_verl_that_knows_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of verl #6603: Megatron-Core passes `padding_mask`, verl's function has no such argument."""
    passed = [name for name in inspect.signature(GPTModel._postprocess).parameters if name != "padding_mask"]
    arguments = ", ".join([passed[0], *(f"{name}=None" for name in passed[1:])])
    scope: dict[str, Any] = {}
    exec(f"def older({arguments}):\n    return hidden_states", scope)
    monkeypatch.setattr(mtp_patch, NAME, scope["older"])
    with pytest.raises(TypeError, match="padding_mask"):
        getattr(mtp_patch, NAME)(object(), hidden_states=1, padding_mask=object())
    outcome = tolerate_extra_arguments(mtp_patch)
    assert outcome.state is State.APPLIED
    assert outcome.detail == "drops padding_mask"
    postprocess = getattr(mtp_patch, NAME)
    assert postprocess(object(), hidden_states=1, padding_mask=object()) == 1
    assert postprocess(object(), hidden_states=1, something_new=None) == 1
    with pytest.raises(TypeError, match="'something_new', and it has a value"):
        postprocess(object(), hidden_states=1, something_new=2)
    assert tolerate_extra_arguments(mtp_patch).detail == "by an earlier call"
