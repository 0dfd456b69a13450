"""The base classes of answers and stored records."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

log = logging.getLogger("p2ptrain.observe")


class Part(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class Stored(Part):
    """A row of records.sqlite."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """Reads a row, ignoring fields that a newer release may have written."""
        return cls(**{name: value for name, value in row.items() if name in cls.model_fields})

    @classmethod
    def of_rows(cls, rows: Iterable[dict[str, Any]]) -> Iterator[Self]:
        """Reads the rows that fit the schema; others, perhaps from another release, must not prevent a start."""
        for row in rows:
            try:
                yield cls.of(row)
            except (ValidationError, TypeError) as error:
                log.warning("skipping a row of the records: %s", str(error).splitlines()[0])

    @property
    def row(self) -> dict[str, Any]:
        return dict(self)
