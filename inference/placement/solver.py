"""The best placement of services on a fleet, as an integer program for HiGHS (by scipy's `milp`, extra `place`).

variables of each node   GPUs left whole; GPUs divided by each layout; servers of each service on each profile, and
                         on each number of whole GPUs
variables of a service   sequences held that count, at most those wanted
first                    most value: the sum of value x sequences
then                     fewest GPUs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contracts.errors import ConfigError
from inference.placement.fleet import Capacity, Fleet, Gpus
from inference.placement.mig import Layout, Profile, layouts

SECONDS = 5.0
"""Time limit of each of the two searches; after it, the best placement found so far is used."""
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Server:
    """A model server to start."""

    service: str
    node: str
    kind: str
    gpus: tuple[int, ...]
    """Numbers among the node's GPUs of this entry of the fleet file, from 0."""
    profile: str | None
    """MIG profile; None: whole GPUs."""
    start: int | None
    """Position of the slice."""
    sequences: int
    """That it holds."""


@dataclass(frozen=True)
class Placement:
    """What to start."""

    servers: tuple[Server, ...]
    served: Mapping[str, int]
    """Service -> sequences of all of its servers, at most those wanted."""
    value: float
    bound: float
    """No placement has more value: the optimum of the relaxation without integers."""
    gpus: int
    """GPUs in use."""


class _Program:
    """Variables by name, and rows of bounds on their sums."""

    def __init__(self) -> None:
        self.names: list[tuple[Any, ...]] = []
        self.upper: list[float] = []
        self.integer: list[int] = []
        self._rows: list[dict[int, float]] = []
        self._lower: list[float] = []

    def variable(self, *name: Any, upper: float = np.inf, integer: bool = True) -> int:
        self.names.append(name)
        self.upper.append(upper)
        self.integer.append(int(integer))
        return len(self.names) - 1

    def at_least(self, row: Mapping[int, float], bound: float = 0.0) -> None:
        """The weighted sum of these variables is at least `bound`."""
        self._rows.append(dict(row))
        self._lower.append(bound)

    def best(self, gain: Mapping[int, float], seconds: float, *, integer: bool = True) -> NDArray[np.float64] | None:
        """Values with the largest weighted sum; None if there are none."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_array

        rows = lil_array((len(self._rows), len(self.names)))
        for number, row in enumerate(self._rows):
            for variable, factor in row.items():
                rows[number, variable] = factor
        cost = np.zeros(len(self.names))
        for variable, factor in gain.items():
            cost[variable] = -factor
        found = milp(
            cost,
            constraints=LinearConstraint(rows.tocsr(), np.array(self._lower), np.inf),
            bounds=Bounds(0, np.array(self.upper)),
            integrality=np.array(self.integer) if integer else None,
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        return None if found.x is None else np.asarray(found.x)


def place(fleet: Fleet, capacities: Mapping[str, Capacity], seconds: float = SECONDS) -> Placement:
    """Best placement of the fleet's services. Raises ConfigError if the fewest servers do not fit."""
    _require_fits(fleet, capacities)
    program, gain = _Program(), dict[int, float]()
    for name, service in fleet.services.items():
        gain[program.variable("served", name, upper=service.sequences, integer=False)] = service.value
    held: dict[str, dict[int, float]] = {name: {} for name in fleet.services}
    for number, gpus in enumerate(fleet.gpus):
        _add_node(program, number, gpus, capacities, held)
    for served, name in zip(gain, fleet.services, strict=True):
        program.at_least({**held[name], served: -1.0})
        program.at_least(dict.fromkeys(held[name], 1.0), fleet.services[name].servers)
    relaxed = program.best(gain, seconds, integer=False)
    found = program.best(gain, seconds)
    if relaxed is None or found is None:
        counts = ", ".join(f"{each.servers} of {name}" for name, each in fleet.services.items())
        raise ConfigError(f"the fewest servers do not fit together ({counts}): lower `servers`, or add GPUs")
    value = sum(factor * found[variable] for variable, factor in gain.items())
    bound = sum(factor * relaxed[variable] for variable, factor in gain.items())
    program.at_least(gain, value - _ROUNDING * max(value, 1.0))
    used = {index: -1.0 for index, name in enumerate(program.names) if name[0] in ("whole", "layout")}
    fewest = program.best(used, seconds)
    return _placement(program, found if fewest is None else fewest, fleet, capacities, bound)


def _require_fits(fleet: Fleet, capacities: Mapping[str, Capacity]) -> None:
    """Raise ConfigError for a service of which no server fits anywhere, with what would fit."""
    for name, capacity in capacities.items():
        service = capacity.service
        if not service.servers or any(_places(gpus, capacity) for gpus in fleet.gpus):
            continue
        widest = max(filter(capacity.divides, service.tensor_parallel), default=1)
        largest = max(gpus.described.memory_gib for gpus in fleet.gpus)
        raise ConfigError(
            f"service {name}: one sequence of {service.context} tokens and {capacity.weights / 2**30:.1f} GiB of"
            f" weights fit no slice and no GPUs of the fleet, the largest of which has {largest:g} GiB. Would fit: one"
            f" GPU of {capacity.needed_gib(1):.0f} GiB, or {widest} of {capacity.needed_gib(widest):.0f} GiB each; a"
            " shorter context needs less"
        )


def _places(gpus: Gpus, capacity: Capacity) -> dict[Profile | int, int]:
    """Profile, or number of whole GPUs -> sequences of a server there, where it holds any."""
    kind, service = gpus.described, capacity.service
    found: dict[Profile | int, int] = {profile: capacity.on_slice(kind, profile) for profile in kind.profiles}
    for parts in service.tensor_parallel:
        if parts <= gpus.count:
            found[parts] = capacity.on_gpus(kind, parts)
    return {place: sequences for place, sequences in found.items() if sequences}


def _add_node(
    program: _Program,
    node: int,
    gpus: Gpus,
    capacities: Mapping[str, Capacity],
    held: Mapping[str, dict[int, float]],
) -> None:
    kind = gpus.described
    whole = program.variable("whole", node, upper=gpus.count)
    divided = {program.variable("layout", node, each, upper=gpus.count): each for each in layouts(kind) if each}
    program.at_least(dict.fromkeys((whole, *divided), -1.0), -gpus.count)
    used: dict[Profile | None, dict[int, float]] = {None: {whole: 1.0}}
    for profile in kind.profiles:
        used[profile] = {
            variable: float(sum(each == profile for each, _ in layout)) for variable, layout in divided.items()
        }
    for name, capacity in capacities.items():
        for place, sequences in _places(gpus, capacity).items():
            server = program.variable("server", node, name, place)
            held[name][server] = float(sequences)
            used[place if isinstance(place, Profile) else None][server] = -float(place if isinstance(place, int) else 1)
    for row in used.values():
        program.at_least(row)


def _placement(
    program: _Program,
    values: NDArray[np.float64],
    fleet: Fleet,
    capacities: Mapping[str, Capacity],
    bound: float,
) -> Placement:
    counts = {name: round(value) for name, value in zip(program.names, values, strict=True) if name[0] != "served"}
    servers: list[Server] = []
    for node, gpus in enumerate(fleet.gpus):
        chosen = {name[2:]: count for name, count in counts.items() if name[:2] == ("server", node) and count}
        cut = [name[2] for name, count in counts.items() if name[:2] == ("layout", node) for _ in range(count)]
        servers += _on_node(gpus, capacities, chosen, cut)
    held = Counter[str]()
    for server in servers:
        held[server.service] += server.sequences
    served = {name: min(each.sequences, held[name]) for name, each in fleet.services.items()}
    value = sum(fleet.services[name].value * count for name, count in served.items())
    in_use = sum(count for name, count in counts.items() if name[0] in ("whole", "layout"))
    return Placement(tuple(servers), served, value, bound, in_use)


def _on_node(
    gpus: Gpus,
    capacities: Mapping[str, Capacity],
    chosen: Mapping[tuple[str, Profile | int], int],
    cut: Sequence[Layout],
) -> list[Server]:
    """Servers at their GPUs: whole ones first, the widest before others, then divided ones."""
    servers, first = [], 0
    wide = [(place, name) for (name, place), count in chosen.items() if isinstance(place, int) for _ in range(count)]
    for parts, name in sorted(wide, key=lambda each: (-each[0], each[1])):
        numbers = tuple(range(first, first + parts))
        sequences = capacities[name].on_gpus(gpus.described, parts)
        servers.append(Server(name, gpus.node, gpus.kind, numbers, None, None, sequences))
        first += parts
    waiting: dict[Profile, list[str]] = {}
    for (name, place), count in sorted(chosen.items(), key=lambda each: each[0][0]):
        if isinstance(place, Profile):
            waiting.setdefault(place, []).extend([name] * count)
    for number, layout in enumerate(cut, first):
        for profile, start in layout:
            if waiting.get(profile):
                name = waiting[profile].pop(0)
                sequences = capacities[name].on_slice(gpus.described, profile)
                servers.append(Server(name, gpus.node, gpus.kind, (number,), profile.name, start, sequences))
    return servers
