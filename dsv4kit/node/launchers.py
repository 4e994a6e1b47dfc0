"""The launchers by the names recipes call them."""

from __future__ import annotations

from dsv4kit.node.launcher import Launcher
from dsv4kit.node.ray.launcher import RayLauncher
from dsv4kit.node.torchrun import TorchrunLauncher

BY_NAME: dict[str, type[Launcher]] = {"ray": RayLauncher, "torchrun": TorchrunLauncher}
