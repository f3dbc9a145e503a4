"""Fixtures of the report's room."""

from tests.report_room.stories import berlin as berlin
