"""Number types, and dynamic loss scaling for fp16."""

from gptworks.config.schema import ScalerConfig
from gptworks.model.dtypes import DTYPES as DTYPES


class LossScaler:
    """Multiplies the loss so that fp16 gradients do not vanish. Shrinks after bad steps, grows after many good ones."""

    def __init__(self, cfg: ScalerConfig, enabled: bool) -> None:
        self.cfg = cfg
        self.enabled = enabled
        self.scale = cfg.init if enabled else 1.0
        self.good_steps = 0
        self.bad_steps = 0

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        refilled_by_growth = self.cfg.refill == "growth"
        if finite:
            if not refilled_by_growth:
                self.bad_steps = 0
            self.good_steps += 1
            if self.good_steps == self.cfg.window:
                self.good_steps = self.bad_steps = 0
                self.scale *= self.cfg.growth
        else:
            self.good_steps = 0
            self.bad_steps += 1
            if self.bad_steps >= self.cfg.hysteresis:
                if not refilled_by_growth:
                    self.bad_steps = 0
                self.scale = max(self.cfg.floor, self.scale * self.cfg.backoff)

    def state(self) -> dict[str, float]:
        """Empty while switched off, so that a run that goes on with fp16 begins with its own first scale."""
        if not self.enabled:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps, "bad_steps": self.bad_steps}

    def restore(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.scale = state["scale"]
            self.good_steps, self.bad_steps = int(state["good_steps"]), int(state["bad_steps"])
