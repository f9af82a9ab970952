"""What a campaign found, and the table of all of them."""

import dataclasses


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """The figures of one campaign.

    Attributes:
        campaign: Its name.
        cases: Cases tried.
        wrong: Answers that were neither right nor a miss.
        deaths: Servers that ended, or raised through a public call, without being killed by us.
        figures: What else was measured, in words.
        missed: Bounds that do not hold.
        not_run: Cases that could not be tried here, and why: they count as missed.
    """

    campaign: str
    cases: int = 0
    wrong: int = 0
    deaths: int = 0
    figures: list[str] = dataclasses.field(default_factory=list)
    missed: list[str] = dataclasses.field(default_factory=list)
    not_run: list[str] = dataclasses.field(default_factory=list)

    def bound(self, what: str, value: float, limit: str) -> None:
        """Note a figure, and that it missed its bound, such as ``<= 0.6``."""
        relation, number = limit.split()
        holds = value <= float(number) if relation == "<=" else value >= float(number)
        text = f"{what} {value:.4g} ({'≤' if relation == '<=' else '≥'} {number})"
        self.figures.append(text)
        if not holds:
            self.missed.append(text)

    def expect(self, holds: bool, what: str) -> None:
        """Note a failure unless something holds."""
        if not holds:
            self.missed.append(what)

    @property
    def failures(self) -> list[str]:
        """Why the campaign failed; empty when it did not."""
        failures = [*self.missed, *(f"not run: {reason}" for reason in self.not_run)]
        if self.wrong:
            failures.append(f"{self.wrong} wrong answers")
        if self.deaths:
            failures.append(f"{self.deaths} server deaths")
        return failures


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = [
        "| campaign | cases tried | wrong answers | server deaths | extra figures |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for outcome in outcomes:
        words = "; ".join([*outcome.figures, *(f"NOT RUN: {why}" for why in outcome.not_run)])
        numbers = f"{outcome.cases:,} | {outcome.wrong} | {outcome.deaths}"
        lines.append(f"| {outcome.campaign} | {numbers} | {words} |")
    return "\n".join(lines)
