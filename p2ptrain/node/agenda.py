"""The agenda: what members have moved about the run's future, told to the owner; and what this node assents to.

A motion (core/succession.py) is that the run go on as another. Each new one, and what becomes of it, is a line of the
log. Whether this node assents is its owner's decision, or that of the standing rule (`succession.accept`). In either
case it assents only if it can answer for what the successor would begin with: the root of its weights has to cover
everything, that of a roll-back has to be the certified one of a checkpoint that this node or a peer has, and this node
or a peer has to have the data, if that is to be another.

A motion names a data set by the digest of its manifest alone. The author's node links the data into its own directory,
where the successor finds it, and others assent once they or a connected peer have its manifest: a successor whose data
nobody has could not train."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.config.succession import change_of, changed, told
from p2ptrain.core import events as ev
from p2ptrain.core.messages import NOTHING
from p2ptrain.core.succession import Motion, Succession, needed, why_not_moved
from p2ptrain.data.dataset import MANIFEST_NAME, TokenDataset, decode_manifest, manifest_digest, read_manifest
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.root import covered_pieces
from p2ptrain.files import PARTIAL_SUFFIX, forget, make_directory, read, trouble, write_atomically
from p2ptrain.identity import peer_id_of
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.transport import TransportError
from p2ptrain.node.fetching import fetch_manifest
from p2ptrain.node.find import open_dataset
from p2ptrain.node.home import SEALED, UNFILLED, Home
from p2ptrain.node.limits import disk_demand, refuse_disk
from p2ptrain.train.memory import need_of
from p2ptrain.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from p2ptrain.node.driver import Driver

OTHER_TOKENS = "the data has other tokens than this run's: another tokenizer, or other marks of what is learned"
LOOK_SECONDS = 1.0
AHEAD_ROUNDS = 20  # from a motion to its last round, if nobody says: owners have to see it and type; a guess
AGAIN_ROUNDS = 8  # before the standing rule repeats an assent that no manifest carries
ASK_SECONDS = 60.0  # before peers are asked again for a checkpoint that none had
AGREED_NAME = "agreed"  # the file in the run's directory with the motion that the owner goes along with
RATES = frozenset(
    f"recipe.{key}"
    for key in (
        *("inner_learning_rate", "learning_rate", "schedule", "warmup_rounds", "rounds", "decay_rounds", "final_ratio"),
        *("weight_decay", "inner_weight_decay", "local_steps", "local_steps_min"),
    )
)
NEAR = frozenset(("recipe.inner_learning_rate", "recipe.learning_rate", "recipe.local_steps"))  # by the rule "rates"

log = logging.getLogger("p2ptrain.node")


def link_or_copy(source: str, target: str) -> None:
    """Links a file, or copies it to another file system; one that is there whole stays."""
    if (there := Path(target)).exists() and there.stat().st_size == Path(source).stat().st_size:
        return
    partial = there.with_name(there.name + PARTIAL_SUFFIX)
    forget(partial)
    try:
        partial.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, partial)
    partial.replace(there)


def accepts(rule: str, run: RunConfig, motion: Motion) -> bool:
    """Whether a standing rule assents to a motion."""
    if rule == "rates":
        changes = told(run, motion.change)
        are_near = all(_is_near(*changes[name]) for name in NEAR & changes.keys())
        return not motion.goes_back and changes.keys() <= RATES and are_near
    return rule == "all"


def _is_near(old: object, new: object) -> bool:
    """Whether a rate or a number of steps is within a factor of ten of the present one."""
    before, after = Fraction(str(old)), Fraction(str(new))
    return before == after or (before > 0 and Fraction(1, 10) <= after / before <= 10)


def text_of(run: RunConfig, motion: Motion) -> str:
    """Describes a motion in the words that follow "that the run"."""
    back = f" from the weights of round {motion.weights:,}" if motion.goes_back else ""
    changes = ", ".join(f"{name} {new} instead of {old}" for name, (old, new) in settings_of(run, motion).items())
    return f"go on after round {motion.last:,}{back}{changes and f' with {changes}'}"


def settings_of(run: RunConfig, motion: Motion) -> dict[str, tuple[str, str]]:
    """Returns the settings that a motion changes, each with its present value and the next as text."""

    def written(value: object) -> str:
        return visible(value if isinstance(value, str) else json.dumps(value))

    values = told(run, motion.change).items()  # to a protocol that is not known here they may be anything
    return {visible(name): (written(old), written(new)) for name, (old, new) in values}


def costs_of(run: RunConfig, wanted: RunConfig, shapes: Sequence[Sequence[int]]) -> list[str]:
    """Returns what a run with these shapes costs each machine once it is changed, in words; empty if as much as now."""
    old, new, found = run.recipe, wanted.recipe, list[str]()
    if (times := Fraction(new.round_sequences, old.round_sequences)) != 1:
        found.append(f"a round is {float(times):.3g} times the work: {new.round_sequences:,} sequences")
    if (times := Fraction(new.sequences_per_pass, old.sequences_per_pass)) != 1:
        found.append(
            f"a pass holds {float(times):.3g} times the sequences in memory, unless device.sequences_per_pass is set"
        )
    if (old.k, old.value_bits) != (new.k, new.value_bits):
        try:
            sizes = [Outer.of(each, shapes).payload_bytes for each in (run, wanted)]
        except ConfigError as error:
            return [*found, str(error)]
        found.append(f"a contribution has {sizes[1] / sizes[0]:.3g} times the bytes: {sizes[1]:,} at most")
    return found


@dataclass(frozen=True, slots=True)
class AgendaItem:
    """A motion of a member that the run go on as another, as people see it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # used as it is in /status

    motion: str = field(metadata={"description": "its name, hex, for `p2ptrain assent`"})
    text: str = field(metadata={"description": "one line for people, which follows: that the run"})
    author: str = field(metadata={"description": "the member that moves it, by id"})
    last_round: int = field(metadata={"description": "the last round of this run that takes contributions"})
    weights_round: int = field(
        metadata={"description": "the round whose weights the successor begins with: the last one, or an earlier one"}
    )
    changes: dict[str, tuple[str, str]] = field(
        metadata={"description": "the settings that change, each with its value now and then"}
    )
    costs: list[str] = field(metadata={"description": "what it costs a machine of the run, in words; empty: no more"})
    assents: int = field(metadata={"description": "members that assent to it"})
    needed: int = field(metadata={"description": "members that have to, at the same time"})
    is_mine: bool = field(metadata={"description": "this node assents to it; once it is decided: goes along with it"})
    obstacle: str = field(
        metadata={"description": "why this node cannot assent, as far as it has looked; empty: it can"}
    )


class Agenda:
    def __init__(self, driver: Driver, accept: str, home: Home) -> None:
        """accept: the standing rule"""
        self.accept, self._home = accept, home
        self._driver, self._edges, self._view = driver, driver.edges, driver.node.view()
        self._open: dict[bytes, Motion] = {}  # by name, at the last look
        self._decided: Motion | None = None
        self._obstacles: dict[bytes, tuple[str, float]] = {}  # of open motions, and when they were looked for
        self._assented = NOTHING, 0  # by the standing rule: the motion, and the round of the last try
        self._path = self._edges.persistence.store.directory / AGREED_NAME
        said = re.findall(rb"\b[0-9a-f]{64}\b", read(self._path) or b"")
        self.agreed, *withdrawn = [bytes.fromhex(name.decode()) for name in said] or [NOTHING]
        self._withdrawn = set(withdrawn)  # motions that the standing rule leaves alone

    async def watch(self) -> None:
        await self._driver.has_begun.wait()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with self._edges.transport.boundary.contain("the agenda"):  # it shows what peers have moved
                await self.look()

    async def look(self) -> None:
        """Tells the owner what is new, and assents by the standing rule."""
        here, now = self._view.state.succession, asyncio.get_running_loop().time()
        self._tell(here)
        self._obstacles = {name: found for name, found in self._obstacles.items() if name in self._open}
        for name, motion in self._open.items():
            why, looked_at = self._obstacles.get(name, ("unknown", -ASK_SECONDS))
            if why and now >= looked_at + ASK_SECONDS:
                found = await self.obstacle(motion)
                if found and found != why:
                    log.info("this node cannot assent to %s: %s", name.hex()[:8], found)
                self._obstacles[name] = found, now
        self._follow_the_rule(here)

    def goes_along(self, decided: Motion) -> bool:
        """Whether this node goes on with the successor that was decided."""
        if self.accept == "never" or decided.name in self._withdrawn or self._successor(decided) is None:
            return False
        mine = {self.agreed, self._view.state.succession.assent_of(self._view.me)}
        return decided.name in mine or accepts(self.accept, self._view.run, decided)

    def _successor(self, motion: Motion) -> RunConfig | None:
        """Returns the run's config with the change that is moved; None if this release knows no such run."""
        try:
            return changed(self._view.run, motion.change)
        except RemoteProtocolError:
            return None

    def item(self, motion: Motion) -> AgendaItem:
        """Describes a motion, and where members and this node stand."""
        view, run, here = self._view, self._view.run, self._view.state.succession
        mine = here.assent_of(view.me) if view.is_member else self.agreed
        is_mine = self.goes_along(motion) if motion == here.decided else motion.name == mine
        return AgendaItem(
            motion=motion.name.hex(),
            text=text_of(run, motion),
            author=peer_id_of(motion.author),
            last_round=motion.last,
            weights_round=motion.weights,
            changes=settings_of(run, motion),
            costs=costs_of(run, self._successor(motion) or run, self._driver.replica.replica.outer.shapes),
            assents=here.assents_to(motion.name),
            needed=needed(view.state.roster.size),
            is_mine=is_mine,
            obstacle=self._obstacles.get(motion.name, ("", 0.0))[0],
        )

    def _tell(self, here: Succession) -> None:
        """Logs what has changed since the last look."""
        run, before, decided = self._view.run, self._open, self._decided
        self._open, self._decided = {motion.name: motion for motion in here.motions}, here.decided
        for name, motion in self._open.items():
            if name not in before:
                log.info("%s moves that the run %s: `p2ptrain agenda`", peer_id_of(motion.author), text_of(run, motion))
        for name, motion in before.items():
            if name not in self._open and here.decided != motion:
                what = "the motion of %s has lapsed, that the run %s"
                log.info(what, peer_id_of(motion.author), text_of(run, motion))
        if here.decided is not None and here.decided != decided:
            end = f"ends then; to go along: `p2ptrain assent {here.decided.name.hex()[:8]}`"
            goes = "goes along" if self.goes_along(here.decided) else end
            log.warning("decided: the run is to %s; this node %s", text_of(run, here.decided), goes)
        if decided is not None and here.decided is None:
            log.warning("no longer decided, as the members have regrouped: that the run %s", text_of(run, decided))

    def _follow_the_rule(self, here: Succession) -> None:
        """Assents to a motion that the standing rule accepts, unless this node assents to one already; to the one with
        most assents, so that nodes with the same rule meet; to none that was open when the owner withdrew."""
        view, state = self._view, self._view.state
        said = next((each for each in here.assents if each.member == view.me), None)
        if not view.is_member or view.is_stopping or (said is not None and said.motion in self._open):
            return
        for motion in sorted(here.motions, key=lambda each: (-here.assents_to(each.name), each.made, each.name)):
            is_due = self._assented[0] != motion.name or state.round >= self._assented[1] + AGAIN_ROUNDS
            is_fine = not self._obstacles.get(motion.name, ("unknown", 0.0))[0]
            if motion.name not in self._withdrawn and is_fine and accepts(self.accept, view.run, motion):
                if is_due:
                    self._assented = motion.name, state.round
                    log.info('assenting to %s, as succession.accept = "%s"', motion.name.hex()[:8], self.accept)
                    self._driver.intake.give(ev.AssentRequested(motion.name))
                return

    # -- The weights and data that a successor would begin with -------------------------------------

    async def obstacle(self, motion: Motion) -> str:
        """Returns why this node cannot answer for what a successor would begin with; empty if it can."""
        wanted = self._successor(motion)
        if wanted is None:
            return "this release of p2ptrain knows no such run; a later one may"
        own = self._home.of_run(self._view.run.id)  # what is saved there makes room
        try:
            refuse_disk(wanted, await asyncio.to_thread(disk_demand, wanted, self._home, need_of(wanted), of_data=own))
        except ConfigError as error:
            return error.problem
        why = await self._obstacle_of_weights(motion)
        if not why and wanted.data.manifest != self._view.run.data.manifest:
            return await self._obstacle_of_data(wanted.data.manifest)
        return why

    def _take_in(self, given: Path) -> str:
        """Links a prepared data set into this node's directory; returns the digest of its manifest."""
        encoded = read_manifest(given)
        manifest = manifest_digest(encoded)
        if not self._fits(TokenDataset.open(given, manifest)):
            raise DataError(OTHER_TOKENS, fix="Prepare it as this run's data was prepared")
        target = self._home.dataset(manifest)
        with trouble(target):
            make_directory(target)
            without = shutil.ignore_patterns(MANIFEST_NAME)  # with it the data set counts as whole
            shutil.copytree(given, target, ignore=without, copy_function=link_or_copy, dirs_exist_ok=True)
            write_atomically(target / MANIFEST_NAME, encoded)
        return manifest

    async def _obstacle_of_data(self, manifest: str) -> str:
        """Returns why a run cannot go on with this data set, as far as this node sees; empty if it can. A node that has
        it offers its manifest to peers from then on."""
        directory = await asyncio.to_thread(self._home.dataset, manifest)
        here = await asyncio.to_thread(open_dataset, directory, manifest)
        if here is not None:
            self._edges.served_blobs.offer_manifest(manifest, directory)
            return "" if self._fits(here) else OTHER_TOKENS
        fetching = self._edges.fetching
        try:
            async with asyncio.timeout(ASK_SECONDS):  # one slow peer must not hold up the other motions
                encoded = await fetch_manifest(fetching.fetcher, manifest, fetching.data_sources())
            found = await asyncio.to_thread(lambda: TokenDataset(directory, decode_manifest(encoded)))
        except (FetchError, TransportError, TimeoutError, ValueError):
            return f"neither this disk nor a connected peer has the data {manifest[:16]}"
        return "" if self._fits(found) else OTHER_TOKENS

    def _fits(self, found: TokenDataset) -> bool:
        mine = self._edges.fetching.dataset
        return (found.tokenizer, found.is_masked) == (mine.tokenizer, mine.is_masked)

    async def _obstacle_of_weights(self, motion: Motion) -> str:
        number, root = motion.weights, motion.root
        if not self._is_covered(number):
            return f"the root of round {number:,} covers only a part of the state, and a successor needs all of it"
        certified = (await self._roots()).get(number) if motion.goes_back else root
        if certified is None:
            return _not_kept(number)
        if certified != root:
            return f"the root in the motion is not the certified one of round {number:,}"
        if not motion.goes_back or self._edges.served_blobs.states.find(root) is not None:
            return ""
        fetching = self._edges.fetching
        answers = await asyncio.gather(*map(fetching.states_of, fetching.data_sources()))
        if any(root == offered for states in answers for _, offered in states):
            return ""
        return _not_kept(number, "neither its disk nor a connected peer has a checkpoint of it")

    def _is_covered(self, number: int) -> bool:
        """Whether the root of a round covers all of the state."""
        return covered_pieces(self._driver.replica.replica.state_bytes, self._view.run.state, number, NOTHING) is None

    async def _roots(self) -> dict[int, bytes]:
        """Returns the certified roots of the kept history, read in the thread that writes it."""
        persistence = self._edges.persistence
        return await persistence.on_disk(lambda: persistence.store.journal.roots)

    # -- The owner's requests -----------------------------------------------------------------------

    async def propose(
        self, settings: Mapping[str, object], last: int | None, back_to: int | None, data: str = ""
    ) -> Motion:
        """Moves that the run go on with these settings, as in a run file; those that it has already change nothing.
        last: its last round; back_to: the round whose weights the successor begins with; data: a prepared data set"""
        self._refuse_if_never()
        if data:
            settings = {**settings, "data.manifest": await asyncio.to_thread(self._take_in, Path(data))}
        view = self._view
        state, run, root = view.state, view.run, NOTHING
        has = run.model_dump(mode="json")
        change = change_of(run, {name: value for name, value in settings.items() if not _is_so(has, name, value)})
        if last is None:
            last = state.round + AHEAD_ROUNDS
            if back_to is None and not self._is_covered(last):
                last = -(-last // run.state.full_root_rounds) * run.state.full_root_rounds
        if back_to is not None:
            if back_to > state.root_round:
                raise DataError(f"round {back_to:,} is not certified yet; the newest that is: {state.root_round:,}")
            root = (await self._roots()).get(back_to, NOTHING)
            if root == NOTHING:
                raise DataError(_not_kept(back_to))
        motion = Motion(view.me, state.round + 1, last, last if back_to is None else back_to, root, change)
        if why := why_not_moved(motion, state, run) or await self.obstacle(motion):
            raise DataError(why)
        self._driver.intake.give(ev.MoveRequested(last, motion.weights, root, change))
        return replace(motion, made=view.state.round + 1)  # rounds may have ended meanwhile

    async def assent(self, name: str) -> str:
        """Assents to the motion whose name begins so, and returns what this means."""
        self._refuse_if_never()
        here = self._view.state.succession
        every = [*here.motions, *([here.decided] if here.decided else [])]
        found = [motion for motion in every if motion.name.hex().startswith(name.lower())]
        if len(found) != 1:
            which = f"{len(found)} motions begin" if found else "no motion begins"
            raise DataError(f"{which} with {name[:64]!r}", fix="`p2ptrain agenda` lists them")
        motion = found[0]
        if why := await self.obstacle(motion):
            raise DataError(why)
        await self._agree_to(motion.name)
        if motion == here.decided:
            return "it is decided already; this node goes along"
        if not self._view.is_member:
            return "this node has no seat, so its assent does not count; it goes along if the members decide so"
        self._driver.intake.give(ev.AssentRequested(motion.name))
        return "a manifest carries the assent within a few rounds"

    async def withdraw(self) -> str:
        """Withdraws this node's assent, and returns what this means."""
        here = self._view.state.succession
        mine, opened = here.assent_of(self._view.me), {motion.name for motion in here.motions}
        if here.decided is not None and mine == here.decided.name:
            raise DataError("it is decided, for good", fix="`p2ptrain leave` ends this node's part")
        if self.agreed == NOTHING and mine not in opened and (self.accept == "ask" or not opened):
            raise DataError("this node assents to nothing")
        self._withdrawn |= opened
        await self._agree_to(NOTHING)
        if mine in opened:
            self._driver.intake.give(ev.AssentRequested(NOTHING))
        return "this node assents to nothing any more"

    async def _agree_to(self, name: bytes) -> None:
        here = self._view.state.succession
        self._withdrawn &= {motion.name for motion in (*here.motions, *filter(None, [here.decided]))} - {name}
        said = "\n".join(each.hex() for each in (name, *sorted(self._withdrawn)))
        await self._edges.persistence.on_disk(write_atomically, self._path, said.encode())
        self.agreed = name

    def _refuse_if_never(self) -> None:
        if self.accept == "never":
            fix = 'Set it to "ask", and start this node again'
            raise ConfigError('"never" keeps this node from it', key="succession.accept", fix=fix)


def _not_kept(number: int, why: str = "its history has no certified root of it") -> str:
    return f"this node does not keep round {number:,}: {why}"


def _is_so(has: Mapping[str, object], name: str, value: object) -> bool:
    """Whether a run has a setting like this, or a start would fill it in."""
    section, _, key = name.partition(".")
    table = has.get(section)
    present = table.get(key) if isinstance(table, dict) else table
    return present == value or (name in SEALED and value in UNFILLED)
