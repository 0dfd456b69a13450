"""Questions: requests for named messages that a round needs and lacks.

Each message is requested from one peer at a time, and from the next one if no answer comes. If many peers may have it,
some are drawn at random after the first, and peers that were asked in vain are replaced: otherwise the peers that vote
first, or have the lowest keys, could all be liars. The answer is a message like any other, but what a proposal needs is
exempt from the bounds that keep strangers out: an honest member attests it. Anyone can name what none needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from p2ptrain.core.context import Context
from p2ptrain.core.events import Ask

ASK_SECONDS = 1.0  # until an unanswered question goes to the next peer; doubles
DOUBLINGS_MAX = 5
QUESTIONS_MAX = 4_096  # per round: every availability and offer of it, twice
UNNEEDED_MAX = QUESTIONS_MAX // 2  # for messages that no proposal needs: anyone may name one that does not exist
NAMES_MAX = 256  # per question
SOURCES_MAX = 8  # peers that a question goes to in turn, until they are replaced


@dataclass(slots=True)
class MissingMessage:
    """A missing message, and the peers that may have it."""

    sources: list[bytes]  # the one asked last, then the next ones, then those asked in vain
    next_at: float
    is_needed: bool
    tries: int = 0
    in_vain: int = 0  # sources at the end of the list that were asked in vain

    def next_source(self) -> bytes:
        self.sources.append(self.sources.pop(0))
        self.in_vain = min(self.in_vain + 1, len(self.sources) - 1)
        return self.sources[0]

    @property
    def room(self) -> int:
        return SOURCES_MAX - len(self.sources) + self.in_vain

    def add(self, sources: list[bytes]) -> None:
        """Adds as many sources as there is room for, replacing the first ones that were asked in vain."""
        sources = sources[: self.room]
        place = len(self.sources) - self.in_vain
        self.sources[place:place] = sources
        over = max(0, len(self.sources) - SOURCES_MAX)
        first = len(self.sources) - self.in_vain
        del self.sources[first : first + over]
        self.in_vain -= over


class Questions:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.open: dict[bytes, MissingMessage] = {}
        self.unneeded = 0

    def ask(self, names: Iterable[bytes], sources: list[bytes], is_needed: bool = False) -> None:
        """Asks for messages, except those just asked for. `is_needed`: a proposal, ours or another's, waits for them.

        There is always room for needed messages, and they are requested again, whoever named them before: otherwise a
        few liars that name messages that do not exist, or withhold messages, would hold up every proposal."""
        named = tuple(islice(names, QUESTIONS_MAX))  # otherwise one call could evict its own questions
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
                self.close(name)
                if len(self.open) >= QUESTIONS_MAX:
                    self.close(next(iter(self.open)))  # the oldest: if it still matters, it is asked again
                first = others[:SOURCES_MAX] + [source for source in before if source not in others]
                self.open[name] = MissingMessage(first[:SOURCES_MAX], self.context.now + ASK_SECONDS, is_needed)
                self.unneeded += not is_needed
                if others[:1] != before[:1]:
                    fresh.append(name)
        if fresh and others:
            self._emit(others[0], fresh)

    def _drawn(self, sources: list[bytes]) -> list[bytes]:
        """Orders sources: the first, which should have the message, then randomly drawn ones, best reputation first."""
        rest = list(dict.fromkeys(sources[1:]))
        self.context.rng.shuffle(rest)
        return sources[:1] + self.context.reputation.preferred(rest, self.context.now)

    def needs(self, name: bytes) -> bool:
        """Whether a proposal waits for this message."""
        question = self.open.get(name)
        return question is not None and question.is_needed

    def give_up(self, name: bytes) -> bool:
        """Closes a question whose answer does not fit, unless a proposal waits for it; returns whether it was open."""
        question = self.open.get(name) if self.needs(name) else self.close(name)
        return question is not None

    def close(self, name: bytes) -> MissingMessage | None:
        """Closes a question, if it is open, and returns it: the message has come, or others are more important."""
        question = self.open.pop(name, None)
        if question is not None:
            self.unneeded -= not question.is_needed
        return question

    def tick(self, is_known: Callable[[bytes], bool]) -> None:
        now = self.context.now
        by_peer: dict[bytes, list[bytes]] = {}
        for name, question in list(self.open.items()):
            if is_known(name):
                self.close(name)
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
        return {
            "questions": (len(self.open), QUESTIONS_MAX),
            "questions for what no proposal needs": (self.unneeded, UNNEEDED_MAX),
        }
