"""verl's MTP post-processing accepts the arguments that a newer Megatron-Core passes to it (seed row S6).

verl replaces `GPTModel._postprocess` by its own function. Megatron-Core passes every argument by name, and has added
some over time (`padding_mask` first): a verl that does not know one fails with TypeError at the first forward.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from types import ModuleType
from typing import Any

from dsv4kit.plugin.patching import PatchResult, State, attribute, marked, original_of

_log = logging.getLogger(__name__)

_FUNCTION = "_megatron_gptmodel_postprocess"
_IGNORABLE = frozenset({"padding_mask"})
"""May be dropped even when given: it keeps padding out of the router's statistics, the loss masks padding itself."""


def tolerate_extra_arguments(module: ModuleType) -> PatchResult:
    """On `verl.models.mcore.mtp_patch`."""
    original = attribute(module, _FUNCTION)
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    known = inspect.signature(original).parameters
    gpt_model = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel
    passed = inspect.signature(inspect.unwrap(gpt_model._postprocess)).parameters
    missing = [name for name, p in passed.items() if name not in known and p.kind is not p.VAR_KEYWORD]
    if not missing or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return PatchResult(State.NOT_NEEDED, "it knows every argument Megatron-Core passes")

    @functools.wraps(original)
    def postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        unknown = {name: kwargs.pop(name) for name in list(kwargs) if name not in known}
        for name, value in unknown.items():
            if value is not None and name not in _IGNORABLE:
                raise TypeError(f"dsv4kit: verl's MTP patch does not know the argument {name!r}, and it has a value")
        return original(self, *args, **kwargs)

    setattr(module, _FUNCTION, marked(postprocess, original))
    return PatchResult(State.APPLIED, f"drops {', '.join(missing)}")
