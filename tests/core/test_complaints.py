"""Complaints: stable codes, and one table of texts."""

from __future__ import annotations

import re

from p2ptrain.core.complaints import Code, by_gravity, complaint
from tests.helpers.web import every_complaint


def test_codes_are_in_the_order_of_gravity() -> None:
    severities = [code.meaning.severity for code in Code]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_a_code_is_what_a_label_of_a_metric_may_be() -> None:
    assert [code for code in Code if not re.fullmatch("[a-z]+(_[a-z]+)*", code)] == []


def test_each_has_words_of_its_own() -> None:
    told = every_complaint()
    for words in ([each.title for each in told], [each.advice for each in told], [each.text for each in told]):
        assert len({*words}) == len(Code)
    assert not [each.text for each in told if "{" in each.text or "\n" in each.text]


def test_a_complaint_has_its_fields_as_data_and_in_its_text() -> None:
    found = complaint(Code.OVER_MEMORY, used_bytes=2_000, limit_bytes=1_000)
    assert found.fields == {"used_bytes": 2_000, "limit_bytes": 1_000}
    assert found.text.startswith("over its memory limit: 2,000 bytes are in use, and limits.memory_bytes allows 1,000;")
    assert complaint(Code.DEGRADED, why="{no field}").text == "degraded: {no field}"


def test_the_worst_comes_first() -> None:
    assert by_gravity(reversed(every_complaint())) == every_complaint()
