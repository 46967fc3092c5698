"""Router: which of several replicas of a policy gets a request, by what each has in its prefix cache.

    prompt --fingerprint--> hashes of its blocks --index--> cached tokens of each replica --choice--> replica
    events of engines, own decisions --residency--> index           loads, learned rates --score--^

`Router` joins these parts; decisions are local and take microseconds. May import contracts and inference.errors.
"""

from __future__ import annotations

from inference.router.fingerprint import Fingerprinter, Namespace
from inference.router.residency import Batch, Cleared, Removed, Stored
from inference.router.router import Decision, Router, RouterConfig

__all__ = [
    "Batch",
    "Cleared",
    "Decision",
    "Fingerprinter",
    "Namespace",
    "Removed",
    "Router",
    "RouterConfig",
    "Stored",
]
