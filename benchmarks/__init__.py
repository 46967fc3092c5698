"""Benchmarks: the project's performance goals, and measurements to compare with them.

    python -m benchmarks NAME [--options]  ->  module NAME: run(Options) -> Result  ->  goals.yaml  ->  table or JSON,
    exit 1 on a miss

In: real planes, on this machine. Out: a `Result` with named metrics. A benchmark is one module with an `Options` model
and a `run`. May import every package of this repository; nothing imports it.
"""
