"""Explains why machines can't connect: a host name that resolves to a loopback address is useless to other machines."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address

from megatron_lite.processes.failure import TrainingError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@contextmanager
def explained() -> Iterator[None]:
    """Raise TrainingError with advice if the ranks can't connect and this machine's host name explains it."""
    try:
        yield
    except RuntimeError as error:
        found = advice(os.environ)
        if found is None:
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise TrainingError(f"{found} ({first_line})") from error


def advice(environment: Mapping[str, str]) -> str | None:
    """Return the advice; None on a single machine, or if the user has named an interface, or the host name is usable."""
    world = environment.get("WORLD_SIZE", "1")
    is_single = world == environment.get("LOCAL_WORLD_SIZE", world)
    if is_single or VARIABLES[0] in environment:
        return None
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return None
    if not ip_address(address).is_loopback:
        return None
    exports = " ".join(f"{variable}=eth0" for variable in VARIABLES)
    return (
        f"the host name {name} resolves to {address}, which other machines can't reach: name the network interface, "
        f"for example export {exports} (`ip -brief address` lists the interfaces)"
    )
