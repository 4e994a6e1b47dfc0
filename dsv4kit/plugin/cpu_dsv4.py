"""verl's Megatron engine training DeepSeek-V4 on a CPU: every stand-in of `cpu_megatron`, for the life of the process.

    VERL_USE_EXTERNAL_MODULES=dsv4kit.plugin.cpu_platform,dsv4kit.plugin.cpu_dsv4

Megatron-LM and Megatron-Bridge come from the checkouts that DSV4KIT_MEGATRON_LM and DSV4KIT_MEGATRON_BRIDGE name.
"""

from __future__ import annotations

import os
import sys

from dsv4kit.plugin.cpu_megatron import install

_PLACES = (("DSV4KIT_MEGATRON_LM", ""), ("DSV4KIT_MEGATRON_BRIDGE", "src"))

sys.path[:0] = [os.path.join(os.environ[name], below) for name, below in _PLACES if os.environ.get(name)]
install()
