"""Verdict of the doctor: a sentence from the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.doctor.gap import Gap
from analysis.doctor.trials import Toggle, Trial

MOST_SIGMAS = 6.0
"""Largest accepted surprise of the sampled tokens, in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Measurements before anything was changed."""

    bound: float
    """Mean difference in nats up to which there is no mismatch."""
    first: Gap
    """Gap after the first sync of the weights."""
    second: Gap
    """Gap after a sync of other weights."""
    moved: float
    """Nats by which these weights move the trainer's own log-probabilities."""
    changed: int
    """Sequences whose text has other ids when it is tokenised again."""
    sequences: int
    fingerprint: str | None
    """How the engine's weights differ by its own fingerprint, as a clause; None if they do not."""
    surprise: float
    """Mean of -logp - entropy of the sampled tokens under the trainer, in nats; 0 on average for samples from it."""
    sigmas: float
    """The same in standard errors."""

    @property
    def draws_otherwise(self) -> bool:
        """True if the log-probabilities agree, but the tokens were sampled from another distribution."""
        # with a gap, the surprise would only show the same mismatch again
        return self.second.mean <= self.bound and abs(self.sigmas) > MOST_SIGMAS

    @property
    def surprise_in_words(self) -> str:
        """Surprise of the tokens, as `0.1 nats less`."""
        return f"{abs(self.surprise):.2g} nats {'less' if self.surprise < 0 else 'more'}"

    def describe_rest(self) -> str:
        """Return the other measurements, on three lines."""
        return (
            f"weights of the engine   {self.fingerprint or 'by their fingerprint those that were sent'}\n"
            f"ids                     the text of {self.changed} of {self.sequences} sequences has other ids when it "
            "is tokenised again\n"
            f"tokens                  {self.surprise_in_words} surprising than the trainer expects "
            f"({abs(self.sigmas):.1f} standard errors)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on engine and trainer, with the cause of a mismatch."""

    kind: Literal["none", "cause", "unknown"]
    sentence: str
    cause: Toggle | None = None


def decide(
    facts: Facts, trials: Sequence[Trial], *, temperature: float, fitted: float | None, hints: str = ""
) -> Verdict:
    """Return the verdict: the first trial that closes the gap, or another cause from the facts.

    fitted: temperature at which the tokens are most probable, if they are no samples of their log-probabilities. hints:
    what in the model may be the cause, if no trial closes the gap.
    """
    # a gap after the update comes first: it may also be the reason for each of the other findings
    gap, bound = facts.second, facts.bound
    # `not <=`, because every comparison with NaN is false: an engine that returns NaN does not agree
    if not gap.mean <= bound:
        return _name_closing(facts, trials, hints)
    if not facts.first.mean <= bound:
        lost = f"the first sync of the weights was lost, and the next one arrived: gap {facts.first} -> {gap}"
        return Verdict(kind="cause", cause=Toggle.WEIGHTS, sentence=f"cause: {lost}")
    if facts.fingerprint is not None:
        other = (
            f"the engine's fingerprint is not that of the weights that were sent ({facts.fingerprint}), though its "
            f"log-probabilities are the trainer's: gap {gap}"
        )
        return Verdict(kind="cause", cause=Toggle.WEIGHTS, sentence=f"cause: {other}")
    if fitted is not None:
        same = f"{fitted:g}" == f"{temperature:g}"
        where = "" if same else f"at about temperature {fitted:g}, or "
        drawn = (
            f"the engine draws its tokens {where}not from the whole distribution, and "
            f"returns log-probabilities at {temperature:g}: gap {gap}, but the tokens are {facts.surprise_in_words} "
            f"surprising than these say ({abs(facts.sigmas):.0f} standard errors)"
        )
        return Verdict(kind="cause", cause=Toggle.TEMPERATURE, sentence=f"cause: {drawn}")
    counted = f"{gap.tokens:,} tokens of {facts.sequences} sequences, {gap.describe()}"
    return Verdict(kind="none", sentence=f"no mismatch: {counted}; up to {bound:g} on average is none")


def _name_closing(facts: Facts, trials: Sequence[Trial], hints: str) -> Verdict:
    closing = [trial for trial in trials if trial.closes(facts.bound)]
    if not closing:
        best = min(trials, key=lambda trial: trial.left)
        helps = f"{best.change} ({best.toggle}): gap {best.before} -> {best.after}"
        return Verdict(
            kind="unknown",
            sentence=f"cause unknown: {facts.second.describe()}, and no single toggle closes the gap; the largest "
            f"part goes where {helps}" + (f"; {hints}" if hints else ""),
        )
    # trials run from the most specific to the least (run_trials), and a later one often contains an earlier one
    cause = closing[0].toggle
    chosen = min((trial for trial in closing if trial.toggle is cause), key=lambda trial: trial.after.mean)
    said = f"cause: {chosen.means}: gap {chosen.before} -> {chosen.after} ({chosen.change})"
    if facts.fingerprint is not None and cause is Toggle.WEIGHTS:
        said += f"; its fingerprint says so too: {facts.fingerprint}"
    if others := list(dict.fromkeys(str(trial.toggle) for trial in closing if trial.toggle is not cause)):
        said += f"; it also closes with {' and '.join(others)}, which says less"
    return Verdict(kind="cause", sentence=said, cause=cause)
