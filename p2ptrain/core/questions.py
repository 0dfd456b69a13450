"""Questions: messages that a round needs and lacks, by name, and who may have them.

Each is asked of one peer at a time, and of the next one when no answer came. Of more who may have it some are drawn,
after the first, and who was asked in vain makes way for others: else those who vote first, or come first by their keys,
could be liars and all of them. The answer is a message like any other; that it was asked for lets it pass bounds that
keep strangers out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from p2ptrain.core.context import Context
from p2ptrain.core.events import Ask

ASK_SECONDS = 1.0  # until an unanswered question goes to somebody else; doubles
DOUBLINGS_MAX = 5
QUESTIONS_MAX = 4_096  # of a round: every availability and offer of it, twice
UNNEEDED_MAX = QUESTIONS_MAX // 2  # of those for what no proposal needs: anyone may name what does not exist
NAMES_MAX = 256  # of one question
SOURCES_MAX = 8  # peers that a question goes to in turn, before there are others


@dataclass(slots=True)
class Question:
    """A message that we lack."""

    sources: list[bytes]  # first the one asked last, then those to come, then those asked in vain
    next_at: float
    is_needed: bool
    tries: int = 0
    in_vain: int = 0  # sources at the end

    def next_source(self) -> bytes:
        """Go on to the next one."""
        self.sources.append(self.sources.pop(0))
        self.in_vain = min(self.in_vain + 1, len(self.sources) - 1)
        return self.sources[0]

    @property
    def room(self) -> int:
        return SOURCES_MAX - len(self.sources) + self.in_vain

    def add(self, sources: list[bytes]) -> None:
        """As many as there is room for; of those that were asked in vain the first make way."""
        sources = sources[: self.room]
        place = len(self.sources) - self.in_vain
        self.sources[place:place] = sources
        over = max(0, len(self.sources) - SOURCES_MAX)
        first = len(self.sources) - self.in_vain
        del self.sources[first : first + over]
        self.in_vain -= over


class Questions:
    """Of one round."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.open: dict[bytes, Question] = {}
        self.unneeded = 0

    def ask(self, names: Iterable[bytes], sources: list[bytes], is_needed: bool = False) -> None:
        """Ask for these, unless that has just been done. `is_needed`: a proposal, ours or another's, waits for them.

        What is needed finds room and is asked for anew, whoever has named it before: else a few liars, who name what
        does not exist, or are asked for what they keep to themselves, would hold up every proposal.
        """
        named = tuple(islice(names, QUESTIONS_MAX))  # else one call would push out, and ask again, its own
        if all((known := self.open.get(name)) and known.is_needed >= is_needed and not known.room for name in named):
            return
        others = self._drawn([source for source in sources if source != self.context.me])
        fresh = []
        for name in named:
            question = self.open.get(name)
            before = question.sources if question is not None else []
            new = [source for source in others if source not in before]
            if question is not None and (question.is_needed or not is_needed):
                question.add(new)
            elif is_needed or (self.unneeded < UNNEEDED_MAX and len(self.open) < QUESTIONS_MAX):
                self._close(name)
                if len(self.open) >= QUESTIONS_MAX:
                    self._close(next(iter(self.open)))  # the oldest: if its proposal still counts, it is asked anew
                first = others[:SOURCES_MAX] + [source for source in before if source not in others]
                self.open[name] = Question(first[:SOURCES_MAX], self.context.now + ASK_SECONDS, is_needed)
                self.unneeded += not is_needed
                if others[:1] != before[:1]:
                    fresh.append(name)
        if fresh and others:
            self._emit(others[0], fresh)

    def _drawn(self, sources: list[bytes]) -> list[bytes]:
        """The first, who should have it, and then the others by chance, those with the best record before the rest."""
        rest = list(dict.fromkeys(sources[1:]))
        self.context.rng.shuffle(rest)
        return sources[:1] + self.context.reputation.preferred(rest, self.context.now)

    def answered(self, name: bytes) -> None:
        self._close(name)

    def _close(self, name: bytes) -> None:
        question = self.open.pop(name, None)
        if question is not None:
            self.unneeded -= not question.is_needed

    def tick(self, is_known: Callable[[bytes], bool]) -> None:
        """Ask again what is still unknown."""
        now = self.context.now
        by_peer: dict[bytes, list[bytes]] = {}
        for name, question in list(self.open.items()):
            if is_known(name):
                self._close(name)
                continue
            if question.next_at > now:
                continue
            question.tries += 1
            question.next_at = now + ASK_SECONDS * 2.0 ** min(question.tries, DOUBLINGS_MAX)
            if question.sources:
                by_peer.setdefault(question.next_source(), []).append(name)
        for peer, names in by_peer.items():
            self._emit(peer, names)

    def _emit(self, peer: bytes, names: list[bytes]) -> None:
        for start in range(0, len(names), NAMES_MAX):
            self.context.emit(Ask(peer, tuple(sorted(names[start : start + NAMES_MAX]))))

    @property
    def deadline(self) -> float | None:
        return min((question.next_at for question in self.open.values()), default=None)

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        return {
            "questions": (len(self.open), QUESTIONS_MAX),
            "questions for what no proposal needs": (self.unneeded, UNNEEDED_MAX),
        }
