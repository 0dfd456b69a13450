"""Log lines about seats, branches and complaints: each change is told once."""

from __future__ import annotations

from logging import INFO, WARNING

import msgspec
import pytest

from p2ptrain.core.audits import CLEAN, Conduct, Tier
from p2ptrain.core.complaints import MEANINGS, Code, Complaint, complaint
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.identity import peer_id_of
from p2ptrain.observe.progress import LOOKS, NAMES_MAX, News
from tests.helpers.core import KEYS, ROOT0, RUN
from tests.helpers.web import every_complaint

DISK, BEHIND = complaint(Code.DEGRADED, why="the disk is full"), complaint(Code.CATCHING_UP)


def state(members: int = 3, branch: bytes = RUN) -> AgreedState:
    return msgspec.structs.replace(genesis(branch, KEYS[:members], ROOT0), round=8)


def test_nothing_new_is_nothing_said() -> None:
    news = News()
    assert [news.look(state(), []) for _ in range(9)] == [[]] * 9


def test_who_comes_and_who_goes_is_named() -> None:
    news = News()
    news.look(state(1), [])
    ids = [peer_id_of(key) for key in KEYS]
    assert news.look(state(3), []) == [(INFO, f"{', '.join(sorted(ids[1:3]))} got a seat: 3 members")]
    assert news.look(state(1), []) == [(INFO, f"{', '.join(sorted(ids[1:3]))} lost a seat or left: 1 member")]
    [(_, text)] = news.look(state(NAMES_MAX + 3), [])
    assert text.endswith(f" and 2 more got a seat: {NAMES_MAX + 3} members")


def test_who_is_banned_or_kept_away_is_named_with_the_reason_and_once() -> None:
    news, other = News(), peer_id_of(KEYS[1])
    assert news.look(state(), [], {KEYS[3]: ""}, {}) == [], "what was before the start is in the peers"
    bans, away = {KEYS[3]: "", KEYS[0]: "bad payload", KEYS[2]: ""}, {KEYS[1]: {"late": 1, "malformed": 24}}
    assert news.look(state(), [], bans, away) == [
        *(
            (WARNING, f"{peer_id_of(key)} was banned: {why}")
            for key, why in sorted({KEYS[0]: "bad payload", KEYS[2]: "not known here"}.items())
        ),
        (WARNING, f"{other} is kept away: malformed 24, late 1"),
    ]
    assert news.look(state(), [], bans, away) == []
    assert news.look(state(), [], bans, {}) == [(INFO, f"{other} no longer kept away")]


def judged(**conducts: Conduct) -> AgreedState:
    """A state with members of these conducts, by the number of their keys."""
    told = {KEYS[int(name[1:])]: conduct for name, conduct in conducts.items()}
    now = state(4)
    admitted = [msgspec.structs.replace(each, conduct=told.get(each.key, CLEAN)) for each in now.admitted]
    return msgspec.structs.replace(now, admitted=tuple(admitted))


def test_who_is_suspended_on_trial_counted_again_or_may_not_audit_is_named_once() -> None:
    news, ids = News(), [peer_id_of(key) for key in KEYS]
    found, none = "members found work in the contributions", "all members measured, and found no work in"
    assert news.look(judged(k1=Conduct(Tier.ON_TRIAL)), []) == [], "what was before the start is in the peers"
    bad = judged(k1=CLEAN, k2=Conduct(Tier.SUSPENDED), k3=Conduct(muted=72, strikes=1))
    assert news.look(bad, []) == [
        (WARNING, f"{ids[2]} suspended: {none} the contributions"),
        (INFO, f"{ids[1]} counted: {found}"),
        (WARNING, f"{ids[3]} may not audit for a while: not all found what these audits said"),
    ]
    assert news.look(bad, []) == []
    again = judged(k0=Conduct(Tier.ON_TRIAL), k2=CLEAN, k3=Conduct(muted=72, strikes=1))
    first = "members measure first whether the contributions come from training"
    assert news.look(again, []) == [(INFO, f"{ids[0]} on trial: {first}"), (INFO, f"{ids[2]} counted: {found}")]


def test_another_branch_is_told_as_trouble() -> None:
    news = News()
    news.look(state(3), [])
    lines = news.look(state(2, b"b" * 32), [])
    assert lines[0] == (WARNING, f"continued from round 9 on branch {'62' * 8}, 2 members")
    assert len(lines) == 2


def test_a_complaint_is_told_when_it_lasts_and_when_it_is_over() -> None:
    news = News()
    told = [news.look(state(), [DISK, BEHIND]) for _ in range(LOOKS + 2)]
    assert told == [[]] * (LOOKS - 1) + [[(WARNING, DISK.text), (INFO, "catching up")]] + [[]] * 2
    assert news.look(state(), [BEHIND]) == [(INFO, "the disk can be written again")]


@pytest.mark.parametrize("now", every_complaint(), ids=lambda each: each.code)
def test_each_complaint_has_words_of_its_own_for_its_end(now: Complaint) -> None:
    news = News()
    told = [line for _ in range(LOOKS) for line in news.look(state(), [now])]
    [(_, began)], [(_, ended)] = told, news.look(state(), [])
    assert began == now.text
    assert ended == MEANINGS[now.code].ended
    assert ended not in {began, *(each.ended for other, each in MEANINGS.items() if other != now.code)}
    assert "over:" not in ended


def test_the_end_of_not_admitted_is_told_as_admitted() -> None:
    news = News()
    for _ in range(LOOKS):
        news.look(state(), [complaint(Code.NOT_ADMITTED)])
    assert news.look(state(), []) == [(INFO, "admitted")]


def test_a_complaint_that_passes_at_once_is_not_told() -> None:
    news = News()
    for _ in range(5):
        assert news.look(state(), [DISK]) == []
        assert news.look(state(), []) == []


def test_a_complaint_whose_figures_change_is_told_once() -> None:
    news = News()
    disks = [complaint(Code.DEGRADED, why=f"{number} bytes are left") for number in range(9)]
    told = [line for disk in disks for line in news.look(state(), [disk])]
    assert told == [(WARNING, disks[LOOKS - 1].text)]
    assert news.look(state(), []) == [(INFO, "the disk can be written again")]
