"""The sandbox's network: one /24, a switch in a namespace of its own, one network namespace per node.

The bridge is not in the host's namespace, so that the host's firewall rules for bridged or forwarded packets (those of
a container engine, for example) cannot come between two nodes. The host sees one link: the controller's address.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.sandbox.host import mount_points, must, run
from dsv4kit.sandbox.spec import SandboxPaths

# The first range is private and little used; the second is set aside for network tests (RFC 2544).
RANGES = (IPv4Network("10.77.0.0/16"), IPv4Network("198.18.0.0/16"))
CONTROLLER_HOST = 254


def choose_subnet(used: Iterable[IPv4Network]) -> IPv4Network:
    """The first /24 of `RANGES` that overlaps none of `used`; a `UserError` when there is none."""
    taken = [network for network in used if network.prefixlen > 0]
    for candidate in (subnet for whole in RANGES for subnet in whole.subnets(new_prefix=24)):
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise UserError(f"no free /24 for the sandbox's network in {' or '.join(map(str, RANGES))}: see `ip route`")


def used_networks() -> Iterator[IPv4Network]:
    """The IPv4 networks of this machine's routes and addresses."""
    for route in json.loads(must(["ip", "-j", "-4", "route", "show", "table", "all"]) or "[]"):
        if route.get("dst", "default") != "default":
            yield IPv4Network(route["dst"], strict=False)
    for link in json.loads(must(["ip", "-j", "-4", "address"]) or "[]"):
        for address in link.get("addr_info", []):
            if "local" in address:
                yield IPv4Network(f"{address['local']}/{address['prefixlen']}", strict=False)


class Network:
    """The links and network namespaces of one sandbox, known by its tag."""

    def __init__(self, layout: SandboxPaths) -> None:
        self.tag = layout.tag
        self.switch = f"{layout.tag}-switch"

    def namespace(self, node: str) -> str:
        return f"{self.tag}-{node}"

    def create(self, nodes: list[str]) -> IPv4Network:
        """Make the switch and the nodes' links; returns the /24 chosen (node i has its address i)."""
        subnet = choose_subnet(used_networks())
        controller = subnet[CONTROLLER_HOST]
        spaces = "".join(f"netns add {name}\n" for name in (self.switch, *map(self.namespace, nodes)))
        _batch(
            f"{spaces}link add {self.tag} type veth peer name uplink netns {self.switch}\n"
            f"address add {controller}/24 dev {self.tag}\n"
            f"link set {self.tag} up\n"
        )
        ports = "".join(
            f"link add {node} type veth peer name eth0 netns {self.namespace(node)}\nlink set {node} master br0 up\n"
            for node in nodes
        )
        _batch(
            f"link add br0 type bridge\nlink set br0 up\nlink set uplink master br0 up\n{ports}", namespace=self.switch
        )
        for i, node in enumerate(nodes, 1):
            # The default route leads nowhere, but it makes "which address do I use to reach the world" (asked by Ray,
            # Gloo and vLLM) answer with the node's own, and a connection to the outside fails within seconds.
            _batch(
                f"address add {subnet[i]}/24 dev eth0\nlink set lo up\nlink set eth0 up\nroute add default dev eth0\n",
                namespace=self.namespace(node),
            )
        return subnet

    def plug(self, node: str, up: bool) -> None:
        """Connect a node's port at the switch, or cut it."""
        must(["ip", "-n", self.switch, "link", "set", node, "up" if up else "down"])

    def unplugged(self) -> set[str]:
        """The nodes whose port is cut."""
        done = run(["ip", "-n", self.switch, "-j", "link"])
        links = json.loads(done.stdout or "[]") if done.returncode == 0 else []
        return {link["ifname"] for link in links if "UP" not in link["flags"]}

    def remove(self) -> bool:
        """Remove every link and namespace of this sandbox, also of a half-made one; True when there was any."""
        found = False
        if Path(f"/sys/class/net/{self.tag}").exists():
            must(["ip", "link", "delete", self.tag])
            found = True
        directory = Path("/run/netns")
        for name in sorted(entry.name for entry in directory.glob(f"{self.tag}-*")):
            found = True
            if run(["ip", "netns", "delete", name]).returncode:
                # A namespace file whose mount never came about: `ip` was killed between the two.
                (directory / name).unlink(missing_ok=True)
        if found:
            _tidy(directory)
        return found


def controller_address(subnet: IPv4Network) -> IPv4Address:
    return subnet[CONTROLLER_HOST]


def _batch(commands: str, namespace: str = "") -> None:
    must(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], stdin=commands)


def _tidy(directory: Path) -> None:
    """Undo the mount `ip netns add` made of the directory on itself, unless someone has a namespace there."""
    if not directory.exists() or any(directory.iterdir()):
        return
    while str(directory) in mount_points() and run(["umount", str(directory)]).returncode == 0:
        pass
    run(["rmdir", str(directory)])
