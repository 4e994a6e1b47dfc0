"""Python runs this first in every process of a segment, because the run's own copy of the kit is on PYTHONPATH.

DSV4KIT_GC_THRESHOLD=N has Python's garbage collector look after N new objects, not 700: a start of the trainer imports
some thousand modules in a dozen processes, makes millions of objects that all stay, and looks at them again and again.
DSV4KIT_STACKS_DIR has the process write its stacks into a file there, named by its pid, whenever it gets the signal of
node/stacks.py.
A `sitecustomize` of the image's own, which this one hides, runs as well.
"""

import contextlib
import faulthandler
import gc
import importlib.util
import os
import signal
import sys
from importlib.machinery import PathFinder

if threshold := os.environ.get("DSV4KIT_GC_THRESHOLD"):
    gc.set_threshold(int(threshold), *gc.get_threshold()[1:])

if stacks := os.environ.get("DSV4KIT_STACKS_DIR"):
    with contextlib.suppress(OSError, RuntimeError):
        _stacks = open(os.path.join(stacks, str(os.getpid())), "w")  # noqa: SIM115  # for as long as the process lives
        faulthandler.register(signal.SIGRTMIN + 7, _stacks, all_threads=True)

_HERE = os.path.dirname(os.path.abspath(__file__))
_spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE])
if _spec and _spec.loader:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
