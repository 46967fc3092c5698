"""`python -m benchmarks NAME [options]`: run one benchmark, print its table or JSON, exit 1 when a goal is missed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from benchmarks.catalog import CATALOG, load_benchmark
from benchmarks.goals import check_goals, load_goals
from benchmarks.machine import machine_facts
from benchmarks.report import as_json, print_catalog, print_report
from benchmarks.result import NotHereError, Options
from contracts.errors import ConfigError, TriplaneError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, 1 for a missed goal or an error, 2 for a wrong option or if
    there is nothing to measure, 130 after an interruption.
    """
    try:
        # so that children and sandboxes are stopped, too
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except TriplaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, NotHereError) else 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if arguments == ["list", "--names"]:
        print("\n".join(CATALOG))
        return 0
    if not arguments or arguments[0] in ("-h", "--help", "list"):
        print_catalog(load_goals(), as_text="--json" not in arguments)
        return 0
    benchmark = load_benchmark(arguments[0])
    parsed = vars(_parser(benchmark.name, benchmark.options).parse_args(arguments[1:]))
    plain, gate = parsed.pop("json"), not parsed.pop("no_gate")
    options = _options(benchmark.options, parsed)
    machine = machine_facts()
    result = benchmark.run(options)
    verdicts = check_goals(load_goals().get(benchmark.name, []), result.metrics) if result.judged else []
    if plain:
        print(json.dumps(as_json(benchmark.name, options, machine, result, verdicts), indent=1))
    else:
        print_report(benchmark.name, machine, result, verdicts)
    return 1 if gate and not all(verdict.met for verdict in verdicts) else 0


def _options(model: type[Options], values: dict[str, str | None]) -> Options:
    try:
        return model.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"{option}={first['input']}: {first['msg']}") from None


def _parser(name: str, options: type[Options]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=CATALOG[name], allow_abbrev=False)
    for field, info in options.model_fields.items():
        text = f"{info.description} (default: {info.default})".replace("%", "%%")
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if info.annotation is bool else {}
        parser.add_argument("--" + field.replace("_", "-"), metavar="VALUE", help=text, **alone)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--no-gate", action="store_true", help="exit 0 even when a goal is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
