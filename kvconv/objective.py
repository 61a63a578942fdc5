"""What an error costs: three answers, each a small class; the chooser and the spreading of bits take any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .samples import HeadSamples, Stored
from .spd import power

#: From an error in what is stored, float32 [n_chunk, n, head_dim], to what it costs.
Meter = Callable[[Tensor], float]


class Objective(ABC):
    """A way to count errors.

    name: of `--objective`.  needs_gradients: whether samples must have them.  weighs: whether it knows that channels
    matter differently; without that, transforms made of such knowledge and clips are not tried (plain error chooses
    clips that are too tight).
    """

    name: ClassVar[str]
    needs_gradients: ClassVar[bool] = False
    weighs: ClassVar[bool] = True

    @abstractmethod
    def meter(self, samples: HeadSamples, stored: Stored) -> Meter:
        """The meter for errors of `stored`."""

    def count(self, samples: HeadSamples, stored: Stored, error: Tensor) -> float:
        """What one error costs; infinite where it is not a number."""
        cost = self.meter(samples, stored)(error)
        return cost if np.isfinite(cost) else float("inf")


def _restored(error: Tensor, stored: Stored) -> Tensor:
    return error if stored.inverse is None else error @ stored.inverse.T


class Roundtrip(Objective):
    """Squared error over squared deviation from the channel means: every channel counts the same."""

    name = "roundtrip"
    weighs = False

    def meter(self, samples: HeadSamples, stored: Stored) -> Meter:
        statistics = samples.statistics
        per_token = statistics.deviation / statistics.n

        def cost(error: Tensor) -> float:
            n = error.shape[0] * error.shape[1]
            total = float(_restored(error, stored).double().square().sum())
            return total / (per_token * n) if per_token > 0 else 0.0

        return cost


class Query(Objective):
    """Keys: mean square of the error of a score, `E (q . d)^2` over all pairs, d an error of the key.

    Values: `|W_o d|^2` over `|W_o v|^2`.  In the manner of OSCAR; keys and values are on scales of their own.
    """

    name = "query"

    def meter(self, samples: HeadSamples, stored: Stored) -> Meter:
        statistics = samples.statistics
        if samples.side == "k":
            assert statistics.query is not None
            metric = statistics.query / statistics.n / statistics.head_dim
        else:
            assert statistics.output is not None
            energy = float((statistics.output * statistics.centred().outer).sum()) / statistics.n
            metric = statistics.output / energy if energy > 0 else statistics.output
        root = torch.from_numpy(power(metric, 0.5)).float()

        def cost(error: Tensor) -> float:
            weighed = _restored(error, stored) @ root
            return float(weighed.double().square().sum()) / (error.shape[0] * error.shape[1])

        return cost


class Fisher(Objective):
    """Half the mean square of gradient times error: nats per token, on one scale for all heads, layers and sides.

    Errors of different tokens count as independent, but for the part in which all of them point the same way: a code
    that shrinks what it stores by a share `a` (a tight clip does) costs `a^2 / 2` times the mean square over chunks of
    the sum of `g . x`, per token, beside the rest.  Without that part clips come out too tight.
    """

    name = "fisher"
    needs_gradients = True

    def meter(self, samples: HeadSamples, stored: Stored) -> Meter:
        assert samples.gradient is not None
        gradient = samples.gradient.float()
        if stored.inverse is not None:
            gradient = gradient @ stored.inverse
        scale = (gradient * stored.exact).sum(-1).double()
        together = 0.5 * float(scale.sum(1).square().mean()) / scale.shape[1]
        together = max(together, 0.5 * float(scale.square().mean()))

        def cost(error: Tensor) -> float:
            n = error.shape[1]
            x = stored.exact[:, :n]
            slopes = (gradient[:, :n] * error).sum(-1)
            energy = float((x * x).sum())
            shrink = float((error * x).sum()) / energy if energy > 0 else 0.0
            return 0.5 * float(slopes.double().square().mean()) + shrink**2 * together

        return cost


OBJECTIVES: dict[str, Objective] = {kind.name: kind() for kind in (Roundtrip, Query, Fisher)}
