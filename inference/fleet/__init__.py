"""Fleet: the replicas behind `python -m inference route`, their leases, health, drains, versions and updates.

    replica --joining: a lease, renewed--> registry (in memory, or in Redis for several routers) --sync--+
    addresses of the command line, resolved -------------------------------------------------------------+--> Fleet
    active probes, faults of requests --health: at most half is ejected, never the last------------------+      |
                                                                          one router a policy version <---------+
    `triplane fleet update`: drain -> load -> proven by a probe -> back, at most N replicas at a time

`registry` and `shared_registry` keep leases and drains; `fleet` decides which replicas may be chosen; `pools` has a
router for each policy version, so that a request that is pinned to one can't reach a replica of another; `face` is the
HTTP API under /fleet, `client` speaks it, `joining` keeps a lease with it, `update` rolls weights out over it. `events`
tells a webhook, `scaler` KEDA. May import contracts, inference.engines, inference.router and inference.errors.
"""
