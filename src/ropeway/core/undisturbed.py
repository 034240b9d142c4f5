"""What decodes take undisturbed, as a share of what is predicted for them. Knows no plans, queues or objectives."""

from __future__ import annotations

# Steps that hold prompts until one holds none, to be looked at: 2 % of the prompts' time where they never cease.
MAX_NUM_DISTURBED = 40
GAIN = 1 / 8
MAX_STRAY = 1.25  # from the share so far, that a step counts for: one slow step is no news
MIN_SHARE, MAX_SHARE = 0.5, 1.5


class Undisturbed:
    """Follows the time of steps of decodes alone, over what the costs learned of all steps predict for them.

    While prompts stream in, these costs follow the steps that hold prompts. Beside chunks of prompts of 8,000 tokens
    decodes were predicted to take 1.21 times what they did alone (the default model, one answer; beside 8, 1.26 times),
    so steps measured by the prediction were as much too long.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._num_disturbed = 0  # steps in a row that held prompts

    @property
    def is_look_due(self) -> bool:
        """Whether the next step should hold decodes alone, if it can."""
        return self._num_disturbed >= MAX_NUM_DISTURBED

    def observe(self, predicted_s: float, step_s: float, *, is_alone: bool) -> None:
        """A step with decodes was predicted to take predicted_s and took step_s; is_alone: with nothing else."""
        if not is_alone:
            self._num_disturbed += 1
            return
        self._num_disturbed = 0
        share = min(max(step_s / predicted_s, self.share / MAX_STRAY), self.share * MAX_STRAY)
        self.share = min(max(self.share + GAIN * (share - self.share), MIN_SHARE), MAX_SHARE)
