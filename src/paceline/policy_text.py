"""Text forms of a policy: short, JSON and TOML, each read back to the same policy."""

from __future__ import annotations

import json
import sys
from functools import cached_property
from typing import Any

import tomli_w
from pydantic import BaseModel

from paceline.text import shortened

if sys.version_info >= (3, 11):
    from typing import Self

    import tomllib
else:
    import tomli as tomllib
    from typing_extensions import Self


class PolicyError(ValueError):
    """An invalid policy: one sentence that names the field, what it must be, and its value."""


class TextForms(BaseModel):
    """A table of fields with text forms: the base of a policy."""

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, in order; lists instead of tuples.

        Examples:
            >>> from paceline import CapacityPolicy
            >>> CapacityPolicy(capacity_factor=1.25, keep="score").changed_fields()
            {'capacity_factor': 1.25}
        """
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name in type(self).model_fields
            if (value := getattr(self, name)) != type(self).model_fields[name].default
        }

    def __str__(self) -> str:
        """Return the short form, "capacity_factor=1.25,unit=expert"; `parse` reads it back."""
        fields = self.changed_fields()
        return ",".join(
            f"{name}={'+'.join(value) if isinstance(value, list) else str(value).lower()}"
            if not isinstance(value, str)
            else f"{name}={value}"
            for name, value in fields.items()
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the short form, for example "capacity_factor=1.25,unit=device,drop_first=image".

        Raises:
            PolicyError: on an unknown field, a missing "=" or a bad value.

        Examples:
            >>> from paceline import CapacityPolicy
            >>> CapacityPolicy.parse("capacity_factor=1.25,drop_first=image+video").drop_first
            ('image', 'video')
        """
        _require_text(text)
        fields: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not value:
                raise PolicyError(
                    "policy must have the form name=value, as in "
                    '"capacity_factor=1.25,unit=device", '
                    f"got {shortened(repr(part))} in {shortened(repr(text), 120)}"
                )
            if name in fields:
                raise PolicyError(
                    f"policy must set a field once, got {shortened(name)} twice in "
                    f"{shortened(repr(text), 120)}"
                )
            fields[name] = None if value.lower() == "none" else value
        return cls(**fields)

    def to_json(self) -> str:
        """Write all fields as a JSON object; `from_json` reads it back.

        Examples:
            >>> from paceline import CapacityPolicy
            >>> CapacityPolicy(capacity_factor=1.25).to_json()[:40]
            '{"capacity_factor":1.25,"unit":"device",'
        """
        return self.json_form

    @cached_property
    def json_form(self) -> str:
        """The text of `to_json`, computed before a graph is compiled."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json`'s form. Raises PolicyError on bad JSON or a bad field.

        Examples:
            >>> from paceline import CapacityPolicy
            >>> CapacityPolicy.from_json('{"capacity_factor": 1.25}').capacity_factor
            1.25
        """
        _require_text(text)
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PolicyError(
                f"policy must be JSON, got an error: {shortened(str(error), 200)}"
            ) from None
        return cls._from_mapping(fields)

    def to_toml(self) -> str:
        """Write the fields that differ from their defaults as TOML; `from_toml` reads it back.

        Examples:
            >>> from paceline import CapacityPolicy
            >>> CapacityPolicy(capacity_factor=1.25).to_toml()
            'capacity_factor = 1.25\\n'
        """
        return tomli_w.dumps(self.changed_fields())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read `to_toml`'s form. Raises PolicyError on bad TOML or a bad field.

        A float keeps the decimal that the file spells.

        Examples:
            >>> from paceline import CapacityPolicy
            >>> CapacityPolicy.from_toml("capacity_factor = 1.25").capacity_factor
            1.25
        """
        _require_text(text)
        try:
            fields = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PolicyError(
                f"policy must be TOML, got an error: {shortened(str(error), 200)}"
            ) from None
        return cls._from_mapping(fields)

    @classmethod
    def _from_mapping(cls, fields: Any) -> Self:
        if not isinstance(fields, dict):
            raise PolicyError(f"policy must be a table of fields, got {shortened(repr(fields))}")
        return cls(**fields)


def _require_text(text: Any) -> None:
    if not isinstance(text, str):
        raise PolicyError(f"policy must be a text, got {type(text).__name__}")
