"""Targets of the core: messages, histories, states, admissions and run configs."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.fuzz import Target
from p2ptrain.audit.history import CountingVerifier
from p2ptrain.audit.receipt import check, decode_receipt
from p2ptrain.config import RunConfig
from p2ptrain.config.hf import read_hf_config
from p2ptrain.core import messages as wire
from p2ptrain.core.admission import (
    check_request,
    decode_claim,
    decode_invitation,
    encode_invitation,
    make_claim,
    make_ticket,
)
from p2ptrain.core.history import BranchStart, Entry, History, decode_history, encode_history, follow, jump
from p2ptrain.core.manifest import contradiction
from p2ptrain.core.messages import Ballot, Certificate, Evidence, Message, Received, encode
from p2ptrain.core.reputation import Reason, Reputation
from p2ptrain.core.wire import encode as packed
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError, SettingError
from p2ptrain.identity import Identity
from p2ptrain.node.find import _check_protocol
from tests.helpers.core import (
    KEYS,
    RUN,
    announced,
    authored,
    content_name,
    line_of,
    payload_digest,
    run_of,
    signed,
    voted,
)
from tests.helpers.golden import FAMILY
from tests.helpers.history import BEGINNING, CHANGES, END, ENTRY, RUN_CONFIG, SEVEN
from tests.helpers.receipts import CONFIG, FIRST, receipt_after, with_a_branch
from tests.helpers.trainer import TINY

SIGNER = Identity(b"s" * 32)
REFUSED = (RemoteProtocolError,)


class Anyone:
    """Takes every signature: an attacker signs what it sends."""

    run_id = RUN

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return True


ANYONE = Anyone()


class AnyoneCounted(CountingVerifier):
    """Likewise, of any run."""

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return True


def messages() -> list[bytes]:
    """Returns an envelope of each kind of message."""
    one, seats, short = KEYS[0], b"\x07", (bytes(16), b"\1" * 16)
    body = authored(one, b"a contribution")
    attached = announced(one, payload=payload_digest(body), content=content_name(body), payload_bytes=len(body))
    votes = [signed(voted(one, Ballot.PREVOTE, key)).envelope for key in KEYS[1:3]]
    kinds: list[Message] = [
        announced(one),
        wire.Availability(RUN, 5, 4, RUN, short, (), short, seats, one),
        wire.Proposal(RUN, 5, 2, 1, KEYS[:3], RUN, one),
        voted(one, Ballot.PRECOMMIT, RUN, view=3, number=2**40),
        Certificate(RUN, 1, 0, RUN, seats, (bytes(64),) * 3),
        wire.Hello(RUN, 7, 1, seats, seats, b"", b"\1", False, one),
        wire.JoinRequest(RUN, 1, claim(), one),
        wire.Leave(RUN, 300, one),
        wire.Call(RUN, RUN, 1, one),
        wire.Regroup(RUN, RUN, 1, KEYS[:3], one),
        Evidence(*sorted(votes)),
        wire.AuditReport(RUN, 9, KEYS[1], -1_234, 980, True, one),
    ]
    return [*(signed(each).envelope for each in kinds), signed(attached, body).envelope]


def claim() -> bytes:
    ticket = make_ticket(SIGNER.key, SIGNER.sign, RUN, SIGNER.key, 3, 1_000)
    return make_claim(ticket, SIGNER.sign, RUN, KEYS[0])


def _encoded(received: Any) -> bytes:
    assert isinstance(received, Received)
    return encode(received.message, wire.signature_of(received), received.attachment)


INVITES = run_of(admission={"policy": "invite", "keys": [SIGNER.key.hex()]})


def _requested(data: bytes) -> object:
    message = wire.decode(data, ANYONE).message
    if isinstance(message, wire.JoinRequest | wire.Leave | Evidence):
        return check_request(message, SEVEN, INVITES, ANYONE)
    return message


def requests() -> list[bytes]:
    evidence = next(each for each in messages() if b"evidence" in each)
    kinds = [wire.JoinRequest(RUN, 1, claim(), KEYS[8]), wire.Leave(RUN, 1, KEYS[1])]
    return [*(signed(each).envelope for each in kinds), evidence]


def followed() -> list[bytes]:
    """Returns histories after SEVEN, without a gap and with one."""
    lineage = (BranchStart(RUN, 0),)
    two, last = ([entry for entry, _ in line_of(state, RUN_CONFIG, 2)] for state in (SEVEN, END))
    made = History(lineage, 2, (), None, tuple(two)), History(lineage, END.round + 2, tuple(CHANGES), END, tuple(last))
    return [bytes(encode_history(each)) for each in made]


def histories() -> list[bytes]:
    lineage = (BranchStart(RUN, 0),)
    made = [
        History(lineage, 1, (), None, (ENTRY,)),
        History((*lineage, BranchStart(BEGINNING.branch, 0)), 0, (BEGINNING, ENTRY), None, ()),
        History(lineage, END.round, tuple(CHANGES), END, ()),
        History(lineage, 3, tuple(CHANGES[:1]), None, tuple(CHANGES)),
    ]
    return [bytes(encode_history(each)) for each in made]


def _followed(data: bytes) -> None:
    """Follows a history, as one whose signatures are right."""
    history = decode_history(data)
    state = SEVEN
    if history.base is not None:
        jump(state, history.changes, history.base, ANYONE)
        state = history.base
    for step in history.steps:
        before, state = state, follow(state, step, RUN_CONFIG, ANYONE)
        if isinstance(step, Entry):
            contradiction(step.manifest, before, RUN_CONFIG)
    for entry in history.changes:
        if isinstance(entry, Entry):
            contradiction(entry.manifest, SEVEN, RUN_CONFIG)


def receipts() -> tuple[bytes, ...]:
    return packed(receipt_after(FIRST, CONFIG)), packed(with_a_branch())


def runs() -> list[bytes]:
    """Returns configs of runs of every shape, all sealed but the first."""
    invites = {"policy": "invite", "keys": [SIGNER.key.hex()]}
    shapes: list[dict[str, Any]] = [
        {"admission": invites},
        {"recipe": {"name": "demo", "value_bits": 3}, "admission": invites | {"policy": "allowlist"}},
        *({"recipe": {"name": "local", **each}} for each in FAMILY.values()),
        {"model": {"kind": "transformers", "config": llama(), "sequence_length": 8}, "tokenizer": json_tokenizer()},
        {"model": {"kind": "plugin", "plugin": "a-plugin 1.0", "settings": {"a": "1", "b": 2}}},
        {"adapt": {"kind": "lora", "rank": 4}},
        {"recipe": {"name": "local", **FAMILY["region"]}, "world": {"run": "ab" * 32, "rounds": 3}},
    ]
    found = [RunConfig.model_validate({"name": "x"})]
    for each in shapes:
        run = RunConfig.model_validate({"name": "a-run", "model": TINY, **each})
        keys = [key.hex() for key in KEYS[:2]]
        base = ("cd" * 32, 1_000) if run.adapt.is_on else ("", 0)
        shape = "" if run.model.kind == "builtin" else "ef" * 32
        made = run.sealed(manifest="ab" * 32, initial_root="cd" * 32, founders=keys, shapes=shape, base=base)
        found.append(made)
    return [each.canonical() for each in found]


def llama() -> str:
    return json.dumps({
        "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16", "eos_token_id": [1, 2],
    })  # fmt: skip


def json_tokenizer() -> dict[str, str]:
    return {"kind": "json", "digest": "ab" * 32}


GPT2 = json.dumps({
    "model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "activation_function": "gelu_new", "attn_pdrop": 0.1, "n_inner": None, "initializer_range": 0.02,
})  # fmt: skip
QWEN3 = json.dumps({
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "use_sliding_window": True,
})  # fmt: skip


def _hf_config(data: bytes) -> None:
    """Reads a config.json; its errors say what is wrong, a colon and what to do, in a line that can be printed."""
    try:
        read_hf_config(data.decode(errors="surrogateescape"))
    except ValueError as error:
        if type(error) is ValueError:
            assert ": " in str(error), error
            assert str(error).isprintable(), error
        raise


def _restored(data: bytes) -> bytes:
    """Restores the scores of peers, and uses them."""
    restored = Reputation()
    restored.restore(data, 10.0)
    for peer in [*restored.records]:
        restored.is_greylisted(peer, 20.0)
        restored.note(peer, Reason.MALFORMED, 20.0)
    return restored.saved(30.0)


def scores() -> bytes:
    made = Reputation()
    for key in KEYS[:3]:
        made.note(key, Reason.MALFORMED, 0.0)
    return made.saved(5.0)


def core_targets() -> list[Target]:
    claims, invitation = (claim(),), encode_invitation(make_ticket(SIGNER.key, SIGNER.sign, RUN, KEYS[0], 1, 9), RUN)
    return [
        Target("message", "msgpack", tuple(messages()), lambda data: wire.decode(data, ANYONE), REFUSED, _encoded),
        Target("request-to-join", "msgpack", tuple(requests()), _requested, REFUSED),
        Target("history", "msgpack", tuple(histories()), decode_history, REFUSED,
               lambda each: bytes(encode_history(each))),
        Target("history-followed", "msgpack", tuple(followed()), _followed, REFUSED, seconds=0.03),
        Target("receipt", "msgpack", receipts(), decode_receipt, REFUSED, packed),
        Target("receipt-checked", "msgpack", receipts(),
               lambda data: check(decode_receipt(data), "", AnyoneCounted), REFUSED, seconds=0.03),
        Target("claim", "msgpack", claims, decode_claim, REFUSED, packed),
        Target("invitation", "text", (invitation.encode(),),
               lambda data: decode_invitation(data.decode("latin-1")), REFUSED),
        Target("run-config", "json", tuple(runs()), RunConfig.from_canonical, REFUSED, lambda run: run.canonical(),
               seconds=0.02, forget=read_hf_config.cache_clear),
        Target("run-protocol", "json", tuple(runs()[:2]), lambda data: _check_protocol(RUN, data), (ConfigError,)),
        Target("hf-config", "json", (llama().encode(), GPT2.encode(), QWEN3.encode()), _hf_config, (SettingError,),
               forget=read_hf_config.cache_clear),
        Target("scores-of-peers", "msgpack", (scores(),), _restored, (DataError,)),
    ]  # fmt: skip
