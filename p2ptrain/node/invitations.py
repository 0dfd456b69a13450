"""Invitations as a person types them, and the claims that this node makes with them."""

from __future__ import annotations

import re
from pathlib import Path

from p2ptrain.core.admission import Invitation, decode_invitation, make_claim
from p2ptrain.errors import ConfigError, RemoteProtocolError
from p2ptrain.identity import Identity


def read_invitation(text_or_file: str) -> Invitation:
    """Reads an invitation, or the file that contains it."""
    try:
        if re.fullmatch(r"[0-9a-f]{128,}", text_or_file):  # longer than what people call a file
            return decode_invitation(text_or_file)
        return decode_invitation(Path(text_or_file).read_text())
    except (OSError, ValueError, RemoteProtocolError) as error:  # ValueError: not UTF-8, or a name with a zero byte
        fix = "Use the invitation exactly as you received it: its text, or the file that contains it"
        raise ConfigError(f"not an invitation: {error}", key="--invitation", fix=fix) from error


def claim_for(invitation: Invitation, identity: Identity, run_id: str) -> bytes:
    """Returns the claim that this node shows when it asks to join: the bearer's signature for its key."""
    bearer = Identity(invitation.seed)
    if bearer.key != invitation.ticket.bearer:
        raise ConfigError("not an invitation: its key is damaged", key="--invitation", fix="Ask for it again")
    return make_claim(invitation.ticket, bearer.sign, bytes.fromhex(run_id), identity.key)
