"""The asset graph of an experiment, one file an asset, in graph order; each file is a factory over an Experiment.

    task_suite   base_policy                                       once
         \\         /
      iteration_inputs[i]    pinned: policy, start, suite, base    <- live pointer, else base_policy
              |
          prompts[i] -> rollouts[i] -> rewards[i] -> dataset[i] -> checkpoint[i] -> evaluation[i] -> sampler[i] -> live
          pointer
                                                |                                                               |
                                           reward_flips[i]                                                      |
                                                                                                            report[i]

In: an Experiment. Out: asset definitions under the key prefix of its name. References pass between them
(`resources.ref_io`), never data.

Imported by triplane_dagster. May import: dagster, ops, resources and what lies below.
"""

from __future__ import annotations

from importlib import import_module

import dagster as dg

from ops.graph import GRAPH
from resources.experiment import Experiment


def experiment_assets(experiment: Experiment) -> list[dg.AssetsDefinition]:
    """Every asset of one experiment, in graph order: `assets.<name>` of each step that `ops.graph` declares."""
    return [import_module(f"assets.{spec.name}").build(experiment) for spec in GRAPH]
