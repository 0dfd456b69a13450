"""The voice: what this node has said, and where it stays silent so as not to contradict it.

A message that may be sent only once goes to the disk before it goes out, so that a node that is killed in between
sends the same again and nothing else. A node that no longer knows what it has sent, or that returns to a branch that it
left long ago, stays silent in the rounds in which it may have spoken."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from p2ptrain.core import messages as msg
from p2ptrain.core.events import Effect, Halted, Persist, Said, Saved, Silence
from p2ptrain.core.roster import Roster

SILENT_BRANCHES_MAX = 64  # branches left; the oldest is forgotten, and by then its rounds are long past
PLACES_MAX = 64  # rounds whose own messages are remembered; a node that returns to an older one is silent there
SAID_MAX = 256  # messages of a round: three a view, and peers accept those of 64 views
BACKING_BYTES_MAX = 2**26  # for all rounds but the current one, which takes as much as its messages: 30 MB at most
RECALL_MARGIN = 2  # rounds: others may be one behind what we had seen, and we may have been one ahead


class OwnMessages(Struct):
    """Our messages of one round of one branch, which we must not contradict."""

    said: list[Said]
    lock: bytes = b""  # the envelope of our newest precommit for a manifest: our lock
    backing_bytes: int = 0

    def add(self, said: Said) -> None:
        """Adds a message. If there are too many, drops one of an old view, to which nobody returns; never the lock."""
        self.said.append(said)
        self.backing_bytes += sum(map(len, said.backing))
        if len(self.said) > SAID_MAX:
            old = next(each for each in self.said if each.envelope != self.lock)
            self.said.remove(old)
            self.backing_bytes -= sum(map(len, old.backing))

    def drop_backing(self) -> None:
        if self.backing_bytes:
            self.said, self.backing_bytes = [Said(said.envelope) for said in self.said], 0


class Voice:
    """Speaks for the node where a message may be sent only once, and remembers what it has said."""

    def __init__(
        self, overlap_rounds: int, emit: Callable[[Effect], None], publish: Callable[[msg.Received], None]
    ) -> None:
        self._overlap_rounds, self._emit, self._publish = overlap_rounds, emit, publish
        self.is_halted = False  # more than f members have lied, so no vote can be trusted any more
        self.silent: dict[bytes, int] = {}  # by branch: the last round in which we stay silent
        self.silent_everywhere = -1  # the same for any branch: our record of it is lost
        self.said: dict[tuple[bytes, int], OwnMessages] = {}  # by branch and round
        self.regroups: dict[tuple[bytes, bytes], Said] = {}  # by branch and parent: our newest regroup
        self.recalled: dict[bytes, int] | None = None  # members' rounds, while we do not know what we have sent
        self.here: tuple[bytes, int] = (b"", -1)  # the current branch and round

    def restore(self, saved: Saved, verifier: msg.Verifier, is_forgetful: bool) -> list[msg.Received]:
        """Restores what the journal has, and returns the messages; `is_forgetful`: it has lost what we said before."""
        if is_forgetful:
            self._emit(Persist(Silence(b"", msg.NUMBER_MAX)))
        for silence in saved.silences:
            if silence.branch:
                self.keep_silent(silence.branch, silence.round)
            else:
                self.silent_everywhere = silence.round
        if is_forgetful or self.silent_everywhere >= msg.NUMBER_MAX:
            self.recalled, self.silent_everywhere = {}, msg.NUMBER_MAX
        self.is_halted = saved.halted is not None
        messages = [msg.decode(said.envelope, verifier) for said in saved.said]
        for received, said in zip(messages, saved.said, strict=True):
            self.remember(received, said)
        return messages

    def may_speak(self, branch: bytes, number: int) -> bool:
        """Whether we know everything that we have sent in this round."""
        return number > max(self.silent_everywhere, self.silent.get(branch, -1)) and not self.is_halted

    def keep_silent(self, branch: bytes, number: int) -> None:
        self.silent[branch] = max(number, self.silent.pop(branch, -1))
        while len(self.silent) > SILENT_BRANCHES_MAX:  # never the current branch: we might contradict ourselves there
            del self.silent[next(at for at in self.silent if at != self.here[0])]

    def enter(self, branch: bytes, number: int) -> None:
        """Enters a round, and drops the backing of our messages in earlier rounds of its branch, which are certified.

        The cost: if those certificates were lost everywhere and we entered such a round again, we would still be
        locked, but could not propose our locked manifest; only a member that still has it could. A round that we leave
        by leaving its branch keeps its backing."""
        self.here = branch, number
        for (at, place), words in self.said.items():
            if at == branch and place < number:
                words.drop_backing()
        self._forget_backing(self.here)

    def publish_once(
        self, message: msg.Received, backing: tuple[bytes, ...] = (), payloads: tuple[bytes, ...] = ()
    ) -> None:
        """Publishes a message that may be sent only once, after it is on the disk."""
        said = Said(message.envelope, backing, payloads)
        self.remember(message, said)
        self._emit(Persist(said))
        self._publish(message)

    def leave(self, branch: bytes, number: int) -> None:
        """Records that we stay silent, after a restart, on a branch that we leave: it may win in the end."""
        self._emit(Persist(Silence(branch, number + self._overlap_rounds)))

    def halt(self, proof: Halted) -> None:
        """Falls silent for good."""
        if not self.is_halted:
            self.is_halted = True
            self._emit(Persist(proof))

    def recall(self, member: bytes, number: int, roster: Roster, kept: int) -> None:
        """Notes a member's round, to find out how long we have to stay silent after losing our log.

        Any quorum includes an honest member that voted in the last decided round, and we can have spoken in the next
        one at most. Rounds far beyond the others (more than `kept`), which f liars may have made up, must not mute us.
        """
        if self.recalled is None:
            return
        self.recalled[member] = number
        if len(self.recalled) >= min(roster.quorum, roster.size - 1):
            claimed = sorted(self.recalled.values(), reverse=True)
            highest = min(claimed[0], claimed[roster.tolerated] + kept)
            self.silent_everywhere = highest + self._overlap_rounds + RECALL_MARGIN
            self.recalled = None
            self._emit(Persist(Silence(b"", self.silent_everywhere)))

    def remember(self, message: msg.Received, said: Said) -> None:
        """Keeps a message, so that we do not contradict it if we return to its round later or after a restart."""
        content = message.message
        if isinstance(content, msg.Regroup):
            parent = content.branch, content.parent
            self.regroups.pop(parent, None)  # attempts only rise: older ones are over
            self.regroups[parent] = said
            if len(self.regroups) > PLACES_MAX:
                del self.regroups[next(iter(self.regroups))]
            return
        assert isinstance(content, msg.Announcement | msg.Proposal | msg.Vote), "no other kind may be sent only once"
        place = content.branch, content.round
        words = self.said.pop(place, None) or OwnMessages([])
        self.said[place] = words  # at the end: the least recently used are forgotten first
        if isinstance(content, msg.Vote) and content.ballot is msg.Ballot.PRECOMMIT and content.manifest != msg.NOTHING:
            words.drop_backing()  # those of an older lock
            words.lock = message.envelope
        words.add(Said(said.envelope, said.backing))  # the payloads are only needed for the disk
        self._forget_places()
        if said.backing:
            self._forget_backing(place)

    def _forget_places(self) -> None:
        """Forgets the oldest rounds and stays silent there for good, but not in this round of its branch or later.

        Rounds that are not the last of their branch go first: if a branch that we left wins after all, the swarm may
        need our vote in its last rounds."""
        if len(self.said) <= PLACES_MAX:
            return
        branch, number = self.here
        last: dict[bytes, int] = {}
        for at, place in self.said:
            last[at] = max(place, last.get(at, place))
        ahead = self._overlap_rounds
        free = [place for place in self.said if place[0] != branch or place[1] < number]
        free.sort(key=lambda place: place[1] >= last[place[0]] - ahead)  # and the oldest first
        for old in free[: len(self.said) - PLACES_MAX]:
            del self.said[old]
            self.keep_silent(*old)

    def _forget_backing(self, but: tuple[bytes, int]) -> None:
        """Drops the oldest backing, as in `enter`, when many branches were left while we were locked."""
        sizes = {place: words.backing_bytes for place, words in self.said.items() if place != but}
        total = sum(sizes.values())
        for place, size in sizes.items():
            if total > BACKING_BYTES_MAX and size:
                self.said[place].drop_backing()
                total -= size

    def remembered(self, branch: bytes, number: int) -> list[Said]:
        """Returns our messages of a round, and our regroups from its branch."""
        regroups = [said for (at, _), said in self.regroups.items() if at == branch]
        words = self.said.get((branch, number))
        return regroups + (words.said if words else [])

    def limits(self) -> dict[str, tuple[int, int]]:
        """Returns each buffer's size and bound. Rounds after the current one, two at most, are kept."""
        backing = [words.backing_bytes for place, words in self.said.items() if place != self.here]
        return {
            "rounds spoken in": (len(self.said), PLACES_MAX + 2),
            "words of a round": (max((len(words.said) for words in self.said.values()), default=0), SAID_MAX),
            "sets signed": (len(self.regroups), PLACES_MAX),
            "silent branches": (len(self.silent), SILENT_BRANCHES_MAX),
            "bytes that back what we said": (sum(backing), BACKING_BYTES_MAX),
        }
