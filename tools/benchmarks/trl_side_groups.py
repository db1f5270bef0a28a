"""trl_side.py with whole groups in an update: TRL 1.16 without the shuffle of a step's samples over the updates.

python trl_side_groups.py grpo TASK.json
"""

from __future__ import annotations

import trl.trainer.grpo_trainer as grpo_trainer
import trl_side


def keep_order(samples):
    """Return the samples of a step in their order, in which those of a prompt are neighbours."""
    return samples


if __name__ == "__main__":
    # a name that TRL has renamed must not pass unseen
    assert callable(grpo_trainer.shuffle_sequence_dict)
    grpo_trainer.shuffle_sequence_dict = keep_order
    trl_side.main()
