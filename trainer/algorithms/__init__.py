"""Policy-gradient algorithms and corrections: settings with their formulas, one file each, over shared pure functions.

    rewards --advantages--> A --+
    logprobs - old --log_ratio--> r --objective--> s --corrections--> w s, or masked --aggregation--> loss

An algorithm is a settings class with two methods, `log_ratio` and `objective`. `trainer.losses.policy_loss` does the
rest, equally for all. Tensors are used through their methods only, so that importing this package, as job files do,
loads no torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.algorithms.cispo import Cispo
from trainer.algorithms.dapo import Dapo
from trainer.algorithms.dr_grpo import DrGrpo
from trainer.algorithms.grpo import Grpo
from trainer.algorithms.gspo import Gspo
from trainer.algorithms.ppo import Ppo
from trainer.algorithms.reinforce_pp import ReinforcePlusPlus
from trainer.algorithms.rloo import Rloo

Algorithm = Annotated[Grpo | DrGrpo | Dapo | Gspo | Cispo | Rloo | ReinforcePlusPlus | Ppo, Field(discriminator="kind")]
"""Any algorithm, chosen by `kind`."""
