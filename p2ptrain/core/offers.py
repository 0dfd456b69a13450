"""Offers: the pool of announced contributions that may still be taken.

An announcement is named by the first 16 bytes of its digest. For each admitted author the pool keeps its oldest round,
which is the one that a manifest takes, and the newest ones up to a bound. It keeps at most two announcements per round,
enough to prove a lie. The payloads themselves are with the driver; payloads.py records whether they are held, have the
announced length, and were found good by the strict decoder."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from p2ptrain.core.messages import ADMITTED_MAX, SEATS_MAX, Announcement, Availability, Heard, Received, read
from p2ptrain.core.payloads import Payloads
from p2ptrain.core.state import AgreedState

ROUNDS_KEPT = 3  # per author; an honest one has two on offer at most
OFFERS_OF_AUTHOR_MAX = 2 * ROUNDS_KEPT + 2 * SEATS_MAX  # two more per member that attests them: we need those
OFFERS_MAX = 2 * ROUNDS_KEPT * ADMITTED_MAX + 4 * SEATS_MAX * SEATS_MAX


class Offer(Struct):
    name: bytes
    announcement: Announcement
    received: Received


class Offers:
    def __init__(self, staleness: int, payloads: Payloads) -> None:
        self.staleness, self.payloads = staleness, payloads
        self.by_name: dict[bytes, Offer] = {}
        self.by_author: dict[bytes, list[Offer]] = {}
        self.by_payload: dict[bytes, list[Offer]] = {}

    def add(self, received: Received, is_needed: bool = False) -> Heard:
        """Adds an announcement by an admitted author for a round that may still count. `is_needed`: by a proposal."""
        announcement = read(received, Announcement)
        name = received.name
        if name in self.by_name:
            return Heard.USELESS
        offer = Offer(name, announcement, received)
        mine = self.by_author.get(announcement.author)
        if mine is None:
            self.by_author[announcement.author] = [offer]
            verdict = Heard.NEW
        else:
            verdict = self._verdict(mine, announcement.round, is_needed)
            if verdict not in (Heard.NEW, Heard.CONFLICT):
                return verdict
            mine.append(offer)
        self.by_name[name] = offer
        self.by_payload.setdefault(announcement.payload, []).append(offer)
        return verdict

    def _verdict(self, mine: list[Offer], number: int, is_needed: bool) -> Heard:
        """Decides about another announcement for a round, given those of its author."""
        same = sum(offer.announcement.round == number for offer in mine)
        if is_needed:
            if len(mine) >= OFFERS_OF_AUTHOR_MAX:
                return Heard.FULL
        elif same >= 2:
            return Heard.USELESS
        elif not same and len({offer.announcement.round for offer in mine}) >= ROUNDS_KEPT:
            return Heard.FULL
        return Heard.CONFLICT if same else Heard.NEW

    def conflicting(self, received: Received) -> Received:
        """Returns the first announcement of the same author for the same round."""
        announcement = read(received, Announcement)
        return next(
            offer.received
            for offer in self.by_author[announcement.author]
            if offer.announcement.round == announcement.round
        )

    def announcement(self, name: bytes) -> Announcement | None:
        offer = self.by_name.get(name)
        return offer.announcement if offer else None

    def is_good(self, announcement: Announcement) -> bool:
        """Whether the payload of an announcement is here and matches it."""
        return self.payloads.checked(announcement) is True

    def has_from(self, author: bytes, state: AgreedState) -> bool:
        """Whether we hold a good contribution by this author that the next round may take."""
        return any(
            self.is_good(offer.announcement) and state.may_take(offer.announcement, self.staleness)
            for offer in self.by_author.get(author, ())
        )

    def are_of_others(self, names: tuple[bytes, ...], author: bytes) -> bool:
        """Whether all of these announcements are known and none of them is by this author."""
        known = [self.by_name.get(name) for name in names]
        return all(offer is not None and offer.announcement.author != author for offer in known)

    def attestable(
        self, state: AgreedState, looks_at: Callable[[bytes, int], bool] = lambda author, number: True
    ) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the names that our availability lists as held and as refused: the oldest round of each author."""
        held: list[bytes] = []
        refused: list[bytes] = []
        here, checked = self.payloads.held, self.payloads.checked
        for author, offers in self.by_author.items():
            if author not in state.place:
                continue
            known = [
                offer
                for offer in offers
                if offer.announcement.payload in here
                and state.may_take(offer.announcement, self.staleness)
                and looks_at(author, offer.announcement.round)
            ]
            if not known:
                continue
            oldest = min(offer.announcement.round for offer in known) if len(known) > 1 else known[0].announcement.round
            for offer in known:
                said = offer.announcement
                if said.round == oldest:
                    (held if checked(said) else refused).append(offer.name)
        return tuple(sorted(held)), tuple(sorted(refused))

    def holders(self, payload: bytes, available: dict[bytes, list[Received]]) -> list[bytes]:
        """Returns the members that have attested a payload, in any of their availabilities."""
        names = [offer.name for offer in self.by_payload.get(payload, ())]
        return [
            author
            for author, several in available.items()
            if any(name in read(received, Availability).held for name in names for received in several)
        ]

    def prune(self, state: AgreedState) -> None:
        for author in list(self.by_author):
            kept = [
                offer
                for offer in self.by_author[author]
                if offer.announcement.branch == state.branch
                and (offer.announcement.round > state.round + 1 or state.may_take(offer.announcement, self.staleness))
            ]
            if kept:
                self.by_author[author] = kept
            else:
                del self.by_author[author]
        self.by_name, self.by_payload = {}, {}
        for offers in self.by_author.values():
            for offer in offers:
                self.by_name[offer.name] = offer
                self.by_payload.setdefault(offer.announcement.payload, []).append(offer)

    def limits(self) -> dict[str, tuple[int, int]]:
        return {
            "offers": (len(self.by_name), OFFERS_MAX),
            "offers of an author": (max(map(len, self.by_author.values()), default=0), OFFERS_OF_AUTHOR_MAX),
            "authors": (len(self.by_author), ADMITTED_MAX),
            "payloads on offer": (len(self.by_payload), OFFERS_MAX),
        }
