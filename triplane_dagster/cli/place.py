"""`triplane place`: which model servers a fleet of GPUs should run."""

from __future__ import annotations

import platform
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.errors import ConfigError
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json, print_rows

if TYPE_CHECKING:
    from inference.placement.fleet import Fleet
    from inference.placement.solver import Placement, Server


def place(
    fleet: Annotated[
        Path | None, typer.Argument(metavar="FLEET.yaml", help="GPUs, and the models to serve on them.")
    ] = None,
    inventory: Annotated[
        bool, typer.Option("--inventory", help="Print the GPUs of this machine as `gpus` of a fleet file, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the model servers to start on whole GPUs and MIG slices, so that most of the wanted sequences fit on the
    fewest GPUs. Changes no GPU and starts nothing.

    A fleet file (docs/engines.md has every key):

        gpus:
          - {node: a, kind: H100-80GB, count: 8}

        services:
          policy: {model: /models/Qwen3-30B-A3B, context: 32768, sequences: 256}
          judge: {model: /models/Qwen3-4B, context: 8192, sequences: 64, servers: 2}

    Examples:

        triplane place --inventory > fleet.yaml           # on one node; add the lists of others below `gpus`

        triplane place fleet.yaml

        triplane place fleet.yaml --json
    """
    if inventory:
        _print_inventory(as_json)
        return
    if fleet is None:
        raise ConfigError("name a fleet file, or say --inventory: `triplane place --help` shows one")
    from inference.placement.fleet import Capacity, Fleet

    try:
        from inference.placement.solver import place as solve
    except ImportError:
        raise ConfigError("triplane place needs scipy: run pip install 'triplane[place]'") from None

    wanted = Fleet.read(fleet)
    found = solve(wanted, {name: Capacity(service) for name, service in wanted.services.items()})
    if as_json:
        servers = [{**vars(each), "command": _command(each, wanted)} for each in found.servers]
        print_json({**vars(found), "servers": servers})
        return
    _print(found, wanted)


def _print_inventory(as_json: bool) -> None:
    import yaml

    from inference.placement.inventory import inventory

    found = {"gpus": inventory(platform.node())}
    if as_json:
        print_json(found)
    else:
        typer.echo(yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=120), nl=False)


def _print(found: Placement, fleet: Fleet) -> None:
    rows: list[dict[str, Any]] = [
        {
            "node": each.node,
            "GPUs": ", ".join(map(str, each.gpus)),
            "kind": each.kind,
            "slice": "whole" if each.profile is None else f"{each.profile} at {each.start}",
            "service": each.service,
            "sequences": each.sequences,
        }
        for each in found.servers
    ]
    print_rows(rows, as_json=False, empty="no server is worth a GPU: every `sequences` is held by none")
    for name, service in fleet.services.items():
        console().print(
            f"{name}: {found.served[name]} of {service.sequences} sequences of {service.context} tokens.", markup=False
        )
    total = sum(gpus.count for gpus in fleet.gpus)
    share = f"{found.value / found.bound:.1%}" if found.bound else "all"
    console().print(f"{found.gpus} of {total} GPUs in use; {share} of what no placement can exceed.\n")
    for node, number, slices in _divided(found):
        console().print(f"{node}: nvidia-smi mig -i {number} -cgi {slices} -C", soft_wrap=True, markup=False)
    for command in dict.fromkeys(_command(each, fleet) for each in found.servers):
        console().print(command, soft_wrap=True, markup=False)


def _divided(found: Placement) -> list[tuple[str, int, str]]:
    """(node, GPU number, `PROFILE:START,...`) of each GPU to divide."""
    slices: dict[tuple[str, int], list[str]] = {}
    for each in found.servers:
        if each.profile is not None:
            slices.setdefault((each.node, each.gpus[0]), []).append(f"{each.profile}:{each.start}")
    return [(node, number, ",".join(parts)) for (node, number), parts in slices.items()]


def _command(server: Server, fleet: Fleet) -> str:
    """Command that starts the server; the user makes only its GPUs or its slice visible to it."""
    service = fleet.services[server.service]
    flags = ["--tensor-parallel-size", str(len(server.gpus)), "--max-model-len", str(service.context)]
    flags += ["--max-num-seqs", str(server.sequences), "--gpu-memory-utilization", f"{service.utilization:g}"]
    flags += ["--kv-cache-dtype", "fp8"] if service.fp8_cache else []
    return shlex.join(["vllm", "serve", str(service.model), *flags])
