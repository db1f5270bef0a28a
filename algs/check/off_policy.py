"""Obligations (h), (k) and (l): the gradient off-policy, far from ratio 1 and with another engine.

Samples have a single token, so a sequence's ratio is a token's. A term that does not depend on the advantage,
such as a KL, is measured with advantage 0 and left out of the weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from algs.base import Algorithm, PolicyGradient
from algs.check import fixtures
from algs.check.instruments import list_own_fields, with_settings
from algs.check.update import SAME, NotApplicable, ObligationFailed, compute_advantages, slopes_by_ratio

AWAY = torch.logspace(-4, 0.5, 60, dtype=torch.float64)
"""Distances of log-ratios from 0: clips of whole sequences bind near 1e-4, those of tokens near 0.2."""
FAR = torch.tensor([5.0, 10.0, 25.0], dtype=torch.float64)
"""Distances where only direction and finiteness are checked."""
GAPS = [1e-4, -1e-4, 0.02, -0.02, 0.1, -0.1]
"""log(pi_prox / pi_rollout) near 0, where no cap binds."""
FAR_GAPS = [0.5, 1.0, 2.0, 3.0]
PARTNERS = {"low": "high", "lower": "upper", "min": "max"}
DUAL = 2.0
"""Ratio from which a bound for A=-1 counts as a dual clip."""
NONE, HARD = 1e-9, 1e-3
"""Weights below NONE count as no gradient. A clip is hard if the weight just inside the bound is above HARD."""


def weigh(alg: Algorithm, log_ratios: Tensor, *, engine_gap: float = 0.0) -> Tensor:
    """Return the weight of the advantage in the gradient, [R, 2], for A=+1 and A=-1; 1 for log pi itself."""
    slopes = slopes_by_ratio(alg, log_ratios, (1.0, -1.0, 0.0), engine_gap=engine_gap)
    return torch.stack([slopes[:, 2] - slopes[:, 0], slopes[:, 1] - slopes[:, 2]], dim=1)


def weigh_on_policy(alg: Algorithm) -> Tensor:
    """Return the weight at ratio 1, [2]. Raises NotApplicable if it is 0, since nothing can be compared with it."""
    weight = weigh(alg, torch.zeros(1, dtype=torch.float64))[0]
    if not bool((weight.abs() > NONE).all()):
        raise NotApplicable("not examined off-policy: a single token has no gradient at ratio 1")
    return weight


def corrects_the_engine_once(alg: Algorithm) -> str:
    """Check that the gradient has at most one factor rho = pi_prox / pi_rollout, whatever the settings are called.

    The policy is the proximal one, and only rollout_logp is moved. So a weight of rho^p is measured as p.
    """
    assert isinstance(alg, PolicyGradient)
    level, start = alg.correction.level, weigh_on_policy(alg)
    of_advantages = measure_advantages(alg)
    at = torch.zeros(1, dtype=torch.float64)
    most, masked = 0.0, 0
    for gap in [*GAPS, *FAR_GAPS]:
        # signed: a reversed gradient has no logarithm, and (l) tells of it
        weight = (weigh(alg, at, engine_gap=gap)[0] / start).clamp(min=0.0)
        if not bool(weight.isfinite().all()):
            raise ObligationFailed(f"with pi_prox / pi_rollout at exp({gap:g}) the gradient is not finite")
        powers = [float(w.log()) / gap + of_advantages for w in weight if w > NONE]
        masked += len(weight) - len(powers)
        near = gap in GAPS
        most = max([most, *powers]) if near else most
        if any(power > 1.05 if near else power > 1 + SAME for power in powers):
            remedy = "set correction.level to none, and let anchored_on_rollout say why"
            own = f"correction.level={level} comes on top of its own pi / pi_rollout: {remedy}"
            raise ObligationFailed(
                f"with pi_prox / pi_rollout at {math.exp(gap):.4g} the gradient is weighted by its power of "
                f"{max(powers):.3g}; {own if level != 'none' else 'divide by rollout_logp once'}"
            )
    how = f"weighted by pi_prox / pi_rollout to the power of {most:.2g} near 1" if most > 0.05 else "not corrected"
    mask = f", masked at {masked} of {2 * len([*GAPS, *FAR_GAPS])} points" if masked else ""
    return f"{how}{mask}; examined with single tokens and correction.level={level}"


def measure_advantages(alg: Algorithm) -> float:
    """Return the power of pi_prox / pi_rollout by which compute_advantages weighs the advantages; 0 if it does not."""
    step, gap = fixtures.made_up_step(alg), 1e-2

    def list_advantages(engine_gap: float) -> Tensor:
        groups = compute_advantages(alg, fixtures.make_on_policy(step, engine_gap=engine_gap), stale=True)
        samples = [s for group in groups for s in group]
        return torch.cat(
            [torch.from_numpy(s.advantage[s.loss_mask]) for s in samples if s.advantage is not None and s.n_trained]
        )

    before, after = list_advantages(0.0), list_advantages(gap)
    some = before.abs() > NONE
    powers = (after[some] / before[some]).clamp(min=NONE).log() / gap
    # an advantage that contains rollout_logp in another way, as in OPD, moves tokens up and down
    return float(powers.min()) if len(powers) and bool((powers > 0.5).all()) else 0.0


def binds_outwards(alg: Algorithm) -> str:
    """Check the gradient far from ratio 1: finite, in the direction of the advantage, and clipped outwards only.

    Outwards is where A has pushed the ratio: above 1 for A=+1, below 1 for A=-1. A token that has moved against its
    advantage must be able to come back, so a clip must not bind inwards alone.
    """
    assert isinstance(alg, PolicyGradient)
    if alg.not_outwards:
        raise NotApplicable(f"declared: {alg.not_outwards}")
    start = weigh_on_policy(alg)
    both = torch.cat([-FAR, FAR])
    for log_ratios in (torch.cat([-AWAY, AWAY]), both):
        # from a batch of its own, since some losses have statistics of the batch
        for log_ratio, weights in zip(log_ratios.tolist(), weigh(alg, log_ratios) / start, strict=True):
            for sign, weight in zip((1, -1), weights.tolist(), strict=True):
                if not weight >= -SAME:  # nan too
                    raise ObligationFailed(
                        f"at A={sign:+d}, ratio {math.exp(log_ratio):.4g} the gradient is {weight:.3g} times that at "
                        "ratio 1: it should keep the direction of the advantage"
                    )
    bounds = {(sign, side): find_bound(alg, sign, side) for sign in (1, -1) for side in (1, -1)}
    for sign in (1, -1):
        inwards = bounds[sign, -sign]
        # not a cap of the ratio, which binds for both signs, nor a bound of the loss far out, as a dual clip
        is_clip = inwards is not None and bounds[-sign, -sign] is None and abs(math.log(inwards)) < math.log(DUAL)
        if is_clip and bounds[sign, sign] is None:
            raise ObligationFailed(
                f"with A={sign:+d} the gradient vanishes {describe_side(-sign)} ratio {inwards:.6g} and nowhere "
                f"{describe_side(sign)} 1: the clip binds on the wrong side, where the token must come back"
            )
    high, low = bounds[1, 1], bounds[-1, -1]
    # declared bounds are the user's choice, and (h) moves them one by one
    swapped = high is not None and low is not None and 1 - low > (high - 1) * 1.02
    if swapped and not find_pairs(alg):
        raise ObligationFailed(
            f"the gradient vanishes below ratio {low:.6g} with A=-1 and above {high:.6g} with A=+1: the lower bound is "
            "the wider one, are they swapped? If not, declare them as clip_low and clip_high"
        )
    told = [
        f"with A={sign:+d} it vanishes {describe_side(side)} {bound:.6g}"
        for (sign, side), bound in bounds.items()
        if bound is not None
    ]
    reach = f"ratios from {math.exp(-float(AWAY[-1])):.2g} to {math.exp(float(AWAY[-1])):.3g}"
    return f"{'; '.join(told) or 'it vanishes nowhere'} ({reach}, single tokens)"


def find_bound(alg: Algorithm, sign: int, side: int) -> float | None:
    """Return the ratio on a side of 1 from which the gradient with advantage `sign` is gone; None without a hard clip.

    side: 1 for ratios above 1, -1 for those below.
    """
    log_ratios, column, outside = side * AWAY, 0 if sign > 0 else 1, 0.0
    for _ in range(3):  # each time between the two points around the bound
        weights = weigh(alg, log_ratios)[:, column].abs()
        gone = (weights <= NONE).nonzero()
        if not len(gone) or not (first := int(gone[0])) or weights[first - 1] <= HARD:
            return None
        inside, outside = float(log_ratios[first - 1]), float(log_ratios[first])
        log_ratios = torch.linspace(inside, outside, 30, dtype=torch.float64)
    return math.exp(outside)


def describe_side(side: int) -> str:
    return "above" if side > 0 else "below"


def find_pairs(alg: Algorithm) -> list[tuple[str, str]]:
    """Return pairs of numbers of the algorithm's own that are called low and high, or alike."""
    fields = list_own_fields(alg)
    numbers = {name for name in type(alg).model_fields if isinstance(getattr(alg, name), float)}
    pairs: list[tuple[str, str]] = []
    for name in sorted(numbers & {*fields, "clip_low", "clip_high"}):
        words = name.split("_")
        partner = "_".join(PARTNERS.get(word, word) for word in words)
        if partner != name and partner in numbers:
            pairs.append((name, partner))
    return pairs


def clips_on_the_right_side(alg: Algorithm) -> str:
    """Halve each declared bound: only gradients on its side of ratio 1 may change."""
    pairs = find_pairs(alg)
    if not pairs:
        raise NotApplicable("it has no clip_low and clip_high, nor another pair of low and high; (l) looks for clips")
    log_ratios = torch.cat([-AWAY, AWAY])
    before, told = slopes_by_ratio(alg, log_ratios, (1.0, -1.0)), list[str]()
    for low, high in pairs:
        sides = {name: find_moved(alg, name, log_ratios, before) for name in (low, high)}
        for name, other, side in ((high, low, 1.0), (low, high, -1.0)):
            moved, did = sides[name], f"{name} from {getattr(alg, name):g} to {getattr(alg, name) / 2:g}"
            wrong = [point for point in moved if point[1] * side <= 0]
            # of numbers that are called otherwise it is only known that they are a pair, so both must be on the
            # other's side
            is_clip = (low, high) == ("clip_low", "clip_high")
            swapped = bool(moved) and len(wrong) == len(moved) and all(p[1] * side > 0 for p in sides[other])
            if wrong and (is_clip or swapped):
                sign, log_ratio, was, now = wrong[0]
                raise ObligationFailed(
                    f"{did} moves the gradient at A={sign:+g}, ratio {math.exp(log_ratio):.4g} from {was:.4g} to "
                    f"{now:.4g}: {other}'s side"
                )
            if is_clip and not any(sign == side for sign, *_ in moved):
                raise ObligationFailed(f"{did} moves no gradient with A={side:+g} on its side of ratio 1")
            told.append(f"{name} {len(moved) or 'none: not examined'}")
    points = f"{', '.join(told)} of {before.numel()} points"
    return f"halving one moves gradients on its own side of ratio 1 only ({points})"


def find_moved(
    alg: Algorithm, name: str, log_ratios: Tensor, before: Tensor
) -> list[tuple[float, float, float, float]]:
    """Return the points whose gradient changes if a setting is halved: advantage, log-ratio, gradient before and after.

    Empty for a value that the algorithm refuses.
    """
    narrow = with_settings(alg, {name: getattr(alg, name) / 2})
    if narrow is None:
        return []
    # the same totals: through them a bound may have an effect on every token
    after = slopes_by_ratio(narrow, log_ratios, (1.0, -1.0), totals_of=alg)
    return [
        (1.0 - 2 * j, float(log_ratios[i]), float(before[i, j]), float(after[i, j]))
        for i, j in ((before - after).abs() > SAME).nonzero().tolist()
    ]
