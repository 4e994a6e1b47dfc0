"""Python runs this first in every process of a segment, because the run's own copy of the kit is on PYTHONPATH.

DSV4KIT_GC_THRESHOLD=N has Python's garbage collector look after N new objects, not 700: a start of the trainer imports
some thousand modules in a dozen processes, makes millions of objects that all stay, and looks at them again and again.
A `sitecustomize` of the image's own, which this one hides, runs as well.
"""

import gc
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

if threshold := os.environ.get("DSV4KIT_GC_THRESHOLD"):
    gc.set_threshold(int(threshold), *gc.get_threshold()[1:])

_HERE = os.path.dirname(os.path.abspath(__file__))
_spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE])
if _spec and _spec.loader:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
